/* tools/cmd_text.c - what was said in a stored session, as text again.
 *
 * Responsible for: `show --text`: the token ids of each turn without the template around it, for
 * people and as JSON.
 * Not responsible for: the rest of `show` (cmd_session.c).
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/text.h"

#include "engine/model/template.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

enum { OPENING_BYTES = 256, CLOSING_TOKENS_MAX = 4 };

struct telling {
    const struct kv_alloc *alloc;
    const struct image *image;
    struct tokenizer *tokenizer;
    struct template *tmpl; /* NULL: nothing is taken away */
    void *text;            /* of one turn, terminated */
    size_t capacity, bytes;
};

/* The vocabulary that the ids are of. */
static enum kv_err check_vocabulary(const struct cmd *cmd, const struct telling *telling,
                                    struct kv_diag *diag) {
    struct kv_digest here = tokenizer_digest(telling->tokenizer);
    if (kv_digest_equal(&here, &telling->image->model.tokenizer))
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_MISMATCH,
                       "session %s: model file %s has another vocabulary than the session's model; "
                       "name that with --model",
                       telling->image->name, cmd->config->model);
}

/* What the template writes in front of a turn of this role; "" when it is not known. */
struct opening {
    char text[OPENING_BYTES];
    size_t size;
};

static struct opening opening_of(const struct telling *telling, enum image_role role) {
    static const enum template_role roles[] = {[IMAGE_SYSTEM] = TEMPLATE_SYSTEM,
                                               [IMAGE_USER] = TEMPLATE_USER,
                                               [IMAGE_ASSISTANT] = TEMPLATE_ASSISTANT};
    struct opening opening = {.size = 0};
    size_t size = 0;
    if (role != IMAGE_RAW && telling->tmpl != NULL &&
        template_opening(telling->tmpl, roles[role], opening.text, OPENING_BYTES, &size, NULL) ==
            KV_OK)
        opening.size = size;
    return opening;
}

static int is_control(const struct telling *telling, uint64_t index) {
    return index < telling->image->n &&
           tokenizer_is_control(telling->tokenizer, telling->image->ids[index]);
}

/* In front of its opening a turn may have what closes the one before, when that was cut off, and
 * the first token of all. */
static uint64_t begin_of(const struct telling *telling, const struct image_span *span) {
    for (uint64_t i = span->first; i < span->end && i < span->first + CLOSING_TOKENS_MAX; i++)
        if (is_control(telling, i) && !is_control(telling, i + 1) &&
            !tokenizer_is_stop(telling->tokenizer, telling->image->ids[i]))
            return i;
    return span->first;
}

/* A turn ends with its end token; what the template puts behind that nobody said. Control tokens
 * inside a turn are never shown. */
static enum kv_err add_pieces(struct telling *telling, const struct image_span *span,
                              size_t opening_bytes, struct kv_diag *diag) {
    int raw = span->role == IMAGE_RAW;
    telling->bytes = 0;
    for (uint64_t i = raw ? span->first : begin_of(telling, span); i < span->end; i++) {
        uint32_t id = telling->image->ids[i];
        struct gguf_text piece = tokenizer_piece(telling->tokenizer, id);
        if (!raw && tokenizer_is_stop(telling->tokenizer, id))
            break;
        if (!raw && is_control(telling, i) && telling->bytes >= opening_bytes)
            continue;
        if (!kv_alloc_grow(telling->alloc, &telling->text, &telling->capacity,
                           telling->bytes + piece.size_bytes + 1, 1))
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the text of a turn");
        if (piece.size_bytes > 0)
            memcpy((char *)telling->text + telling->bytes, piece.bytes, piece.size_bytes);
        telling->bytes += piece.size_bytes;
    }
    if (telling->text != NULL)
        ((char *)telling->text)[telling->bytes] = 0;
    return KV_OK;
}

static enum kv_err tell_turn(struct cmd *cmd, struct telling *telling, uint32_t index, cJSON *turn,
                             struct kv_diag *diag) {
    const struct image_span *span = &telling->image->roles[index];
    const struct opening opening = opening_of(telling, span->role);
    enum kv_err err = add_pieces(telling, span, opening.size, diag);
    if (err != KV_OK)
        return err;
    const char *text = telling->bytes > 0 ? telling->text : "";
    size_t from = opening.size;
    if (from > telling->bytes || memcmp(text, opening.text, from) != 0)
        from = 0;
    if (turn != NULL) {
        json_text(turn, "text", text + from);
        return KV_OK;
    }
    fprintf(cmd->out, "%s%" PRIu32 " %s:\n", index > 0 ? "\n" : "", index + 1,
            cmd_role_name(span->role));
    text_print_clean(cmd->out, text + from, telling->bytes - from);
    fprintf(cmd->out, "\n");
    return KV_OK;
}

enum kv_err cmd_tell_text(struct cmd *cmd, const struct image *image, cJSON *turns,
                          struct kv_diag *diag) {
    struct telling telling = {.alloc = cmd->alloc, .image = image};
    cJSON *turn = turns != NULL ? turns->child : NULL;
    enum kv_err err = KV_OK;
    KV_TRY(cmd_open_tokenizer(cmd, &telling.tokenizer, &telling.tmpl, diag));
    KV_TRY(check_vocabulary(cmd, &telling, diag));
    for (uint32_t i = 0; i < image->role_count; i++) {
        KV_TRY(tell_turn(cmd, &telling, i, turn, diag));
        turn = turn != NULL ? turn->next : NULL;
    }
done:
    kv_alloc_release(cmd->alloc, telling.text);
    template_drop(telling.tmpl);
    tokenizer_drop(telling.tokenizer);
    return err;
}
