/* tools/cmd_store.c - verify and stats: the store as a whole.
 *
 * Responsible for: the text and JSON of these commands.
 * Not responsible for: repairing anything.
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

/* --- verify */

enum { NAME_BYTES = IMAGE_NAME_BYTES_MAX + 1 };

/* Names are taken first, so that no index walk is open while extents are read. */
struct names {
    const struct kv_alloc *alloc;
    void *items; /* [count][NAME_BYTES] */
    size_t capacity, count;
    uint64_t stored_bytes;
    int no_memory;
};

static int on_name(void *context, const struct snapshot_entry *entry) {
    struct names *names = context;
    if (!kv_alloc_grow(names->alloc, &names->items, &names->capacity, names->count + 1,
                       NAME_BYTES)) {
        names->no_memory = 1;
        return 0;
    }
    memcpy((char *)names->items + names->count * NAME_BYTES, entry->head.name, NAME_BYTES);
    names->count++;
    names->stored_bytes += entry->stored_bytes;
    return 1;
}

static void tell_check(cJSON *list, const char *name, enum kv_err err,
                       const struct restore_check *check, const struct kv_diag *diag) {
    char size[TEXT_SHORT_BYTES];
    if (list != NULL) {
        cJSON *item = cJSON_CreateObject();
        json_text(item, "name", name);
        json_text(item, "result", kv_err_name(err));
        json_text(item, "reason", err == KV_OK ? "" : diag->text);
        cJSON_AddNumberToObject(item, "snapshots", check->snapshots);
        cJSON_AddNumberToObject(item, "extents", check->extents);
        cJSON_AddNumberToObject(item, "blocks", check->blocks);
        cJSON_AddNumberToObject(item, "pages", check->pages);
        cJSON_AddNumberToObject(item, "stored_bytes", (double)check->stored_bytes);
        cJSON_AddItemToArray(list, item);
        return;
    }
    text_print_clean(stdout, name, strlen(name));
    if (err == KV_OK) {
        char part[4][TEXT_SHORT_BYTES];
        printf(": ok, %s, %s, %s, %s, %s\n", text_count(check->snapshots, "snapshot", part[0]),
               text_count(check->extents, "extent", part[1]),
               text_count(check->blocks, "block", part[2]),
               text_count(check->pages, "page", part[3]), text_size(check->stored_bytes, size));
    } else {
        printf(": %s: ", kv_err_name(err));
        text_print_clean(stdout, diag->text, strlen(diag->text));
        printf("\n");
    }
}

static enum kv_err verify_names(struct cmd *cmd, struct store *store, const struct names *names,
                                struct kv_diag *diag) {
    struct progress progress;
    enum kv_err first = KV_OK;
    uint64_t bytes = 0, bad = 0;
    cJSON *list = cmd->result != NULL ? cJSON_AddArrayToObject(cmd->result, "sessions") : NULL;
    progress_begin(&progress, stderr, cmd->clock, "verifying", "bytes");
    for (size_t i = 0; i < names->count; i++) {
        const char *name = (const char *)names->items + i * NAME_BYTES;
        struct restore_check check;
        struct kv_diag why = {""};
        memset(&check, 0, sizeof check);
        enum kv_err err = restore_verify(store, cmd->alloc, name, &check, &why);
        /* Removed by a writer since the list was made: there is nothing to be wrong. */
        if (err == KV_ERR_NOT_FOUND && names->count > 1)
            continue;
        progress_end(&progress);
        tell_check(list, name, err, &check, &why);
        bytes += check.stored_bytes;
        progress_update(&progress, bytes, names->stored_bytes);
        bad += err != KV_OK;
        if (err != KV_OK && first == KV_OK) {
            first = err;
            *diag = why;
        }
    }
    progress_end(&progress);
    if (bad > 1)
        kv_diag_prefix(diag, "%" PRIu64 " of %zu sessions are damaged; the first", bad,
                       names->count);
    return first;
}

enum kv_err cmd_verify(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct store *store = NULL;
    struct snapshot_entry entry;
    struct names names = {.alloc = cmd->alloc};
    if (cmd->session_name != NULL)
        KV_TRY(session_check_name(cmd->session_name, diag));
    KV_TRY(cmd_open_store(cmd, CMD_READ, &store, diag));
    if (cmd->session_name != NULL) {
        KV_TRY(cmd_find(cmd, store, &entry, diag));
        on_name(&names, &entry);
    } else {
        KV_TRY(snapshot_list(store, cmd->alloc, on_name, &names, diag));
    }
    if (names.no_memory)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the names of %zu sessions",
                           names.count));
    err = verify_names(cmd, store, &names, diag);
    char sessions[TEXT_SHORT_BYTES];
    if (err == KV_OK && cmd->result == NULL)
        printf("%s verified\n", text_count(names.count, "session", sessions));
done:
    kv_alloc_release(cmd->alloc, names.items);
    cmd_close_store(cmd, store);
    return err;
}

/* --- stats */

static const char *const cause_names[STORE_CAUSES] = {"other",    "blocks", "saves",
                                                      "removals", "gc",     "care"};

static struct store_written_sum written_sum(const struct store_stats *stats) {
    struct store_written_sum sum = {0};
    for (size_t i = 0; i < STORE_CAUSES; i++) {
        sum.batches += stats->written[i].batches;
        sum.user_bytes += stats->written[i].user_bytes;
        sum.device_bytes += stats->written[i].device_bytes;
    }
    return sum;
}

static double amplification(const struct store_written_sum *sum) {
    return sum->user_bytes != 0 ? (double)sum->device_bytes / (double)sum->user_bytes : 0;
}

static void written_json(const struct store_stats *stats, cJSON *to) {
    struct store_written_sum sum = written_sum(stats);
    cJSON *list = cJSON_AddObjectToObject(to, "written");
    for (size_t i = 0; i < STORE_CAUSES; i++) {
        cJSON *item = cJSON_AddObjectToObject(list, cause_names[i]);
        cJSON_AddNumberToObject(item, "batches", (double)stats->written[i].batches);
        cJSON_AddNumberToObject(item, "user_bytes", (double)stats->written[i].user_bytes);
        cJSON_AddNumberToObject(item, "device_bytes", (double)stats->written[i].device_bytes);
        cJSON_AddNumberToObject(item, "amplification", amplification(&stats->written[i]));
    }
    cJSON_AddNumberToObject(to, "user_bytes_written", (double)sum.user_bytes);
    cJSON_AddNumberToObject(to, "device_bytes_written", (double)sum.device_bytes);
    cJSON_AddNumberToObject(to, "write_amplification", amplification(&sum));
}

static void written_text(const struct store_stats *stats) {
    struct store_written_sum sum = written_sum(stats);
    char user[TEXT_SHORT_BYTES];
    char device[TEXT_SHORT_BYTES];
    char batches[TEXT_SHORT_BYTES];
    printf("  written       %s for %s of users, amplification %.2f\n",
           text_size(sum.device_bytes, device), text_size(sum.user_bytes, user),
           amplification(&sum));
    for (size_t i = 0; i < STORE_CAUSES; i++)
        if (stats->written[i].batches != 0)
            printf("    %-9s   %s in %s, for %s of users, amplification %.2f\n", cause_names[i],
                   text_size(stats->written[i].device_bytes, device),
                   text_count(stats->written[i].batches, "batch", batches),
                   text_size(stats->written[i].user_bytes, user),
                   amplification(&stats->written[i]));
}

static void stats_json(const struct store_stats *stats, cJSON *to) {
    json_text(to, "door", stats->door_name);
    cJSON_AddBoolToObject(to, "direct", stats->direct);
    json_text(to, "fallback", stats->fallback);
    json_text(to, "opened", stats->opened);
    cJSON_AddNumberToObject(to, "records", (double)stats->records);
    cJSON_AddNumberToObject(to, "live_bytes", (double)stats->live_bytes);
    cJSON_AddNumberToObject(to, "garbage_bytes", (double)stats->garbage_bytes);
    cJSON_AddNumberToObject(to, "segment_bytes", (double)stats->segment_bytes);
    cJSON_AddNumberToObject(to, "index_bytes", (double)stats->index_bytes);
    cJSON_AddNumberToObject(to, "kept_bytes", (double)stats->kept_bytes);
    if (stats->bytes_max != STORE_BYTES_UNLIMITED)
        cJSON_AddNumberToObject(to, "bytes_max", (double)stats->bytes_max);
    else
        cJSON_AddNullToObject(to, "bytes_max");
    if (stats->bytes_max != STORE_BYTES_UNLIMITED)
        cJSON_AddNumberToObject(to, "room_bytes", (double)stats->room_bytes);
    else
        cJSON_AddNullToObject(to, "room_bytes");
    cJSON_AddNumberToObject(to, "batches", (double)stats->batches);
    cJSON_AddNumberToObject(to, "segments", stats->segments);
    cJSON_AddBoolToObject(to, "refuses_writes", stats->refuses_writes);
    written_json(stats, to);
}

static const char *limit_text(uint64_t bytes, char out[TEXT_SHORT_BYTES]) {
    return bytes == 0 ? "no limit" : text_size(bytes, out);
}

static void stats_text(const struct config *config, const struct store_stats *stats) {
    char text[TEXT_SHORT_BYTES];
    char day[TEXT_SHORT_BYTES];
    printf("store           %s\n", config->store);
    printf("  door          %s%s\n", stats->door_name, stats->direct ? ", O_DIRECT" : ", buffered");
    if (stats->fallback[0] != 0)
        printf("  fallback      %s\n", stats->fallback);
    if (stats->opened[0] != 0)
        printf("  at opening    %s\n", stats->opened);
    printf("  records       %" PRIu64 ", %s\n", stats->records,
           text_count(stats->batches, "batch", text));
    printf("  segments      %" PRIu32 ", %s\n", stats->segments,
           text_size(stats->segment_bytes, text));
    printf("  live          %s\n", text_size(stats->live_bytes, text));
    printf("  garbage       %s\n", text_size(stats->garbage_bytes, text));
    printf("  index         %s\n", text_size(stats->index_bytes, text));
    printf("  kept          %s, for removals on a full disk\n", text_size(stats->kept_bytes, text));
    printf("  budget        %s",
           stats->bytes_max == STORE_BYTES_UNLIMITED ? "none" : text_size(stats->bytes_max, text));
    if (stats->bytes_max != STORE_BYTES_UNLIMITED)
        printf(", %s left; at its end %s", text_size(stats->room_bytes, text),
               config->may_degrade ? "planes and old snapshots may go" : "saves are refused");
    printf("\n  write budget  %s a second, %s a day\n",
           limit_text(config->write_second_bytes, text), limit_text(config->write_day_bytes, day));
    written_text(stats);
}

enum kv_err cmd_stats(struct cmd *cmd, struct kv_diag *diag) {
    struct store *store = NULL;
    struct store_stats stats;
    enum kv_err err = cmd_open_store(cmd, CMD_READ, &store, diag);
    if (err != KV_OK)
        return err;
    store_stats_get(store, &stats);
    uint64_t disk_free = 0;
    int low = cmd_disk_low(cmd->config, &disk_free);
    if (cmd->result != NULL) {
        json_text(cmd->result, "store", cmd->config->store);
        cJSON_AddNumberToObject(cmd->result, "disk_free_bytes", (double)disk_free);
        cJSON_AddBoolToObject(cmd->result, "disk_low", low);
        cJSON_AddNumberToObject(cmd->result, "write_second_bytes",
                                (double)cmd->config->write_second_bytes);
        cJSON_AddNumberToObject(cmd->result, "write_day_bytes",
                                (double)cmd->config->write_day_bytes);
        cJSON_AddBoolToObject(cmd->result, "may_degrade", cmd->config->may_degrade);
        stats_json(&stats, cmd->result);
    } else {
        char size[TEXT_SHORT_BYTES];
        stats_text(cmd->config, &stats);
        printf("  disk          %s free%s\n", text_size(disk_free, size),
               low ? ": low, remove sessions, then `coldplane gc`" : "");
    }
    cmd_tell_retained(cmd, store, NULL, cmd->result);
    cmd_close_store(cmd, store);
    return KV_OK;
}
