/* tools/cmd_retain.c - expire, and what the byte budget made go.
 *
 * Responsible for: the text and JSON of these.
 * Not responsible for: what goes and when (snapshot/snap_retain.h).
 */
#include "tools/cmd.h"

#include "snapshot/snap_retain.h"
#include "tools/json_text.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

enum kv_err cmd_expire(struct cmd *cmd, struct kv_diag *diag) {
    struct store *store = NULL;
    struct snapshot_entry entry;
    int may_expire = !cmd->config->undo;
    enum kv_err err = session_check_name(cmd->session_name, diag);
    if (err == KV_OK)
        err = cmd_open_store(cmd, CMD_WRITE, &store, diag);
    if (err == KV_OK)
        err = cmd_find(cmd, store, &entry, diag);
    if (err == KV_OK)
        err = snap_retain_expire(store, cmd->session_name, may_expire, diag);
    if (err == KV_OK && cmd->result != NULL) {
        json_text(cmd->result, "name", cmd->session_name);
        cJSON_AddBoolToObject(cmd->result, "may_expire", may_expire);
        cJSON_AddNumberToObject(cmd->result, "stored_bytes", (double)entry.stored_bytes);
    } else if (err == KV_OK) {
        char size[TEXT_SHORT_BYTES];
        fprintf(cmd->out, "session ");
        text_print_clean(cmd->out, cmd->session_name, strlen(cmd->session_name));
        fprintf(cmd->out,
                may_expire ? ": may go whole (%s) when store-max is reached\n"
                           : ": stays (%s), whatever store-max says\n",
                text_size(entry.stored_bytes, size));
    }
    cmd_close_store(cmd, store);
    return err;
}

static void action_json(cJSON *list, const struct snap_retain_action *action) {
    cJSON *item = cJSON_CreateObject();
    json_text(item, "kind", snap_retain_name(action->kind));
    json_text(item, "session", action->name);
    if (action->kind == SNAP_RETAIN_PLANES)
        json_text(item, "plane", layout_stream_name((enum layout_stream)action->stream));
    cJSON_AddNumberToObject(item, "blocks", action->blocks);
    cJSON_AddNumberToObject(item, "tokens", (double)action->tokens);
    cJSON_AddNumberToObject(item, "bytes", (double)action->bytes);
    cJSON_AddNumberToObject(item, "unix", (double)(action->at_ns / 1000000000u));
    cJSON_AddItemToArray(list, item);
}

static void action_text(const struct snap_retain_action *action) {
    char size[TEXT_SHORT_BYTES];
    char when[TEXT_SHORT_BYTES];
    printf("    %s  ", text_when(action->at_ns, when));
    text_size(action->bytes, size);
    if (action->kind == SNAP_RETAIN_PLANES)
        printf("plane %s of %s, %s, of session ",
               layout_stream_name((enum layout_stream)action->stream),
               text_count(action->blocks, "block", when), size);
    else if (action->kind == SNAP_RETAIN_SNAPSHOT)
        printf("snapshot at token %" PRIu64 ", %s, of session ", action->tokens, size);
    else
        printf("whole session of %s, %s: ", text_count(action->tokens, "token", when), size);
    text_print_clean(stdout, action->name, strlen(action->name));
    printf("\n");
}

static void totals_json(const struct snap_retain_log *log, cJSON *to) {
    for (int i = 1; i < SNAP_RETAIN_KINDS; i++) {
        cJSON *item = cJSON_AddObjectToObject(to, snap_retain_name((enum snap_retain_kind)i));
        cJSON_AddNumberToObject(item, "actions", (double)log->actions[i]);
        cJSON_AddNumberToObject(item, "bytes", (double)log->bytes[i]);
    }
}

void cmd_tell_retained(struct cmd *cmd, struct store *store, const char *name, cJSON *to) {
    struct snap_retain_log log;
    cJSON *list = NULL;
    int begun = 0;
    (void)cmd;
    if (snap_retain_read(store, &log, NULL) != KV_OK)
        return;
    if (to != NULL) {
        cJSON *retained = cJSON_AddObjectToObject(to, "given_up");
        if (name == NULL)
            totals_json(&log, retained);
        list = cJSON_AddArrayToObject(retained, "newest");
    }
    for (uint32_t i = 0; i < log.count; i++) {
        if (name != NULL && strcmp(log.newest[i].name, name) != 0)
            continue;
        if (list != NULL) {
            action_json(list, &log.newest[i]);
            continue;
        }
        if (!begun++)
            fprintf(cmd->out, "  given up, the newest first\n");
        action_text(&log.newest[i]);
    }
}
