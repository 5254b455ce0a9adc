/* tools/serve.h - one service shared by many threads: requests in, answers out.
 *
 * Responsible for: admission (bounded queue, slots, deadlines), one chat turn or plain completion
 * from a request to a saved session and its receipt, refusing by name, an orderly end, counters.
 * Not responsible for: HTTP and JSON (http_*.c), the control socket (control.h), which session a
 * prompt continues (serve_find.h), who is the scheduler thread (service.h).
 *
 * Threads: serve_open, serve_close and serve_attach on the main thread; serve_turn, serve_picture,
 * serve_stop from any thread. Callbacks of a request run on the thread that called serve_turn,
 * never as the scheduler thread.
 * Units: bytes, tokens, nanoseconds of the monotonic clock.
 */
#ifndef TOOLS_SERVE_H
#define TOOLS_SERVE_H

#include "engine/model/template.h"
#include "tools/service.h"

struct serve;
struct receipt_keep;

struct serve_settings {
    uint32_t requests_max;           /* at work and waiting together; more get BUSY */
    uint64_t wait_ns;                /* longest wait for a session or for slots */
    uint32_t tokens_max;             /* for a request that names none */
    const struct receipt_keep *keep; /* where receipts are kept; NULL: nowhere */
    /* One line for each event, without prompt text; may be NULL. Any thread. */
    void (*log)(void *context, const char *line);
    void *log_context;
    int log_text; /* 1: what is asked and answered stands in lines of its own */
};
/* Shares the service, which stays the caller's and is closed after serve_close. NOMEM. */
enum kv_err serve_open(struct service *service, const struct serve_settings *settings,
                       struct serve **serve_out, struct kv_diag *diag);
/* No call is running. NULL is allowed. */
void serve_close(struct serve *serve);
/* As the scheduler thread, after a command that may have made, renamed or moved stored sessions by
 * other ways than serve_turn: so that requests find them by their text. NOMEM, IO. */
enum kv_err serve_refresh(struct serve *serve, struct kv_diag *diag);
/* The same for one of them, also a name that is nowhere any more. */
enum kv_err serve_note(struct serve *serve, const char *name, struct kv_diag *diag);
/* Not as the scheduler thread: until every receipt so far is kept, and what it saved is found, for
 * at most `wait_ns` (UINT64_MAX: however long). 1 when they are. */
int serve_settle(struct serve *serve, uint64_t wait_ns);

enum serve_found { SERVE_NEW, SERVE_DEVICE, SERVE_RAM, SERVE_DISK }; /* where it was woken from */
enum serve_finish { SERVE_STOP, SERVE_LENGTH, SERVE_CONTEXT, SERVE_CANCELLED, SERVE_DEADLINE };

enum {
    SERVE_OWNER_BYTES = IMAGE_OWNER_BYTES,
    SERVE_STOPS_MAX = 16,
    SERVE_STOP_BYTES_MAX = 1024,
    SERVE_LOGPROBS_MAX = 20,
    SERVE_RECEIPTS = 16
};

struct serve_logprob {
    uint32_t token;
    float logprob;
};
/* One for each token, and one at the end without a token when text was held back. */
struct serve_piece {
    const char *text; /* whole UTF-8 characters; may be empty; may hold those of tokens before */
    size_t text_bytes;
    int has_token;
    uint32_t token;
    float logprob; /* these with logprobs asked */
    const struct serve_logprob *top;
    uint32_t top_count;
};

/* Every field is set; borrowed for the call. */
struct serve_request {
    const char *request_id;           /* stands in log lines */
    uint8_t owner[SERVE_OWNER_BYTES]; /* whose key; zeros: the operator */
    const char *session; /* named by the client, or NULL: found by the text (prefix.h) */
    const struct template_message *messages; /* NULL: a plain completion of prompt */
    size_t message_count;
    const char *prompt;
    size_t prompt_bytes;
    uint32_t tokens_max; /* 0: as the settings say; cut to what the context has left */
    struct image_sampler sampler;
    const char *const *stops; /* the answer ends before the first of them */
    size_t stop_count;
    int logprobs;
    uint32_t top_logprobs;
    uint64_t deadline_ns;                                         /* UINT64_MAX: none */
    int (*piece)(void *context, const struct serve_piece *piece); /* 0 stops; may be NULL */
    int (*cancelled)(void *context); /* the client is gone; looked at often; may be NULL */
    void *context;
};

struct serve_answer {
    char *text; /* owned: serve_answer_release; valid UTF-8, terminated */
    size_t text_bytes;
    enum serve_finish finish;
    uint64_t tokens_prompt, tokens_completion, tokens_reused, tokens_prefilled;
    uint64_t first_difference; /* token at which a stored history stopped to agree; its length when
                                  it agreed to its end */
    enum serve_found found;
    char session[IMAGE_NAME_BYTES_MAX + 1];
    uint64_t receipt_id; /* of the save; 0: not kept */
    uint32_t tier_blocks[16];
    uint32_t retry_after_seconds; /* with BUSY, NO_SLOTS, and CANCELLED when the service ends */
    uint64_t wait_ns, wake_ns, prefill_ns, decode_ns, save_ns;
};
/* The answer is made and the session saved when it returns KV_OK, also when it was stopped by the
 * client or by the deadline (finish says so). `answer_out` is written in every case.
 * BUSY the queue is full or the session is at work too long, NO_SLOTS too many are awake, INVALID,
 * LIMIT (context), NOT_FOUND (a named session of another owner), CANCELLED (nothing
 * happened yet, or the service ends); MISMATCH, CORRUPT, PROOF, VERSION: the stored session is
 * refused; IO, NO_SPACE (disk, store budget): not saved, the session stays, unless it is new and
 * nobody named it: nobody would find it; DEVICE, NOMEM. */
enum kv_err serve_turn(struct serve *serve, const struct serve_request *request,
                       struct serve_answer *answer_out, struct kv_diag *diag);
void serve_answer_release(struct serve *serve, struct serve_answer *answer);
/* The bytes of a token, cut to `capacity`; 0 for one that does not exist. Any thread. */
size_t serve_token_bytes(struct serve *serve, uint32_t token, char *out, size_t capacity);

/* What is going on, as one picture. */
struct serve_session {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    enum session_state state;
    uint8_t owner[SERVE_OWNER_BYTES]; /* this line is filled by serve_picture_stored */
    int pinned, in_ram;
    uint64_t n, n_kv, idle_ns;
    uint32_t slots, blocks, blocks_durable;
    uint32_t tier_blocks[16];
};
struct serve_totals {
    uint64_t requests, refused, cancelled, failed; /* of serve_turn */
    uint64_t tokens_prompt, tokens_completion, tokens_reused, tokens_prefilled;
    uint64_t saves, sleeps, wakes, saves_failed, wakes_refused;
    uint64_t spill_bytes, spill_ns, restore_bytes, restore_ns; /* of receipts */
    uint64_t fingerprints_equal, fingerprints_different, probes_asked, probes_passed, needles_asked,
        needles_passed;
};
struct serve_picture {
    struct engine_slots slots;
    struct engine_model model;
    struct serve_session *sessions; /* awake; owned: serve_picture_release */
    uint32_t session_count;
    uint64_t asleep_more; /* that serve_picture_stored had no room for */
    uint32_t requests_now, requests_max;
    uint32_t spill_queue;
    uint64_t store_bytes, store_bytes_max;
    uint64_t write_budget_wait_ns;
    struct serve_totals totals;
    struct receipt receipts[SERVE_RECEIPTS]; /* the newest first */
    uint64_t receipt_ids[SERVE_RECEIPTS];
    /* Whose session it was then: its name may be another's by now. All 0xff: nobody knows. */
    uint8_t receipt_owners[SERVE_RECEIPTS][SERVE_OWNER_BYTES];
    uint32_t receipt_count;
    int stopping;
    char note[512]; /* what could not be reported otherwise */
};
/* Takes the baton for microseconds. NOMEM. */
enum kv_err serve_picture(struct serve *serve, struct serve_picture *picture_out,
                          struct kv_diag *diag);
/* Adds the sessions that are asleep, those used last first, SERVE_ASLEEP_MAX at most; idle_ns is by
 * the wall clock, tier_blocks those of the policy in force, `with_tiers` and for the first
 * SERVE_TIERS_MAX alone, whose images are read. Takes milliseconds, without the baton. NOMEM, IO,
 * CORRUPT: as it was before. */
enum { SERVE_ASLEEP_MAX = 512, SERVE_TIERS_MAX = 64 };
enum kv_err serve_picture_stored(struct serve *serve, struct serve_picture *picture, int with_tiers,
                                 struct kv_diag *diag);
void serve_picture_release(struct serve *serve, struct serve_picture *picture);
/* 1 while requests are taken: for /ready. Never waits. */
int serve_is_ready(struct serve *serve);

/* A stop that is under way waits for no answer any more. */
void serve_hurry(struct serve *serve);
/* New requests are refused from now on and those under way end: at the next step, or when
 * `grace_ns` are over. Returns when all are gone and every session is durable. IO, NO_SPACE, LIMIT:
 * the first that could not be saved, named; BUSY: a command holds it, each of these is logged. */
enum kv_err serve_stop(struct serve *serve, uint64_t grace_ns, struct kv_diag *diag);

#endif
