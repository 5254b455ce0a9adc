/* tools/cmd_tree.c - fork, rename, pin, rollback, rm: sessions as names and branches.
 *
 * Responsible for: the text and JSON of these commands.
 * Not responsible for: what they do to records (snapshot/snap_tree.h), listing (cmd_session.c).
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/receipt_keep.h"
#include "tools/receipt_print.h"
#include "tools/text.h"
#include "tools/turn.h"

#include "snapshot/snap_tree.h"
#include "store/store_gc.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PURGE_TRIES = 200 }; /* of 50 ms each, while others read what was removed */

static struct snap_tree tree_of(const struct cmd *cmd, struct store *store,
                                const struct snap_retain_leave *leave) {
    return (struct snap_tree){store, cmd->alloc, cmd->clock, leave};
}

static void print_name(FILE *out, const char *name) {
    text_print_clean(out, name, strlen(name));
}

/* --- fork, rename, pin */

enum kv_err cmd_fork(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct store *store = NULL;
    struct snap_tree_room room;
    struct snap_tree_place place;
    struct snapshot_entry entry;
    char size[TEXT_SHORT_BYTES];
    const char *new_name = cmd_word(cmd, 1);
    KV_TRY(snap_tree_check(cmd->session_name, diag));
    KV_TRY(session_check_new_name(new_name, diag));
    KV_TRY(cmd_open_store(cmd, CMD_WRITE, &store, diag));
    KV_TRY(snap_tree_parse(store, cmd->session_name, &room, &place, diag));
    cmd->session_name = place.name;
    KV_TRY(cmd_find(cmd, store, &entry, diag));
    const struct snap_retain_leave leave = cmd_leave(cmd, NULL);
    const struct snap_tree tree = tree_of(cmd, store, &leave);
    KV_TRY(snap_tree_fork(&tree, &place, new_name, diag));
    KV_TRY(snapshot_find(store, cmd->alloc, new_name, &entry, diag));
    if (cmd->result != NULL) {
        cJSON_AddItemToObject(cmd->result, "forked", cmd_entry_json(&entry));
    } else {
        print_name(cmd->out, new_name);
        fprintf(cmd->out, ": %" PRIu64 " tokens, %s of blocks shared with ", entry.head.n,
                text_size(entry.shared_bytes, size));
        print_name(cmd->out, place.name);
        fprintf(cmd->out, "\n");
    }
done:
    cmd_close_store(cmd, store);
    return err;
}

enum kv_err cmd_rename(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct store *store = NULL;
    struct snapshot_entry entry;
    char dir[CONFIG_PATH_BYTES + 16];
    const char *new_name = cmd_word(cmd, 1);
    KV_TRY(session_check_name(cmd->session_name, diag));
    KV_TRY(session_check_new_name(new_name, diag));
    KV_TRY(cmd_open_store(cmd, CMD_WRITE, &store, diag));
    KV_TRY(cmd_find(cmd, store, &entry, diag));
    const struct snap_retain_leave leave = cmd_leave(cmd, NULL);
    const struct snap_tree tree = tree_of(cmd, store, &leave);
    KV_TRY(snap_tree_rename(&tree, cmd->session_name, new_name, diag));
    const struct receipt_keep keep = cmd_receipts(cmd, dir);
    receipt_keep_rename(&keep, cmd->session_name, new_name);
    KV_TRY(snapshot_find(store, cmd->alloc, new_name, &entry, diag));
    if (cmd->result != NULL) {
        cJSON_AddItemToObject(cmd->result, "renamed", cmd_entry_json(&entry));
    } else {
        print_name(cmd->out, cmd->session_name);
        fprintf(cmd->out, " is now ");
        print_name(cmd->out, new_name);
        fprintf(cmd->out, "\n");
    }
done:
    cmd_close_store(cmd, store);
    return err;
}

enum kv_err cmd_pin(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct store *store = NULL;
    struct snapshot_entry entry;
    int pinned = strcmp(cmd->config->words[0], "unpin") != 0;
    KV_TRY(session_check_name(cmd->session_name, diag));
    KV_TRY(cmd_open_store(cmd, CMD_WRITE, &store, diag));
    KV_TRY(cmd_find(cmd, store, &entry, diag));
    const struct snap_tree tree = tree_of(cmd, store, NULL);
    KV_TRY(snap_tree_pin(&tree, cmd->session_name, pinned, diag));
    if (cmd->result != NULL) {
        json_text(cmd->result, "name", cmd->session_name);
        cJSON_AddBoolToObject(cmd->result, "pinned", pinned);
    } else {
        print_name(cmd->out, cmd->session_name);
        fprintf(cmd->out, pinned ? ": pinned\n" : ": not pinned\n");
    }
done:
    cmd_close_store(cmd, store);
    return err;
}

/* --- rollback */

struct kept {
    int place;
    char tag[RECORD_TAG_BYTES_MAX + 1];
};

static int second_tag(void *context, uint64_t snapshot, const struct record_snapshot *record) {
    struct kept *kept = context;
    (void)snapshot;
    if (kept->place++ == 0)
        return 1;
    memcpy(kept->tag, record->tag, sizeof kept->tag);
    return 0;
}

struct turns {
    const char *name;
    const struct image_span *items;
    uint32_t count;
    uint64_t n;
};

/* "3000" or "turn:6". */
static enum kv_err parse_place(const char *text, const struct turns *turns, uint64_t *n_out,
                               struct kv_diag *diag) {
    char *end = NULL;
    int is_turn = strncmp(text, "turn:", 5) == 0;
    const char *digits = text + (is_turn ? 5 : 0);
    errno = 0;
    uint64_t number = isdigit((unsigned char)digits[0]) ? strtoull(digits, &end, 10) : 0;
    if (end == NULL || *end != 0 || errno != 0 || number == 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "--to %s: write a number of tokens, or turn:K as `coldplane show` "
                           "counts them",
                           text);
    if (!is_turn) {
        *n_out = number;
    } else if (number <= turns->count) {
        *n_out = turns->items[number - 1].end;
    } else {
        return kv_diag_set(diag, KV_ERR_INVALID, "--to %s: session %s has %" PRIu32 " turns", text,
                           turns->name, turns->count);
    }
    if (*n_out < turns->n)
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_INVALID,
                       "--to %s: session %s has %" PRIu64 " tokens; go back to fewer", text,
                       turns->name, turns->n);
}

static enum kv_err look_rollback(void *context, struct store *store, struct kv_diag *diag) {
    struct cmd *cmd = context;
    struct image image;
    uint64_t n = 0;
    image_init(&image);
    enum kv_err err = cmd_look_stored(cmd, store, diag);
    /* An image that cannot be read is what the wake tells. */
    if (err == KV_OK && cmd->host == NULL &&
        restore_image(store, cmd->alloc, cmd->session_name, &image, NULL) == KV_OK) {
        const struct turns turns = {image.name, image.roles, image.role_count, image.n};
        err = parse_place(cmd->config->to, &turns, &n, diag);
    }
    image_release(&image, cmd->alloc);
    return err;
}

static void tell_rollback(struct cmd *cmd, const struct receipt *receipt, uint64_t before,
                          uint32_t blocks, const char *kept) {
    if (cmd->result != NULL) {
        cJSON *to = cJSON_AddObjectToObject(cmd->result, "rolled_back");
        cJSON_AddNumberToObject(to, "tokens_before", (double)before);
        cJSON_AddNumberToObject(to, "tokens", (double)receipt->tokens);
        cJSON_AddNumberToObject(to, "blocks_kept", blocks);
        cJSON_AddNumberToObject(to, "tokens_prefilled", (double)receipt->tokens_prefilled);
        json_text(to, "kept_tag", kept);
        cJSON_AddItemToObject(cmd->result, "receipt", receipt_print_json(receipt));
        return;
    }
    print_name(cmd->out, receipt->name);
    fprintf(cmd->out,
            ": back from %" PRIu64 " to %" PRIu64 " tokens, %" PRIu32 " blocks kept, %" PRIu64
            " tokens prefilled again; before it: tag %s\n",
            before, receipt->tokens, blocks, receipt->tokens_prefilled, kept);
}

enum kv_err cmd_rollback(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct service *service = NULL;
    struct session *session = NULL;
    struct service_opened opened;
    struct session_info info;
    struct receipt receipt;
    struct kept kept = {0};
    uint64_t n = 0, prefilled = 0;
    KV_TRY(session_check_name(cmd->session_name, diag));
    if (cmd->config->to == NULL)
        KV_TRY(kv_diag_set(diag, KV_ERR_INVALID,
                           "rollback: to which token or turn? add --to N or --to turn:K"));
    KV_TRY(cmd_open_service(cmd, CMD_WRITE, look_rollback, cmd, &service, diag));
    KV_TRY(cmd_open_session(cmd, service, 0, &session, &opened, diag));
    session_info(session, &info);
    const struct turns turns = {info.name, info.roles, info.role_count, info.n};
    KV_TRY(parse_place(cmd->config->to, &turns, &n, diag));
    uint64_t before = info.n;
    KV_TRY(turn_rewind(service, session, n, &prefilled, diag));
    session_info(session, &info);
    KV_TRY(service_save(service, session, 0, &receipt, diag));
    receipt.tokens_prefilled = prefilled;
    KV_TRY(snap_tree_walk(service_store(service), cmd->session_name, second_tag, &kept, diag));
    tell_rollback(cmd, &receipt, before, info.blocks, kept.tag);
done:
    cmd_close_service(cmd, service);
    return err;
}

/* --- rm */

/* Again and again while others read where it stood, as a session that wakes does in a daemon. */
static enum kv_err collect(struct cmd *cmd, struct store *store, const struct store_gc_options *gc,
                           struct store_gc_report *report, struct kv_diag *diag) {
    const struct timespec pause = {.tv_nsec = 50000000};
    enum kv_err err = store_gc(store, gc, report, diag);
    for (int i = 0; err == KV_OK && report->held != 0 && i < PURGE_TRIES; i++) {
        const struct store_gc_report before = *report;
        if (cmd_interrupted(cmd))
            break;
        nanosleep(&pause, NULL); /* tidy-allow: wait a reader that ends tells nobody */
        err = store_gc(store, gc, report, diag);
        report->removed += before.removed;
        report->punched_bytes += before.punched_bytes;
        report->freed_bytes += before.freed_bytes;
        report->written_bytes += before.written_bytes;
    }
    return err;
}

/* Holes where it stood; where the file system makes none, its segments are written again. The index
 * goes with it: pages that LMDB has freed still hold what was deleted. */
static enum kv_err purge(struct cmd *cmd, struct store *store, struct store_gc_report *report,
                         struct kv_diag *diag) {
    struct store_gc_options gc = store_gc_options_usual();
    char note[STORE_NOTE_BYTES];
    gc.punch_only = gc.punch_every = 1;
    enum kv_err err = collect(cmd, store, &gc, report, diag);
    if (err == KV_OK && report->no_holes) {
        gc.punch_only = gc.punch_every = 0;
        gc.live_percent = 100;
        gc.with_open = 1;
        err = collect(cmd, store, &gc, report, diag);
    }
    if (err != KV_OK) {
        kv_diag_prefix(diag, "removed, but its bytes were not all purged");
        return err;
    }
    if (report->held != 0)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "removed, but others read in %" PRIu32
                           " segments all the time, where its bytes stay: the next `rm --purge`, "
                           "of any session, gives them back",
                           report->held);
    if (report->damaged != 0)
        return kv_diag_set(diag, KV_ERR_IO,
                           "removed, but %" PRIu32 " segments could not be written again: %s",
                           report->damaged, report->trouble);
    err = store_reindex(store, note, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "removed, but the index was not made anew");
    return err;
}

static const char purge_limits[] =
    "its name in the log of changes; copies that the file system or the drive keep of blocks given "
    "back are beyond this program";

static void tell_removed(struct cmd *cmd, const struct snapshot_entry *entry, const char *tag,
                         const struct store_gc_report *purged) {
    char size[TEXT_SHORT_BYTES], written[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON *item = cmd_entry_json(entry);
        if (tag != NULL)
            json_text(item, "tag", tag);
        cJSON_AddItemToObject(cmd->result, "removed", item);
        if (purged == NULL)
            return;
        item = cJSON_AddObjectToObject(cmd->result, "purged");
        cJSON_AddNumberToObject(item, "segments", purged->removed);
        cJSON_AddNumberToObject(item, "punched_bytes", (double)purged->punched_bytes);
        cJSON_AddNumberToObject(item, "freed_bytes", (double)purged->freed_bytes);
        cJSON_AddNumberToObject(item, "written_bytes", (double)purged->written_bytes);
        json_text(item, "limits", purge_limits);
        return;
    }
    fprintf(cmd->out, "removed ");
    print_name(cmd->out, entry->head.name);
    if (tag != NULL)
        fprintf(cmd->out, "@%s\n", tag);
    else
        fprintf(cmd->out, ": %" PRIu64 " tokens, %s\n", entry->head.n,
                text_size(entry->stored_bytes, size));
    if (purged == NULL)
        return;
    fprintf(cmd->out,
            "purged: %s given back, %" PRIu32
            " segments removed, %s of others written again, index "
            "made anew\n  not covered: what a fork of it still uses, and %s\n",
            text_size(purged->freed_bytes, size), purged->removed,
            text_size(purged->written_bytes, written), purge_limits);
}

enum kv_err cmd_rm(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct store *store = NULL;
    struct snapshot_entry entry;
    struct snap_tree_room room;
    struct snap_tree_place place;
    struct store_gc_report report;
    int purges = cmd->config->purge;
    KV_TRY(snap_tree_check(cmd->session_name, diag));
    KV_TRY(cmd_open_store(cmd, CMD_WRITE, &store, diag));
    KV_TRY(snap_tree_parse(store, cmd->session_name, &room, &place, diag));
    cmd->session_name = place.name;
    KV_TRY(cmd_find(cmd, store, &entry, diag));
    const struct snap_tree tree = tree_of(cmd, store, NULL);
    if (place.tag != NULL)
        KV_TRY(snap_tree_untag(&tree, &place, diag));
    else
        KV_TRY(snapshot_remove(store, cmd->alloc, place.name, diag));
    char dir[CONFIG_PATH_BYTES + 16];
    const struct receipt_keep keep = cmd_receipts(cmd, dir);
    if (purges && place.tag == NULL)
        receipt_keep_forget(&keep, place.name);
    if (purges)
        KV_TRY(purge(cmd, store, &report, diag));
    tell_removed(cmd, &entry, place.tag, purges ? &report : NULL);
done:
    cmd_close_store(cmd, store);
    return err;
}
