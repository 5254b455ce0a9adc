/* engine/engine_inner.h - what stands behind a struct engine and a struct session.
 *
 * Responsible for: the two structs and the few functions that the files of engine/ share.
 * Not responsible for: anything outside the files of this folder.
 *
 * Threads: the scheduler thread, but for posts and what stands behind a lock.
 * Units: as engine.h.
 */
#ifndef ENGINE_ENGINE_INNER_H
#define ENGINE_ENGINE_INNER_H

#include "engine/device/device.h"
#include "engine/engine.h"
#include "engine/kv/block.h"
#include "engine/kv/policy.h"
#include "engine/kv/posts.h"
#include "engine/kv/pressure.h"
#include "engine/kv/slots.h"
#include "engine/kv/window.h"
#include "engine/model/forward.h"
#include "engine/model/sampler.h"
#include "engine/model/template.h"
#include "engine/model/tokenizer.h"
#include "engine/transfer.h"

#include <pthread.h>

/* Where bytes from a disk land; it stays until the engine is closed. */
struct engine_inner_landing {
    pthread_mutex_t lock;
    void *at;
    uint64_t bytes;
    int taken;
};

struct engine {
    struct engine_settings settings;
    struct device *device;
    struct slots slots;
    struct block_table blocks;
    struct posts posts, behind; /* behind: one of them before each step */
    struct forward *forward;
    struct tokenizer *tokenizer;
    struct template *template;
    struct engine_model model;

    struct session **sessions; /* [sessions_max] */
    uint32_t session_count;
    struct session *leaving; /* in no other list, and not yet rid of all their blocks */
    uint64_t prefill_turn;   /* counts chunks: who is next */
    struct session **batch;  /* [sessions_max], of the running step; NULL: dropped meanwhile */
    uint32_t batch_count;
    struct forward_seq *seqs; /* [singles_max + 1] */
    uint32_t singles_max;
    struct pressure_session *pressed;     /* [sessions_max] */
    struct pressure_move *moves;          /* [sessions_max * IMAGE_AGES_MAX] */
    struct sampler_candidate *candidates; /* [vocab] */
    int32_t *bad_tokens;                  /* [layers * kv_heads], of a seal, on the device … */
    int32_t *bad_host;                    /* … and here */
    struct engine_inner_landing landing;
    pthread_mutex_t lane_in, lane_lent, lane_check; /* of the device: readers take turns */
    int stepping;
    int committing; /* the workspace holds rows that are not in their windows yet */
};

/* Of a session whose layers come one after another (transfer_layers.c). */
struct engine_inner_gate {
    int closed;         /* the scheduler thread's: some are not there yet, for all it knows */
    uint64_t waited_ns; /* its too … */
    uint64_t last_ns; /* … and when a question was let through to the last layers, 0: none yet */
    pthread_mutex_t lock;
    pthread_cond_t moved;
    /* under the lock: */
    uint32_t layers; /* that are there */
    enum kv_err err; /* why no more will come */
};

struct session {
    struct engine *engine;
    struct session *next_leaving;
    char name[IMAGE_NAME_BYTES_MAX + 1];
    enum session_state state;
    struct image_policy_change policies[IMAGE_POLICIES_MAX]; /* the last one is in force */
    uint32_t policy_count;
    int promoting; /* planes of `promoted`, which is not in force yet, are on their way */
    struct image_policy promoted;
    struct image_sampler sampler;

    uint32_t *ids;
    size_t ids_capacity;
    uint64_t n, n_kv;
    uint64_t fed_end;  /* everything before it is to be prefilled */
    uint64_t kept_end; /* n when the feeding that is not prefilled yet began */
    struct image_span *roles;
    size_t roles_capacity;
    uint32_t role_count;

    struct block **blocks;
    struct kvops_block *views; /* the same blocks as attention reads them */
    size_t block_capacity;
    uint32_t block_count;
    int settled; /* all of them were reviewed, and none wanted planes that it had not */
    struct window window;
    int has_window;

    /* Woken at less than its tier map. */
    int held;      /* it asks for no planes */
    int expecting; /* slots are reserved for planes that nobody was asked for yet */
    int watched;   /* what its tokens see is noted */
    struct engine_inner_gate gate;
    struct receipt_seen seen[RECEIPT_SEEN_MAX], step_seen; /* step: of the newest rows */
    uint32_t seen_count;

    float *logits;        /* [vocab] */
    uint64_t logits_n_kv; /* they follow token logits_n_kv - 1; 0: none */
    int whole_rows;       /* somebody wants to see them as tokens are sampled */
    struct sampler_candidate best[SAMPLER_TOP_MAX]; /* of the running step, instead of logits */
    uint32_t best_count;                            /* 0: there are logits */
    int generating, cancelled;
    int asked;      /* how many ask it several things: it stays as it is */
    int patient;    /* others step more than once between two pieces of a question */
    int late;       /* a block's tier waits for them: its planes came meanwhile */
    uint32_t along; /* so many fingerprints go with the next question, at these floors … */
    int along_floors[SESSION_PRINTS];
    struct image_fingerprint prints[SESSION_PRINTS]; /* … and once they have gone they are here */
    uint32_t tokens_left;
    session_row observe;
    void *observe_context;

    struct transfer_durable durable;
    struct image_needle *needles;
    size_t needles_capacity;
    uint32_t needle_count;
    struct image_probe probes[IMAGE_PROBES_MAX];
    uint32_t probe_count;
    uint64_t last_used_ns, last_prefill_turn;
    int unrun; /* woken, and has not run since */
    uint64_t tokens_prefilled, tokens_decoded;

    /* of the running step */
    uint32_t step_rows;
    int step_is_prefill;
    struct block *sealing;              /* to be filled, or NULL */
    uint32_t fresh[LAYOUT_BLOCK_SLOTS]; /* recipe bf16: the window's new slots */
};

static inline const struct image_policy *engine_inner_policy(const struct session *session) {
    return &session->policies[session->policy_count - 1].policy;
}

/* KV_OK when `slots` beyond the reserve (less `allowance`) and `frames` blocks are free: applies
 * posts, lowers sessions under pressure, asks hooks.slots_low, tries again.
 * NO_SLOTS with need and have. */
struct engine_inner_need {
    struct session *session; /* NULL: none yet */
    uint32_t slots, allowance, frames;
};
enum kv_err engine_inner_room(struct engine *engine, const struct engine_inner_need *need,
                              struct kv_diag *diag);

/* A session without slots, in no list; NOMEM. */
enum kv_err engine_inner_session_make(struct engine *engine, const char *name,
                                      struct session **session_out, struct kv_diag *diag);
/* Gives back everything it has, in pieces: others go first between two. It is in no list. */
void engine_inner_session_release(struct session *session);
/* Those under way, to their last block; 1 when there was one. */
int engine_inner_leave(struct engine *engine);
uint32_t engine_inner_leaving(const struct engine *engine); /* slots that they still have */
/* NO_SLOTS (sessions_max are resident), EXISTS. */
enum kv_err engine_inner_can_add(struct engine *engine, const char *name, struct kv_diag *diag);
/* INVALID. */
enum kv_err engine_inner_check_policy(const struct image_policy *policy, struct kv_diag *diag);
void engine_inner_add(struct engine *engine, struct session *session);
/* Room for `n` ids and their blocks, and two more roles. NOMEM. */
enum kv_err engine_inner_reserve(struct session *session, uint64_t n, struct kv_diag *diag);
/* Appends a block that is read at `tier`. */
void engine_inner_push_block(struct session *session, struct block *block, enum layout_tier tier);
/* What the policy says now about block `index`, or all. */
void engine_inner_review_block(struct session *session, uint32_t index);
void engine_inner_review(struct session *session);
/* After a step from `before` tokens that may have sealed a block: all of them only where the policy
 * gives one another tier, or planes are wanted; at 131,072 tokens they are 511. */
void engine_inner_review_step(struct session *session, uint64_t before, int sealed);
/* Some blocks have a reader less: who else has them reviews all after its next step. */
void engine_inner_review_soon(struct engine *engine);
/* Slots that the policy will no longer read once n_kv is reached. */
uint32_t engine_inner_coarsened(const struct session *session, uint64_t n_kv);
/* Blocks that are read at less than the policy gives, and the coarsest tier of all blocks. */
uint32_t engine_inner_coarse(const struct session *session, enum layout_tier *coarsest_out);
/* From the next token on its history is mixed, unless it is already. */
void engine_inner_mark_mixed(struct session *session);
/* Before n_kv passes the rows of a step, and for each token sampled behind them. */
void engine_inner_rows_saw(struct session *session);
void engine_inner_token_saw(struct session *session, uint64_t position);
/* Asks for what the block expects; it is held until that has come. */
void engine_inner_expect(struct session *session, struct block *block);
/* PARTIAL ends with the last plane that was on its way. */
void engine_inner_partial_over(struct session *session);
/* Puts `policy` in force and into the tier history. */
void engine_inner_record_policy(struct session *session, const struct image_policy *policy);
/* Forgets the oldest change of the tier history that is not the mark of mixed history. */
void engine_inner_forget_policy(struct session *session);
/* Sessions under pressure: see engine_relieve. `wanted` more slots than are free; 0: up to the
 * watermarks. */
uint32_t engine_inner_relieve(struct engine *engine, uint32_t wanted);
int engine_inner_has_work(const struct session *session);
/* Waits for layer `first`, while others may step; layers [first, *end_out) are there then.
 * The error that transfer_layers_failed was told. */
enum kv_err engine_inner_layers_wait(struct session *session, uint32_t first, uint32_t *end_out,
                                     struct kv_diag *diag);
/* The request ends: takes back what has no KV, IDLE when nothing is left to do. */
void engine_inner_end_request(struct session *session);
void engine_inner_needle_release(struct engine *engine, struct image_needle *needle);
/* Tokens with KV behind the blocks. While a session that went back is prefilled again these are
 * fewer than its length alone would say. */
static inline uint32_t engine_inner_window_tokens(const struct session *session) {
    uint64_t before = LAYOUT_SINK_TOKENS + (uint64_t)session->block_count * LAYOUT_BLOCK_TOKENS;
    return session->n_kv > before ? (uint32_t)(session->n_kv - before) : 0;
}
/* Where attention finds the session's tokens. */
struct kvops_seq engine_inner_seq(const struct session *session);
/* DEVICE: what the device says, in the user's words. */
enum kv_err engine_inner_device(struct engine *engine, struct kv_diag *diag);
enum kv_err engine_inner_bad(const struct session *session, const struct forward_seq *seq,
                             struct kv_diag *diag);

#endif
