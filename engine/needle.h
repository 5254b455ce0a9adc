/* engine/needle.h - facts that a session must still know, asked without touching it.
 *
 * Responsible for: finding where a fact stands, asking it plain and with a hole, scoring values.
 * Not responsible for: which facts (users, tests) or what a failed one means (restore/, tools/).
 *
 * A needle is a question, the prefix of the answer and the expected answer. It is asked as one
 * teacher-forced throwaway chunk: end of the running turn if needed, a user turn with the question,
 * the assistant's answer prefix, the expected answer. Passed: every argmax of the answer's tokens
 * agrees. It counts (kept) only if it passed and the log-probability of the answer drops by at
 * least NEEDLE_DROP_NATS once the blocks and window pages where the fact stands are hidden.
 *
 * Threads: the scheduler thread.
 * Units: nats.
 * Errors: INVALID, NOT_FOUND (the fact does not stand in the session, or in the sinks only), EXISTS
 * (same key), LIMIT (question and answer do not fit one chunk; too many needles), BUSY (fed tokens
 * without KV; it is being asked), DEVICE, NOMEM.
 */
#ifndef ENGINE_NEEDLE_H
#define ENGINE_NEEDLE_H

#include "engine/engine.h"
#include "engine/transfer.h"

#define NEEDLE_DROP_NATS 2.0f

struct needle_text {
    const char *key;           /* unique in the session */
    const char *ask;           /* the user's question */
    const char *answer_prefix; /* may be "" */
    const char *expect;        /* the value */
};
/* The house form that the default model answers (two statements, then the question): fills
 * `statement_out` with the sentence to put into the text and `text_out`'s strings with pointers
 * into the caller's buffers. */
struct needle_form {
    char statement[512], ask[256], answer_prefix[256], expect[64], key[128];
};
enum kv_err needle_house_form(const char *key, const char *value, struct needle_form *form_out,
                              struct kv_diag *diag);

/* Finds every occurrence of `expect` in the session's own text, refuses a fact that stands nowhere
 * or only in the sinks, and registers it. Not asked yet. */
enum kv_err needle_register(struct session *session, const struct needle_text *text,
                            struct kv_diag *diag);

/* 1 when `value` stands in the session's own text, sinks too: whoever answers it need have it from
 * nobody else. */
int needle_stands(struct session *session, const char *value);

struct needle_result {
    int asked; /* 0: there is no room for the question any more; the rest is as recorded */
    int passed, kept;
    float logp, logp_hole;
};
/* Asks one registered needle. `with_hole` 0 leaves kept and logp_hole as recorded. The record in
 * the session is updated when `update` is set. */
struct needle_question {
    int with_hole, floor, update;
};
enum kv_err needle_check(struct session *session, uint32_t index,
                         const struct needle_question *question, struct needle_result *result_out,
                         struct kv_diag *diag);
/* Several of them, as few batches as they fit in; the bits are those of each asked alone. One that
 * has no room any more is passed over, never LIMIT. After an error nothing is updated. */
struct needle_list {
    const uint32_t *indices;
    uint32_t count;
};
enum kv_err needle_check_all(struct session *session, const struct needle_list *list,
                             const struct needle_question *question,
                             struct needle_result *results_out, struct kv_diag *diag);
/* Asks a fact that need not be this session's, as an audit does; `kept` and `logp_hole` are 0. */
enum kv_err needle_ask(struct session *session, const struct needle_text *text,
                       struct needle_result *result_out, struct kv_diag *diag);
/* Several, in as few batches as they fit in. */
enum kv_err needle_ask_all(struct session *session, const struct needle_text *texts, uint32_t count,
                           struct needle_result *results_out, struct kv_diag *diag);
/* Log-probability of other values under the same question: the identity test by margin. */
enum kv_err needle_score(struct session *session, uint32_t index, const char *value,
                         float *logp_out, struct kv_diag *diag);

#endif
