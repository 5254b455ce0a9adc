/* tools/cmd_receipt.c - receipt: what was kept of saves and wakes.
 *
 * Responsible for: listing them, showing one.
 * Not responsible for: keeping them (receipt_keep.c).
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/receipt_keep.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *text_of(const cJSON *document, const char *name) {
    const cJSON *item = cJSON_GetObjectItem(document, name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static double number_of(const cJSON *document, const char *name) {
    const cJSON *item = cJSON_GetObjectItem(document, name);
    return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

static void list_one(struct cmd *cmd, cJSON *list, uint64_t id, const cJSON *document) {
    char hex[17], when[TEXT_SHORT_BYTES];
    const char *name = text_of(document, "name");
    snprintf(hex, sizeof hex, "%016" PRIx64, id);
    if (cmd->result != NULL) {
        cJSON *item = cJSON_CreateObject();
        json_text(item, "id", hex);
        json_text(item, "operation", text_of(document, "operation"));
        json_text(item, "name", name);
        json_text(item, "result", text_of(document, "result"));
        cJSON_AddNumberToObject(item, "tokens", number_of(document, "tokens"));
        cJSON_AddNumberToObject(item, "kept_unix", number_of(document, "kept_unix"));
        cJSON_AddItemToArray(list, item);
        return;
    }
    uint64_t unix_ns = (uint64_t)number_of(document, "kept_unix") * 1000000000U;
    printf("%s  %-19s  %-8s %-8s %8.0f  ", hex, text_when(unix_ns, when),
           text_of(document, "operation"), text_of(document, "result"),
           number_of(document, "tokens"));
    text_print_clean(stdout, name, strlen(name));
    printf("\n");
}

static enum kv_err list_all(struct cmd *cmd, const struct receipt_keep *keep,
                            struct kv_diag *diag) {
    uint64_t ids[RECEIPT_KEEP_MAX];
    uint32_t count = 0;
    cJSON *list = cmd->result != NULL ? cJSON_AddArrayToObject(cmd->result, "receipts") : NULL;
    enum kv_err err = receipt_keep_list(keep, ids, &count, diag);
    if (err == KV_OK && cmd->result == NULL && count != 0)
        printf("%-16s  %-19s  %-8s %-8s %8s  session\n", "id", "kept (UTC)", "what", "result",
               "tokens");
    for (uint32_t i = 0; err == KV_OK && i < count; i++) {
        cJSON *document = NULL;
        /* One that cannot be read does not hide the others. */
        if (receipt_keep_read(keep, ids[i], &document, NULL) == KV_OK)
            list_one(cmd, list, ids[i], document);
        cJSON_Delete(document);
    }
    if (err == KV_OK && cmd->result == NULL && count == 0)
        printf("no receipts; saves and wakes leave them\n");
    return err;
}

/* One line for each value, its place in the document in front. */
static void print_values(const cJSON *item, const char *above) {
    for (const cJSON *at = item->child; at != NULL; at = at->next) {
        char place[128];
        snprintf(place, sizeof place, "%s%s%s", above, above[0] != 0 ? "." : "",
                 at->string != NULL ? at->string : "-");
        if (cJSON_IsObject(at) || cJSON_IsArray(at)) {
            print_values(at, place);
            continue;
        }
        printf("  %-28s ", place);
        if (cJSON_IsString(at))
            text_print_clean(stdout, at->valuestring, strlen(at->valuestring));
        else if (cJSON_IsNumber(at))
            printf("%.10g", at->valuedouble);
        else
            printf(cJSON_IsTrue(at) ? "yes" : cJSON_IsNull(at) ? "-" : "no");
        printf("\n");
    }
}

enum kv_err cmd_receipt(struct cmd *cmd, struct kv_diag *diag) {
    char dir[CONFIG_PATH_BYTES + 16];
    const char *word = cmd_word(cmd, 0);
    const struct receipt_keep keep = cmd_receipts(cmd, dir);
    char *end = NULL;
    cJSON *document = NULL;
    if (word == NULL)
        return list_all(cmd, &keep, diag);
    errno = 0;
    uint64_t id = strlen(word) <= 16 ? strtoull(word, &end, 16) : 0;
    if (id == 0 || *end != 0 || errno != 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "receipt %.40s: an id has up to 16 hex digits; `coldplane receipt` "
                           "lists them",
                           word);
    enum kv_err err = receipt_keep_read(&keep, id, &document, diag);
    if (err != KV_OK)
        return err;
    if (cmd->result != NULL) {
        cJSON_AddItemToObject(cmd->result, "receipt", document);
        return KV_OK;
    }
    printf("receipt %016" PRIx64 "\n", id);
    print_values(document, "");
    cJSON_Delete(document);
    return KV_OK;
}
