/* engine/engine.h - chat sessions with tiered KV on one device.
 *
 * Responsible for: holding the model, the slot pool and the resident sessions; stepping them;
 * asking throwaway questions; giving out frozen states and taking loaded ones.
 * Not responsible for: any I/O, names on disk, or when to save (snapshot/, restore/, tools/ through
 * struct engine_hooks).
 *
 * Threads: one scheduler thread at a time calls everything here, except engine_post and
 * engine_post_behind. Which thread that is may change between calls and where a hook `away` says
 * so.
 * Units: tokens, positions and pages are counts; slots are DESIGN section 3 slots; sizes in bytes.
 * Errors: INVALID, NOT_FOUND (also a device), EXISTS (a name, a needle's key), BUSY (state does not
 * allow it), LIMIT (context or named maximum), NO_SLOTS, MISMATCH (model file or image), CORRUPT
 * (model file), NOMEM, DEVICE (values that are not finite; an accelerator that fails).
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/image.h"
#include "engine/session.h"
#include "kernels/layout.h"
#include "store/base/alloc.h"
#include "store/base/clock.h"
#include "store/base/diag.h"
#include "store/base/digest.h"

struct engine;
struct block; /* a sealed block; immutable bytes, counted references */

/* AUTO takes the first GPU, or the processor where there is none. */
enum engine_device { ENGINE_DEVICE_CPU, ENGINE_DEVICE_AUTO, ENGINE_DEVICE_CUDA };
enum engine_simd { ENGINE_SIMD_AUTO, ENGINE_SIMD_C, ENGINE_SIMD_AVX2 };

/* Calls up. Any member may be NULL. All run on the scheduler thread and only enqueue. */
struct engine_hooks {
    void *context;
    /* `block` was sealed in `session` and is held once for the receiver, who answers with
     * transfer_block_durable or transfer_block_failed. */
    void (*block_sealed)(void *context, struct session *session, struct block *block);
    /* Attention will read planes of `block` that are not resident: the receiver reads them into
     * the reserved slots (transfer_block_missing) and then calls transfer_planes_arrived. */
    void (*planes_wanted)(void *context, struct session *session, struct block *block);
    /* `slots` more are needed than are free. The receiver may wait for pending writes or put idle
     * sessions to sleep; 1 when something changed and the engine should try again. */
    int (*slots_low)(void *context, struct session *for_session, uint32_t slots);
    /* Free slots that sessions at work will still need: none of them is for a new session or for
     * one that is loaded. */
    uint32_t (*slots_promised)(void *context);
    /* Around a wait, or work that others need not wait for, never within a step: between `away` and
     * `back` another thread may be the scheduler thread. */
    void (*away)(void *context);
    void (*back)(void *context);
    /* Between two pieces of a proof or of what a session gives back, never within a step: others go
     * first. `small`: the piece was a part of what a step costs, else about as much as one. 1 when
     * somebody stepped. */
    int (*breathe)(void *context, int small);
};

struct engine_settings {
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    struct engine_hooks hooks;
    enum engine_device device;
    uint32_t cuda_index;          /* which GPU, of ENGINE_DEVICE_CUDA */
    uint64_t device_memory_bytes; /* reserved on a GPU, at most; UINT64_MAX: no limit */
    int graphs;                   /* a GPU may record steps; the bits are the same */
    enum engine_simd simd;
    uint32_t threads;           /* 1 … 256, the caller included */
    uint32_t sessions_max;      /* resident at once, 1 … 1,024 */
    uint64_t slot_budget_bytes; /* slots and META frames together; reserved at open; UINT64_MAX:
                                   what a GPU has left beside the model */
    /* Of the pool, beyond the reserve: with fewer free slots than low, sessions under policy
     * `pressure` give up planes until high are free; beyond high they get them back. */
    uint32_t slots_low_percent, slots_high_percent;
    uint32_t reserve_slots; /* kept back from admission; serves planes that wait for their write */
    int poison_free_slots;  /* fill freed slots with NaN patterns: tests and the demo */
    uint64_t shuffle_seed;  /* order in which slots are given out; 0 keeps ascending order */
};

/* `model_bytes` is a whole GGUF file, borrowed for the call only. */
enum kv_err engine_open(const struct engine_settings *settings, const void *model_bytes,
                        size_t model_size, struct engine **engine_out, struct kv_diag *diag);
/* Drops every session. Whoever holds a block must have answered before. NULL is allowed. */
void engine_close(struct engine *engine);

struct engine_model {
    struct layout_geometry geometry;
    struct image_model identity; /* what a snapshot must match */
    uint32_t vocab_count, context_tokens, q_heads, hidden, ffn;
    uint64_t weight_bytes; /* weights as held in memory */
    const char *simd_name; /* "c", "avx2" or "cuda" */
    char device_name[96];
    char device_note[192]; /* why AUTO took the processor, or what slows the GPU; else "" */
    const char *architecture;
};
void engine_model(const struct engine *engine, struct engine_model *model_out);
struct tokenizer;
struct template;
const struct tokenizer *engine_tokenizer(const struct engine *engine);
const struct template *engine_template(const struct engine *engine);

struct engine_slots {
    uint32_t total, free, reserve, used, peak_used;
    uint32_t leaving; /* of used: sessions that are just being dropped give them back */
    uint64_t slot_bytes, meta_frame_bytes;
    uint64_t pool_bytes; /* what the budget was turned into */
};
void engine_slots(const struct engine *engine, struct engine_slots *slots_out);

/* Slots that a session of `n_kv` tokens holds once its blocks are durable; window and sinks
 * included. For admission before anything starts, and for the table of the demo. */
uint32_t engine_plan_slots(const struct engine *engine, const struct image_policy *policy,
                           uint64_t n_kv);

/* One scheduler step: applies what was posted, decodes every generating session in one batch and
 * prefills at most one chunk of one session (round robin). `*count_out` = 0 and KV_OK: nothing to
 * do. A session that fails gets an event and keeps what it had before the step (fed tokens without
 * KV are taken back); the others go on; the call itself still returns KV_OK, but for DEVICE when
 * the device is lost: then every later call fails too, and what was saved is safe.
 * `events` has room for 2 × sessions_max + 1. A session that was cancelled has its event first;
 * slots_low may put it to sleep later in the same step, so compare an event's session with those
 * that session_at gives before touching it. */
enum engine_event_kind { ENGINE_PREFILLED, ENGINE_TOKEN, ENGINE_DONE, ENGINE_FAILED };
enum engine_done {
    ENGINE_DONE_STOP,
    ENGINE_DONE_LENGTH,
    ENGINE_DONE_CONTEXT,
    ENGINE_DONE_FED,
    ENGINE_DONE_CANCELLED /* what was fed and not yet prefilled is taken back */
};
struct engine_event {
    struct session *session;
    enum engine_event_kind kind;
    uint32_t token;        /* ENGINE_TOKEN: the sampled id, now pending */
    uint64_t n_kv;         /* after the step */
    enum engine_done done; /* ENGINE_DONE: FED = everything fed is prefilled, nothing to generate */
    enum kv_err err;       /* ENGINE_FAILED; text in the diag given to engine_step */
};
enum kv_err engine_step(struct engine *engine, struct engine_event *events, uint32_t *count_out,
                        struct kv_diag *diag);

/* 1 when the device is lost, whatever call has found out: all that is left is to close. */
int engine_lost(const struct engine *engine);

/* Policy `pressure`. relieve lowers sessions until `slots` beyond the reserve are free, as far as
 * durable planes allow, and returns how many it freed; where one is just being dropped its blocks
 * go, and nobody is lowered yet. balance, between steps or while waiting, applies what was posted
 * and does what the watermarks ask for; 0: there was nothing to do, as for engine_apply. A step
 * balances too. */
uint32_t engine_relieve(struct engine *engine, uint32_t slots);
int engine_balance(struct engine *engine);

/* Runs `call(context)` on the scheduler thread before the next step. Any thread. NOMEM: it never
 * runs. What is posted `behind` is work in pieces: one piece before each step. */
enum kv_err engine_post(struct engine *engine, void (*call)(void *context), void *context);
enum kv_err engine_post_behind(struct engine *engine, void (*call)(void *context), void *context);
/* Runs what is queued now, and one piece, without a step; 0 when there was nothing. */
int engine_apply(struct engine *engine);

/* For who waits on the scheduler thread: sessions may change and go until engine_back, and within
 * engine_breathe. None does anything within a step or without the hooks. */
void engine_away(struct engine *engine);
void engine_back(struct engine *engine);
int engine_breathe(struct engine *engine, int small); /* 1 when somebody stepped */

#endif
