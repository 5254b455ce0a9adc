/* tools/cmd_needle.c - needle add, plant, check, ls, rm: facts that a session must still know.
 *
 * Responsible for: stating a fact in the house form, the text and JSON of these commands.
 * Not responsible for: asking and scoring (engine/needle.c).
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/receipt_print.h"
#include "tools/text.h"
#include "tools/turn.h"

#include "engine/needle.h"
#include "engine/transfer.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

/* What an asking says of a needle: `kept` is whether it could have failed when it passed. */
struct verdict {
    const char *name, *text;
};

static struct verdict verdict_of(const struct image_needle *needle) {
    if (needle->asked_n_kv == 0)
        return (struct verdict){"not-asked", "not asked yet"};
    if (!needle->passed)
        return (struct verdict){"failed", "failed"};
    if (!needle->kept)
        return (struct verdict){"cannot-fail",
                                "passed, but it cannot fail: without the fact it is hardly less "
                                "likely, so it proves nothing"};
    return (struct verdict){"kept", "passed, kept"};
}

static void tell_needle(const struct cmd *cmd, cJSON *list, const struct image_needle *needle) {
    if (list != NULL) {
        cJSON *item = cJSON_CreateObject();
        json_text(item, "key", needle->key);
        json_text(item, "verdict", verdict_of(needle).name);
        cJSON_AddBoolToObject(item, "kept", needle->kept);
        cJSON_AddBoolToObject(item, "passed", needle->passed);
        cJSON_AddNumberToObject(item, "logp", (double)needle->logp);
        cJSON_AddNumberToObject(item, "logp_hole", (double)needle->logp_hole);
        cJSON_AddNumberToObject(item, "asked_n_kv", (double)needle->asked_n_kv);
        cJSON *spans = cJSON_AddArrayToObject(item, "spans");
        for (uint32_t i = 0; i < needle->span_count; i++) {
            cJSON *span = cJSON_CreateObject();
            cJSON_AddNumberToObject(span, "first", (double)needle->spans[i].first);
            cJSON_AddNumberToObject(span, "end", (double)needle->spans[i].end);
            cJSON_AddItemToArray(spans, span);
        }
        cJSON_AddItemToArray(list, item);
        return;
    }
    text_print_clean(cmd->out, needle->key, strlen(needle->key));
    fprintf(cmd->out, ": %s", verdict_of(needle).text);
    if (needle->asked_n_kv > 0)
        fprintf(cmd->out,
                " (log-probability %.2f, without the fact %.2f, asked at token %" PRIu64 ")",
                (double)needle->logp, (double)needle->logp_hole, needle->asked_n_kv);
    fprintf(cmd->out, "\n");
}

static void tell_not_kept(const struct cmd *cmd, const char *session, uint32_t count) {
    if (count == 0 || cmd->result != NULL)
        return;
    fprintf(cmd->out,
            "not kept: %" PRIu32 ". No wake or audit asks what is not kept; the next snapshot or "
            "sleep asks it again and keeps it if it can fail then, `coldplane needle rm %s --key "
            "KEY` forgets it\n",
            count, session);
}

static cJSON *needle_list(struct cmd *cmd) {
    return cmd->result != NULL ? cJSON_AddArrayToObject(cmd->result, "needles") : NULL;
}

/* NOT_FOUND with the keys that are there; *index_out is where `key` stands. */
static enum kv_err find_key(const struct image_needle *needles, uint32_t count, const char *key,
                            uint32_t *index_out, struct kv_diag *diag) {
    char keys[400] = "";
    size_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(needles[i].key, key) == 0) {
            *index_out = i;
            return KV_OK;
        }
        if (at < sizeof keys - 1) {
            int wrote =
                snprintf(keys + at, sizeof keys - at, "%s%s", i > 0 ? ", " : "", needles[i].key);
            at += wrote > 0 ? (size_t)wrote : 0;
        }
    }
    return kv_diag_set(diag, KV_ERR_NOT_FOUND, "needle %.100s: not in this session; %s%s", key,
                       count > 0 ? "it has: " : "it has none, `needle plant` makes one", keys);
}

static enum kv_err key_taken(const char *key, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_EXISTS,
                       "needle %s: the session has it already; choose another key", key);
}

/* The key of the command, as it is stored: plant and add want a new one, the others one that is
 * there. */
static enum kv_err look_key(void *context, struct store *store, struct kv_diag *diag) {
    struct cmd *cmd = context;
    const char *key = cmd->config->key, *action = cmd_word(cmd, 0);
    int wants_new = strcmp(action, "plant") == 0 || strcmp(action, "add") == 0;
    struct image image;
    uint32_t index = 0;
    image_init(&image);
    enum kv_err err = cmd_look_stored(cmd, store, diag);
    /* An image that cannot be read is what the wake tells. */
    if (err == KV_OK && cmd->host == NULL && key != NULL &&
        restore_image(store, cmd->alloc, cmd->session_name, &image, NULL) == KV_OK) {
        err = find_key(image.needles, image.needle_count, key, &index, wants_new ? NULL : diag);
        if (wants_new)
            err = err == KV_OK ? key_taken(key, diag) : KV_OK;
    }
    image_release(&image, cmd->alloc);
    return err;
}

/* --- plant */

static enum kv_err state_fact(struct service *service, struct session *session,
                              const struct needle_form *form, struct kv_diag *diag) {
    struct session_info info;
    struct turn_result result;
    uint32_t count = 0, index = 0;
    struct image_needle *needles = transfer_needles(session, &count);
    session_info(session, &info);
    if (find_key(needles, count, form->key, &index, NULL) == KV_OK)
        return key_taken(form->key, diag);
    if (info.n < LAYOUT_SINK_TOKENS)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "session %s has %" PRIu64
                           " tokens; a fact within the first %d can never "
                           "be lost, so talk a little before planting one",
                           info.name, info.n, LAYOUT_SINK_TOKENS);
    struct template_message message = {TEMPLATE_USER, form->statement, strlen(form->statement)};
    const struct turn_options options = {.messages = &message, .message_count = 1};
    enum kv_err err = turn_run(service, session, &options, &result, diag);
    turn_result_release(service, &result);
    return err;
}

static void tell_saved(struct cmd *cmd, const struct receipt *receipt) {
    if (cmd->result != NULL)
        cJSON_AddItemToObject(cmd->result, "receipt", receipt_print_json(receipt));
    else
        receipt_print_line(receipt, cmd->out);
}

/* Registers it, asks it with and without its hole, and saves. */
static enum kv_err register_in(struct cmd *cmd, struct service *service, struct session *session,
                               const struct needle_text *text, struct kv_diag *diag) {
    const struct needle_question question = {.with_hole = 1, .update = 1};
    struct needle_result asked;
    struct receipt receipt;
    uint32_t count = 0;
    enum kv_err err = KV_OK;
    KV_TRY(needle_register(session, text, diag));
    struct image_needle *needles = transfer_needles(session, &count);
    KV_TRY(needle_check(session, count - 1, &question, &asked, diag));
    KV_TRY(service_save(service, session, 0, &receipt, diag));
    tell_needle(cmd, needle_list(cmd), &needles[count - 1]);
    tell_not_kept(cmd, cmd->session_name, !needles[count - 1].kept);
    tell_saved(cmd, &receipt);
done:
    return err;
}

static enum kv_err plant_in(struct cmd *cmd, struct service *service, struct session *session,
                            struct kv_diag *diag) {
    struct needle_form form;
    enum kv_err err = needle_house_form(cmd->config->key, cmd->config->value, &form, diag);
    if (err == KV_OK)
        err = state_fact(service, session, &form, diag);
    if (err != KV_OK)
        return err;
    const struct needle_text text = {form.key, form.ask, form.answer_prefix, form.expect};
    return register_in(cmd, service, session, &text, diag);
}

/* Opens the session for writing, works in it, closes. */
static enum kv_err in_session(struct cmd *cmd,
                              enum kv_err (*work)(struct cmd *cmd, struct service *service,
                                                  struct session *session, struct kv_diag *diag),
                              struct kv_diag *diag) {
    struct service *service = NULL;
    struct session *session = NULL;
    struct service_opened opened;
    enum kv_err err = cmd_open_service(cmd, CMD_WRITE, look_key, cmd, &service, diag);
    if (err == KV_OK)
        err = cmd_open_session(cmd, service, 0, &session, &opened, diag);
    if (err == KV_OK)
        err = work(cmd, service, session, diag);
    cmd_close_service(cmd, service);
    return err;
}

static enum kv_err plant(struct cmd *cmd, struct kv_diag *diag) {
    if (cmd->config->key == NULL || cmd->config->value == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "needle plant: --key and --value are needed, such as --key 'green "
                           "lamp' --value 4817");
    if (!text_is_plain(cmd->config->key) || !text_is_plain(cmd->config->value))
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "needle plant: --%s is not one line of UTF-8 text without control "
                           "characters; take plain words",
                           text_is_plain(cmd->config->key) ? "value" : "key");
    return in_session(cmd, plant_in, diag);
}

/* --- add, rm */

static enum kv_err add_in(struct cmd *cmd, struct service *service, struct session *session,
                          struct kv_diag *diag) {
    const struct config *config = cmd->config;
    const struct needle_text text = {config->key != NULL ? config->key : config->ask, config->ask,
                                     config->answer_prefix != NULL ? config->answer_prefix : "",
                                     config->expect};
    return register_in(cmd, service, session, &text, diag);
}

static void tell_removed(struct cmd *cmd) {
    const char *key = cmd->config->key;
    if (cmd->result != NULL) {
        cJSON *item = cJSON_CreateObject();
        json_text(item, "key", key);
        json_text(item, "verdict", "removed");
        cJSON_AddItemToArray(needle_list(cmd), item);
        return;
    }
    text_print_clean(cmd->out, key, strlen(key));
    fprintf(cmd->out, ": removed; what was said stays in the session\n");
}

static enum kv_err rm_in(struct cmd *cmd, struct service *service, struct session *session,
                         struct kv_diag *diag) {
    struct receipt receipt;
    uint32_t count = 0, index = 0;
    enum kv_err err = KV_OK;
    struct image_needle *needles = transfer_needles(session, &count);
    KV_TRY(find_key(needles, count, cmd->config->key, &index, diag));
    KV_TRY(transfer_drop_needle(session, index, diag));
    KV_TRY(service_save(service, session, 0, &receipt, diag));
    tell_removed(cmd);
    tell_saved(cmd, &receipt);
done:
    return err;
}

static enum kv_err add(struct cmd *cmd, struct kv_diag *diag) {
    const struct config *config = cmd->config;
    const char *const texts[] = {config->ask, config->expect, config->answer_prefix, config->key};
    if (config->ask == NULL || config->expect == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "needle add: --ask and --expect are needed, such as --ask 'What is the "
                           "name of my cat?' --expect Mimi");
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (texts[i] != NULL && !text_is_plain(texts[i]))
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "needle add: a text is not one line of UTF-8 without control "
                               "characters; take plain words");
    return in_session(cmd, add_in, diag);
}

static enum kv_err rm(struct cmd *cmd, struct kv_diag *diag) {
    if (cmd->config->key == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "needle rm: --key is needed; `coldplane needle ls` lists the keys");
    return in_session(cmd, rm_in, diag);
}

/* --- check */

struct checked {
    const struct cmd *cmd;
    uint32_t kept, failed;
    const char *first_failed;
    struct progress *progress;
};

static enum kv_err check_one(struct session *session, uint32_t index, cJSON *list,
                             struct checked *checked, struct kv_diag *diag) {
    const struct needle_question question = {.with_hole = 1};
    struct needle_result asked;
    uint32_t count = 0;
    struct image_needle *needles = transfer_needles(session, &count);
    enum kv_err err = needle_check(session, index, &question, &asked, diag);
    /* What it found is printed where the line of progress stood. */
    progress_end(checked->progress);
    if (err != KV_OK)
        return err;
    struct session_info info;
    session_info(session, &info);
    struct image_needle now = needles[index];
    now.passed = asked.passed;
    now.logp = asked.logp;
    now.logp_hole = asked.logp_hole;
    now.asked_n_kv = info.n_kv;
    checked->kept += now.kept != 0;
    if (now.kept && !now.passed && checked->failed++ == 0)
        checked->first_failed = needles[index].key;
    now.kept = asked.kept;
    tell_needle(checked->cmd, list, &now);
    return KV_OK;
}

static enum kv_err check_in(struct cmd *cmd, struct session *session, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct progress progress;
    struct checked checked = {.cmd = cmd, .progress = &progress};
    uint32_t count = 0, first = 0;
    struct image_needle *needles = transfer_needles(session, &count);
    uint32_t end = count;
    if (cmd->config->key != NULL) {
        KV_TRY(find_key(needles, count, cmd->config->key, &first, diag));
        end = first + 1;
    } else if (count == 0) {
        KV_TRY(kv_diag_set(diag, KV_ERR_NOT_FOUND,
                           "session %s has no needles; `coldplane needle plant` makes one",
                           cmd->session_name));
    }
    cJSON *list = needle_list(cmd);
    cmd_progress(cmd, &progress, "asking", "needles");
    session_ask_begin(session);
    for (uint32_t i = first; i < end && err == KV_OK; i++) {
        progress_update(&progress, i - first, end - first);
        session_ask_breathe(session);
        err = cmd_interrupted(cmd) ? kv_diag_set(diag, KV_ERR_CANCELLED,
                                                 "stopped after %" PRIu32 " needles", i - first)
                                   : check_one(session, i, list, &checked, diag);
    }
    session_ask_end(session);
    progress_end(&progress);
    KV_TRY(err);
    if (checked.failed > 0)
        err = kv_diag_set(diag, KV_ERR_PROOF,
                          "session %s: %" PRIu32 " of %" PRIu32 " kept needles failed, first %s; "
                          "`coldplane verify` reads what is stored",
                          cmd->session_name, checked.failed, checked.kept, checked.first_failed);
done:
    return err;
}

static enum kv_err check(struct cmd *cmd, struct kv_diag *diag) {
    struct service *service = NULL;
    struct cmd_asked asked = {NULL, 0};
    enum kv_err err = cmd_open_service(cmd, CMD_READ, look_key, cmd, &service, diag);
    /* The needles are asked here, one by one, instead of inside the wake. */
    if (err == KV_OK)
        err = cmd_ask_begin(cmd, service, cmd->session_name, &asked, diag);
    if (err == KV_OK) {
        err = check_in(cmd, asked.session, diag);
        cmd_ask_end(cmd, service, &asked);
    }
    cmd_close_service(cmd, service);
    return err;
}

/* --- ls */

static enum kv_err list(struct cmd *cmd, struct kv_diag *diag) {
    struct store *store = NULL;
    struct snapshot_entry entry;
    struct image image;
    image_init(&image);
    enum kv_err err = cmd_open_store(cmd, CMD_READ, &store, diag);
    if (err == KV_OK)
        err = cmd_find(cmd, store, &entry, diag);
    if (err == KV_OK)
        err = restore_image(store, cmd->alloc, cmd->session_name, &image, diag);
    if (err == KV_OK) {
        cJSON *items = needle_list(cmd);
        uint32_t not_kept = 0;
        for (uint32_t i = 0; i < image.needle_count; i++) {
            tell_needle(cmd, items, &image.needles[i]);
            not_kept += image.needles[i].kept == 0;
        }
        tell_not_kept(cmd, cmd->session_name, not_kept);
        if (image.needle_count == 0 && cmd->result == NULL)
            fprintf(cmd->out, "no needles; `coldplane needle plant` makes one\n");
    }
    image_release(&image, cmd->alloc);
    cmd_close_store(cmd, store);
    return err;
}

enum kv_err cmd_needle(struct cmd *cmd, struct kv_diag *diag) {
    const char *action = cmd_word(cmd, 0);
    cmd->session_name = cmd_word(cmd, 1);
    enum kv_err err = session_check_name(cmd->session_name, diag);
    if (err != KV_OK)
        return err;
    if (strcmp(action, "plant") == 0)
        return plant(cmd, diag);
    if (strcmp(action, "add") == 0)
        return add(cmd, diag);
    if (strcmp(action, "rm") == 0)
        return rm(cmd, diag);
    if (strcmp(action, "check") == 0)
        return check(cmd, diag);
    if (strcmp(action, "ls") == 0)
        return list(cmd, diag);
    return kv_diag_set(diag, KV_ERR_INVALID,
                       "needle %.60s: no such action; take add, plant, check, ls or rm", action);
}
