/* tools/cmd_tokenize.c - text on standard input to token ids.
 *
 * Responsible for: reading the vocabulary alone, without weights in memory as an engine holds them.
 * Not responsible for: how text is cut (engine/model/tokenizer.c).
 */
#include "tools/cmd.h"
#include "tools/text.h"

#include "engine/model/gguf.h"
#include "engine/model/template.h"
#include "engine/model/tokenizer.h"

#include <cjson/cJSON.h>
#include <inttypes.h>

static enum kv_err make_template(struct cmd *cmd, const struct gguf *gguf,
                                 const struct tokenizer *tokenizer, struct template **template_out,
                                 struct kv_diag *diag) {
    const struct template_make_args args = {gguf, tokenizer, NULL};
    struct kv_diag own = {""};
    enum kv_err err = template_make(&args, cmd->alloc, template_out, &own);
    return err == KV_OK || err == KV_ERR_MISMATCH ? KV_OK : kv_diag_set(diag, err, "%s", own.text);
}

enum kv_err cmd_open_tokenizer(struct cmd *cmd, struct tokenizer **tokenizer_out,
                               struct template **template_out, struct kv_diag *diag) {
    uint8_t *model = NULL;
    uint64_t model_bytes = 0;
    struct gguf *gguf = NULL;
    enum kv_err err =
        service_read_model(cmd->config->model, cmd->alloc, &model, &model_bytes, diag);
    if (err == KV_OK)
        err = gguf_parse(model, model_bytes, cmd->alloc, &gguf, diag);
    if (err == KV_OK)
        err = tokenizer_make(gguf, cmd->alloc, tokenizer_out, diag);
    if (err == KV_OK && template_out != NULL)
        err = make_template(cmd, gguf, *tokenizer_out, template_out, diag);
    if (err != KV_OK && model != NULL)
        kv_diag_prefix(diag, "model file %s", cmd->config->model);
    gguf_drop(gguf);
    kv_alloc_release(cmd->alloc, model);
    return err;
}

static enum kv_err print_ids(struct cmd *cmd, const struct tokenizer_ids *ids,
                             struct kv_diag *diag) {
    if (cmd->result == NULL) {
        for (size_t i = 0; i < ids->count; i++)
            printf("%s%" PRIu32, i > 0 ? " " : "", ids->items[i]);
        printf("\n");
        if (ids->replaced_bytes > 0)
            fprintf(stderr, "coldplane: %zu bytes have no token; U+FFFD stands in for them\n",
                    ids->replaced_bytes);
        return KV_OK;
    }
    /* Built from the end: cJSON walks an array to append to it. */
    cJSON *list = cJSON_AddArrayToObject(cmd->result, "ids");
    for (size_t i = ids->count; i > 0; i--)
        if (!cJSON_InsertItemInArray(list, 0, cJSON_CreateNumber(ids->items[i - 1])))
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu ids", ids->count);
    cJSON_AddNumberToObject(cmd->result, "count", (double)ids->count);
    cJSON_AddNumberToObject(cmd->result, "replaced_bytes", (double)ids->replaced_bytes);
    return KV_OK;
}

enum kv_err cmd_tokenize(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct tokenizer *tokenizer = NULL;
    struct tokenizer_ids ids = {NULL, 0, 0, 0};
    char *text = NULL;
    size_t bytes = 0;
    KV_TRY(cmd_open_tokenizer(cmd, &tokenizer, NULL, diag));
    KV_TRY(text_read_all(stdin, cmd->alloc, &text, &bytes, diag));
    ids.capacity = bytes + 1;
    ids.items = kv_alloc_zeroed(cmd->alloc, ids.capacity, sizeof *ids.items);
    if (ids.items == NULL)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the ids of %zu bytes", bytes));
    KV_TRY(tokenizer_encode(tokenizer, text, bytes,
                            cmd->config->special ? TOKENIZER_PARSE_SPECIAL : 0, &ids, diag));
    err = print_ids(cmd, &ids, diag);
done:
    kv_alloc_release(cmd->alloc, ids.items);
    kv_alloc_release(cmd->alloc, text);
    tokenizer_drop(tokenizer);
    return err;
}
