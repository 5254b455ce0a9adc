/* engine/model/template.h - chat turns as text and as token ids.
 *
 * Responsible for: recognising ChatML and Llama-3 in the model file's chat template, its default
 * system message, and rendering turns one after another as a conversation grows.
 * Not responsible for: running arbitrary templates (others are refused, with the flag that
 * overrides) or keeping the conversation (the session does).
 *
 * Token rendering puts control tokens in by id and encodes what people wrote with special parsing
 * off: a user who types the text of a control token cannot end a turn. For text without such
 * strings the ids equal those of the rendered text with special parsing on.
 *
 * Threads: read-only after template_make.
 * Units: bytes, token ids, positions.
 */
#ifndef ENGINE_MODEL_TEMPLATE_H
#define ENGINE_MODEL_TEMPLATE_H

#include "engine/model/tokenizer.h"

enum { TEMPLATE_MESSAGES_MAX = 65536 };

enum template_kind { TEMPLATE_CHATML = 0, TEMPLATE_LLAMA3 = 1 };

enum template_role {
    TEMPLATE_SYSTEM = 0,
    TEMPLATE_USER = 1,
    TEMPLATE_ASSISTANT = 2,
    TEMPLATE_ROLE_COUNT
};

enum {
    TEMPLATE_FIRST = 1,     /* nothing stands before: BOS, and the default system message unless
                               the first message is one */
    TEMPLATE_ASK = 2,       /* ends with the opening of an assistant turn */
    TEMPLATE_OPEN_LAST = 4, /* the last message is not closed: an answer prefix to go on from */
    TEMPLATE_END_TURN = 8,  /* before all else: the end token of a turn that was cut off */
    TEMPLATE_AFTER_END = 16 /* before all else: what follows an end token that stands already; with
                               TEMPLATE_END_TURN after that token */
};

struct template_message {
    enum template_role role;
    const char *text;
    size_t text_bytes;
};

struct template_turns {
    const struct template_message *messages;
    size_t count;
    unsigned flags;
};

/* Positions in the id list, from the message's opening control token to behind its closing text. */
struct template_span {
    enum template_role role;
    size_t first;
    size_t end;
};

struct template_spans {
    struct template_span *items;
    size_t capacity; /* messages + 2 are enough: the default system message and an open answer */
    size_t count;
};

struct template;

/* `name` NULL: as the file says. Else "chatml" or "llama-3", whatever the file says.
 * KV_ERR_MISMATCH: no template or an unknown one (the diag names `--template`), or the vocabulary
 * lacks its control tokens. KV_ERR_INVALID: an unknown name. KV_ERR_NOMEM. Gguf and tokenizer: the
 * tokenizer must outlive the result, the gguf need not. */
struct template_make_args {
    const struct gguf *gguf;
    const struct tokenizer *tokenizer;
    const char *name;
};
enum kv_err template_make(const struct template_make_args *args, const struct kv_alloc *alloc,
                          struct template **template_out, struct kv_diag *diag);
void template_drop(struct template *tmpl); /* NULL is allowed */

enum template_kind template_kind(const struct template *tmpl);
/* The default system message; empty when the template has none. */
struct gguf_text template_default_system(const struct template *tmpl);
/* The control token that closes a turn. */
uint32_t template_end_id(const struct template *tmpl);
/* Digest over kind, control ids and default texts. */
struct kv_digest template_digest(const struct template *tmpl);

/* As text. *size_bytes_out is what is needed, also with KV_ERR_LIMIT (`capacity` too small); the
 * text is not terminated. KV_ERR_INVALID: TEMPLATE_OPEN_LAST without a message or with
 * TEMPLATE_ASK, an unknown role, a system message that is not the first, too many messages. */
enum kv_err template_text(const struct template *tmpl, const struct template_turns *turns,
                          char *text_out, size_t capacity_bytes, size_t *size_bytes_out,
                          struct kv_diag *diag);

/* What stands in front of a message of that role, as template_text writes it. */
enum kv_err template_opening(const struct template *tmpl, enum template_role role, char *text_out,
                             size_t capacity_bytes, size_t *size_bytes_out, struct kv_diag *diag);

/* As ids appended to `ids`, and the spans of the messages (spans NULL when not wanted). Errors as
 * template_text and tokenizer_encode; with KV_ERR_LIMIT ids->count is what would be needed. After
 * any error the spans are as before. */
enum kv_err template_ids(const struct template *tmpl, const struct template_turns *turns,
                         struct tokenizer_ids *ids, struct template_spans *spans,
                         struct kv_diag *diag);

#endif
