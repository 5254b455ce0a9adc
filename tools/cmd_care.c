/* tools/cmd_care.c - gc, fsck and scrub: the store kept in order.
 *
 * Responsible for: the order of record half and store half, text, JSON and exit codes.
 * Not responsible for: what is moved or compared (store/, snapshot/).
 */
#include "tools/cmd.h"

#include "snapshot/snap_care.h"
#include "store/store_fsck.h"
#include "store/store_gc.h"
#include "store/store_scrub.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>

enum { WHO_BYTES = 512, WHAT_BYTES = 96 };

struct care {
    struct cmd *cmd;
    struct store *store;
    struct progress progress;
    struct snap_care_owners *owners; /* NULL when they cannot be told */
    cJSON *list;                     /* of findings, with --json */
    uint64_t damage, notes;
    int quiet; /* the second look after a repair */
};

static int on_pause(void *context, uint64_t ns) {
    struct care *care = context;
    struct timespec left = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    /* tidy-allow: wait a bounded rate is kept by waiting, there is no event */
    while (ns != 0 && nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
    return cmd_interrupted(care->cmd);
}

static void on_progress(void *context, uint64_t done, uint64_t all) {
    struct care *care = context;
    progress_update(&care->progress, done, all);
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
    cJSON_AddNumberToObject(to, "freed_bytes", (double)space->freed_bytes);
    cJSON_AddBoolToObject(to, "stopped", space->stopped);
    json_text(to, "trouble", space->trouble);
}

static void gc_text(int dry_run, const struct snap_care_report *records,
                    const struct store_gc_report *space) {
    char one[TEXT_SHORT_BYTES];
    char two[TEXT_SHORT_BYTES];
    const char *would = dry_run ? "would be " : "";
    printf("records: %" PRIu64 " snapshots, %" PRIu64 " pages, %" PRIu64 " blocks, %" PRIu64
           " lineages of no session %sdeleted\n",
           records->dead_snapshots, records->dead_pages, records->dead_blocks,
           records->dead_lineages, would);
    if (records->trouble[0] != 0) {
        printf("records: none deleted, ");
        text_print_clean(stdout, records->trouble, strlen(records->trouble));
        printf("; run `coldplane fsck`\n");
    }
    printf("moved:   %s of live extents %sout of %" PRIu32 " sparse segments\n",
           text_size(space->moved_bytes, one), would, space->sparse);
    printf("freed:   %" PRIu32 " segments, %s%s\n", space->removed,
           text_size(space->freed_bytes, one), dry_run ? " (planned)" : "");
    if (!dry_run)
        printf("segments: %" PRIu32 ", %s before; %" PRIu32 ", %s after\n", space->segments_before,
               text_size(space->segment_bytes_before, one), space->segments_after,
               text_size(space->segment_bytes_after, two));
    if (space->trouble[0] != 0)
        printf("%s\n", space->trouble);
    if (space->stopped)
        printf("stopped before its end; what was freed stays freed\n");
}

enum kv_err cmd_gc(struct cmd *cmd, struct kv_diag *diag) {
    struct care care = {.cmd = cmd};
    struct snap_care_report records = {0};
    struct store_gc_report space = {0};
    struct store_gc_options options = store_gc_options_usual();
    enum kv_err err = KV_OK;
    options.dry_run = cmd->config->dry_run;
    options.bytes_per_second = cmd->config->rate_bytes;
    options.pause = on_pause;
    options.progress = on_progress;
    options.context = &care;
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_store(cmd, options.dry_run, &care.store, diag));
    const struct snap_care_collect_args collect = {
        .store = care.store, .alloc = cmd->alloc, .dry_run = options.dry_run};
    KV_TRY(snap_care_collect(&collect, &records, diag));
    progress_begin(&care.progress, stderr, cmd->clock, "moving", "bytes");
    err = store_gc(care.store, &options, &space, diag);
    progress_end(&care.progress);
    if (cmd->result != NULL)
        gc_json(cmd->result, &records, &space);
    else
        gc_text(options.dry_run, &records, &space);
    if (err == KV_OK && (space.damaged != 0 || records.trouble[0] != 0))
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "something stayed because it is damaged: %s",
                          space.trouble[0] != 0 ? space.trouble : records.trouble);
done:
    store_close(care.store);
    return err;
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
    printf("%s %s", finding->is_note ? "note  " : "damage", finding->kind);
    if (finding->sessions[0] != 0) {
        printf(", session ");
        text_print_clean(stdout, finding->sessions, strlen(finding->sessions));
    }
    if (finding->what[0] != 0)
        printf(", %s", finding->what);
    printf(": ");
    text_print_clean(stdout, finding->text, strlen(finding->text));
    printf("\n");
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

static int on_session(void *context, const struct snapshot_entry *entry) {
    struct care *care = context;
    struct restore_check check;
    struct kv_diag why = {""};
    enum kv_err err = restore_verify(care->store, care->cmd->alloc, entry->head.name, &check, &why);
    if (err != KV_OK) {
        const struct finding finding = {"session", entry->head.name, "", why.text, 0};
        tell_finding(care, &finding);
    }
    return 1;
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
                                         .context = care};
    const struct snap_care_check_args halves = {care->store, cmd->alloc, repair, on_session_finding,
                                                care};
    enum kv_err err = KV_OK;
    care->damage = care->notes = 0;
    KV_TRY(snap_care_owners_make(care->store, cmd->alloc, &care->owners, diag));
    progress_begin(&care->progress, stderr, cmd->clock, "reading", "bytes");
    err = store_fsck(&args, report, diag);
    progress_end(&care->progress);
    if (err != KV_OK)
        goto done;
    KV_TRY(snap_care_check(&halves, sessions, diag));
    /* Names that cannot be followed have been told above. */
    if (cmd->config->read_data)
        (void)snapshot_list(care->store, cmd->alloc, on_session, care, NULL);
done:
    snap_care_owners_drop(care->owners);
    care->owners = NULL;
    return err;
}

static enum kv_err open_for_fsck(struct care *care, struct kv_diag *diag) {
    struct cmd *cmd = care->cmd;
    struct store_options options = cmd_store_options(cmd);
    struct kv_diag own = {""};
    int writes = cmd->config->repair || cmd->config->rebuild_index;
    options.read_only = !writes;
    options.inspect = !writes;
    options.rebuild_index = cmd->config->rebuild_index;
    enum kv_err err = store_open(&options, &care->store, &own);
    if (err == KV_ERR_CORRUPT) {
        const struct finding finding = {"index", "", "", own.text, 0};
        tell_finding(care, &finding);
    }
    if (err != KV_OK)
        return kv_diag_set(diag, err, "%s%s", own.text,
                           err == KV_ERR_CORRUPT && !writes ? ": --rebuild-index mends the index"
                                                            : "");
    return KV_OK;
}

static void fsck_summary(struct care *care, const struct store_fsck_report *report,
                         const struct snap_care_report *sessions) {
    struct store_stats stats;
    store_stats_get(care->store, &stats);
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
        json_text(to, "opened", stats.opened);
        return;
    }
    if (stats.opened[0] != 0)
        printf("opening: %s\n", stats.opened);
    printf("%" PRIu64 " sessions, %" PRIu64 " records, %" PRIu64 " extents, %" PRIu64
           " batches, %" PRIu64 " segments: %" PRIu64 " damaged, %" PRIu64 " notes",
           sessions->sessions, report->records, report->extents, report->batches, report->segments,
           care->damage, care->notes);
    if (care->cmd->config->repair)
        printf(", %" PRIu64 " mended", mended);
    printf("\n");
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
    if (!cmd->config->repair && store_sequence(care.store) != sequence)
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
    store_close(care.store);
    return err;
}

/* --- scrub */

static void on_bad(void *context, const uint8_t *key, size_t key_bytes, const char *text) {
    const struct finding finding = {.kind = "extent-data", .text = text};
    tell_record(context, finding, key, key_bytes);
}

static void scrub_summary(struct cmd *cmd, const struct store_scrub_report *report) {
    char size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON *to = cmd->result;
        cJSON_AddNumberToObject(to, "pass", (double)report->pass);
        cJSON_AddNumberToObject(to, "records", (double)report->records);
        cJSON_AddNumberToObject(to, "bad", (double)report->bad);
        cJSON_AddNumberToObject(to, "read_bytes", (double)report->read_bytes);
        cJSON_AddBoolToObject(to, "resumed", report->resumed);
        cJSON_AddBoolToObject(to, "finished", report->finished);
        return;
    }
    printf("pass %" PRIu64 "%s: %" PRIu64 " records, %s read, %" PRIu64 " bad%s\n", report->pass,
           report->resumed ? " (went on)" : "", report->records,
           text_size(report->read_bytes, size), report->bad,
           report->finished ? "" : "; not at its end, the next run goes on");
}

enum kv_err cmd_scrub(struct cmd *cmd, struct kv_diag *diag) {
    struct care care = {.cmd = cmd};
    struct store_scrub_report report = {0};
    enum kv_err err = KV_OK;
    struct store_scrub_args args = {.bytes_per_second = cmd->config->rate_bytes,
                                    .restart = cmd->config->restart,
                                    .pause = on_pause,
                                    .progress = on_progress,
                                    .bad = on_bad,
                                    .context = &care};
    if (cmd->result != NULL)
        care.list = cJSON_AddArrayToObject(cmd->result, "findings");
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_store(cmd, 0, &care.store, diag));
    KV_TRY(snap_care_owners_make(care.store, cmd->alloc, &care.owners, diag));
    args.store = care.store;
    progress_begin(&care.progress, stderr, cmd->clock, "reading", "bytes");
    err = store_scrub(&args, &report, diag);
    progress_end(&care.progress);
    if (err == KV_OK)
        scrub_summary(cmd, &report);
    if (err == KV_OK && report.bad != 0)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "%" PRIu64 " records are not what was written",
                          report.bad);
done:
    snap_care_owners_drop(care.owners);
    store_close(care.store);
    return err;
}
