/* tools/turn.h - text into a session and answers out of it.
 *
 * Responsible for: rendering turns with the model's chat template, closing what the turn before
 * left open, feeding, generating, whole characters while tokens arrive, saving the turn.
 * Not responsible for: finding sessions (service.h) or what a person sees (cmd_*.c).
 *
 * Threads: as service.h; the callbacks run on the calling thread, which is not the scheduler thread
 * then when the service is shared: they must not touch sessions.
 * Units: tokens, nanoseconds.
 * Errors: LIMIT (session, text and context sizes named; nothing was fed), NO_SLOTS, DEVICE, NOMEM,
 * and those of service_save. After an error of the save the session is resident and whole; after
 * CANCELLED (take_back) it holds a part of the messages, and the caller drops it.
 */
#ifndef TOOLS_TURN_H
#define TOOLS_TURN_H

#include "engine/model/template.h"
#include "tools/service.h"

/* Text of the answer in whole characters, not terminated; 0 stops the generation. */
typedef int (*turn_stream)(void *context, const char *text, size_t text_bytes);
/* Looked at often: 1 stops the generation, what was generated stays. */
typedef int (*turn_cancelled)(void *context);
typedef void (*turn_prefilled)(void *context, uint64_t tokens_done, uint64_t tokens_all);

/* Every field is set; a zeroed struct with messages and tokens_max is a good beginning. */
struct turn_options {
    const struct template_message *messages; /* a system message only first in an empty session */
    size_t message_count;
    uint32_t tokens_max; /* to generate; 0 feeds the messages, closed, and prefills them */
    int resume;          /* nothing is fed: the answer begins where the session stands */
    int save;            /* save when the turn is over */
    int take_back;       /* CANCELLED, nothing saved, when it stops before all messages are read */
    turn_stream stream;  /* may be NULL, as the next two */
    turn_cancelled cancelled;
    turn_prefilled prefilled;
    void *context; /* for all three */
};

struct turn_result {
    char *text; /* the answer, valid UTF-8, terminated; owned: turn_result_release */
    size_t text_bytes;
    uint64_t tokens_fed, tokens_generated;
    enum engine_done done;
    int cancelled;
    uint64_t tokens_unread; /* of those fed, when it was stopped before all were prefilled */
    uint64_t prefill_ns, decode_ns;
    int saved;
    struct receipt receipt; /* of the save; operation 0 without one */
};

/* Makes room, feeds, steps until this session is done (others that are active step along), saves.
 * `result_out` is written in every case and must be released. */
enum kv_err turn_run(struct service *service, struct session *session,
                     const struct turn_options *options, struct turn_result *result_out,
                     struct kv_diag *diag);
void turn_result_release(struct service *service, struct turn_result *result);

/* The parts of turn_run for who does more between them. */
struct turn_rendered {
    struct tokenizer_ids ids;
    struct template_spans spans; /* whose they are */
};
/* Any thread. LIMIT, INVALID, NOMEM; on KV_OK to be released. */
enum kv_err turn_render(struct service *service, const struct template_turns *turns,
                        struct turn_rendered *rendered_out, struct kv_diag *diag);
void turn_rendered_release(struct service *service, struct turn_rendered *rendered);
enum image_role turn_role(enum template_role role);
/* Listens until the session is done; what it failed with. `heard` does not run as the scheduler
 * thread; with `*stop_out` 1 the session is cancelled. */
struct hearing_ear;
struct hearing_heard;
typedef void (*turn_heard)(void *context, const struct hearing_heard *heard, int *stop_out);
enum kv_err turn_listen(struct service *service, struct hearing_ear *ear, turn_heard heard,
                        void *context, struct kv_diag *diag);

/* Until what `session` was fed is prefilled and what it generates is done; others work along. An
 * ear of the caller may listen for more. CANCELLED, and what the session failed with. */
struct turn_work {
    turn_prefilled prefilled; /* with n_kv; may be NULL, as the next */
    turn_cancelled cancelled;
    void *context;
};
enum kv_err turn_work(struct service *service, struct session *session,
                      const struct turn_work *work, struct kv_diag *diag);

/* Feeds `text` as one closed user turn, cut at a token so that the session holds at most
 * `tokens_end` tokens afterwards, and prefills it. For pasted documents of a given length. */
struct turn_document {
    const char *text;
    size_t text_bytes;
    uint64_t tokens_end;
    turn_prefilled prefilled; /* may be NULL */
    void *context;
};
enum kv_err turn_feed_document(struct service *service, struct session *session,
                               const struct turn_document *document, struct kv_diag *diag);

/* Back to the first `n` tokens (snapshot_rewind), with whatever must be prefilled again.
 * `prefilled_out` is written on KV_OK. BUSY unless the session is saved as it is. */
enum kv_err turn_rewind(struct service *service, struct session *session, uint64_t n,
                        uint64_t *prefilled_out, struct kv_diag *diag);
/* The same for a session that was just woken under another name, which becomes one of its own
 * (snapshot_branch). */
enum kv_err turn_branch(struct service *service, struct session *session, uint64_t n,
                        struct kv_diag *diag);
/* Where the newest answer begins, behind its opening, and where the message before it does.
 * NOT_FOUND when the session does not end with an answer to a message. */
struct turn_last {
    uint64_t message, answer;
};
enum kv_err turn_last(struct service *service, struct session *session, struct turn_last *last_out,
                      struct kv_diag *diag);

#endif
