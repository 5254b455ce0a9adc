/* tools/cmd_rates.c - bench rates: this machine measured once, and what that says of a session.
 *
 * Responsible for: a session of random tokens in the store itself, prefilled, saved, woken and
 * removed; the rates out of that; estimates for `show`.
 * Not responsible for: keeping them and the arithmetic (snapshot/snap_rates.c).
 */
#include "tools/cmd_bench.h"
#include "tools/json_text.h"
#include "tools/text.h"
#include "tools/turn.h"

#include "engine/probe.h"
#include "snapshot/snap_rates.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256, CHUNKS_MOST = 8, WAKES = 5, COPY_BYTES = 64 << 20 };
static const char scratch[] = "coldplane-rates";

struct measuring {
    struct cmd *cmd;
    struct service *service;
    struct session *session;
    uint32_t chunks;
    uint64_t chunk_ns[CHUNKS_MOST]; /* of each in turn, one deeper than the other */
    uint64_t step_ns[2];            /* of a fingerprint behind the first and behind the last */
    struct receipt wakes[WAKES];
    struct snap_rates rates;
};

static uint64_t now(const struct measuring *measuring) {
    return kv_clock_now_ns(measuring->cmd->clock);
}

/* What a run that was killed has left. */
static enum kv_err remove_scratch(struct measuring *measuring, struct kv_diag *diag) {
    struct kv_diag own = {""};
    cmd_write_begin(measuring->cmd, measuring->service);
    enum kv_err err =
        snapshot_remove(service_store(measuring->service), measuring->cmd->alloc, scratch, &own);
    cmd_write_end(measuring->cmd, measuring->service);
    if (err == KV_OK || err == KV_ERR_NOT_FOUND)
        return KV_OK;
    return kv_diag_set(diag, err, "%s", own.text);
}

/* The least of a few: everything else on the machine only adds. */
static enum kv_err time_step(struct measuring *measuring, uint64_t *ns_out, struct kv_diag *diag) {
    struct image_fingerprint print;
    enum kv_err err = KV_OK;
    *ns_out = UINT64_MAX;
    for (int i = 0; err == KV_OK && i < 5; i++) {
        uint64_t begun = now(measuring);
        err = session_fingerprint(measuring->session, 0, &print, diag);
        uint64_t ns = now(measuring) - begun;
        *ns_out = ns < *ns_out ? ns : *ns_out;
    }
    return err;
}

/* Random tokens: a prefill takes the same time whatever they say. */
static enum kv_err prefill(struct measuring *measuring, struct kv_diag *diag) {
    struct engine *engine = service_engine(measuring->service);
    struct engine_model model;
    uint32_t ids[CHUNK];
    uint64_t random = 88172645463325252u;
    const struct turn_work idle = {.prefilled = NULL};
    const struct service_lookup lookup = {.create = 1,
                                          .policy = &measuring->cmd->config->policy,
                                          .sampler = &measuring->cmd->config->sampler};
    struct service_opened opened;
    enum kv_err err = KV_OK;
    engine_model(engine, &model);
    measuring->chunks = model.context_tokens / 2 / CHUNK;
    if (measuring->chunks > CHUNKS_MOST)
        measuring->chunks = CHUNKS_MOST;
    if (measuring->chunks < 3)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "bench rates: a context of %" PRIu32 " tokens is too short to measure",
                           model.context_tokens);
    KV_TRY(
        service_session(measuring->service, scratch, &lookup, &measuring->session, &opened, diag));
    for (uint32_t c = 0; c < measuring->chunks; c++) {
        for (uint32_t i = 0; i < CHUNK; i++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            ids[i] = (uint32_t)(random % model.vocab_count);
        }
        uint64_t begun = now(measuring);
        KV_TRY(session_feed(measuring->session, ids, CHUNK, IMAGE_RAW, diag));
        KV_TRY(turn_work(measuring->service, measuring->session, &idle, diag));
        measuring->chunk_ns[c] = now(measuring) - begun;
        if (c == 0)
            KV_TRY(time_step(measuring, &measuring->step_ns[0], diag));
        if (cmd_interrupted(measuring->cmd))
            KV_TRY(kv_diag_set(diag, KV_ERR_CANCELLED, "bench rates: stopped"));
    }
    err = time_step(measuring, &measuring->step_ns[1], diag);
done:
    return err;
}

static enum kv_err wake_often(struct measuring *measuring, struct kv_diag *diag) {
    const struct restore_options options = {0};
    struct receipt receipt;
    enum kv_err err = service_save(measuring->service, measuring->session, 0, &receipt, diag);
    for (int i = 0; err == KV_OK && i < WAKES; i++) {
        service_drop(measuring->service, measuring->session);
        snapshot_drain(service_snapshot(measuring->service));
        measuring->session = NULL;
        err = service_wake(measuring->service, scratch, &options, &measuring->session,
                           &measuring->wakes[i], diag);
    }
    return err;
}

static enum kv_err measure_copy(struct measuring *measuring, struct kv_diag *diag) {
    const struct kv_alloc *alloc = measuring->cmd->alloc;
    uint8_t *from = kv_alloc_zeroed(alloc, 1, COPY_BYTES);
    uint8_t *to = kv_alloc_zeroed(alloc, 1, COPY_BYTES);
    enum kv_err err = KV_OK;
    if (from == NULL || to == NULL)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory to measure copying"));
    memset(from, 1, COPY_BYTES);
    memset(to, 2, COPY_BYTES);
    uint64_t begun = now(measuring);
    memcpy(to, from, COPY_BYTES);
    uint64_t ns = now(measuring) - begun + 1;
    /* Read, so that the copy is not left out. */
    measuring->rates.copy = (float)(COPY_BYTES * 1e9 / (double)ns * (double)to[COPY_BYTES - 1]);
done:
    kv_alloc_release(alloc, from);
    kv_alloc_release(alloc, to);
    return err;
}

/* --- out of the measurements */

static int by_number(const void *left, const void *right) {
    float a = *(const float *)left, b = *(const float *)right;
    return a < b ? -1 : a > b;
}

/* The middle of what the wakes say. */
static float middle_rate(const struct measuring *measuring, enum receipt_stage stage) {
    float rates[WAKES];
    for (int i = 0; i < WAKES; i++) {
        const struct receipt *receipt = &measuring->wakes[i];
        uint64_t bytes = stage == RECEIPT_READ ? receipt->door_bytes : 0;
        for (int s = 0; stage != RECEIPT_READ && s < LAYOUT_STREAM_COUNT; s++)
            bytes += receipt->raw_bytes[s];
        uint64_t ns = receipt->stage_ns[stage] + 1;
        /* What is digested where it lies has been copied there by the same thread. */
        ns += stage == RECEIPT_DIGEST ? receipt->stage_ns[RECEIPT_COPY] : 0;
        rates[i] = (float)((double)bytes * 1e9 / (double)ns);
    }
    qsort(rates, WAKES, sizeof *rates, by_number);
    return rates[WAKES / 2];
}

/* A line through two points; one that falls is noise and taken for level. */
static void line(double at, double value, double far_at, double far_value, float *base_out,
                 float *slope_out) {
    double slope = (far_value - value) / (far_at - at);
    *slope_out = slope > 0 ? (float)slope : 0;
    *base_out = (float)(value - (double)*slope_out * at);
    if (!(*base_out > 0))
        *base_out = (float)(value / 2);
}

/* The first half of the chunks against the second: single chunks jump about. The first is left out:
 * it also warms up. */
static void conclude(struct measuring *measuring) {
    struct snap_rates *rates = &measuring->rates;
    struct engine_model model;
    uint32_t half = (measuring->chunks - 1) / 2;
    double sums[2] = {0, 0}, depths[2] = {0, 0};
    for (uint32_t c = 1; c <= 2 * half; c++) {
        sums[c > half] += (double)measuring->chunk_ns[c] / CHUNK / half;
        depths[c > half] += (c + 0.5) * CHUNK / half;
    }
    line(depths[0], sums[0], depths[1], sums[1], &rates->prefill_ns, &rates->prefill_deeper_ns);
    line(CHUNK, (double)measuring->step_ns[0], (double)measuring->chunks * CHUNK,
         (double)measuring->step_ns[1], &rates->step_ns, &rates->step_deeper_ns);
    rates->read = middle_rate(measuring, RECEIPT_READ);
    rates->unzip = middle_rate(measuring, RECEIPT_UNZIP);
    rates->digest = middle_rate(measuring, RECEIPT_DIGEST);
    engine_model(service_engine(measuring->service), &model);
    rates->model = model.identity.tensors;
    rates->numerics = model.identity.numerics;
    rates->threads = cmd_bench_threads(measuring->cmd);
    rates->measured_ns = kv_clock_wall_ns(measuring->cmd->clock);
}

static void tell_rates(struct cmd *cmd, const struct snap_rates *rates) {
    const struct {
        const char *name, *text;
        float bytes;
    } items[] = {{"read_bytes_per_s", "read", rates->read},
                 {"unzip_bytes_per_s", "unzip", rates->unzip},
                 {"digest_bytes_per_s", "digest", rates->digest},
                 {"copy_bytes_per_s", "copy", rates->copy}};
    char text[TEXT_SHORT_BYTES];
    for (size_t i = 0; i < sizeof items / sizeof items[0]; i++) {
        if (cmd->result != NULL)
            cJSON_AddNumberToObject(cmd->result, items[i].name, (double)items[i].bytes);
        else
            fprintf(cmd->out, "%-10s %s/s\n", items[i].text,
                    text_size((uint64_t)items[i].bytes, text));
    }
    if (cmd->result != NULL) {
        cJSON_AddNumberToObject(cmd->result, "prefill_ns", (double)rates->prefill_ns);
        cJSON_AddNumberToObject(cmd->result, "prefill_deeper_ns", (double)rates->prefill_deeper_ns);
        cJSON_AddNumberToObject(cmd->result, "step_ns", (double)rates->step_ns);
        cJSON_AddNumberToObject(cmd->result, "step_deeper_ns", (double)rates->step_deeper_ns);
        return;
    }
    fprintf(cmd->out, "prefill    %.0f tokens/s at depth 0, %.0f at 4,096\n",
            1e9 / (double)rates->prefill_ns,
            1e9 / ((double)rates->prefill_ns + 4096 * (double)rates->prefill_deeper_ns));
    fprintf(cmd->out, "proof      %.1f ms at depth 0, %.1f ms at 4,096\n",
            (double)rates->step_ns / 1e6,
            ((double)rates->step_ns + 4096 * (double)rates->step_deeper_ns) / 1e6);
}

enum kv_err cmd_bench_rates(struct cmd *cmd, struct kv_diag *diag) {
    struct measuring measuring = {.cmd = cmd};
    enum kv_err err = KV_OK;
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_service(cmd, CMD_CREATE, NULL, NULL, &measuring.service, diag));
    KV_TRY(cmd_make(cmd, scratch, diag));
    service_settle(measuring.service, scratch);
    struct session *left = session_find(service_engine(measuring.service), scratch);
    if (left != NULL)
        service_drop(measuring.service, left);
    KV_TRY(remove_scratch(&measuring, diag));
    err = prefill(&measuring, diag);
    if (err == KV_OK)
        err = wake_often(&measuring, diag);
    if (err == KV_OK)
        err = measure_copy(&measuring, diag);
    if (measuring.session != NULL)
        service_drop(measuring.service, measuring.session);
    snapshot_drain(service_snapshot(measuring.service));
    if (err == KV_OK) {
        conclude(&measuring);
        err = remove_scratch(&measuring, diag);
    } else {
        (void)remove_scratch(&measuring, NULL);
    }
    KV_TRY(err);
    cmd_write_begin(cmd, measuring.service);
    err = snap_rates_put(service_store(measuring.service), &measuring.rates, diag);
    cmd_write_end(cmd, measuring.service);
    KV_TRY(err);
    cmd_bench_host(cmd);
    tell_rates(cmd, &measuring.rates);
done:
    cmd_close_service(cmd, measuring.service);
    return err;
}

/* --- estimates */

static uint64_t raw_bytes(const struct image *image) {
    const struct layout_geometry *geometry = &image->model.geometry;
    const struct image_policy *policy = &image->policies[image->policy_count - 1].policy;
    uint64_t bytes = layout_dense_bytes(geometry, 1) *
                     (image->n_kv - (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS);
    for (uint32_t b = 0; b < image->block_count; b++) {
        uint32_t streams = layout_tier_streams(image_tier(policy, b, image->n_kv));
        for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++)
            if (streams & 1u << s)
                bytes += layout_stream_bytes(geometry, (enum layout_stream)s);
    }
    return bytes;
}

enum kv_err cmd_rates_estimate(struct store *store, const struct image *image,
                               struct cmd_estimate *estimate_out, struct kv_diag *diag) {
    struct snap_rates rates;
    struct snap_rates_load load = {.stored_bytes = estimate_out->stored_bytes,
                                   .raw_bytes = raw_bytes(image),
                                   .n_kv = image->n_kv};
    enum kv_err err = snap_rates_get(store, &rates, diag);
    if (err != KV_OK)
        return err;
    uint32_t probes =
        image->probe_count < estimate_out->probes ? image->probe_count : estimate_out->probes;
    load.probe_rows = probes * (PROBE_QUESTION + PROBE_ANSWER);
    estimate_out->wake_ns = snap_rates_wake_ns(&rates, &load);
    estimate_out->prefill_ns = snap_rates_prefill_ns(&rates, image->n_kv);
    estimate_out->measured_ns = rates.measured_ns;
    estimate_out->same_model = memcmp(&rates.model, &image->model.tensors, sizeof rates.model) == 0;
    return KV_OK;
}

void cmd_rates_show(const struct cmd_estimate *estimate, struct cJSON *to) {
    char wake[TEXT_SHORT_BYTES], prefill[TEXT_SHORT_BYTES], when[TEXT_SHORT_BYTES];
    if (to != NULL) {
        cJSON *item = cJSON_AddObjectToObject(to, "estimate");
        cJSON_AddNumberToObject(item, "wake_ns", (double)estimate->wake_ns);
        cJSON_AddNumberToObject(item, "prefill_ns", (double)estimate->prefill_ns);
        cJSON_AddBoolToObject(item, "same_model", estimate->same_model);
        cJSON_AddNumberToObject(item, "measured_unix",
                                (double)(estimate->measured_ns / 1000000000U));
        return;
    }
    printf("  estimate      a wake %s, prefilling again %s (measured %s UTC%s)\n",
           text_duration(estimate->wake_ns, wake), text_duration(estimate->prefill_ns, prefill),
           text_when(estimate->measured_ns, when),
           estimate->same_model ? "" : ", with another model");
}
