/* tests/support_nine_wake.c - what a wake costs, and what it is measured against in the same run.
 *
 * Responsible for: what support_nine_wake.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine_wake.h"

#include "engine/engine_inner.h"
#include "kernels/cuda/cuda_bench.h"
#include "store/base/clock.h"
#include "store/store_ram.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COPY_BYTES = 64 << 20, COPIES = 7, STEP_EVENTS = 2 * NINE_SESSIONS_MAX + 1 };

static uint64_t now_ns(void) {
    return kv_clock_now_ns(kv_clock_system());
}

/* --- copy rate */

static void take_rate(void *context, const struct cuda_bench_device *device) {
    *(double *)context = device->copy_rate;
}

static double host_copy_rate(void) {
    uint8_t *from = malloc(COPY_BYTES), *to = malloc(COPY_BYTES);
    uint64_t ns[COPIES] = {0};

    for (uint32_t i = 0; from && to && i < COPIES; i++) {
        memset(from, (int)i, COPY_BYTES);
        uint64_t begun_ns = now_ns();
        memcpy(to, from, COPY_BYTES);
        ns[i] = now_ns() - begun_ns;
    }
    free(from);
    free(to);
    nine_sort(ns, COPIES);
    return ns[COPIES / 2] ? 2.0 * COPY_BYTES / ((double)ns[COPIES / 2] * 1e-9) : 0;
}

double nine_copy_rate(enum engine_device device, const char **why_out) {
    double rate = 0;
    const struct cuda_bench_options options = {.tokens = CUDA_BENCH_TOKENS_MAX,
                                               .batch_max = 1,
                                               .repeats = COPIES,
                                               .device = take_rate,
                                               .context = &rate};

    *why_out = NULL;
    if (device == ENGINE_DEVICE_CPU)
        return host_copy_rate();
    *why_out = cuda_bench_run(&options);
    return *why_out ? 0 : rate;
}

/* --- prefill */

/* Feeds `count` tokens and runs them; the median time of a chunk. */
static enum kv_err run_chunks(struct nine *nine, struct session *session, const uint32_t *ids,
                              uint32_t count, double *chunk_ms_out, struct kv_diag *diag) {
    uint64_t ns[NINE_PREFILL_CHUNKS];
    uint32_t chunks = 0, events_count = 1;
    enum kv_err err = session_feed(session, ids, count, IMAGE_RAW, diag);

    while (err == KV_OK && chunks < count / FORWARD_CHUNK_ROWS) {
        struct engine_event events[STEP_EVENTS];
        uint64_t begun_ns = now_ns();
        err = engine_step(nine->engine, events, &events_count, diag);
        ns[chunks++] = now_ns() - begun_ns;
        for (uint32_t i = 0; i < events_count && err == KV_OK; i++)
            if (events[i].kind == ENGINE_FAILED)
                err = events[i].err;
    }
    if (err != KV_OK)
        return err;
    nine_sort(ns, chunks);
    *chunk_ms_out = (double)ns[(chunks - 1) / 2] * 1e-6;
    return KV_OK;
}

double nine_prefill_chunk_ms(const struct nine_prefill *prefill, uint64_t depth) {
    uint32_t i = 1;

    while (i + 1 < NINE_PREFILL_DEPTHS && depth > prefill->depths[i])
        i++;
    double width = (double)prefill->depths[i] - (double)prefill->depths[i - 1];
    double part = ((double)depth - (double)prefill->depths[i - 1]) / width;
    double ms = prefill->chunk_ms[i - 1] + part * (prefill->chunk_ms[i] - prefill->chunk_ms[i - 1]);
    return ms > 0 ? ms : 0;
}

static enum kv_err prefill_at_depths(struct nine *nine, const uint32_t *ids,
                                     struct nine_prefill *prefill, struct kv_diag *diag) {
    const struct session_settings settings = {
        .name = "prefill", .policy = nine->policy, .sampler = {.top_p = 1, .top_k = 1, .seed = 1}};
    uint32_t stretch = prefill->chunks * FORWARD_CHUNK_ROWS;
    uint64_t tokens = nine->settings.tokens, n = 0;
    struct session *session = NULL;
    enum kv_err err = session_create(nine->engine, &settings, &session, diag);

    for (uint32_t i = 0; i < NINE_PREFILL_DEPTHS && err == KV_OK; i++) {
        uint64_t depth = i * (tokens - stretch) / (NINE_PREFILL_DEPTHS - 1);
        depth -= depth % FORWARD_CHUNK_ROWS;
        const struct fill fill =
            support_synth_fill(nine->rows, ids + n, (uint32_t)(depth - n), nine->settings.threads);
        if (depth > n)
            err = fill_session(session, &fill, diag);
        if (err == KV_OK)
            err = run_chunks(nine, session, ids + depth, stretch, &prefill->chunk_ms[i], diag);
        prefill->depths[i] = depth + stretch / 2;
        n = depth + stretch;
    }
    if (session)
        session_drop(session);
    nine_settle(nine);
    return err;
}

enum kv_err nine_prefill_run(struct nine *nine, struct nine_prefill *prefill_out,
                             struct kv_diag *diag) {
    uint64_t tokens = nine->settings.tokens, chunks = tokens / FORWARD_CHUNK_ROWS;
    uint32_t *ids = calloc(tokens, sizeof *ids);
    enum kv_err err = KV_OK;

    *prefill_out = (struct nine_prefill){
        .chunks = chunks / 8 < NINE_PREFILL_CHUNKS ? (uint32_t)(chunks / 8) : NINE_PREFILL_CHUNKS};
    if (!ids)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a text to prefill");
    support_synth_filler(&nine->synth, nine->settings.seed, ids, (uint32_t)tokens);
    /* Once to warm up. */
    for (int i = 0; i < 2 && err == KV_OK; i++)
        err = prefill_at_depths(nine, ids, prefill_out, diag);
    free(ids);
    for (uint64_t i = 0; i < chunks; i++)
        prefill_out->seconds +=
            nine_prefill_chunk_ms(prefill_out, i * FORWARD_CHUNK_ROWS + FORWARD_CHUNK_ROWS / 2) *
            1e-3;
    return err;
}

/* --- wakes */

static enum kv_err wake(struct nine *nine, struct nine_wakes *wakes, enum nine_wake_kind kind,
                        struct nine_wake *wake, struct kv_diag *diag) {
    const struct restore_options options = {.tiers = kind == NINE_EAGER ? RECEIPT_TIERS_EAGER
                                                                        : RECEIPT_TIERS_EXACT};
    struct nine_user *user = &nine->users[wakes->user];
    struct receipt *receipt = &wakes->receipts[kind];
    char text[NINE_TEXT_BYTES];
    uint64_t begun_ns = now_ns();
    uint32_t tokens = 0;
    enum kv_err err =
        restore_wake(&nine->source, user->name, &options, &user->session, receipt, diag);

    wake->wake_ns = now_ns() - begun_ns;
    if (err != KV_OK)
        return err;
    user->away = 0;
    err = nine_step(nine, &tokens, diag);
    wake->first_ns = now_ns() - begun_ns;
    wake->door_bytes = receipt->door_bytes;
    wake->ram_bytes = receipt->ram_bytes;
    if (err == KV_OK && tokens != 1)
        err = kv_diag_set(diag, KV_ERR_PROOF, "%s woke and gave %u tokens", user->name, tokens);
    wakes->wakes++;
    if (nine_wake_proven(receipt, text))
        wakes->proven++;
    else if (wakes->first_unproven[0] == 0)
        memcpy(wakes->first_unproven, text, sizeof text);
    nine_settle(nine);
    return err;
}

/* As many bytes as the wake brought, from pinned memory to where a chunk lies on the device. */
static enum kv_err copy_pinned(struct nine *nine, uint64_t bytes, uint64_t *ns_out,
                               struct kv_diag *diag) {
    uint64_t each = fill_chunk_bytes(nine->engine);
    uint16_t *from = device_host_get(nine->engine->device, each);
    enum kv_err err = from ? KV_OK : kv_diag_set(diag, KV_ERR_NOMEM, "no pinned memory");

    if (from)
        memset(from, 0, each);
    uint64_t begun_ns = now_ns();
    for (uint64_t done = 0; done < bytes && err == KV_OK; done += each)
        err = forward_put_chunk(nine->engine->forward, from);
    /* The last copy is a whole one too. */
    *ns_out = (uint64_t)((double)(now_ns() - begun_ns) * (double)bytes /
                         (double)((bytes + each - 1) / each * each));
    device_host_put(nine->engine->device, from);
    return err;
}

static enum kv_err one_round(struct nine *nine, struct nine_wakes *wakes, enum nine_wake_kind kind,
                             uint32_t round, struct kv_diag *diag) {
    struct store_read_stats stats;
    struct receipt receipt;
    enum kv_err err = nine_sleep(nine, wakes->user, &receipt, diag);

    if (err == KV_OK && kind == NINE_RAM)
        err = restore_prefetch(&nine->source, nine->users[wakes->user].name, &stats, diag);
    if (err == KV_OK)
        err = wake(nine, wakes, kind, &wakes->kinds[kind][round], diag);
    return err;
}

enum kv_err nine_wakes_run(struct nine *nine, uint32_t of, struct nine_wakes *wakes_out,
                           struct kv_diag *diag) {
    struct nine_wakes *wakes = wakes_out;
    enum kv_err err = KV_OK;

    memset(wakes, 0, sizeof *wakes);
    wakes->user = UINT32_MAX;
    for (uint32_t i = 0; i < nine->user_count; i++) {
        struct nine_user *user = &nine->users[i];
        user->away = 1;
        if (user->session &&
            (wakes->user == UINT32_MAX || user->tokens > nine->users[wakes->user].tokens))
            wakes->user = i;
    }
    /* What lies in memory would serve the others too, so it comes last. */
    for (uint32_t i = 0; i < NINE_PAIRS && of & NINE_WAKES_DISK && err == KV_OK; i++) {
        err = one_round(nine, wakes, NINE_EAGER, i, diag);
        if (err == KV_OK)
            err = one_round(nine, wakes, NINE_EXACT, i, diag);
        if (err == KV_OK)
            err = nine_read_plain(nine, wakes->kinds[NINE_EXACT][i].door_bytes, &wakes->plain[i],
                                  diag);
    }
    for (uint32_t i = 0; i < NINE_PAIRS && of & NINE_WAKES_MEMORY && err == KV_OK; i++) {
        err = one_round(nine, wakes, NINE_RAM, i, diag);
        wakes->layers[i] = wakes->receipts[NINE_RAM].layers;
        wakes->copy_bytes = wakes->kinds[NINE_RAM][i].ram_bytes;
        if (err == KV_OK)
            err = copy_pinned(nine, wakes->copy_bytes, &wakes->copy_ns[i], diag);
    }
    if (of & NINE_WAKES_MEMORY)
        store_ram_forget(nine->store, wakes->receipts[NINE_RAM].lineage);
    for (uint32_t i = 0; i < nine->user_count; i++)
        nine->users[i].away = 0;
    return err;
}

static int by_wake(const void *a, const void *b) {
    const struct nine_wake *x = a, *y = b;

    return (x->wake_ns > y->wake_ns) - (x->wake_ns < y->wake_ns);
}

struct nine_wake nine_wakes_median(const struct nine_wakes *wakes, enum nine_wake_kind kind) {
    struct nine_wake sorted[NINE_PAIRS];

    memcpy(sorted, wakes->kinds[kind], sizeof sorted);
    qsort(sorted, NINE_PAIRS, sizeof sorted[0], by_wake);
    return sorted[NINE_PAIRS / 2];
}
