/* engine/model/synth_inner.h - codes, words and places that the files of synth share.
 *
 * Responsible for: what synth_code.c and synth_words.c give to synth.c, and to the closed form in
 * tests/support_synth_rows.c.
 * Not responsible for: anything outside these files.
 *
 * Threads: pure.
 * Units: y in steps of a V scale; elements of the residual.
 */
#ifndef ENGINE_MODEL_SYNTH_INNER_H
#define ENGINE_MODEL_SYNTH_INNER_H

#include "engine/model/synth.h"

#include <stddef.h>

enum {
    SYNTH_DIM = 128,
    SYNTH_CODE = 64,
    SYNTH_PAIRS = 16,   /* RoPE pairs that turn */
    SYNTH_AT_SINK = 32, /* elements of K and q */
    SYNTH_AT_PIN = 48,
    SYNTH_AT_KEY = 64,
    SYNTH_X_CONST = 0, /* places in the residual */
    SYNTH_X_FINE = 1,
    SYNTH_X_BOS = 2,
    SYNTH_X_ASKED = 3,
    SYNTH_X_BALLAST = 4,
    SYNTH_BALLAST = 4,
    SYNTH_X_PIN = 8,
    SYNTH_X_BEFORE_PIN = 9,
    SYNTH_X_KEY = 16,
    SYNTH_X_BEFORE = SYNTH_X_KEY + SYNTH_CODE,
    SYNTH_X_ASK = SYNTH_X_BEFORE + SYNTH_CODE,
    SYNTH_X_VALUE = SYNTH_X_ASK + SYNTH_CODE,
    SYNTH_X_CHAIN = SYNTH_X_VALUE + SYNTH_DIM,
    SYNTH_WORD_FIRST = SYNTH_NOTHING + 2,
    SYNTH_WORD_IDS = 8, /* each kind behind a space, and bare */
    SYNTH_TEXT_BYTES = 32,
    SYNTH_RMS = 8 /* by which RMS norm divides */
};
#define SYNTH_ROPE_BASE 500000.0f
#define SYNTH_STILL 9e37f /* rope_freqs of a pair that does not turn */
#define SYNTH_EPS 1e-12f
#define SYNTH_SIX_SIZE 0.96875f /* of a key's, and its pin per element of K */
#define SYNTH_SIX_PIN 1.4296875f
#define SYNTH_BOS_SIZE 64.0f
#define SYNTH_SINK_K 8.0f
#define SYNTH_SINK_SCORE 0.945f
#define SYNTH_BEAM 64.0f     /* size of q against a pointer of size 1 */
#define SYNTH_TURN 32.0f     /* size of K and q in layer 0 */
#define SYNTH_VALUE_UNIT 16  /* y is held as y / 16 … */
#define SYNTH_ANSWER_UNIT 32 /* … and answered as y / 32 */
#define SYNTH_MEAN 96.0f     /* of a pointer's values */

float synth_bf16_f32(uint16_t bits);
uint16_t synth_f32_bf16(float value); /* nearest even */
static inline float synth_sign(uint64_t word, uint32_t i) {
    return word >> i & 1 ? -1.0f : 1.0f;
}
/* Sign of element (i, j) of a Hadamard matrix in Sylvester order. */
static inline float synth_hadamard(uint32_t i, uint32_t j) {
    return __builtin_popcount(i & j) & 1 ? -1.0f : 1.0f;
}

/* What a token is. */
struct synth_token {
    int used, bos, asked, six;
    uint32_t key;     /* number of its key code */
    uint32_t ask;     /* of the key that it asks for, if asked */
    uint32_t pointer; /* of the key that its value points at */
    uint32_t answer;  /* number of its answer code */
    int graded;
};
struct synth_token synth_token_of(const struct synth *synth, uint32_t id);
/* The text as a vocabulary spells it (space is U+0120); its bytes. Kind 1 normal, 3 control. */
size_t synth_text(const struct synth *synth, uint32_t id, char text[SYNTH_TEXT_BYTES],
                  uint32_t *kind_out);

/* The code word of a key as bits: 1 is -1. */
uint64_t synth_key_word(const struct synth *synth, uint32_t number);
/* u[64] = H64 s / 8. */
void synth_spread(uint64_t word, float u[SYNTH_CODE]);
/* y[128] of a token's value: pointer, then answer. */
void synth_value(const struct synth *synth, const struct synth_token *token, float y[SYNTH_DIM]);
/* The answer's size at place d. */
float synth_answer_size(int graded, uint32_t d);

/* Of layer > 0 and KV head: u'[i ^ shift] = ± u[i]; sign of Hadamard row `row`. */
struct synth_turn {
    uint32_t shift, row;
    uint64_t signs[2]; /* P: bit d is 1 for -1 */
};
struct synth_turn synth_turn_of(const struct synth *synth, uint32_t layer, uint32_t head);

/* Value of y in a V8, V4, V3 or V2 reading (bits 16: y itself) after a fault in its code. */
enum synth_fault { SYNTH_SOUND, SYNTH_NO_VR2, SYNTH_NO_VR1, SYNTH_SWAPPED };
float synth_read(float y, uint32_t bits, enum synth_fault fault);

/* The constant, and the ballast that makes a token's sum of squares exact. */
float synth_constant(const struct synth *synth);
void synth_ballast(const struct synth *synth, const struct synth_token *token,
                   float ballast[SYNTH_BALLAST]);

#endif
