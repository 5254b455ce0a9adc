/* tools/cmd_session.c - ls, show, snapshot, restore: sessions as stored things.
 *
 * Responsible for: the text and JSON of these commands.
 * Not responsible for: talking (cmd_chat.c), needles (cmd_needle.c), the store (cmd_store.c).
 */
#include "tools/cmd.h"
#include "tools/cmd_host.h"
#include "tools/json_text.h"
#include "tools/receipt_print.h"
#include "tools/text.h"

#include "engine/record.h"
#include "snapshot/snap_tree.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

/* --- ls */

struct listing {
    struct cmd *cmd;
    cJSON *items;
    uint32_t count;
};

static void add_hex(cJSON *to, const char *name, uint64_t id) {
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, id);
    json_text(to, name, text);
}

cJSON *cmd_entry_json(const struct snapshot_entry *entry) {
    cJSON *item = cJSON_CreateObject();
    json_text(item, "name", entry->head.name);
    add_hex(item, "snapshot", entry->snapshot);
    add_hex(item, "lineage", entry->head.lineage);
    cJSON_AddNumberToObject(item, "tokens", (double)entry->head.n);
    cJSON_AddNumberToObject(item, "tokens_kv", (double)entry->head.n_kv);
    cJSON_AddNumberToObject(item, "blocks", entry->head.block_count);
    cJSON_AddNumberToObject(item, "pages", entry->head.page_count);
    cJSON_AddNumberToObject(item, "stored_bytes", (double)entry->stored_bytes);
    cJSON_AddNumberToObject(item, "shared_bytes", (double)entry->shared_bytes);
    cJSON_AddNumberToObject(item, "snapshots", entry->snapshot_count);
    cJSON_AddNumberToObject(item, "tags", entry->tag_count);
    cJSON_AddBoolToObject(item, "pinned", entry->pinned);
    if (entry->parent[0] != 0) {
        json_text(item, "parent", entry->parent);
        cJSON_AddNumberToObject(item, "parent_blocks", (double)entry->cut);
        cJSON_AddBoolToObject(item, "parent_removed", entry->parent_removed);
    }
    if (entry->head.tag[0] != 0)
        json_text(item, "tag", entry->head.tag);
    cJSON_AddBoolToObject(item, "explicit", entry->head.is_explicit);
    cJSON_AddBoolToObject(item, "asleep", entry->head.asleep);
    cJSON_AddNumberToObject(item, "lowered_blocks", entry->lowered_blocks);
    cJSON *dropped = cJSON_AddArrayToObject(item, "planes_given_up");
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        if (entry->dropped >> i & 1)
            cJSON_AddItemToArray(dropped,
                                 cJSON_CreateString(layout_stream_name((enum layout_stream)i)));
    cJSON_AddBoolToObject(item, "may_expire", entry->may_expire);
    cJSON_AddNumberToObject(item, "saved_unix", (double)(entry->head.created_ns / 1000000000U));
    cJSON_AddNumberToObject(item, "used_unix", (double)(entry->used_ns / 1000000000U));
    return item;
}

/* What the byte budget has taken, and may take. */
static void print_retained(const struct snapshot_entry *entry) {
    if (entry->dropped != 0)
        printf("  (gave up");
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        if (entry->dropped >> i & 1)
            printf(" %s", layout_stream_name((enum layout_stream)i));
    if (entry->dropped != 0)
        printf(" of %" PRIu32 " of %" PRIu32 " blocks)", entry->lowered_blocks,
               entry->head.block_count);
    if (entry->may_expire)
        printf("  (may expire)");
}

static int on_entry(void *context, const struct snapshot_entry *entry) {
    struct listing *listing = context;
    char size[TEXT_SHORT_BYTES], when[TEXT_SHORT_BYTES];
    if (listing->items != NULL) {
        cJSON_AddItemToArray(listing->items, cmd_entry_json(entry));
    } else {
        if (listing->count == 0)
            printf("%8s %11s %9s %4s  %-19s  name\n", "tokens", "stored", "snapshots", "tags",
                   "last use (UTC)");
        printf("%8" PRIu64 " %11s %9" PRIu32 " %4" PRIu32 "  %-19s  ", entry->head.n,
               text_size(entry->stored_bytes, size), entry->snapshot_count, entry->tag_count,
               text_when(entry->used_ns, when));
        text_print_clean(stdout, entry->head.name, strlen(entry->head.name));
        if (entry->pinned)
            printf("  (pinned)");
        if (entry->parent[0] != 0) {
            printf("  (from ");
            text_print_clean(stdout, entry->parent, strlen(entry->parent));
            printf(entry->parent_removed ? ", removed)" : ")");
        }
        print_retained(entry);
        printf("\n");
    }
    listing->count++;
    return 1;
}

enum kv_err cmd_ls(struct cmd *cmd, struct kv_diag *diag) {
    struct store *store = NULL;
    struct listing listing = {.cmd = cmd};
    enum kv_err err = cmd_open_store(cmd, CMD_READ, &store, diag);
    if (err != KV_OK)
        return err;
    if (cmd->result != NULL)
        listing.items = cJSON_AddArrayToObject(cmd->result, "sessions");
    err = snapshot_list(store, cmd->alloc, on_entry, &listing, diag);
    if (err == KV_OK && listing.count == 0 && cmd->result == NULL)
        fprintf(cmd->out, "no sessions; `coldplane chat` begins one\n");
    cmd_close_store(cmd, store);
    return err;
}

/* --- show */

const char *cmd_role_name(enum image_role role) {
    switch (role) {
    case IMAGE_SYSTEM:
        return "system";
    case IMAGE_USER:
        return "user";
    case IMAGE_ASSISTANT:
        return "assistant";
    case IMAGE_RAW:
        break;
    }
    return "raw";
}

static const struct image_policy *policy_of(const struct image *image) {
    return &image->policies[image->policy_count - 1].policy;
}

static void count_tiers(const struct image *image, uint32_t tiers_out[16]) {
    memset(tiers_out, 0, 16 * sizeof *tiers_out);
    for (uint32_t i = 0; image->policy_count > 0 && i < image->block_count; i++)
        tiers_out[image_tier_without(policy_of(image), image_tier(policy_of(image), i, image->n_kv),
                                     image->absent != NULL ? image->absent[i] : 0) &
                  15]++;
}

static void show_json(const struct image *image, cJSON *to) {
    char digest[KV_DIGEST_HEX_BYTES];
    uint32_t tiers[16];
    json_text(to, "architecture", image->model.architecture);
    kv_digest_hex(&image->model.tensors, digest);
    json_text(to, "model", digest);
    kv_digest_hex(&image->model.numerics, digest);
    json_text(to, "numerics", digest);
    cJSON *sampler = cJSON_AddObjectToObject(to, "sampler");
    cJSON_AddNumberToObject(sampler, "temperature", (double)image->sampler.temperature);
    cJSON_AddNumberToObject(sampler, "top_p", (double)image->sampler.top_p);
    cJSON_AddNumberToObject(sampler, "top_k", image->sampler.top_k);
    json_text_u64(sampler, "seed", image->sampler.seed);
    if (image->policy_count > 0) {
        const struct image_policy *policy = policy_of(image);
        receipt_print_policy_json(policy, to);
        receipt_print_history_json(image->policies, image->policy_count, to);
    }
    count_tiers(image, tiers);
    cJSON *tier_blocks = cJSON_AddObjectToObject(to, "tier_blocks");
    for (int i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (tiers[i] != 0)
            cJSON_AddNumberToObject(tier_blocks, layout_tier_name((enum layout_tier)i), tiers[i]);
    cJSON_AddNumberToObject(to, "mixed_from",
                            (double)image_mixed_from(image->policies, image->policy_count));
    cJSON *turns = cJSON_AddArrayToObject(to, "turns");
    for (uint32_t i = 0; i < image->role_count; i++) {
        cJSON *turn = cJSON_CreateObject();
        json_text(turn, "role", cmd_role_name(image->roles[i].role));
        cJSON_AddNumberToObject(turn, "first", (double)image->roles[i].first);
        cJSON_AddNumberToObject(turn, "end", (double)image->roles[i].end);
        cJSON_AddItemToArray(turns, turn);
    }
    cJSON_AddNumberToObject(to, "needles", image->needle_count);
}

struct tag_list {
    cJSON *items; /* with --json */
    uint32_t count;
};

static int on_tag(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct tag_list *list = context;
    char when[TEXT_SHORT_BYTES];
    if (record->tag[0] == 0)
        return 1;
    if (list->items != NULL) {
        cJSON *item = cJSON_CreateObject();
        json_text(item, "tag", record->tag);
        add_hex(item, "snapshot", snapshot);
        cJSON_AddNumberToObject(item, "tokens", (double)record->n);
        cJSON_AddNumberToObject(item, "saved_unix", (double)(record->created_ns / 1000000000U));
        cJSON_AddItemToArray(list->items, item);
    } else {
        printf("    ");
        text_print_clean(stdout, record->tag, strlen(record->tag));
        printf("  %" PRIu64 " tokens of %s UTC\n", record->n, text_when(record->created_ns, when));
    }
    list->count++;
    return 1;
}

static void show_descent(const struct snapshot_entry *entry) {
    char size[TEXT_SHORT_BYTES], when[TEXT_SHORT_BYTES];
    printf("  last use      %s UTC%s\n", text_when(entry->used_ns, when),
           entry->pinned ? ", pinned" : "");
    if (entry->parent[0] != 0) {
        printf("  forked from   ");
        text_print_clean(stdout, entry->parent, strlen(entry->parent));
        printf("%s, %" PRIu64 " blocks\n", entry->parent_removed ? " (removed)" : "", entry->cut);
    }
    if (entry->shared_bytes != 0)
        printf("  shared        %s\n", text_size(entry->shared_bytes, size));
}

static void show_text(const struct snapshot_entry *entry, const struct image *image) {
    char text[TEXT_SHORT_BYTES], digest[KV_DIGEST_HEX_BYTES];
    uint32_t tiers[16];
    printf("session ");
    text_print_clean(stdout, image->name, strlen(image->name));
    printf("\n  snapshot      %016" PRIx64 " of %s UTC%s, %" PRIu32 " kept\n", entry->snapshot,
           text_when(entry->head.created_ns, text), entry->head.asleep ? ", asleep" : "",
           entry->snapshot_count);
    kv_digest_hex(&image->model.tensors, digest);
    printf("  model         %s %s\n", image->model.architecture, digest);
    printf("  tokens        %" PRIu64 " (%" PRIu64 " with KV) of a context of %" PRIu32 "\n",
           image->n, image->n_kv, image->model.context_tokens);
    printf("  stored        %s", text_size(entry->stored_bytes, text));
    if (image->n_kv > 0)
        printf(", %.0f bytes per token", (double)entry->stored_bytes / (double)image->n_kv);
    printf("\n");
    show_descent(entry);
    printf("  blocks        %" PRIu32 ", window pages %" PRIu32, image->block_count,
           image->page_count);
    count_tiers(image, tiers);
    for (int i = 0; i < LAYOUT_TIER_COUNT; i++)
        if (tiers[i] != 0)
            printf("  %s × %" PRIu32, layout_tier_name((enum layout_tier)i), tiers[i]);
    uint64_t mixed_from = image_mixed_from(image->policies, image->policy_count);
    print_retained(entry);
    printf("\n  recipe        ");
    receipt_print_policy(policy_of(image), stdout);
    if (image->policy_count > 1)
        printf(", %" PRIu32 " changes since", image->policy_count - 1);
    if (mixed_from != 0)
        printf("\n  mixed history from token %" PRIu64 " on: answers saw coarser planes",
               mixed_from);
    printf("\n  sampler       temperature %g, top-p %g, top-k %" PRIu32 ", seed %" PRIu64 "\n",
           (double)image->sampler.temperature, (double)image->sampler.top_p, image->sampler.top_k,
           image->sampler.seed);
    kv_digest_hex(&image->fingerprint.logits, digest);
    printf("  fingerprint   %s at token %" PRIu64 "\n", digest, image->fingerprint.n_kv);
    printf("  needles       %" PRIu32 "\n  turns\n", image->needle_count);
    for (uint32_t i = 0; i < image->role_count; i++)
        printf("    %2" PRIu32 " %-10s  %" PRIu64 " … %" PRIu64 "\n", i + 1,
               cmd_role_name(image->roles[i].role), image->roles[i].first, image->roles[i].end);
}

static void tell_estimate(struct cmd *cmd, struct store *store, const struct snapshot_entry *entry,
                          const struct image *image, cJSON *to) {
    struct cmd_estimate estimate = {.stored_bytes = entry->stored_bytes,
                                    .probes = cmd->config->probes};
    struct kv_diag unmeasured = {""};
    if (cmd_rates_estimate(store, image, &estimate, &unmeasured) == KV_OK)
        cmd_rates_show(&estimate, to);
    else if (to == NULL)
        fprintf(cmd->out, "  estimate      none: %s\n", unmeasured.text);
    else
        cJSON_AddNullToObject(to, "estimate");
}

enum kv_err cmd_show(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct store *store = NULL;
    struct snapshot_entry entry;
    struct tag_list tags = {NULL, 0};
    struct image image;
    image_init(&image);
    KV_TRY(session_check_name(cmd->session_name, diag));
    KV_TRY(cmd_open_store(cmd, CMD_READ, &store, diag));
    KV_TRY(cmd_find(cmd, store, &entry, diag));
    KV_TRY(restore_image(store, cmd->alloc, cmd->session_name, &image, diag));
    if (cmd->result != NULL) {
        cJSON *session = cmd_entry_json(&entry);
        show_json(&image, session);
        cmd_tell_retained(cmd, store, cmd->session_name, session);
        tell_estimate(cmd, store, &entry, &image, session);
        tags.items = cJSON_AddArrayToObject(session, "tag_list");
        cJSON_AddItemToObject(cmd->result, "session", session);
        if (cmd->config->text)
            KV_TRY(cmd_tell_text(cmd, &image, cJSON_GetObjectItem(session, "turns"), diag));
    } else if (cmd->config->text) {
        err = cmd_tell_text(cmd, &image, NULL, diag);
        goto done;
    } else {
        show_text(&entry, &image);
        cmd_tell_retained(cmd, store, cmd->session_name, NULL);
        tell_estimate(cmd, store, &entry, &image, NULL);
        if (entry.tag_count != 0)
            fprintf(cmd->out, "  tags\n");
    }
    KV_TRY(snap_tree_walk(store, cmd->session_name, on_tag, &tags, diag));
done:
    image_release(&image, cmd->alloc);
    cmd_close_store(cmd, store);
    return err;
}

/* --- snapshot, restore */

static void give_receipt(struct cmd *cmd, const char *name, const struct receipt *receipt) {
    if (receipt->operation == 0)
        return;
    if (cmd->result != NULL)
        cJSON_AddItemToObject(cmd->result, name, receipt_print_json(receipt));
    else
        receipt_print_table(receipt, cmd->out);
}

static enum kv_err look_snapshot(void *context, struct store *store, struct kv_diag *diag) {
    struct cmd *cmd = context;
    const struct snap_tree_place place = {cmd->session_name, cmd->config->tag};
    enum kv_err err = cmd_look_stored(cmd, store, diag);
    return err == KV_OK && place.tag != NULL ? snap_tree_tag_free(store, &place, diag) : err;
}

enum kv_err cmd_snapshot(struct cmd *cmd, struct kv_diag *diag) {
    struct service *service = NULL;
    struct session *session = NULL;
    struct service_opened opened;
    struct receipt receipt;
    memset(&receipt, 0, sizeof receipt);
    memset(&opened, 0, sizeof opened);
    enum kv_err err = session_check_name(cmd->session_name, diag);
    if (err == KV_OK && cmd->config->tag != NULL)
        err = record_check_tag(cmd->config->tag, diag);
    if (err == KV_OK)
        err = cmd_open_service(cmd, CMD_WRITE, look_snapshot, cmd, &service, diag);
    if (err == KV_OK)
        err = cmd_open_session(cmd, service, 0, &session, &opened, diag);
    if (err == KV_OK)
        err = service_save_tag(service, session, cmd->config->tag, &receipt, diag);
    if (cmd->result != NULL || err != KV_OK)
        give_receipt(cmd, "woken", &opened.receipt);
    give_receipt(cmd, "receipt", &receipt);
    cmd_close_service(cmd, service);
    return err;
}

/* The snapshot that was proven becomes the head; where the session stood stays under a tag. */
static enum kv_err go_back(struct cmd *cmd, struct service *service,
                           const struct snap_tree_place *place, struct kv_diag *diag) {
    const struct snap_retain_leave leave = cmd_leave(cmd, service);
    const struct snap_tree tree = {service_store(service), cmd->alloc, cmd->clock, &leave};
    char kept[RECORD_TAG_BYTES_MAX + 1];
    snapshot_drain(service_snapshot(service));
    cmd_write_begin(cmd, service);
    enum kv_err err = snap_tree_revert(&tree, place, kept, diag);
    cmd_write_end(cmd, service);
    if (err != KV_OK)
        return err;
    if (cmd->result != NULL) {
        json_text(cmd->result, "restored_tag", place->tag);
        json_text(cmd->result, "kept_tag", kept);
    } else if (kept[0] != 0) {
        fprintf(cmd->out, "the session goes on from %s; before it: tag %s\n", place->tag, kept);
    } else {
        fprintf(cmd->out, "%s is where the session stands already\n", place->tag);
    }
    return KV_OK;
}

struct wanted {
    struct cmd *cmd;
    struct snap_tree_room room;
    struct snap_tree_place place;
};

static enum kv_err look_place(void *context, struct store *store, struct kv_diag *diag) {
    struct wanted *wanted = context;
    struct cmd *cmd = wanted->cmd;
    struct snap_tree_place *place = &wanted->place;
    struct snapshot_entry entry;
    enum kv_err err = snap_tree_parse(store, cmd->session_name, &wanted->room, place, diag);
    if (err != KV_OK)
        return err;
    cmd->session_name = place->name;
    err = cmd_find(cmd, store, &entry, diag);
    if (err == KV_OK && place->tag != NULL)
        err = snap_tree_find(store, place, &cmd->snapshot, NULL, diag);
    return err;
}

/* In a daemon a session that is awake stays as it is: the proof is of what is stored. */
static enum kv_err wake_or_prove(struct cmd *cmd, struct service *service,
                                 struct session **session_out, struct service_opened *opened_out,
                                 struct kv_diag *diag) {
    enum kv_err err = cmd->host != NULL ? cmd_host_take_session(cmd, diag) : KV_OK;
    if (err != KV_OK)
        return err;
    if (session_find(service_engine(service), cmd->session_name) != NULL)
        return cmd_host_prove(cmd, &opened_out->receipt, diag);
    return cmd_open_session(cmd, service, 0, session_out, opened_out, diag);
}

enum kv_err cmd_restore(struct cmd *cmd, struct kv_diag *diag) {
    struct service *service = NULL;
    struct session *session = NULL;
    struct service_opened opened;
    struct wanted wanted = {.cmd = cmd};
    struct receipt behind;
    memset(&opened, 0, sizeof opened);
    int may_write = strchr(cmd->session_name, '@') != NULL;
    enum kv_err err = snap_tree_check(cmd->session_name, diag);
    if (err == KV_OK)
        err = cmd_open_service(cmd, may_write ? CMD_WRITE : CMD_READ, look_place, &wanted, &service,
                               diag);
    if (err == KV_OK)
        err = wake_or_prove(cmd, service, &session, &opened, diag);
    if (err == KV_OK && opened.receipt.tokens > 0 && opened.receipt.tokens_reused == 0)
        err =
            kv_diag_set(diag, KV_ERR_PROOF,
                        "session %s: the restore brought back no token; keep the store and report "
                        "the receipt",
                        cmd->session_name);
    give_receipt(cmd, "receipt", &opened.receipt);
    if (err == KV_OK && session != NULL && service_refine(service, session, &behind))
        give_receipt(cmd, "refined", &behind);
    if (err == KV_OK && wanted.place.tag != NULL) {
        session_drop(session);
        err = go_back(cmd, service, &wanted.place, diag);
    }
    cmd_close_service(cmd, service);
    return err;
}
