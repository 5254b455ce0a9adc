/* tools/cmd_bench_restore.c - bench restore: waking beside plain reading and beside prefilling.
 *
 * Responsible for: the measured session, three figures for the same tokens in the same run, and
 * refusing a figure that read nothing or reused nothing.
 * Not responsible for: the restore itself.
 *
 * The text is the licence texts that every Debian ships, as one pasted document.
 */
#include "tools/cmd_bench.h"

#include "engine/record.h"
#include "tools/licences.h"
#include "tools/progress.h"
#include "tools/receipt_keep.h"
#include "tools/receipt_print.h"
#include "tools/text.h"
#include "tools/turn.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 20, USUAL_TOKENS = 7500 };

/* Where the bytes of a wake lie; sorted and merged before reading. */
struct place {
    uint32_t segment;
    uint64_t off, bytes;
};

/* A wake and the plain reader, one behind the other. */
struct pair {
    struct receipt wake;
    uint64_t plain_ns;
};

struct measured {
    struct cmd *cmd;
    struct service *service;
    struct pair pairs[CMD_BENCH_RUNS]; /* by rising wall time once all are done */
    uint32_t *ids;                     /* of the session, to be prefilled again */
    uint64_t n_kv;
    struct image_policy policy;
    void *places;
    size_t place_capacity, place_count;
    uint64_t plain_bytes, prefill_ns;
    int plain_direct;
    uint64_t at_rest_bytes;
    struct cmd_bench_first first;
};

static void on_prefilled(void *context, uint64_t done, uint64_t all) {
    progress_update(context, done, all);
}

/* --- the session */

static enum kv_err feed_licences(struct cmd *cmd, struct service *service, struct session *session,
                                 struct kv_diag *diag) {
    char *text = NULL;
    struct progress progress;
    /* Six bytes to a token are more than these texts need. */
    uint64_t bytes = 6 * cmd_bench_tokens(cmd, USUAL_TOKENS);
    enum kv_err err = licences_text(cmd->alloc, bytes, &text, diag);
    if (err != KV_OK)
        return err;
    cmd_progress(cmd, &progress, "reading the licence texts", "tokens");
    const struct turn_document document = {.text = text,
                                           .text_bytes = strlen(text),
                                           .tokens_end = cmd_bench_tokens(cmd, USUAL_TOKENS),
                                           .prefilled = on_prefilled,
                                           .context = &progress};
    err = turn_feed_document(service, session, &document, diag);
    progress_end(&progress);
    kv_alloc_release(cmd->alloc, text);
    return err;
}

static enum kv_err build(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct service *service = NULL;
    struct session *session = NULL;
    struct session_info info;
    struct snapshot_entry entry;
    struct service_opened opened;
    struct receipt receipt;
    KV_TRY(cmd_open_service(cmd, CMD_CREATE, NULL, NULL, &service, diag));
    if (snapshot_find(service_store(service), cmd->alloc, cmd->session_name, &entry, NULL) == KV_OK)
        goto done;
    const struct service_lookup lookup = {
        .create = 1, .policy = &cmd->config->policy, .sampler = &cmd->config->sampler};
    KV_TRY(cmd_make(cmd, cmd->session_name, diag));
    KV_TRY(service_session(service, cmd->session_name, &lookup, &session, &opened, diag));
    KV_TRY(feed_licences(cmd, service, session, diag));
    session_info(session, &info);
    if (info.n_kv + 16 < cmd_bench_tokens(cmd, USUAL_TOKENS))
        KV_TRY(kv_diag_set(diag, KV_ERR_LIMIT,
                           "bench restore: the licence texts end at %" PRIu64
                           " tokens; take fewer --tokens",
                           info.n_kv));
    KV_TRY(service_save(service, session, 0, &receipt, diag));
    if (cmd->result != NULL)
        cJSON_AddItemToObject(cmd->result, "saved", receipt_print_json(&receipt));
    else
        receipt_print_line(&receipt, cmd->out);
done:
    if (err != KV_OK && session != NULL)
        service_drop(service, session);
    cmd_close_service(cmd, service);
    return err;
}

/* What the daemon told of the session that it made; it was there already when there is none. */
static void add_saved(struct cmd *cmd) {
    uint64_t ids[RECEIPT_KEEP_MAX];
    char dir[CONFIG_PATH_BYTES + 16];
    const struct receipt_keep keep = cmd_receipts(cmd, dir);
    uint32_t count = 0;
    if (receipt_keep_list(&keep, ids, &count, NULL) != KV_OK)
        return;
    for (uint32_t i = 0; i < count && ids[i] >= cmd->built_ns; i++) {
        cJSON *document = NULL;
        if (receipt_keep_read(&keep, ids[i], &document, NULL) != KV_OK)
            continue;
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(document, "name"));
        const char *what = cJSON_GetStringValue(cJSON_GetObjectItem(document, "operation"));
        if (name != NULL && what != NULL && strcmp(name, cmd->session_name) == 0 &&
            strcmp(what, receipt_operation_name(RECEIPT_SAVE)) == 0) {
            cJSON_AddItemToObject(cmd->result, "saved", document);
            return;
        }
        cJSON_Delete(document);
    }
}

static enum kv_err keep_ids(struct measured *measured, struct session *session,
                            struct kv_diag *diag) {
    struct session_info info;
    session_info(session, &info);
    measured->n_kv = info.n_kv;
    measured->policy = info.policy;
    if (measured->ids != NULL)
        return KV_OK;
    measured->ids = kv_alloc_copy(measured->cmd->alloc, info.ids, info.n_kv * sizeof *info.ids);
    return measured->ids != NULL
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %" PRIu64 " ids", info.n_kv);
}

static int by_wall(const void *left, const void *right) {
    const struct receipt *a = &((const struct pair *)left)->wake;
    const struct receipt *b = &((const struct pair *)right)->wake;
    return a->wall_ns < b->wall_ns ? -1 : a->wall_ns > b->wall_ns;
}

static const struct receipt *median(const struct measured *measured) {
    return &measured->pairs[CMD_BENCH_RUNS / 2].wake;
}

/* CASE-37: a restore that read nothing or reused nothing is not a fast one. */
static enum kv_err wake_once(struct measured *measured, struct receipt *receipt_out,
                             struct kv_diag *diag) {
    struct session *session = NULL;
    struct receipt receipt;
    enum kv_err err = service_wake(measured->service, measured->cmd->session_name, NULL, &session,
                                   &receipt, diag);
    if (err == KV_OK)
        err = keep_ids(measured, session, diag);
    if (err == KV_OK &&
        (receipt.door_bytes == 0 || receipt.tokens_reused == 0 || receipt.tokens_prefilled != 0))
        err = kv_diag_set(diag, KV_ERR_PROOF,
                          "bench restore: %" PRIu64 " bytes read, %" PRIu64
                          " tokens reused, %" PRIu64 " prefilled: that was no restore",
                          receipt.door_bytes, receipt.tokens_reused, receipt.tokens_prefilled);
    if (session != NULL)
        session_drop(session);
    if (err == KV_OK)
        *receipt_out = receipt;
    return err;
}

/* --- the plain reader */

static int by_place(const void *left, const void *right) {
    const struct place *a = left, *b = right;
    if (a->segment != b->segment)
        return a->segment < b->segment ? -1 : 1;
    return a->off < b->off ? -1 : a->off > b->off;
}

static enum kv_err take_places(struct measured *measured, const struct record_key *key,
                               uint32_t streams, struct kv_diag *diag) {
    struct store *store = service_store(measured->service);
    struct store_record record;
    enum kv_err err = store_get(store, key->bytes, key->size, &record, diag);
    if (err != KV_OK)
        return err;
    for (uint32_t i = 0; err == KV_OK && i < record.extent_count; i++) {
        const struct store_extent *extent = &record.extents[i];
        if ((streams >> extent->kind & 1) == 0)
            continue;
        if (!kv_alloc_grow(measured->cmd->alloc, &measured->places, &measured->place_capacity,
                           measured->place_count + 1, sizeof(struct place)))
            err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the places of extents");
        else
            ((struct place *)measured->places)[measured->place_count++] =
                (struct place){extent->segment, extent->off,
                               (extent->stored_bytes + STORE_PAGE_BYTES - 1) / STORE_PAGE_BYTES *
                                   STORE_PAGE_BYTES};
    }
    store_record_release(store, &record);
    return err;
}

static enum kv_err find_places(struct measured *measured, const struct snapshot_entry *entry,
                               struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; err == KV_OK && i < entry->head.block_count; i++) {
        struct record_key key = record_key_block(entry->head.lineage, i);
        uint32_t streams = layout_tier_streams(image_tier(&measured->policy, i, measured->n_kv));
        err = take_places(measured, &key, streams, diag);
    }
    for (uint32_t i = 0; err == KV_OK && i < entry->head.page_count; i++) {
        struct record_key key = record_key_page(entry->head.page_ids[i]);
        err = take_places(measured, &key, UINT32_MAX, diag);
    }
    if (err == KV_OK && entry->head.sinks_page != 0) {
        struct record_key key = record_key_page(entry->head.sinks_page);
        err = take_places(measured, &key, UINT32_MAX, diag);
    }
    if (err == KV_OK && measured->place_count == 0)
        err = kv_diag_set(diag, KV_ERR_PROOF, "bench restore: the session has no bytes on disk");
    return err;
}

static void merge_places(struct measured *measured) {
    struct place *places = measured->places;
    size_t kept = 0;
    qsort(places, measured->place_count, sizeof *places, by_place);
    for (size_t i = 1; i < measured->place_count; i++) {
        struct place *last = &places[kept];
        if (places[i].segment == last->segment && places[i].off == last->off + last->bytes)
            last->bytes += places[i].bytes;
        else
            places[++kept] = places[i];
    }
    measured->place_count = kept + 1;
}

static enum kv_err read_place(struct measured *measured, const struct place *place, int file,
                              void *buffer, struct kv_diag *diag) {
    for (uint64_t done = 0; done < place->bytes;) {
        uint64_t left = place->bytes - done;
        ssize_t got =
            pread(file, buffer, left < READ_BYTES ? left : READ_BYTES, (off_t)(place->off + done));
        if (got <= 0)
            return kv_diag_errno(diag, KV_ERR_IO, got < 0 ? errno : EIO, "segment %08" PRIu32,
                                 place->segment);
        done += (uint64_t)got;
        measured->plain_bytes += (uint64_t)got;
    }
    return KV_OK;
}

/* One thread, reads of up to 1 MiB, O_DIRECT where the file system takes it. */
static enum kv_err read_plainly(struct measured *measured, uint64_t *ns_out, struct kv_diag *diag) {
    const struct place *places = measured->places;
    enum kv_err err = KV_OK;
    int file = -1;
    char path[CONFIG_PATH_BYTES + 32];
    void *buffer = kv_alloc_aligned(measured->cmd->alloc, READ_BYTES, STORE_PAGE_BYTES);
    if (buffer == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a read buffer");
    measured->plain_bytes = 0;
    uint64_t started_ns = kv_clock_now_ns(measured->cmd->clock);
    for (size_t i = 0; err == KV_OK && i < measured->place_count; i++) {
        if (i == 0 || places[i].segment != places[i - 1].segment) {
            if (file >= 0)
                close(file);
            snprintf(path, sizeof path, "%s/seg/%08" PRIu32 ".seg", measured->cmd->config->store,
                     places[i].segment);
            file = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
            measured->plain_direct = file >= 0;
            if (file < 0)
                file = open(path, O_RDONLY | O_CLOEXEC);
            if (file < 0)
                err = kv_diag_errno(diag, KV_ERR_IO, errno, "%s", path);
        }
        if (err == KV_OK)
            err = read_place(measured, &places[i], file, buffer, diag);
    }
    *ns_out = kv_clock_now_ns(measured->cmd->clock) - started_ns;
    if (file >= 0)
        close(file);
    kv_alloc_release(measured->cmd->alloc, buffer);
    return err;
}

/* Takes turns, so that what else the machine does falls on both alike. */
static enum kv_err measure_pairs(struct measured *measured, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    for (int run = 0; run < CMD_BENCH_RUNS && err == KV_OK; run++) {
        struct pair *pair = &measured->pairs[run];
        if (run % 2 == 0)
            err = read_plainly(measured, &pair->plain_ns, diag);
        if (err == KV_OK)
            err = wake_once(measured, &pair->wake, diag);
        if (run % 2 != 0 && err == KV_OK)
            err = read_plainly(measured, &pair->plain_ns, diag);
    }
    qsort(measured->pairs, CMD_BENCH_RUNS, sizeof measured->pairs[0], by_wall);
    return err;
}

/* --- prefilling the same tokens */

struct prefilling {
    struct progress progress;
    uint64_t tokens;
};

static void on_again(void *context, uint64_t n_kv, uint64_t all) {
    struct prefilling *prefilling = context;
    (void)all;
    progress_update(&prefilling->progress, n_kv, prefilling->tokens);
}

static enum kv_err prefill(struct measured *measured, struct kv_diag *diag) {
    struct cmd *cmd = measured->cmd;
    struct session *session = NULL;
    struct prefilling prefilling = {.tokens = measured->n_kv};
    const struct turn_work work = {.prefilled = on_again, .context = &prefilling};
    const struct session_settings settings = {
        .name = "prefill", .policy = measured->policy, .sampler = cmd->config->sampler};
    enum kv_err err = session_create(service_engine(measured->service), &settings, &session, diag);
    if (err == KV_OK)
        err = session_feed(session, measured->ids, (uint32_t)measured->n_kv, IMAGE_RAW, diag);
    if (err == KV_OK) {
        progress_begin(&prefilling.progress, stderr, cmd->clock, "prefilling", "tokens");
        uint64_t started_ns = kv_clock_now_ns(cmd->clock);
        err = turn_work(measured->service, session, &work, diag);
        measured->prefill_ns = kv_clock_now_ns(cmd->clock) - started_ns;
        progress_end(&prefilling.progress);
    }
    if (session != NULL)
        session_drop(session);
    return err;
}

/* --- telling */

static double ratio(double left, double right) {
    return right > 0 ? left / right : 0;
}

/* What no restore of these bytes can be faster than: the disk, or unzipping on every thread. */
static double floor_ns(const struct measured *measured, const struct pair *pair) {
    double unzip_ns = (double)pair->wake.stage_ns[RECEIPT_UNZIP] * pair->wake.unzip_threads /
                      (double)measured->cmd->config->threads;
    double plain_ns = (double)pair->plain_ns;
    return unzip_ns > plain_ns ? unzip_ns : plain_ns;
}

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

/* Wake over its floor, pair by pair: the middle one and the largest. */
static void ratios(const struct measured *measured, int with_proof, double out[2]) {
    double all[CMD_BENCH_RUNS];
    for (int i = 0; i < CMD_BENCH_RUNS; i++) {
        const struct receipt *wake = &measured->pairs[i].wake;
        uint64_t ns = wake->wall_ns - (with_proof ? 0 : wake->stage_ns[RECEIPT_PROVE]);
        all[i] = ratio((double)ns, floor_ns(measured, &measured->pairs[i]));
    }
    qsort(all, CMD_BENCH_RUNS, sizeof all[0], by_value);
    out[0] = all[CMD_BENCH_RUNS / 2];
    out[1] = all[CMD_BENCH_RUNS - 1];
}

static void tell_json(const struct measured *measured) {
    cJSON *to = measured->cmd->result;
    double wall = (double)median(measured)->wall_ns;
    double peer_ns = (double)measured->n_kv / CMD_BENCH_PEER_PREFILL * 1e9;
    double load[2], whole[2];
    ratios(measured, 0, load);
    ratios(measured, 1, whole);
    cJSON *walls = cJSON_AddArrayToObject(to, "wall_ns");
    cJSON *plain = cJSON_AddArrayToObject(to, "plain_reader_ns");
    for (int i = 0; i < CMD_BENCH_RUNS; i++) {
        const struct pair *pair = &measured->pairs[i];
        cJSON_AddItemToArray(walls, cJSON_CreateNumber((double)pair->wake.wall_ns));
        cJSON_AddItemToArray(plain, cJSON_CreateNumber((double)pair->plain_ns));
    }
    cJSON_AddItemToObject(to, "restore", receipt_print_json(median(measured)));
    cJSON_AddNumberToObject(to, "tokens", (double)measured->n_kv);
    cJSON_AddNumberToObject(to, "plain_reader_bytes", (double)measured->plain_bytes);
    cJSON_AddBoolToObject(to, "plain_reader_direct", measured->plain_direct);
    cJSON_AddNumberToObject(to, "load_over_floor", load[0]);
    cJSON_AddNumberToObject(to, "load_over_floor_most", load[1]);
    cJSON_AddNumberToObject(to, "wall_over_floor", whole[0]);
    cJSON_AddNumberToObject(to, "wall_over_floor_most", whole[1]);
    cJSON_AddNumberToObject(to, "prefill_ns", (double)measured->prefill_ns);
    cJSON_AddNumberToObject(to, "prefill_over_wall", ratio((double)measured->prefill_ns, wall));
    cJSON_AddNumberToObject(to, "peer_prefill_over_wall", ratio(peer_ns, wall));
    cJSON_AddNumberToObject(to, "bytes_at_rest_per_token",
                            ratio((double)measured->at_rest_bytes, (double)measured->n_kv));
    cJSON_AddNumberToObject(to, "peer_f16_bytes_per_token", CMD_BENCH_PEER_F16_BYTES);
    cJSON_AddNumberToObject(to, "peer_q8_q4_bytes_per_token", CMD_BENCH_PEER_Q4_BYTES);
}

static void tell_pairs(const struct measured *measured) {
    char text[TEXT_SHORT_BYTES], size[TEXT_SHORT_BYTES];
    double load[2], whole[2];
    ratios(measured, 0, load);
    ratios(measured, 1, whole);
    printf("wall of %d wakes       ", CMD_BENCH_RUNS);
    for (int i = 0; i < CMD_BENCH_RUNS; i++)
        printf(" %s", text_duration(measured->pairs[i].wake.wall_ns, text));
    printf("; the middle one counts\nplain reader beside each");
    for (int i = 0; i < CMD_BENCH_RUNS; i++)
        printf(" %s", text_duration(measured->pairs[i].plain_ns, text));
    printf("; the same %s%s\n", text_size(measured->plain_bytes, size),
           measured->plain_direct ? " by O_DIRECT" : " (buffered)");
    printf("over max(plain reader, unzip on %" PRIu32 " threads), pair by pair: "
           "loading %.2f (at most %.2f), proof included %.2f (at most %.2f)\n",
           measured->cmd->config->threads, load[0], load[1], whole[0], whole[1]);
}

static void tell_text(const struct measured *measured) {
    double wall = (double)median(measured)->wall_ns, tokens = (double)measured->n_kv;
    double own_s = (double)measured->prefill_ns / 1e9, peer_s = tokens / CMD_BENCH_PEER_PREFILL;
    receipt_print_table(median(measured), stdout);
    tell_pairs(measured);
    printf("prefill of them here    %.1f s, %.0f tokens/s: the wake is %.0f × faster\n", own_s,
           ratio(tokens, own_s), ratio(own_s * 1e9, wall));
    printf("at the peer's speed     %.1f s, %.0f tokens/s at depth 8,000 (llama.cpp, recorded on "
           "another 2-core machine, not measured now): %.0f × the wake\n",
           peer_s, CMD_BENCH_PEER_PREFILL, ratio(peer_s * 1e9, wall));
    printf("bytes at rest per token %.0f; llama.cpp's session file %d (f16), %d (q8_0/q4_0)\n",
           ratio((double)measured->at_rest_bytes, tokens), CMD_BENCH_PEER_F16_BYTES,
           CMD_BENCH_PEER_Q4_BYTES);
}

/* Whatever the settings say of wakes: it measures each kind. */
static enum kv_err open_measured(struct cmd *cmd, struct config *config, struct cmd *own,
                                 struct service **service_out, struct kv_diag *diag) {
    if (config == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for settings");
    config->eager = config->fit = 0;
    config->ram_bytes = (uint64_t)1 << 40; /* taken as it is needed: for one session */
    *own = *cmd;
    own->config = config;
    return cmd_open_service(own, CMD_READ, NULL, NULL, service_out, diag);
}

enum kv_err cmd_bench_restore(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    char name[64];
    struct snapshot_entry entry;
    struct measured measured;
    struct cmd own;
    struct config *config = NULL;
    memset(&measured, 0, sizeof measured);
    measured.cmd = cmd;
    snprintf(name, sizeof name, "bench-%" PRIu64, cmd_bench_tokens(cmd, USUAL_TOKENS));
    cmd->session_name = name;
    if (cmd->config->build && cmd->built_ns == 0)
        KV_TRY(build(cmd, diag));
    if (cmd->built_ns != 0 && cmd->result != NULL)
        add_saved(cmd);
    /* What is measured needs an engine of its own: that of whoever asked. */
    if (cmd->host != NULL) {
        cJSON_Delete(cmd->result);
        cmd->result = NULL;
        goto done;
    }
    config = kv_alloc_copy(cmd->alloc, cmd->config, sizeof *config);
    KV_TRY(open_measured(cmd, config, &own, &measured.service, diag));
    err = snapshot_find(service_store(measured.service), cmd->alloc, name, &entry, diag);
    if (err == KV_ERR_NOT_FOUND)
        kv_diag_set(diag, err,
                    "bench restore: there is no session %s to wake, so there is nothing to "
                    "measure; --build makes it",
                    name);
    KV_TRY(err);
    measured.at_rest_bytes = entry.stored_bytes;
    /* The first wake pays for what later ones find ready, and says where the bytes lie. */
    KV_TRY(wake_once(&measured, &measured.pairs[0].wake, diag));
    KV_TRY(find_places(&measured, &entry, diag));
    merge_places(&measured);
    KV_TRY(measure_pairs(&measured, diag));
    KV_TRY(cmd_bench_first(cmd, measured.service, &measured.first, diag));
    KV_TRY(prefill(&measured, diag));
    cmd_bench_host(cmd);
    if (cmd->result != NULL)
        tell_json(&measured);
    else
        tell_text(&measured);
    cmd_bench_first_tell(cmd, &measured.first);
done:
    cmd_close_service(cmd, measured.service);
    kv_alloc_release(cmd->alloc, config);
    kv_alloc_release(cmd->alloc, measured.ids);
    kv_alloc_release(cmd->alloc, measured.places);
    cmd->session_name = NULL;
    return err;
}
