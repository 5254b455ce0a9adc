/* tools/cmd_care.c - gc, fsck and scrub: the store kept in order.
 *
 * Responsible for: the order of record half and store half, text, JSON and exit codes.
 * Not responsible for: what is moved or compared (store/, snapshot/).
 */
#include "tools/cmd.h"

#include "snapshot/snap_care.h"
#include "snapshot/snap_lower.h"
#include "store/store_fsck.h"
#include "store/store_gc.h"
#include "store/store_scrub.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <time.h>

enum { WHO_BYTES = 512, WHAT_BYTES = 96, REMEDY_BYTES = 1024 };

struct care {
    struct cmd *cmd;
    struct store *store;
    struct progress progress;
    struct snap_care_owners *owners; /* NULL when they cannot be told */
    cJSON *list;                     /* of findings, with --json */
    uint64_t damage, notes;
    uint64_t kept;                 /* blocks that scrub keeps at a lower tier */
    uint64_t owed_ns;              /* to the rate, in the daemon */
    uint64_t sequence;             /* of the store, behind fsck's look at all records */
    int stopped;                   /* fsck was */
    int quiet;                     /* the second look after a repair */
    char opened[STORE_NOTE_BYTES]; /* what was found when the store was opened for this */
};

static int on_pause(void *context, uint64_t ns) {
    struct care *care = context;
    struct timespec left = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    /* In the daemon it is waited for where others may write meanwhile. */
    if (care->cmd->host != NULL) {
        care->owed_ns = ns;
        return cmd_interrupted(care->cmd);
    }
    /* tidy-allow: wait a bounded rate is kept by waiting, there is no event */
    while (ns != 0 && nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
    return cmd_interrupted(care->cmd);
}

/* Until the rate allows the next piece, or whoever asked says something. */
static void await_rate(struct care *care) {
    struct cmd *cmd = care->cmd;
    struct pollfd wait = {.fd = cmd->signals, .events = POLLIN};
    uint64_t end_ns = kv_clock_now_ns(cmd->clock) + care->owed_ns, now_ns;
    while ((now_ns = kv_clock_now_ns(cmd->clock)) < end_ns && !cmd_interrupted(cmd)) {
        uint64_t left_ms = (end_ns - now_ns) / 1000000u + 1;
        (void)poll(&wait, 1, left_ms < 1000 ? (int)left_ms : 1000);
    }
    care->owed_ns = 0;
}

/* In the daemon turns that are to be saved wait for the writer: they go between two pieces. */
static void on_lend(void *context) {
    struct care *care = context;
    if (care->cmd->host == NULL)
        return;
    struct snapshot *snapshot = service_snapshot(care->cmd->host->service);
    if (care->owed_ns == 0) {
        (void)snapshot_writer_lend(snapshot);
        return;
    }
    snapshot_writer_give(snapshot);
    await_rate(care);
    snapshot_writer_take(snapshot);
}

static void on_progress(void *context, uint64_t done, uint64_t all) {
    struct care *care = context;
    progress_update(&care->progress, done, all);
}

/* In the daemon no second one of its kind: the first lets others write between two pieces. */
static enum kv_err alone(struct cmd *cmd, atomic_flag *at_work,
                         enum kv_err (*work)(struct cmd *cmd, struct kv_diag *diag),
                         struct kv_diag *diag) {
    if (at_work == NULL)
        return work(cmd, diag);
    if (atomic_flag_test_and_set(at_work))
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "a %s is at work already: wait for it, or stop it with ctrl-C where it "
                           "was started",
                           cmd->config->words[0]);
    enum kv_err err = work(cmd, diag);
    atomic_flag_clear(at_work);
    return err;
}

/* --- gc */

static void gc_json(cJSON *to, const struct snap_care_report *records,
                    const struct store_gc_report *space) {
    cJSON_AddNumberToObject(to, "dead_snapshots", (double)records->dead_snapshots);
    cJSON_AddNumberToObject(to, "dead_pages", (double)records->dead_pages);
    cJSON_AddNumberToObject(to, "dead_blocks", (double)records->dead_blocks);
    cJSON_AddNumberToObject(to, "dead_lineages", (double)records->dead_lineages);
    json_text(to, "records_trouble", records->trouble);
    cJSON_AddNumberToObject(to, "segments_before", space->segments_before);
    cJSON_AddNumberToObject(to, "segments_after", space->segments_after);
    cJSON_AddNumberToObject(to, "segment_bytes_before", (double)space->segment_bytes_before);
    cJSON_AddNumberToObject(to, "segment_bytes_after", (double)space->segment_bytes_after);
    cJSON_AddNumberToObject(to, "live_bytes", (double)space->live_bytes);
    cJSON_AddNumberToObject(to, "sparse", space->sparse);
    cJSON_AddNumberToObject(to, "removed", space->removed);
    cJSON_AddNumberToObject(to, "damaged", space->damaged);
    cJSON_AddNumberToObject(to, "moved_bytes", (double)space->moved_bytes);
    cJSON_AddNumberToObject(to, "written_bytes", (double)space->written_bytes);
    cJSON_AddNumberToObject(to, "punched_bytes", (double)space->punched_bytes);
    cJSON_AddNumberToObject(to, "freed_bytes", (double)space->freed_bytes);
    cJSON_AddBoolToObject(to, "no_holes", space->no_holes);
    cJSON_AddBoolToObject(to, "stopped", space->stopped);
    json_text(to, "trouble", space->trouble);
}

static void gc_text(const struct cmd *cmd, const struct snap_care_report *records,
                    const struct store_gc_report *space) {
    int dry_run = cmd->config->dry_run;
    char one[TEXT_SHORT_BYTES];
    char two[TEXT_SHORT_BYTES];
    const char *would = dry_run ? "would be " : "";
    char part[4][TEXT_SHORT_BYTES];
    fprintf(cmd->out, "records: %s, %s, %s, %s of no session %sdeleted\n",
            text_count(records->dead_snapshots, "snapshot", part[0]),
            text_count(records->dead_pages, "page", part[1]),
            text_count(records->dead_blocks, "block", part[2]),
            text_count(records->dead_lineages, "lineage", part[3]), would);
    if (records->trouble[0] != 0) {
        fprintf(cmd->out, "records: none deleted, ");
        text_print_clean(cmd->out, records->trouble, strlen(records->trouble));
        fprintf(cmd->out, "; run `coldplane fsck`\n");
    }
    fprintf(cmd->out, "moved:   %s of live extents %sout of %s that were sparse\n",
            text_size(space->moved_bytes, one), would, text_count(space->sparse, "segment", two));
    fprintf(cmd->out, "freed:   %s%s: ", text_size(space->freed_bytes, one),
            dry_run ? " (planned)" : "");
    fprintf(cmd->out, "%s in place, the rest with %s\n", text_size(space->punched_bytes, one),
            text_count(space->removed, "segment", two));
    if (space->no_holes)
        fprintf(cmd->out, "this file system makes no holes: whole segments only\n");
    if (!dry_run)
        fprintf(cmd->out, "segments: %" PRIu32 ", %s before; %" PRIu32 ", %s after\n",
                space->segments_before, text_size(space->segment_bytes_before, one),
                space->segments_after, text_size(space->segment_bytes_after, two));
    if (space->trouble[0] != 0)
        fprintf(cmd->out, "%s\n", space->trouble);
    if (space->stopped)
        fprintf(cmd->out, "stopped before its end; what was freed stays freed\n");
}

static enum kv_err collect(struct cmd *cmd, struct kv_diag *diag) {
    struct care care = {.cmd = cmd};
    struct snap_care_report records = {0};
    struct store_gc_report space = {0};
    struct store_gc_options options = store_gc_options_usual();
    enum kv_err err = KV_OK;
    options.dry_run = cmd->config->dry_run;
    options.bytes_per_second = cmd->config->rate_bytes;
    options.pause = on_pause;
    options.progress = on_progress;
    options.lend = on_lend;
    options.context = &care;
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_store(cmd, options.dry_run ? CMD_READ : CMD_WRITE, &care.store, diag));
    /* The daemon's sessions are at work beside this, and the writer is held. */
    const struct snap_care_collect_args collect = {
        .store = care.store,
        .alloc = cmd->alloc,
#ifndef BREAK_GC_RESIDENT
        .open = cmd->host != NULL ? service_snapshot(cmd->host->service) : NULL,
#endif
        .dry_run = options.dry_run};
    KV_TRY(snap_care_collect(&collect, &records, diag));
    on_lend(&care);
    cmd_progress(cmd, &care.progress, "moving", "bytes");
    err = store_gc(care.store, &options, &space, diag);
    progress_end(&care.progress);
    if (cmd->result != NULL)
        gc_json(cmd->result, &records, &space);
    else
        gc_text(cmd, &records, &space);
    if (err == KV_OK && (space.damaged != 0 || records.trouble[0] != 0))
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "something stayed because it is damaged: %s",
                          space.trouble[0] != 0 ? space.trouble : records.trouble);
done:
    cmd_close_store(cmd, care.store);
    return err;
}

enum kv_err cmd_gc(struct cmd *cmd, struct kv_diag *diag) {
    return alone(cmd, cmd->host != NULL ? cmd->host->collecting : NULL, collect, diag);
}

/* --- whose and what */

struct who {
    char text[WHO_BYTES];
    size_t used;
};

static void on_owner(void *context, const char *session) {
    struct who *who = context;
    int length = snprintf(who->text + who->used, sizeof who->text - who->used, "%s%s",
                          who->used != 0 ? ", " : "", session);
    if (length > 0 && who->used + (size_t)length < sizeof who->text)
        who->used += (size_t)length;
}

/* "block 3 of lineage …", or nothing for what only the store knows. */
static void describe_key(const uint8_t *key, size_t bytes, char out[WHAT_BYTES]) {
    unsigned long long id = 0;
    unsigned block = 0;
    out[0] = 0;
    if (key == NULL || bytes < 9) {
        if (key != NULL && bytes > 1 && key[0] == 'n')
            snprintf(out, WHAT_BYTES, "name");
        return;
    }
    for (size_t i = 1; i < 9; i++)
        id = id << 8 | key[i];
    for (size_t i = 9; i < 13 && i < bytes; i++)
        block = block << 8 | key[i];
    switch (key[0]) {
    case 'b':
        snprintf(out, WHAT_BYTES, "block %u of lineage %016llx", block, id);
        break;
    case 'p':
        snprintf(out, WHAT_BYTES, "page %016llx", id);
        break;
    case 's':
        snprintf(out, WHAT_BYTES, "snapshot %016llx", id);
        break;
    case 'l':
        snprintf(out, WHAT_BYTES, "lineage %016llx", id);
        break;
    case 'n':
        snprintf(out, WHAT_BYTES, "name");
        break;
    default:
        break;
    }
}

struct finding {
    const char *kind, *sessions, *what, *text;
    int is_note;
};

static void tell_finding(struct care *care, const struct finding *finding) {
    care->damage += !finding->is_note;
    care->notes += finding->is_note != 0;
    if (care->quiet)
        return;
    if (care->list != NULL) {
        cJSON *item = cJSON_CreateObject();
        json_text(item, "kind", finding->kind);
        json_text(item, "sessions", finding->sessions);
        json_text(item, "record", finding->what);
        cJSON_AddBoolToObject(item, "note", finding->is_note);
        json_text(item, "text", finding->text);
        cJSON_AddItemToArray(care->list, item);
        return;
    }
    progress_end(&care->progress);
    fprintf(care->cmd->out, "%s %s", finding->is_note ? "note  " : "damage", finding->kind);
    if (finding->sessions[0] != 0) {
        fprintf(care->cmd->out, ", session ");
        text_print_clean(care->cmd->out, finding->sessions, strlen(finding->sessions));
    }
    if (finding->what[0] != 0)
        fprintf(care->cmd->out, ", %s", finding->what);
    fprintf(care->cmd->out, ": ");
    text_print_clean(care->cmd->out, finding->text, strlen(finding->text));
    fprintf(care->cmd->out, "\n");
}

static void tell_record(struct care *care, struct finding finding, const uint8_t *key,
                        size_t key_bytes) {
    struct who who = {.text = ""};
    char what[WHAT_BYTES];
    describe_key(key, key_bytes, what);
    if (key != NULL && key_bytes > 1 && key[0] == 'n')
        snprintf(who.text, sizeof who.text, "%.*s", (int)key_bytes - 1, (const char *)key + 1);
    else if (key != NULL && care->owners != NULL)
        snap_care_owners_of(care->owners, key, key_bytes, on_owner, &who);
    finding.sessions = who.text;
    finding.what = what;
    tell_finding(care, &finding);
}

/* --- fsck */

static void on_store_finding(void *context, const struct store_fsck_finding *found) {
    const struct finding finding = {
        .kind = store_fsck_name(found->kind), .text = found->text, .is_note = found->is_note};
    tell_record(context, finding, found->key, found->key_bytes);
}

static void on_session_finding(void *context, const struct snap_care_finding *found) {
    const struct finding finding = {found->kind, found->session, "", found->text, found->is_note};
    tell_finding(context, &finding);
}

/* Whoever asked a daemon for it may end it; a process of its own ends by the signal itself. */
static int is_stopped(void *context, uint64_t read_bytes) {
    struct care *care = context;
    (void)read_bytes;
#ifndef BREAK_FSCK_STOP
    care->stopped |= care->cmd->host != NULL && cmd_interrupted(care->cmd);
#endif
    return care->stopped;
}

static int on_session(void *context, const struct snapshot_entry *entry) {
    struct care *care = context;
    struct restore_check check;
    struct kv_diag why = {""};
    enum kv_err err = restore_verify(care->store, care->cmd->alloc, entry->head.name, &check, &why);
    if (err != KV_OK) {
        const struct finding finding = {"session", entry->head.name, "", why.text, 0};
        tell_finding(care, &finding);
    }
    /* What is left to look at stands for itself, session by session. */
    on_lend(care);
    return !is_stopped(care, 0);
}

/* The daemon's sessions are at work beside this, and the writer is held. */
static struct snapshot *open_sessions(const struct cmd *cmd) {
    return cmd->host != NULL ? service_snapshot(cmd->host->service) : NULL;
}

/* One look at everything; findings are counted in `care`. */
static enum kv_err look(struct care *care, int repair, struct store_fsck_report *report,
                        struct snap_care_report *sessions, struct kv_diag *diag) {
    struct cmd *cmd = care->cmd;
    const struct store_fsck_args args = {.store = care->store,
                                         .read_data = cmd->config->read_data,
                                         .repair = repair,
                                         .each = on_store_finding,
                                         .progress = on_progress,
                                         .pause = is_stopped,
                                         .context = care};
    const struct snap_care_check_args halves = {.store = care->store,
                                                .alloc = cmd->alloc,
#ifndef BREAK_FSCK_RESIDENT
                                                .open = open_sessions(cmd),
#endif
                                                .repair = repair,
                                                .each = on_session_finding,
                                                .context = care};
    enum kv_err err = KV_OK;
    care->damage = care->notes = 0;
    KV_TRY(snap_care_owners_make(care->store, cmd->alloc, &care->owners, diag));
    cmd_progress(cmd, &care->progress, "reading", "bytes");
    err = store_fsck(&args, report, diag);
    progress_end(&care->progress);
    if (err != KV_OK)
        goto done;
    KV_TRY(snap_care_check(&halves, sessions, diag));
    care->sequence = store_sequence(care->store);
    /* Names that cannot be followed have been told above. */
    if (cmd->config->read_data)
        (void)snapshot_list(care->store, cmd->alloc, on_session, care, NULL);
done:
    snap_care_owners_drop(care->owners);
    care->owners = NULL;
    return care->stopped ? kv_diag_set(diag, KV_ERR_CANCELLED,
                                       "fsck was stopped: it has not looked at everything")
                         : err;
}

/* Its store, with nobody writing: the index is made anew only when that loses nothing. */
static enum kv_err open_in_daemon(struct care *care, struct kv_diag *diag) {
    struct cmd *cmd = care->cmd;
    enum kv_err err = cmd_open_store(cmd, CMD_WRITE, &care->store, diag);
    return err == KV_OK && cmd->config->rebuild_index
               ? store_reindex(care->store, care->opened, diag)
               : err;
}

static enum kv_err open_for_fsck(struct care *care, struct kv_diag *diag) {
    struct cmd *cmd = care->cmd;
    struct store_options options = cmd_store_options(cmd);
    struct kv_diag own = {""};
    if (cmd->host != NULL)
        return open_in_daemon(care, diag);
    int writes = cmd->config->repair || cmd->config->rebuild_index;
    options.read_only = !writes;
    options.create = 0;
    options.inspect = !writes;
    options.rebuild_index = cmd->config->rebuild_index;
    options.progress = on_progress;
    options.progress_context = care;
    cmd_progress(cmd, &care->progress, "rebuilding the index", "segments");
    enum kv_err err = store_open(&options, &care->store, &own);
    progress_end(&care->progress);
    if (err == KV_ERR_CORRUPT) {
        const struct finding finding = {"index", "", "", own.text, 0};
        tell_finding(care, &finding);
    }
    if (err != KV_OK)
        return kv_diag_set(diag, err, "%s%s", own.text,
                           err == KV_ERR_CORRUPT && !writes ? ": --rebuild-index mends the index"
                                                            : "");
    struct store_stats stats;
    store_stats_get(care->store, &stats);
    memcpy(care->opened, stats.opened, sizeof care->opened);
    return KV_OK;
}

static void fsck_summary(struct care *care, const struct store_fsck_report *report,
                         const struct snap_care_report *sessions) {
    uint64_t mended = report->restated + sessions->counts_mended;
    if (care->cmd->result != NULL) {
        cJSON *to = care->cmd->result;
        cJSON_AddNumberToObject(to, "records", (double)report->records);
        cJSON_AddNumberToObject(to, "extents", (double)report->extents);
        cJSON_AddNumberToObject(to, "batches", (double)report->batches);
        cJSON_AddNumberToObject(to, "segments", (double)report->segments);
        cJSON_AddNumberToObject(to, "stored_sessions", (double)sessions->sessions);
        cJSON_AddNumberToObject(to, "snapshots", (double)sessions->snapshots);
        cJSON_AddNumberToObject(to, "damage", (double)care->damage);
        cJSON_AddNumberToObject(to, "notes", (double)care->notes);
        cJSON_AddNumberToObject(to, "mended", (double)mended);
        json_text(to, "opened", care->opened);
        return;
    }
    if (care->opened[0] != 0)
        fprintf(care->cmd->out, "opening: %s\n", care->opened);
    char part[6][TEXT_SHORT_BYTES];
    fprintf(care->cmd->out, "%s, %s, %s, %s, %s: %" PRIu64 " damaged, %s",
            text_count(sessions->sessions, "session", part[0]),
            text_count(report->records, "record", part[1]),
            text_count(report->extents, "extent", part[2]),
            text_count(report->batches, "batch", part[3]),
            text_count(report->segments, "segment", part[4]), care->damage,
            text_count(care->notes, "note", part[5]));
    if (care->cmd->config->repair)
        fprintf(care->cmd->out, ", %" PRIu64 " mended", mended);
    fprintf(care->cmd->out, "\n");
}

enum kv_err cmd_fsck(struct cmd *cmd, struct kv_diag *diag) {
    struct care care = {.cmd = cmd};
    struct store_fsck_report report = {0}, again = {0};
    struct snap_care_report sessions = {0}, after = {0};
    enum kv_err err = KV_OK;
    if (cmd->result != NULL)
        care.list = cJSON_AddArrayToObject(cmd->result, "findings");
    KV_TRY(open_for_fsck(&care, diag));
    uint64_t sequence = store_sequence(care.store);
    KV_TRY(look(&care, cmd->config->repair, &report, &sessions, diag));
    if (!cmd->config->repair && care.sequence != sequence)
        KV_TRY(kv_diag_set(diag, KV_ERR_BUSY,
                           "somebody wrote meanwhile, so the findings mean nothing: run it again"));
    if (cmd->config->repair) {
        care.quiet = 1;
        KV_TRY(look(&care, 0, &again, &after, diag));
    }
    fsck_summary(&care, &report, &sessions);
    if (care.damage != 0)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "%" PRIu64 " findings of damage%s", care.damage,
                          report.index_wrong ? "; --rebuild-index mends the index" : "");
done:
    cmd_close_store(cmd, care.store);
    return err;
}

/* --- scrub */

struct survivors {
    char *text;
    size_t room, used;
};

static void on_survivor(void *context, const char *session, const struct record_snapshot *record) {
    struct survivors *survivors = context;
    char when[TEXT_SHORT_BYTES];
    int length = snprintf(survivors->text + survivors->used, survivors->room - survivors->used,
                          "%s%s%s%s at token %" PRIu64 " of %s UTC",
                          survivors->used != 0 ? ", " : "", session, record->tag[0] != 0 ? "@" : "",
                          record->tag, record->n, text_when(record->created_ns, when));
    if (length > 0 && survivors->used + (size_t)length < survivors->room)
        survivors->used += (size_t)length;
}

/* What can be done: a plane that only refines is given up; else the snapshots that do not need the
 * record are named. 1 when the record is sound again. */
static int add_remedy(struct care *care, const uint8_t *key, size_t key_bytes, char *text,
                      size_t room) {
    struct snap_lower_found found = {0};
    struct kv_diag why = {""};
    const struct snap_lower_look look = {care->store, care->cmd->alloc, key, key_bytes,
                                         care->cmd->config->keep_lower};
    size_t used = strlen(text);
    enum kv_err err = snap_lower_examine(&look, &found, &why);
    if (err == KV_OK && found.drop != 0) {
        snprintf(text + used, room - used,
                 found.kept ? "; kept at %s: a wake proves it by the floor's fingerprint"
                            : "; this only refines: --keep-lower keeps the session at %s",
                 layout_tier_name(found.top));
        return found.kept;
    }
    if (err != KV_OK && err != KV_ERR_INVALID) {
        snprintf(text + used, room - used, "; %s", why.text);
        return 0;
    }
    struct survivors survivors = {text + used, room - used, 0};
    int length = snprintf(text + used, room - used, "; lost from that snapshot on, others: ");
    survivors.text += length;
    survivors.room -= (size_t)length < survivors.room ? (size_t)length : survivors.room;
    if (care->owners != NULL && survivors.room > 1)
        (void)snap_care_survivors(care->owners, care->store, key, key_bytes, on_survivor,
                                  &survivors);
    if (survivors.used == 0 && survivors.room > 1)
        snprintf(survivors.text, survivors.room, "none");
    return 0;
}

static void on_bad(void *context, const struct store_fsck_finding *found) {
    struct care *care = context;
    char all[REMEDY_BYTES];
    if (found->kind != STORE_FSCK_DATA) {
        on_store_finding(context, found);
        return;
    }
    snprintf(all, sizeof all, "%.400s", found->text);
    int kept = add_remedy(care, found->key, found->key_bytes, all, sizeof all);
    care->kept += (uint64_t)kept;
    const struct finding finding = {
        .kind = store_fsck_name(found->kind), .text = all, .is_note = kept};
    tell_record(context, finding, found->key, found->key_bytes);
}

static void scrub_summary(const struct care *care, const struct store_scrub_report *report) {
    const struct cmd *cmd = care->cmd;
    char records[TEXT_SHORT_BYTES];
    char size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON *to = cmd->result;
        cJSON_AddNumberToObject(to, "pass", (double)report->pass);
        cJSON_AddNumberToObject(to, "records", (double)report->records);
        cJSON_AddNumberToObject(to, "bad", (double)report->bad);
        cJSON_AddNumberToObject(to, "kept_lower", (double)care->kept);
        cJSON_AddNumberToObject(to, "read_bytes", (double)report->read_bytes);
        cJSON_AddBoolToObject(to, "resumed", report->resumed);
        cJSON_AddBoolToObject(to, "finished", report->finished);
        return;
    }
    fprintf(cmd->out, "pass %" PRIu64 "%s: %s, %s read, %" PRIu64 " bad", report->pass,
            report->resumed ? " (went on)" : "", text_count(report->records, "record", records),
            text_size(report->read_bytes, size), report->bad);
    if (care->kept != 0)
        fprintf(cmd->out, ", %s kept at a lower tier", text_count(care->kept, "block", records));
    fprintf(cmd->out, "%s\n", report->finished ? "" : "; not at its end, the next run goes on");
}

static enum kv_err scrub(struct cmd *cmd, struct kv_diag *diag) {
    struct care care = {.cmd = cmd};
    struct store_scrub_report report = {0};
    enum kv_err err = KV_OK;
    struct store_scrub_args args = {.bytes_per_second = cmd->config->rate_bytes,
                                    .restart = cmd->config->restart,
                                    .pause = on_pause,
                                    .progress = on_progress,
                                    .lend = on_lend,
                                    .bad = on_bad,
                                    .context = &care};
    if (cmd->result != NULL)
        care.list = cJSON_AddArrayToObject(cmd->result, "findings");
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_store(cmd, CMD_WRITE, &care.store, diag));
    KV_TRY(snap_care_owners_make(care.store, cmd->alloc, &care.owners, diag));
    args.store = care.store;
    cmd_progress(cmd, &care.progress, "reading", "bytes");
    err = store_scrub(&args, &report, diag);
    progress_end(&care.progress);
    if (err == KV_OK)
        scrub_summary(&care, &report);
    char records[TEXT_SHORT_BYTES];
    if (err == KV_OK && report.bad > care.kept)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "%s: something is not what was written",
                          text_count(report.bad - care.kept, "finding", records));
done:
    snap_care_owners_drop(care.owners);
    cmd_close_store(cmd, care.store);
    return err;
}

enum kv_err cmd_scrub(struct cmd *cmd, struct kv_diag *diag) {
    return alone(cmd, cmd->host != NULL ? cmd->host->scrubbing : NULL, scrub, diag);
}
