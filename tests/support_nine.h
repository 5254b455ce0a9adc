/* tests/support_nine.h - users of a synth model, their facts, and who answers with whose.
 *
 * Responsible for: engine, store and baton of the demonstration; a user's text with its facts at
 * every depth, tier and edge; decoding all of them in one batch; questions and their score.
 * Not responsible for: slots by arithmetic (support_nine_pool.h), sleeping and waking
 * (support_nine_life.h), tables and files (nine.c).
 *
 * Every user has the same keys with values of its own, one key that nobody else has, and text of
 * its own between them. Freed slots are poisoned and slots shuffled throughout. A synth model says
 * <|eot_id|> when it is not asked, so every decoded token ends a generation of one token, and the
 * next one begins before the next step.
 *
 * Threads: one at a time, the engine's scheduler thread; with a second one, whoever has the baton.
 * Units: tokens, nanoseconds.
 */
#ifndef TESTS_SUPPORT_NINE_H
#define TESTS_SUPPORT_NINE_H

#include "engine/needle.h"
#include "restore/restore.h"
#include "snapshot/snapshot.h"
#include "tests/support_nine_holds.h"
#include "tests/support_nine_pool.h"
#include "tests/support_synth.h"
#include "tools/baton.h"

enum {
    NINE_SESSIONS_MAX = 64,
    NINE_SAVERS = NINE_SESSIONS_MAX, /* two more, of support_nine_save.h */
    NINE_USERS_MAX = NINE_SAVERS + 2,
    NINE_SHARED = 13, /* facts under shared keys */
    NINE_FACTS,       /* and one under its own */
    NINE_FOREIGN = 2, /* questions about other users' own keys */
    NINE_ABSENT = 2,
    NINE_ASKS = NINE_FACTS + NINE_FOREIGN + NINE_ABSENT,
    NINE_NEEDLES = 8, /* of the facts: registered with the session, asked plain and with the hole */
    NINE_WORDS = 12,  /* of each user */
    NINE_TOKENS_MIN = 2048,
    NINE_DEPTHS = 6 /* sinks, quarters of the blocks from the oldest, window */
};

struct nine_settings {
    const char *model; /* "synth:small" or "synth:8b" */
    const char *dir;   /* of the store, made when asked for; NULL: there is none */
    uint64_t tokens;   /* of a user */
    int mixed;         /* every second and third user has a half and a quarter of them */
    uint64_t seed;
    enum engine_device device;
    uint32_t cuda_index, threads;
    uint64_t device_memory_bytes, pool_bytes;
    uint32_t reserve_slots;
    uint64_t store_bytes;
    int blank;      /* no facts: only slots are counted */
    int ram_wanted; /* the store gets a RAM tier that holds the first user */
};

struct nine_user {
    char name[16];
    uint32_t tokens;
    uint32_t *ids;
    struct support_synth_fact facts[NINE_FACTS]; /* the last one is its own */
    struct session *session;                     /* NULL: asleep, or nowhere */
    int exists;
    int away;                   /* its turn to sleep or wake: it is not decoded */
    struct image_policy policy; /* nine->policy, under pressure its own, when it was asked */
};

struct nine {
    struct nine_settings settings;
    struct synth synth;
    struct synth_rows *rows;
    struct engine *engine;
    struct engine_model model;
    struct store *store;       /* NULL until nine_store */
    struct snapshot *snapshot; /* the same */
    struct restore_source source;
    struct baton baton;
    int saves;               /* only savers are written, and only by a save */
    int shared;              /* two threads take turns with the baton */
    pthread_mutex_t lock;    /* of these, written with the baton as well */
    pthread_cond_t stepping; /* a step has begun, or nobody steps any more */
    uint64_t steps;
    int decoding;
    struct nine_holds *holds; /* of the thread that moves sessions; NULL: nobody looks */
    struct nine_user users[NINE_USERS_MAX];
    uint32_t user_count; /* planned; texts are made when they are filled */
    struct image_policy policy;
    double opened_s, filled_s;
    uint64_t filled_tokens;
    uint32_t sleeps, sleeps_kept; /* of receipts; and those that kept NINE_NEEDLES needles */
    char first_unkept[NINE_TEXT_BYTES];
};

enum kv_err nine_open(const struct nine_settings *settings, uint32_t users, struct nine *nine_out,
                      struct kv_diag *diag);
void nine_close(struct nine *nine);
/* From now on blocks become durable for good; no session exists. */
enum kv_err nine_store(struct nine *nine, struct kv_diag *diag);
void nine_store_end(struct nine *nine); /* none open is allowed */
/* Bytes that sessions of these lengths write to the store at most. */
uint64_t nine_store_need(const struct nine *nine, uint32_t sessions);

/* Makes user `index`'s session under nine->policy and fills it; on an error it is nowhere. */
enum kv_err nine_add(struct nine *nine, uint32_t index, struct kv_diag *diag);
void nine_drop(struct nine *nine, uint32_t index);
void nine_drop_all(struct nine *nine);
/* Registers NINE_NEEDLES facts that receipts then account for: at every depth and on every edge but
 * in the sinks, which no hole hides. */
enum kv_err nine_register(struct nine *nine, uint32_t index, struct kv_diag *diag);
/* Until every block is durable and no plane waits. */
void nine_settle(struct nine *nine);

/* One step of everybody who is awake and not away; how many tokens it gave. Context is left
 * for the questions; who has none for more is passed over. */
enum kv_err nine_step(struct nine *nine, uint32_t *tokens_out, struct kv_diag *diag);

struct nine_tally {
    uint32_t asked, right;
    float margin; /* the least */
};
struct nine_score {
    uint32_t users, asked, right, thief, invented;
    uint32_t absent, foreign; /* asked; `right` has them too */
    uint32_t graded, named;   /* graded words, and those that named the tier */
    struct nine_tally tiers[LAYOUT_TIER_COUNT], depths[NINE_DEPTHS];
    char first_wrong[NINE_TEXT_BYTES];
};
/* What user `index` is asked, in this order: its facts, others' own keys, absent keys. */
void nine_questions(const struct nine *nine, uint32_t index,
                    struct support_synth_fact questions[NINE_ASKS]);
enum kv_err nine_ask(struct nine *nine, uint32_t index,
                     struct support_synth_answer answers[NINE_ASKS], struct kv_diag *diag);
/* Adds to the score, after nine_ask; where a fact is read is decided by the policy then and `n_kv`
 * alone. */
void nine_judge(const struct nine *nine, uint32_t index, uint64_t n_kv,
                const struct support_synth_answer answers[NINE_ASKS], struct nine_score *score);
/* Both, of a session that is awake. */
enum kv_err nine_prove(struct nine *nine, uint32_t index, struct nine_score *score,
                       struct kv_diag *diag);
int nine_score_good(const struct nine_score *score);

/* Needles that can fail: right, and no longer so once the place of the fact is hidden. */
struct nine_kept {
    uint32_t users, asked, kept;
    uint32_t least; /* kept of the user who has fewest */
    /* `right`: kept; `margin`: what the hole costs in nats. */
    struct nine_tally tiers[LAYOUT_TIER_COUNT], depths[NINE_DEPTHS];
    char first_unkept[NINE_TEXT_BYTES];
};
/* Registers user `index`'s needles, asks them plain and with the hole, and adds what is kept; the
 * session's record is updated. */
enum kv_err nine_keep(struct nine *nine, uint32_t index, struct nine_kept *kept,
                      struct kv_diag *diag);
/* The adding alone, with results in the order of registering. */
void nine_count_kept(const struct nine *nine, uint32_t index, uint64_t n_kv,
                     const struct needle_result results[NINE_NEEDLES], struct nine_kept *kept);

double nine_seconds(void);
void nine_sort(uint64_t *ns, uint32_t count);  /* the smallest first */
double nine_rate(uint64_t bytes, uint64_t ns); /* GB/s */

#endif
