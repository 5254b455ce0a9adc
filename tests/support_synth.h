/* tests/support_synth.h - texts for a synth model, and what it must answer about them.
 *
 * Responsible for: filler, planted facts, questions in one batch, what a tier makes of an answer,
 * rows in closed form for fill_session.
 * Not responsible for: engines and sessions (support_engine.h), what is broken in between.
 *
 * Words below words / 2 are for facts, graded words for graded facts, the others are filler.
 *
 * Threads: the main thread.
 * Units: tokens.
 */
#ifndef TESTS_SUPPORT_SYNTH_H
#define TESTS_SUPPORT_SYNTH_H

#include "engine/engine.h"
#include "engine/fill.h"
#include "engine/model/synth.h"
#include "tests/support_synth_rows.h"

enum { SUPPORT_SYNTH_FACT = 4, SUPPORT_SYNTH_PAIR = 8 }; /* tokens of each */

/* BOS, then random words that no question is about. */
void support_synth_filler(const struct synth *synth, uint64_t seed, uint32_t *ids, uint32_t count);

/* A question and its answer. Graded: the answer tells V's bits. Six: K's, `value` at 8 and `other`
 * at 6. Absent: the answer is "Nothing". */
enum support_synth_kind { SUPPORT_PLAIN, SUPPORT_GRADED, SUPPORT_SIX, SUPPORT_ABSENT };
struct support_synth_fact {
    enum support_synth_kind kind;
    uint32_t key, value, other; /* words */
    uint64_t at;                /* of the key; its value stands behind it */
};
/* Writes the fact's tokens at ids[fact->at]. */
void support_synth_plant(const struct support_synth_fact *fact, uint32_t *ids);
/* The right answer where the fact is read at `tier`. */
uint32_t support_synth_expect(const struct synth *synth, const struct support_synth_fact *fact,
                              enum layout_tier tier);
/* What the session says to each: the best token, and by how much it leads. */
struct support_synth_answer {
    uint32_t id;
    float margin;
};
void support_synth_ask(struct session *session, const struct support_synth_fact *facts,
                       uint32_t count, struct support_synth_answer *answers_out);
/* The same where no cmocka test is running: the errors of session_ask_all. At most 256. */
enum kv_err support_synth_try(struct session *session, const struct support_synth_fact *facts,
                              uint32_t count, struct support_synth_answer *answers_out,
                              struct kv_diag *diag);
/* A plain fact becomes a needle of the session under the name of its value: errors of
 * needle_register. */
enum kv_err support_synth_register(struct session *session, const struct support_synth_fact *fact,
                                   struct kv_diag *diag);
/* For fill_session. */
struct fill support_synth_fill(struct synth_rows *rows, const uint32_t *ids, uint32_t count,
                               uint32_t threads);
enum kv_err support_synth_rows(struct synth_rows *rows, const struct fill_stretch *stretch,
                               uint16_t *chunk, struct kv_diag *diag);
/* The same of the last forward, as it was computed: `chunk` has fill_chunk_bytes. DEVICE. */
enum kv_err support_synth_last(struct engine *engine, uint16_t *chunk, struct kv_diag *diag);
/* Rows [0, count) of chunks of equal shape against the closed form: zeros that are only nearly so
 * (SYNTH_ZERO_MAX), the next BF16 value in a row behind a " …VI" (both allowed), and what is wrong.
 * Added up. */
struct support_synth_difference {
    uint64_t elements, nearly_zero, rounded, wrong;
    uint32_t steps_max; /* BF16 values between, of the wrong ones */
};
void support_synth_compare(const struct synth *synth, const struct fill_stretch *stretch,
                           const uint16_t *real, const uint16_t *closed,
                           struct support_synth_difference *difference);

#endif
