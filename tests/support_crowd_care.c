/* tests/support_crowd_care.c - what the operator of the crowd asks, over the daemon's socket.
 *
 * Responsible for: see support_crowd_care.h.
 * Not responsible for: the chats.
 */
#include "tests/support_crowd_care.h"

#include "engine/needle.h"
#include "tests/support_crowd_text.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

static const char *text_of(const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
    return text != NULL ? text : "";
}

static uint64_t number_of(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) && item->valuedouble > 0 ? (uint64_t)item->valuedouble : 0;
}

static const char *error_of(const cJSON *document) {
    return text_of(cJSON_GetObjectItemCaseSensitive(document, "error"), "text");
}

int support_crowd_care_register(struct crowd *crowd, const struct crowd_chat *chat) {
    struct needle_form form;
    cJSON *document = NULL;
    if (needle_house_form(support_crowd_text_key(CROWD_AUDIT_FACT), chat->values[CROWD_AUDIT_FACT],
                          &form, NULL) != KV_OK)
        return support_crowd_inner_fail(crowd, "needle_house_form");
    int code = served_command(&crowd->served, &document, "needle", "add", chat->session, "--key",
                              form.key, "--ask", form.ask, "--answer-prefix", form.answer_prefix,
                              "--expect", form.expect, NULL);
    if (code != 0)
        support_crowd_inner_fail(crowd, "needle add %s ended with %d: %.300s", chat->session, code,
                                 error_of(document));
    cJSON_Delete(document);
    return code == 0;
}

#ifdef BREAK_CROWD_RECEIPT
/* Damages what is stored and has it woken: a wake that is refused leaves a receipt, too. */
static void damage(struct crowd *crowd) {
    char path[SERVED_PATH_BYTES + 32];
    cJSON *document = NULL;
    snprintf(path, sizeof path, "%.480s/store/seg/00000001.seg", crowd->served.home);
    FILE *file = fopen(path, "r+b");
    for (long at = 0; file != NULL && fseek(file, at, SEEK_SET) == 0 && at < 32 << 20; at += 512)
        fputc('x', file);
    if (file != NULL)
        fclose(file);
    (void)served_command(&crowd->served, &document, "restore", crowd->chats[0].session, NULL);
    cJSON_Delete(document);
}
#endif

/* Every receipt that is still kept; called often enough to see all of them. */
int support_crowd_care_receipts(struct crowd *crowd) {
    cJSON *document = NULL;
    const cJSON *item;
#ifdef BREAK_CROWD_RECEIPT
    damage(crowd);
#endif
    int code = served_command(&crowd->served, &document, "receipt", NULL);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(document, "receipts");
    if (code != 0 || cJSON_GetArraySize(list) == 0)
        support_crowd_inner_fail(crowd, "receipt ended with %d and %d receipts: %.300s", code,
                                 cJSON_GetArraySize(list), error_of(document));
    cJSON_ArrayForEach(item, list) {
        const char *operation = text_of(item, "operation");
        crowd->counts.receipts++;
        crowd->counts.receipts_restore += strcmp(operation, "restore") == 0;
        crowd->counts.receipts_sleep += strcmp(operation, "sleep") == 0;
        if (strcmp(text_of(item, "result"), "ok") != 0)
            support_crowd_inner_fail(crowd, "receipt %s, %s of session %s: %s", text_of(item, "id"),
                                     operation, text_of(item, "name"), text_of(item, "result"));
    }
    cJSON_Delete(document);
    return !support_crowd_inner_failed(crowd);
}

int support_crowd_care_lost(struct crowd *crowd) {
    cJSON *document = NULL;
#ifdef BREAK_CROWD_LOST
    (void)served_command(&crowd->served, &document, "rm", crowd->chats[0].session, NULL);
    cJSON_Delete(document);
    document = NULL;
#endif
    int code = served_command(&crowd->served, &document, "ls", NULL);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(document, "sessions");
    if (code != 0)
        support_crowd_inner_fail(crowd, "ls ended with %d: %.300s", code, error_of(document));
    for (uint32_t i = 0; i < crowd->options.chats && code == 0; i++) {
        const struct crowd_chat *chat = &crowd->chats[i];
        const cJSON *item;
        uint64_t tokens = 0;
        cJSON_ArrayForEach(item, list) {
            if (strcmp(text_of(item, "name"), chat->session) == 0)
                tokens = number_of(item, "tokens");
        }
        if (tokens < chat->tokens)
            support_crowd_inner_fail(
                crowd, "session %s is stored with %llu tokens, acknowledged were %llu",
                chat->session, (unsigned long long)tokens, (unsigned long long)chat->tokens);
    }
    cJSON_Delete(document);
    return !support_crowd_inner_failed(crowd);
}

/* Nobody goes on with them, and an audit would ask each against all. */
static int remove_branches(struct crowd *crowd, const struct crowd_chat *chat) {
    for (uint32_t i = 0; i < chat->branch_count; i++) {
        cJSON *document = NULL;
        const char *name = chat->branches[i];
        int code = strcmp(name, chat->session) == 0
                       ? 0
                       : served_command(&crowd->served, &document, "rm", name, NULL);
        if (code != 0)
            support_crowd_inner_fail(crowd, "rm %s ended with %d: %.300s", name, code,
                                     error_of(document));
        cJSON_Delete(document);
        if (code != 0)
            return 0;
    }
    return 1;
}

static void count_audit(struct crowd *crowd, const cJSON *document) {
    struct crowd_counts *counts = &crowd->counts;
    const cJSON *item;
    counts->audit_questions = number_of(document, "questions");
    counts->audit_foreign = number_of(document, "foreign_answers");
    counts->audit_failed = number_of(document, "failed");
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(document, "sessions")) {
        const cJSON *margin = cJSON_GetObjectItemCaseSensitive(item, "margin_least");
        counts->audit_own += number_of(item, "own_asked");
        if (!cJSON_IsNumber(margin))
            continue;
        if (!counts->has_margin || margin->valuedouble < counts->margin_least)
            counts->margin_least = margin->valuedouble;
        counts->has_margin = 1;
    }
}

int support_crowd_care_audit(struct crowd *crowd) {
    cJSON *document = NULL;
    for (uint32_t i = 0; i < crowd->options.chats; i++)
        if (!remove_branches(crowd, &crowd->chats[i]))
            return 0;
    int code = served_command(&crowd->served, &document, "audit", NULL);
    const struct crowd_counts *counts = &crowd->counts;
    count_audit(crowd, document);
    /* A kept needle may fail after more was said, asleep or not: the chats themselves show that
     * nothing was lost. What may never be is another's value. */
    int told = code == 0 || (code == 7 && counts->audit_foreign == 0 &&
                             4 * counts->audit_failed <= counts->audit_own);
    if (!told)
        support_crowd_inner_fail(crowd, "audit ended with %d: %.300s", code, error_of(document));
    else if (crowd->options.knows && (2 * counts->audit_own < crowd->options.chats ||
                                      !counts->has_margin || counts->margin_least <= 0))
        support_crowd_inner_fail(
            crowd,
            "the audit asked %llu needles of %u chats, margin %.2f: too little to "
            "tell them apart",
            (unsigned long long)counts->audit_own, crowd->options.chats, counts->margin_least);
    cJSON_Delete(document);
    return !support_crowd_inner_failed(crowd);
}
