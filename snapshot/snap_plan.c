/* snapshot/snap_plan.c - what a save would write at most.
 *
 * Responsible for: counting blocks and pages that are not durable yet; nothing happens.
 * Not responsible for: doing it.
 */
#include "snapshot/snapshot.h"

#include "snapshot/snap_commit.h"

/* Raw bytes of one new block at the top of its ladder. */
static uint64_t block_bytes(const struct layout_geometry *geometry,
                            const struct image_policy *policy) {
    uint32_t streams = layout_tier_streams(image_top(policy));
    uint64_t bytes = SNAP_COMMIT_RECORD_BYTES + snap_commit_extent_bytes(RECORD_IDS_BYTES);
    for (uint32_t s = 0; s < LAYOUT_STREAM_COUNT; s++)
        if (streams & 1u << s)
            bytes += snap_commit_extent_bytes(layout_stream_bytes(geometry, s));
    return bytes;
}

static void add_page(const struct layout_geometry *geometry, const struct transfer_durable *durable,
                     uint64_t first, uint32_t tokens, struct snapshot_plan *plan) {
    plan->bytes_max += 2 * SNAP_COMMIT_RECORD_BYTES;
    if (tokens == 0 || snap_line_page(durable, first, tokens) != NULL)
        return;
    uint64_t bytes = layout_dense_bytes(geometry, tokens);
    plan->new_pages++;
    plan->bytes_staged += bytes;
    plan->bytes_max += snap_commit_extent_bytes(bytes);
}

/* An upper bound of the encoded image: what grows is counted, the rest is far below 64 KiB. */
static uint64_t image_bytes(const struct session_info *info, uint32_t needles) {
    const uint64_t fixed = 16384;
    const uint64_t span = 20;
    const uint64_t ids = 4 * (LAYOUT_SINK_TOKENS + LAYOUT_WINDOW_TOKENS_MAX + 1);
    return fixed + ids + info->n * span + info->blocks +
           (uint64_t)needles * 4 * IMAGE_TEXT_BYTES_MAX;
}

enum kv_err snapshot_plan_save(struct snapshot *snapshot, struct session *session,
                               struct snapshot_plan *plan_out, struct kv_diag *diag) {
    struct session_info info;
    struct engine_model model;
    struct snapshot_plan plan = {0};
    uint32_t needles = 0;
    session_brief(session, &info);
    engine_model(snapshot->engine, &model);
    (void)transfer_needles(session, &needles);
    if (info.n - info.n_kv > 1)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "session %s still has %llu tokens to read: save when it is done",
                           info.name, (unsigned long long)(info.n - info.n_kv));
    if (info.n_kv == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "session %s has no tokens yet: nothing to save",
                           info.name);
    const struct transfer_durable *durable = transfer_durable(session);
    uint64_t sealed = layout_sealed_blocks(info.n_kv);
    plan.new_blocks = (uint32_t)(sealed - durable->block_count);
    plan.bytes_max = plan.new_blocks * block_bytes(&model.geometry, &info.policy);
    add_page(&model.geometry, durable, 0, layout_sink_tokens(info.n_kv), &plan);
    uint64_t at = LAYOUT_SINK_TOKENS + sealed * LAYOUT_BLOCK_TOKENS;
    while (at < info.n_kv) {
        uint64_t left = info.n_kv - at;
        uint32_t tokens = left < LAYOUT_PAGE_TOKENS ? (uint32_t)left : LAYOUT_PAGE_TOKENS;
        add_page(&model.geometry, durable, at, tokens, &plan);
        at += tokens;
    }
    plan.bytes_max +=
        snap_commit_extent_bytes(image_bytes(&info, needles)) + 8 * SNAP_COMMIT_RECORD_BYTES;
    /* Batch records repeat keys, values and places, and round up to pages. */
    plan.bytes_max += (2 + plan.new_blocks) * 2 * STORE_PAGE_BYTES;
    *plan_out = plan;
    return KV_OK;
}
