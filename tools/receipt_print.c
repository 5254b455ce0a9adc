/* tools/receipt_print.c - a receipt as JSON and as a table.
 *
 * Responsible for: see receipt_print.h.
 * Not responsible for: filling receipts in.
 */
#include "tools/receipt_print.h"

#include "tools/json_text.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

static void add_id(cJSON *to, const char *name, uint64_t id) {
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, id);
    json_text(to, name, text);
}

static void add_digest(cJSON *to, const char *name, const struct kv_digest *digest) {
    char text[KV_DIGEST_HEX_BYTES];
    kv_digest_hex(digest, text);
    json_text(to, name, text);
}

static void add_number(cJSON *to, const char *name, uint64_t number) {
    cJSON_AddNumberToObject(to, name, (double)number);
}

static uint64_t sum(const uint64_t *values) {
    uint64_t total = 0;
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        total += values[i];
    return total;
}

void receipt_print_policy_json(const struct image_policy *policy, cJSON *to) {
    cJSON *ages = NULL;
    json_text(to, "recipe", image_recipe_name(policy->recipe));
    json_text(to, "policy", policy->pressure ? "pressure" : "age");
    if (policy->recipe != 0)
        json_text(to, "top", layout_tier_name(image_top(policy)));
    ages = cJSON_AddArrayToObject(to, "ages");
    for (uint32_t i = 0; i < policy->age_count && i < IMAGE_AGES_MAX; i++)
        cJSON_AddItemToArray(ages, cJSON_CreateNumber((double)policy->ages[i]));
    if (!policy->pressure)
        return;
    cJSON *lowered = cJSON_AddArrayToObject(to, "stepped_blocks");
    for (uint32_t i = 0; i < image_steps(policy); i++)
        cJSON_AddItemToArray(lowered, cJSON_CreateNumber(policy->ends[i]));
}

void receipt_print_history_json(const struct image_policy_change *policies, uint32_t count,
                                cJSON *to) {
    cJSON *history = cJSON_AddArrayToObject(to, "history");
    for (uint32_t i = 0; i < count; i++) {
        cJSON *change = cJSON_CreateObject();
        add_number(change, "from", policies[i].from_n_kv);
        receipt_print_policy_json(&policies[i].policy, change);
        cJSON_AddItemToArray(history, change);
    }
}

/* "v3, 512/1024" by age; "v2, pressure, top K8V8, blocks lowered 7/3/0". */
void receipt_print_policy(const struct image_policy *policy, FILE *out) {
    fprintf(out, "%s", image_recipe_name(policy->recipe));
    if (policy->pressure)
        fprintf(out, ", pressure");
    if (policy->top_k8v8)
        fprintf(out, ", top %s", layout_tier_name(image_top(policy)));
    for (uint32_t i = 0; i < policy->age_count && i < IMAGE_AGES_MAX; i++)
        fprintf(out, "%s%" PRIu64, i == 0 ? ", " : "/", policy->ages[i]);
    for (uint32_t i = 0; policy->pressure && i < image_steps(policy); i++)
        fprintf(out, "%s%" PRIu32, i == 0 ? ", blocks lowered " : "/", policy->ends[i]);
}

static void add_seen(cJSON *to, const struct receipt *receipt) {
    cJSON *runs = cJSON_AddArrayToObject(to, "tokens_seen");
    for (uint32_t i = 0; i < receipt->seen_count && i < RECEIPT_SEEN_MAX; i++) {
        const struct receipt_seen *seen = &receipt->seen[i];
        cJSON *run = cJSON_CreateObject();
        add_number(run, "first", seen->first);
        add_number(run, "end", seen->end);
        json_text(run, "coarsest", layout_tier_name(seen->coarsest));
        add_number(run, "coarse_blocks", seen->coarse_blocks);
        cJSON_AddItemToArray(runs, run);
    }
}

static void add_bytes(cJSON *to, const struct receipt *receipt) {
    cJSON *streams = cJSON_AddObjectToObject(to, "streams");
    add_number(to, "raw_bytes", sum(receipt->raw_bytes));
    add_number(to, "stored_bytes", sum(receipt->stored_bytes));
    add_number(to, "image_bytes", receipt->image_bytes);
    add_number(to, "record_bytes", receipt->record_bytes);
    add_number(to, "door_bytes", receipt->door_bytes);
    add_number(to, "ram_bytes", receipt->ram_bytes);
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++) {
        if (receipt->raw_bytes[i] == 0 && receipt->stored_bytes[i] == 0)
            continue;
        cJSON *stream = cJSON_AddObjectToObject(streams, layout_stream_name((enum layout_stream)i));
        add_number(stream, "raw_bytes", receipt->raw_bytes[i]);
        add_number(stream, "stored_bytes", receipt->stored_bytes[i]);
    }
}

static void add_proof(cJSON *to, const struct receipt *receipt) {
    cJSON *needles = NULL;
    add_number(to, "digests_checked", receipt->digests_checked);
    add_number(to, "digests_failed", receipt->digests_failed);
    json_text(to, "fingerprint", receipt_proof_name(receipt->fingerprint));
    cJSON_AddNumberToObject(to, "fingerprint_max_diff", (double)receipt->fingerprint_max_diff);
    cJSON_AddBoolToObject(to, "fingerprint_floor", receipt->fingerprint_floor);
    needles = cJSON_AddObjectToObject(to, "needles");
    add_number(needles, "recorded", receipt->needles_recorded);
    add_number(needles, "asked", receipt->needles_asked);
    add_number(needles, "passed", receipt->needles_passed);
    add_number(needles, "kept", receipt->needles_kept);
    cJSON *probes = cJSON_AddObjectToObject(to, "probes");
    add_number(probes, "tried", receipt->probes_tried);
    add_number(probes, "kept", receipt->probes_kept);
    add_number(probes, "asked", receipt->probes_asked);
    add_number(probes, "passed", receipt->probes_passed);
    add_number(probes, "ns", receipt->probes_ns);
}

static void add_times(cJSON *to, const struct receipt *receipt) {
    cJSON *stages = cJSON_AddObjectToObject(to, "stage_ns");
    for (int i = 0; i < RECEIPT_STAGE_COUNT; i++)
        if (receipt->stage_ns[i] != 0)
            add_number(stages, receipt_stage_name((enum receipt_stage)i), receipt->stage_ns[i]);
    if (receipt->blocked_ns != 0)
        add_number(to, "blocked_ns", receipt->blocked_ns);
    add_number(to, "wall_ns", receipt->wall_ns);
    add_number(to, "load_ns", receipt->load_ns);
    add_number(to, "unzip_threads", receipt->unzip_threads);
    json_text(to, "bound_by", receipt->wall_ns != 0 ? receipt_stage_name(receipt->bound_by) : "");
    json_text(to, "door", receipt->door);
    cJSON_AddBoolToObject(to, "direct", receipt->direct);
    add_number(to, "in_flight_most", receipt->in_flight_most);
}

cJSON *receipt_print_json(const struct receipt *receipt) {
    cJSON *to = cJSON_CreateObject();
    if (to == NULL)
        return NULL;
    json_text(to, "schema", "coldplane-receipt");
    add_number(to, "version", RECEIPT_VERSION);
    json_text(to, "operation", receipt_operation_name(receipt->operation));
    json_text(to, "result", kv_err_name(receipt->err));
    json_text(to, "reason", receipt->reason);
    json_text(to, "name", receipt->name);
    add_id(to, "snapshot", receipt->snapshot);
    add_id(to, "parent", receipt->parent);
    add_id(to, "lineage", receipt->lineage);
    add_digest(to, "root", &receipt->root);
    json_text(to, "architecture", receipt->architecture);
    add_digest(to, "model", &receipt->model);
    add_digest(to, "numerics", &receipt->numerics);
    receipt_print_policy_json(&receipt->policy, to);
    receipt_print_history_json(receipt->history, receipt->history_count, to);
    add_number(to, "tokens", receipt->tokens);
    add_number(to, "tokens_reused", receipt->tokens_reused);
    add_number(to, "tokens_prefilled", receipt->tokens_prefilled);
    add_number(to, "blocks", receipt->blocks);
    add_number(to, "pages", receipt->pages);
    add_number(to, "slots", receipt->slots);
    cJSON *tiers = cJSON_AddObjectToObject(to, "tier_blocks");
    for (int i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (receipt->tier_blocks[i] != 0)
            add_number(tiers, layout_tier_name((enum layout_tier)i), receipt->tier_blocks[i]);
    json_text(to, "tiers", receipt_tiers_name(receipt->tiers));
    add_number(to, "degraded_blocks", receipt->degraded_blocks);
    add_number(to, "coarse_blocks", receipt->coarse_blocks);
    add_number(to, "mixed_from", receipt->mixed_from);
    add_seen(to, receipt);
    cJSON *given = cJSON_AddObjectToObject(to, "made_room");
    add_number(given, "lowered_sessions", receipt->lowered_sessions);
    add_number(given, "removed_snapshots", receipt->removed_snapshots);
    add_number(given, "removed_sessions", receipt->removed_sessions);
    add_number(given, "bytes", receipt->given_bytes);
    add_bytes(to, receipt);
    add_proof(to, receipt);
    add_times(to, receipt);
    return to;
}

static void print_streams(const struct receipt *receipt, FILE *out) {
    char raw[TEXT_SHORT_BYTES], stored[TEXT_SHORT_BYTES];
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        if (receipt->stored_bytes[i] != 0)
            fprintf(out, "    %-6s             %12s stored %12s raw\n",
                    layout_stream_name((enum layout_stream)i),
                    text_size(receipt->stored_bytes[i], stored),
                    text_size(receipt->raw_bytes[i], raw));
}

static void print_times(const struct receipt *receipt, FILE *out) {
    char text[TEXT_SHORT_BYTES];
    fprintf(out, "  time                 %s", text_duration(receipt->wall_ns, text));
    if (receipt->wall_ns != 0)
        fprintf(out, ", bound by %s", receipt_stage_name(receipt->bound_by));
    if (receipt->load_ns != 0)
        fprintf(out, "; loading %s, %u to unzip", text_duration(receipt->load_ns, text),
                receipt->unzip_threads);
    fprintf(out, "\n");
    for (int i = 0; i < RECEIPT_STAGE_COUNT; i++)
        if (receipt->stage_ns[i] != 0)
            fprintf(out, "    %-12s       %12s busy %5.1f %%\n",
                    receipt_stage_name((enum receipt_stage)i),
                    text_duration(receipt->stage_ns[i], text),
                    receipt->wall_ns == 0
                        ? 0
                        : 100.0 * (double)receipt->stage_ns[i] / (double)receipt->wall_ns);
}

static void print_probes(const struct receipt *receipt, FILE *out) {
    char text[TEXT_SHORT_BYTES];
    fprintf(out, "  probes               %" PRIu32 " kept", receipt->probes_kept);
    if (receipt->operation == RECEIPT_RESTORE)
        fprintf(out, ", %" PRIu32 " asked, %" PRIu32 " passed", receipt->probes_asked,
                receipt->probes_passed);
    else
        fprintf(out, " of %" PRIu32 " tried", receipt->probes_tried);
    if (receipt->probes_ns != 0)
        fprintf(out, " in %s", text_duration(receipt->probes_ns, text));
    fprintf(out, "\n");
}

static void print_proof(const struct receipt *receipt, FILE *out) {
    fprintf(out, "  digests              %" PRIu32 " checked, %" PRIu32 " failed\n",
            receipt->digests_checked, receipt->digests_failed);
    fprintf(out, "  fingerprint          %s%s", receipt_proof_name(receipt->fingerprint),
            receipt->fingerprint_floor ? ", at the ladder's floor" : "");
    if (receipt->fingerprint == RECEIPT_TOP_EQUAL || receipt->fingerprint == RECEIPT_DIFFERENT)
        fprintf(out, ", largest difference %.4g", (double)receipt->fingerprint_max_diff);
    fprintf(out,
            "\n  needles              %" PRIu32 " recorded, %" PRIu32 " kept, %" PRIu32
            " asked, %" PRIu32 " passed\n",
            receipt->needles_recorded, receipt->needles_kept, receipt->needles_asked,
            receipt->needles_passed);
    print_probes(receipt, out);
}

static void print_degraded(const struct receipt *receipt, FILE *out) {
    if (receipt->degraded_blocks != 0)
        fprintf(out, "  degraded             %" PRIu32 " blocks have given up planes\n",
                receipt->degraded_blocks);
    if (receipt->tiers != RECEIPT_TIERS_EXACT)
        fprintf(out, "  restore              %s\n",
                receipt->tiers == RECEIPT_TIERS_EAGER
                    ? "eager: the ladder's floor at first, the rest behind"
                    : "fit: at the ladder's floor, too few slots for more");
    if (receipt->coarse_blocks != 0)
        fprintf(out, "  coarse               %" PRIu32 " blocks are read below their tier\n",
                receipt->coarse_blocks);
    for (uint32_t i = 0; i < receipt->seen_count && i < RECEIPT_SEEN_MAX; i++)
        fprintf(out,
                "  seen                 tokens %" PRIu64 " … %" PRIu64
                ": %s at the coarsest, %" PRIu32 " blocks below their tier\n",
                receipt->seen[i].first, receipt->seen[i].end,
                layout_tier_name(receipt->seen[i].coarsest), receipt->seen[i].coarse_blocks);
    if (receipt->mixed_from != 0)
        fprintf(out, "  mixed history        from token %" PRIu64 " on\n", receipt->mixed_from);
}

/* 1 when something went. */
static int print_made_room(const struct receipt *receipt, FILE *out) {
    char size[TEXT_SHORT_BYTES];
    if (receipt->lowered_sessions + receipt->removed_snapshots + receipt->removed_sessions == 0)
        return 0;
    fprintf(out,
            "%s given up for it: planes of sessions %" PRIu32 " times, %" PRIu32
            " older snapshots, %" PRIu32 " sessions (`coldplane stats` names them)",
            text_size(receipt->given_bytes, size), receipt->lowered_sessions,
            receipt->removed_snapshots, receipt->removed_sessions);
    return 1;
}

void receipt_print_table(const struct receipt *receipt, FILE *out) {
    char text[TEXT_SHORT_BYTES], raw[TEXT_SHORT_BYTES];
    fprintf(out, "%s of session ", receipt_operation_name(receipt->operation));
    text_print_clean(out, receipt->name, strlen(receipt->name));
    fprintf(out, ": %s\n", receipt->err == KV_OK ? "ok" : kv_err_name(receipt->err));
    if (receipt->snapshot != 0)
        fprintf(out, "  snapshot             %016" PRIx64 "\n", receipt->snapshot);
    if (receipt->policy.recipe != 0) {
        fprintf(out, "  %-20s ", receipt->policy.pressure ? "recipe, policy" : "recipe, ages");
        receipt_print_policy(&receipt->policy, out);
        fprintf(out, "\n");
    }
    if (receipt->history_count > 1) {
        fprintf(out, "  tier history         %" PRIu32 " changes, the first at token %" PRIu64 "\n",
                receipt->history_count - 1, receipt->history[1].from_n_kv);
    }
    fprintf(out, "  tokens               %" PRIu64 ", reused %" PRIu64 ", prefilled %" PRIu64 "\n",
            receipt->tokens, receipt->tokens_reused, receipt->tokens_prefilled);
    fprintf(out, "  blocks, pages        %" PRIu32 ", %" PRIu32, receipt->blocks, receipt->pages);
    for (int i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (receipt->tier_blocks[i] != 0)
            fprintf(out, "  %s × %" PRIu32, layout_tier_name((enum layout_tier)i),
                    receipt->tier_blocks[i]);
    fprintf(out, "\n");
    print_degraded(receipt, out);
    if (receipt->lowered_sessions + receipt->removed_snapshots + receipt->removed_sessions != 0)
        fprintf(out, "  room                 ");
    if (print_made_room(receipt, out))
        fprintf(out, "\n");
    fprintf(out, "  slots                %" PRIu32 "\n", receipt->slots);
    fprintf(out, "  bytes                %s stored, %s raw, image %" PRIu64 " B",
            text_size(sum(receipt->stored_bytes), text), text_size(sum(receipt->raw_bytes), raw),
            receipt->image_bytes);
    fprintf(out, ", through the door %s", text_size(receipt->door_bytes, text));
    if (receipt->ram_bytes != 0)
        fprintf(out, ", from the RAM tier %s", text_size(receipt->ram_bytes, text));
    fprintf(out, "\n");
    print_streams(receipt, out);
    print_proof(receipt, out);
    print_times(receipt, out);
    if (receipt->door[0] != 0)
        fprintf(out, "  door                 %s%s, %" PRIu32 " in flight at most\n", receipt->door,
                receipt->direct ? ", O_DIRECT" : ", buffered", receipt->in_flight_most);
    if (receipt->reason[0] != 0) {
        fprintf(out, "  reason               ");
        text_print_clean(out, receipt->reason, strlen(receipt->reason));
        fprintf(out, "\n");
    }
}

void receipt_print_line(const struct receipt *receipt, FILE *out) {
    char size[TEXT_SHORT_BYTES], time[TEXT_SHORT_BYTES];
    text_size(receipt->door_bytes, size);
    text_duration(receipt->wall_ns, time);
    if (receipt->operation == RECEIPT_RESTORE) {
        fprintf(out,
                "woken: %" PRIu64 " tokens reused, %" PRIu64 " prefilled, %s read in %s, "
                "fingerprint %s, needles %" PRIu32 " of %" PRIu32 " passed\n",
                receipt->tokens_reused, receipt->tokens_prefilled, size, time,
                receipt_proof_name(receipt->fingerprint), receipt->needles_passed,
                receipt->needles_asked);
        if (receipt->ram_bytes != 0)
            fprintf(out, "of the RAM tier: %s\n", text_size(receipt->ram_bytes, size));
        if (receipt->tiers != RECEIPT_TIERS_EXACT)
            fprintf(out, "%s: %" PRIu32 " blocks are read below their tier%s\n",
                    receipt_tiers_name(receipt->tiers), receipt->coarse_blocks,
                    receipt->tiers == RECEIPT_TIERS_EAGER ? " until the rest has come" : "");
        if (receipt->degraded_blocks != 0)
            fprintf(out, "degraded: %" PRIu32 " blocks have given up planes to the byte budget\n",
                    receipt->degraded_blocks);
    } else {
        fprintf(out, "saved: %" PRIu64 " tokens, %s written in %s", receipt->tokens, size, time);
        if (receipt->lowered_sessions + receipt->removed_snapshots + receipt->removed_sessions != 0)
            fprintf(out, "; ");
        (void)print_made_room(receipt, out);
        fprintf(out, "\n");
    }
}
