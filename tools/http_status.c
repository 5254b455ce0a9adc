/* tools/http_status.c - what is going on: the document behind the status page, and metrics.
 *
 * Responsible for: /status (sessions and receipts of the asking owner alone; the operator sees
 * all), /metrics in Prometheus' text form without any session's name, /ready.
 * Not responsible for: counting (serve.h).
 *
 * BREAK_STATUS_OWNER shows everybody's sessions to everybody.
 */
#include "tools/http_inner.h"

#include "kernels/layout.h"
#include "tools/json_text.h"
#include "tools/serve.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { METRICS_BYTES_MAX = 16384 };
static const double ns_per_second = 1e9;

/* Without what the store would add, if it cannot be read now. */
static int take_picture(struct http *http, struct serve_picture *picture, int with_tiers) {
    struct serve *serve = http->options.serve;
    if (serve_picture(serve, picture, NULL) != KV_OK)
        return 0;
    (void)serve_picture_stored(serve, picture, with_tiers, NULL);
    return 1;
}

/* --- /status */

static int is_operator(const uint8_t owner[HTTP_OWNER_BYTES]) {
    static const uint8_t none[HTTP_OWNER_BYTES];
    return memcmp(owner, none, sizeof none) == 0;
}

static int is_visible(const uint8_t whose[HTTP_OWNER_BYTES],
                      const uint8_t owner[HTTP_OWNER_BYTES]) {
#ifdef BREAK_STATUS_OWNER
    (void)whose, (void)owner;
    return 1;
#else
    return is_operator(owner) || memcmp(owner, whose, HTTP_OWNER_BYTES) == 0;
#endif
}

static void add_slots(cJSON *root, const struct engine_slots *slots) {
    cJSON *to = cJSON_AddObjectToObject(root, "slots");
    cJSON_AddNumberToObject(to, "total", slots->total);
    cJSON_AddNumberToObject(to, "free", slots->free);
    cJSON_AddNumberToObject(to, "reserve", slots->reserve);
    json_text_u64(to, "bytes_each", slots->slot_bytes);
}

static void add_pair(cJSON *root, const char *name, uint64_t bytes, uint64_t ns) {
    cJSON *to = cJSON_AddObjectToObject(root, name);
    json_text_u64(to, "bytes", bytes);
    cJSON_AddNumberToObject(to, "seconds", (double)ns / ns_per_second);
}

static void add_totals(struct http *http, cJSON *root, const struct serve_picture *picture) {
    const struct serve_totals *totals = &picture->totals;
    cJSON *tokens = cJSON_AddObjectToObject(root, "tokens");
    json_text_u64(tokens, "prompt", totals->tokens_prompt);
    json_text_u64(tokens, "completion", totals->tokens_completion);
    pthread_mutex_lock(&http->lock);
    json_text_u64(tokens, "made", http->tokens_made);
    pthread_mutex_unlock(&http->lock);
    json_text_u64(tokens, "reused", totals->tokens_reused);
    json_text_u64(tokens, "prefilled", totals->tokens_prefilled);
    add_pair(root, "spill", totals->spill_bytes, totals->spill_ns);
    add_pair(root, "restore", totals->restore_bytes, totals->restore_ns);
    cJSON *proofs = cJSON_AddObjectToObject(root, "proofs");
    json_text_u64(proofs, "passed", totals->fingerprints_equal);
    json_text_u64(proofs, "failed", totals->fingerprints_different);
    cJSON *queue = cJSON_AddObjectToObject(root, "queue");
    cJSON_AddNumberToObject(queue, "requests", picture->requests_now);
    cJSON_AddNumberToObject(queue, "most", picture->requests_max);
    cJSON_AddNumberToObject(queue, "spill", picture->spill_queue);
}

/* Where its KV is, for people. */
static const char *where(const struct serve_session *session) {
    return session->state != SESSION_SLEEPING ? "device" : session->in_ram ? "ram" : "disk";
}

static void add_session(cJSON *to, const struct serve_session *session) {
    cJSON *item = cJSON_CreateObject();
    json_text(item, "name", session->name);
    cJSON_AddStringToObject(item, "state", session_state_name(session->state));
    cJSON_AddStringToObject(item, "where", where(session));
    cJSON_AddBoolToObject(item, "pinned", session->pinned);
    json_text_u64(item, "tokens", session->n);
    cJSON_AddNumberToObject(item, "slots", session->slots);
    cJSON_AddNumberToObject(item, "blocks_durable", session->blocks_durable);
    cJSON_AddNumberToObject(item, "idle_seconds", (double)session->idle_ns / ns_per_second);
    cJSON *tiers = cJSON_AddObjectToObject(item, "tiers");
    /* The coarsest first: a policy by age gives the oldest blocks the lowest tier. */
    for (int tier = LAYOUT_TIER_COUNT - 1; tier >= 0; tier--)
        if (session->tier_blocks[tier] > 0)
            cJSON_AddNumberToObject(tiers, layout_tier_name((enum layout_tier)tier),
                                    session->tier_blocks[tier]);
    if (!cJSON_AddItemToArray(to, item))
        cJSON_Delete(item);
}

static void add_receipt(cJSON *to, const struct receipt *receipt, uint64_t id) {
    cJSON *item = cJSON_CreateObject();
    char hex[24];
    uint64_t bytes = receipt->image_bytes + receipt->record_bytes;
    for (int stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        bytes += receipt->stored_bytes[stream];
    snprintf(hex, sizeof hex, "%016" PRIx64, id);
    cJSON_AddStringToObject(item, "id", hex);
    cJSON_AddStringToObject(item, "operation", receipt_operation_name(receipt->operation));
    json_text(item, "session", receipt->name);
    json_text_u64(item, "tokens", receipt->tokens);
    json_text_u64(item, "bytes", bytes);
    cJSON_AddNumberToObject(item, "wall_ms", (double)receipt->wall_ns / 1e6);
    cJSON_AddStringToObject(item, "proof", receipt_proof_name(receipt->fingerprint));
    if (receipt->err != KV_OK)
        json_text(item, "error", receipt->reason);
    if (!cJSON_AddItemToArray(to, item))
        cJSON_Delete(item);
}

static void add_lists(cJSON *root, const struct serve_picture *picture,
                      const uint8_t owner[HTTP_OWNER_BYTES]) {
    uint32_t counts[SESSION_STATE_COUNT] = {0};
    cJSON *sessions = cJSON_AddArrayToObject(root, "sessions");
    for (uint32_t i = 0; i < picture->session_count; i++) {
        if (!is_visible(picture->sessions[i].owner, owner))
            continue;
        add_session(sessions, &picture->sessions[i]);
        counts[picture->sessions[i].state]++;
    }
    /* How many more there are is nothing that an owner may learn of the others. */
    if (is_operator(owner))
        json_text_u64(root, "asleep_more", picture->asleep_more);
    cJSON *states = cJSON_AddObjectToObject(root, "states");
    for (int state = 0; state < SESSION_STATE_COUNT; state++)
        cJSON_AddNumberToObject(states, session_state_name((enum session_state)state),
                                counts[state]);
    cJSON *receipts = cJSON_AddArrayToObject(root, "receipts");
    for (uint32_t i = 0; i < picture->receipt_count; i++)
        if (is_visible(picture->receipt_owners[i], owner))
            add_receipt(receipts, &picture->receipts[i], picture->receipt_ids[i]);
}

char *http_status_json(struct http *http, const uint8_t owner[HTTP_OWNER_BYTES]) {
    const struct http_options *options = &http->options;
    struct serve_picture *picture = kv_alloc_zeroed(http->alloc, 1, sizeof *picture);
    char *text = NULL;
    if (picture == NULL || !take_picture(http, picture, 1)) {
        kv_alloc_release(http->alloc, picture);
        return NULL;
    }
    cJSON *root = cJSON_CreateObject();
    json_text(root, "model", options->model);
    json_text(root, "device", picture->model.device_name);
    cJSON_AddNumberToObject(root, "uptime_seconds",
                            (double)(http_now_ns(http) - http->opened_ns) / ns_per_second);
    cJSON_AddBoolToObject(root, "stopping", picture->stopping);
    add_slots(root, &picture->slots);
    add_totals(http, root, picture);
    cJSON *store = cJSON_AddObjectToObject(root, "store");
    json_text_u64(store, "bytes", picture->store_bytes);
    if (picture->store_bytes_max != UINT64_MAX)
        json_text_u64(store, "bytes_max", picture->store_bytes_max);
    add_lists(root, picture, owner);
    text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    serve_picture_release(options->serve, picture);
    kv_alloc_release(http->alloc, picture);
    return text;
}

/* --- /metrics */

struct text {
    char *bytes;
    size_t count;
};

/* What does not fit is a bug: every line below is bounded, and so is their number. */
static void add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(struct text *text, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int count = vsnprintf(text->bytes + text->count, METRICS_BYTES_MAX - text->count, format, list);
    va_end(list);
    if (count > 0 && text->count + (size_t)count < METRICS_BYTES_MAX)
        text->count += (size_t)count;
    text->bytes[text->count] = 0;
}

static void head(struct text *text, const char *name, const char *type, const char *help) {
    add(text, "# HELP coldplane_%s %s\n# TYPE coldplane_%s %s\n", name, help, name, type);
}

static void gauge(struct text *text, const char *name, uint64_t value, const char *help) {
    head(text, name, "gauge", help);
    add(text, "coldplane_%s %" PRIu64 "\n", name, value);
}

static void counter(struct text *text, const char *name, uint64_t value, const char *help) {
    head(text, name, "counter", help);
    add(text, "coldplane_%s %" PRIu64 "\n", name, value);
}

static void seconds(struct text *text, const char *name, const char *type, uint64_t ns,
                    const char *help) {
    head(text, name, type, help);
    add(text, "coldplane_%s %.6f\n", name, (double)ns / ns_per_second);
}

static void labelled(struct text *text, const char *name, const char *label, uint64_t value) {
    add(text, "coldplane_%s{%s} %" PRIu64 "\n", name, label, value);
}

static void add_slots_metrics(struct text *text, const struct serve_picture *picture) {
    char label[48];
    uint64_t tiers[LAYOUT_TIER_COUNT] = {0}, rest = picture->slots.used;
    for (uint32_t i = 0; i < picture->session_count; i++)
        for (int tier = 0; tier < LAYOUT_TIER_COUNT; tier++)
            if (picture->sessions[i].state != SESSION_SLEEPING)
                tiers[tier] += (uint64_t)picture->sessions[i].tier_blocks[tier] *
                               layout_tier_slots((enum layout_tier)tier);
    gauge(text, "slots", picture->slots.total, "Slots of the device.");
    gauge(text, "slots_free", picture->slots.free, "Slots that hold nothing.");
    gauge(text, "slot_bytes", picture->slots.slot_bytes, "Bytes of one slot.");
    head(text, "slots_read", "gauge",
         "Slots of sealed blocks by the tier they are read at; forks count what they share.");
    for (int tier = 0; tier < LAYOUT_TIER_COUNT; tier++) {
        snprintf(label, sizeof label, "tier=\"%s\"", layout_tier_name((enum layout_tier)tier));
        labelled(text, "slots_read", label, tiers[tier]);
        rest -= tiers[tier] < rest ? tiers[tier] : rest;
    }
    labelled(text, "slots_read", "tier=\"window\"", rest);
}

static void add_sessions_metrics(struct text *text, const struct serve_picture *picture) {
    char label[48];
    uint64_t counts[SESSION_STATE_COUNT] = {0};
    for (uint32_t i = 0; i < picture->session_count; i++)
        counts[picture->sessions[i].state]++;
    counts[SESSION_SLEEPING] += picture->asleep_more;
    head(text, "sessions", "gauge", "Sessions by state.");
    for (int state = 0; state < SESSION_STATE_COUNT; state++) {
        snprintf(label, sizeof label, "state=\"%s\"",
                 session_state_name((enum session_state)state));
        labelled(text, "sessions", label, counts[state]);
    }
}

static void add_proof_metrics(struct text *text, const struct serve_totals *totals) {
    head(text, "proofs_total", "counter", "Fingerprints compared at a wake.");
    labelled(text, "proofs_total", "result=\"equal\"", totals->fingerprints_equal);
    labelled(text, "proofs_total", "result=\"different\"", totals->fingerprints_different);
    head(text, "probes_total", "counter", "Probes asked at a wake.");
    labelled(text, "probes_total", "result=\"passed\"", totals->probes_passed);
    labelled(text, "probes_total", "result=\"failed\"",
             totals->probes_asked - totals->probes_passed);
    head(text, "needles_total", "counter", "Needles asked.");
    labelled(text, "needles_total", "result=\"passed\"", totals->needles_passed);
    labelled(text, "needles_total", "result=\"failed\"",
             totals->needles_asked - totals->needles_passed);
}

static void add_work_metrics(struct text *text, const struct serve_picture *picture) {
    const struct serve_totals *totals = &picture->totals;
    counter(text, "spill_bytes_total", totals->spill_bytes, "Bytes written by saves and sleeps.");
    seconds(text, "spill_seconds_total", "counter", totals->spill_ns, "Their time.");
    counter(text, "restore_bytes_total", totals->restore_bytes, "Bytes read by wakes.");
    seconds(text, "restore_seconds_total", "counter", totals->restore_ns, "Their time.");
    counter(text, "saves_total", totals->saves, "Saves.");
    counter(text, "saves_failed_total", totals->saves_failed, "Saves that failed.");
    counter(text, "sleeps_total", totals->sleeps, "Sessions put to sleep.");
    counter(text, "wakes_total", totals->wakes, "Sessions woken.");
    counter(text, "wakes_refused_total", totals->wakes_refused, "Wakes that were refused.");
    add_proof_metrics(text, totals);
    counter(text, "requests_total", totals->requests, "Turns asked for.");
    counter(text, "requests_refused_total", totals->refused, "Turns refused.");
    counter(text, "requests_cancelled_total", totals->cancelled, "Turns whose client left.");
    counter(text, "requests_failed_total", totals->failed, "Turns that failed.");
    gauge(text, "requests", picture->requests_now, "Turns at work or waiting.");
    gauge(text, "requests_max", picture->requests_max, "The most that are let in.");
    gauge(text, "spill_queue", picture->spill_queue, "Blocks and saves waiting for the writer.");
    counter(text, "prompt_tokens_total", totals->tokens_prompt, "Tokens of prompts.");
    counter(text, "completion_tokens_total", totals->tokens_completion, "Tokens of answers.");
    counter(text, "reused_tokens_total", totals->tokens_reused, "Tokens not computed again.");
    counter(text, "prefilled_tokens_total", totals->tokens_prefilled, "Tokens prefilled.");
    gauge(text, "store_bytes", picture->store_bytes, "Bytes of the store.");
    if (picture->store_bytes_max != UINT64_MAX)
        gauge(text, "store_bytes_max", picture->store_bytes_max, "The most it may hold.");
    seconds(text, "write_budget_wait_seconds", "gauge", picture->write_budget_wait_ns,
            "Until the write budget lets the next write go.");
}

char *http_status_metrics(struct http *http) {
    struct serve *serve = http->options.serve;
    struct serve_picture *picture = kv_alloc_zeroed(http->alloc, 1, sizeof *picture);
    struct text text = {kv_alloc_zeroed(http->alloc, METRICS_BYTES_MAX, 1), 0};
    int filled = picture != NULL && text.bytes != NULL && take_picture(http, picture, 0);
    if (filled) {
        seconds(&text, "uptime_seconds", "gauge", http_now_ns(http) - http->opened_ns,
                "Since the server was opened.");
        add_slots_metrics(&text, picture);
        add_sessions_metrics(&text, picture);
        add_work_metrics(&text, picture);
        serve_picture_release(serve, picture);
    } else {
        kv_alloc_release(http->alloc, text.bytes);
        text.bytes = NULL;
    }
    kv_alloc_release(http->alloc, picture);
    return text.bytes;
}

/* --- /ready */

int http_status_ready(struct http *http, struct http_error *error_out) {
    if (serve_is_ready(http->options.serve))
        return 1;
    http_error_set(error_out, 503, "not_ready", "no requests are taken now");
    error_out->retry_after_seconds = 1;
    return 0;
}
