/* engine/session.h - one conversation on the device.
 *
 * Responsible for: a session's life on the device: its settings, what is fed and generated, its
 * tiers, its state, throwaway questions, freezing it for a snapshot and loading it back.
 * Not responsible for: stepping (engine.h) or making anything durable (snapshot/, restore/).
 *
 * Threads: the scheduler thread, see engine.h.
 * Units: positions and tokens absolute from the start of the conversation.
 * Errors: as engine.h.
 */
#ifndef ENGINE_SESSION_H
#define ENGINE_SESSION_H

#include "engine/image.h"
#include "engine/receipt.h"
#include "kernels/layout.h"
#include "store/base/diag.h"

struct engine;
struct block;
struct session;

/* Legal moves stand in one table in session_state.c; every other file asks session_move. */
enum session_state {
    SESSION_IDLE,
    SESSION_ACTIVE,
    SESSION_SAVING, /* frozen bytes are on their way; the session may go on */
    SESSION_SLEEPING,
    SESSION_WAKING,
    SESSION_PARTIAL, /* works on coarse planes while finer ones come behind */
    SESSION_FAILED,
    SESSION_STATE_COUNT
};
const char *session_state_name(enum session_state state);

struct session_settings {
    const char *name; /* 1 … 128 bytes of UTF-8, no '/', no control characters; copied */
    struct image_policy policy;
    struct image_sampler sampler;
};
/* INVALID, EXISTS, NO_SLOTS (need and have in the diag, or sessions_max are resident), NOMEM. */
enum kv_err session_create(struct engine *engine, const struct session_settings *settings,
                           struct session **session_out, struct kv_diag *diag);
/* Frees everything on the device; blocks that a writer still holds go when it lets go. It is found
 * no more, and a long one goes in pieces, between which others step (engine_breathe). Never while
 * it is being asked (session_ask_begin). */
void session_drop(struct session *session);
struct session *session_find(struct engine *engine, const char *name);
struct session *session_at(struct engine *engine, uint32_t index); /* NULL past the last */
/* INVALID when the name breaks a rule of DESIGN section 14; the diag says which. */
enum kv_err session_check_name(const char *name, struct kv_diag *diag);
/* The same for a name that is about to be given, which may hold no '@' and not only blanks: stores
 * of before have names that do, and they stay reachable. */
enum kv_err session_check_new_name(const char *name, struct kv_diag *diag);

struct session_info {
    const char *name;
    enum session_state state;
    uint64_t n,
        n_kv; /* ids known, tokens with KV; n - n_kv is what is still to prefill or pending */
    uint32_t blocks, blocks_durable, window_tokens, sink_tokens;
    uint32_t slots;
    uint64_t last_used_ns;
    uint64_t tokens_prefilled; /* since this session object exists: 0 right after a restore */
    uint64_t tokens_decoded;
    const uint32_t *ids;
    const struct image_span *roles;
    uint32_t role_count;
    struct image_policy policy;
    struct image_sampler sampler;
    uint32_t tier_blocks[16];        /* blocks by enum layout_tier as attention reads them now */
    uint32_t coarse_blocks;          /* of them, at less than the policy gives */
    int held_at_floor;               /* woken at the ladder's floor, and to stay there */
    uint64_t mixed_from;             /* image_mixed_from of its history */
    const struct receipt_seen *seen; /* what its tokens saw since it woke coarse */
    uint32_t seen_count;
    const struct image_policy_change *policies; /* its tier history; the last one is in force */
    uint32_t policy_count;
    int unrun; /* under pressure: woken, and has not run since; not to be put to sleep for others */
};
void session_info(const struct session *session, struct session_info *info_out);
/* The same but for what is counted block by block, which takes tens of microseconds where there are
 * hundreds and is 0 here: blocks_durable, slots, tier_blocks, coarse_blocks. */
void session_brief(const struct session *session, struct session_info *info_out);
struct engine *session_engine(const struct session *session);
enum kv_err session_move(struct session *session, enum session_state to);

/* Appends ids to be prefilled, as one span of `role`. LIMIT beyond the context, nothing changed. */
enum kv_err session_feed(struct session *session, const uint32_t *ids, uint32_t count,
                         enum image_role role, struct kv_diag *diag);
/* Samples up to `tokens_max` after everything fed is prefilled (INVALID when nothing was fed and
 * nothing is pending since the session was made, woken or saved); ends at one of the model's end
 * tokens, which then is pending. session_cancel stops it at the next step. */
enum kv_err session_generate(struct session *session, uint32_t tokens_max, struct kv_diag *diag);
void session_cancel(struct session *session);
/* Logits [vocab] of the last row of this session's last step; NULL before the first, and after a
 * step that sampled from a device's best tokens alone: it does where they decide as all would,
 * unless session_whole_rows asks for all (1) from the next step on. */
const float *session_logits(const struct session *session);
void session_whole_rows(struct session *session, int wanted);
/* Every row of every later step: position of the token and its logits. NULL turns it off. */
typedef void (*session_row)(void *context, uint64_t position, const float *logits);
void session_observe(struct session *session, session_row row, void *context);

/* Changes the distances of policy `age` (of no other) from now on: demotes, or promotes through
 * hooks.planes_wanted; recorded in the policy history. No byte of any plane changes. */
enum kv_err session_set_policy(struct session *session, const struct image_policy *policy,
                               struct kv_diag *diag);
/* Goes back to the first `n` tokens (0 … info.n - 1) of an IDLE session. Within the window nothing
 * is computed again: the last token is pending (the only one of a session is prefilled). Further
 * back floor((n - 320) / 256) blocks stay and the tokens behind them, 256 to 511, are prefilled by
 * the next steps: never bit-equal to what they were. Needles whose fact stands behind `n` go.
 * BUSY, INVALID. */
enum kv_err session_rewind(struct session *session, uint64_t n, struct kv_diag *diag);
/* Other random numbers for what is sampled from now on. */
void session_reseed(struct session *session, uint64_t seed);
/* Another way to sample from now on. INVALID, naming the setting. */
enum kv_err session_resample(struct session *session, const struct image_sampler *sampler,
                             struct kv_diag *diag);

/* 1 while planes that the policy wants are on their way. */
int session_promoting(const struct session *session);
/* A session that was loaded at the ladder's floor gets the planes that its policy gives, behind its
 * steps, through hooks.planes_wanted; where slots were not reserved for them, as far as there are
 * free ones. WAKING it becomes PARTIAL until they have come, IDLE when there are none. Once its
 * bytes are proven, not before. */
void session_refine(struct session *session);

/* A throwaway forward of `count` ids (at most 255) after the session's own tokens, its pending one
 * included in front: seals, demotes and appends nothing. Row i gives the logits that follow id i.
 * Token ranges in `hide` are left out as whole blocks and window pages (a hole). */
struct session_range {
    uint64_t first, end;
};
struct session_ask {
    const uint32_t *ids;
    uint32_t count;
    const struct session_range *hide;
    uint32_t hide_count;
    int floor;           /* read every block at the lowest tier of the ladder */
    uint32_t rows_first; /* rows before it are not given out */
};
/* `row(context, i, logits)` for i = 0 … count - 1; with a pending token and count 0 one call with
 * i = 0 gives the logits after the pending token. */
enum kv_err session_ask(struct session *session, const struct session_ask *ask, session_row row,
                        void *context, struct kv_diag *diag);
/* Several questions, each on the session as it is and none on another, as few batches as they fit
 * in; `row` also gets which. The bits are those of each asked alone. Rows of different questions
 * may be given at the same time, on threads of their own; those of one come in order. */
typedef void (*session_ask_row)(void *context, uint32_t ask, uint64_t row, const float *logits);
enum kv_err session_ask_all(struct session *session, const struct session_ask *asks, uint32_t count,
                            session_ask_row row, void *context, struct kv_diag *diag);
/* Who asks a session several things does it between begin and end, which nest: it stays as it is
 * then, whoever steps meanwhile. Nothing can be fed to it (BUSY), its tiers stay. Between two of
 * them session_ask_breathe lets others go first (engine_breathe), as session_ask_all does between
 * its batches and behind a few layers of each; not where the session is at work itself, for it
 * would be another one afterwards. Where others may step, `row` is called while they do. */
void session_ask_begin(struct session *session);
void session_ask_end(struct session *session);
void session_ask_breathe(struct session *session);
/* 1: nobody waits for what it is asked, so that others step several times between two pieces: most
 * of their steps are as if nothing were asked. 0: at once, as usual. */
void session_ask_patiently(struct session *session, int patient);
/* DESIGN section 10: one throwaway forward at position n_kv. */
enum kv_err session_fingerprint(struct session *session, int floor,
                                struct image_fingerprint *fingerprint_out, struct kv_diag *diag);
/* The same as part of the next question that is asked, which reads all the memory anyway: `along`
 * wants one or both (as its tiers are, and at the floor), `take` ends that and gives it, by itself
 * where no question has come. Within session_ask_begin and end. */
enum { SESSION_PRINTS = 2 };
void session_fingerprint_along(struct session *session, int floor);
enum kv_err session_fingerprint_take(struct session *session,
                                     struct image_fingerprint *fingerprint_out,
                                     struct kv_diag *diag);
void session_fingerprints_along(struct session *session);
enum kv_err session_fingerprints_take(struct session *session,
                                      struct image_fingerprint prints_out[SESSION_PRINTS],
                                      struct kv_diag *diag);

#endif
