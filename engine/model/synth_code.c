/* engine/model/synth_code.c - the code tables of a synth model.
 *
 * Responsible for: words of the extended BCH code, values on the grid of the KV code and how each
 * tier reads them, signs and shifts of a layer and head, ballast.
 * Not responsible for: which token has which (synth_words.c), weights (synth.c).
 */
#include "engine/model/synth_inner.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { CODE_BITS = 16, STREAM_KEY = 1, STREAM_ANSWER = 2, STREAM_TURN = 3 };
enum { BALLAST_UNIT = 8, BALLAST_MAX = 255 }; /* ballast is a whole number of eighths */

/* Tr(a x), Tr(b x^9), Tr(c x^5) and 1 for all x of GF(64), x^6 = x + 1, bits of x as the index:
 * [64, 16], least distance 24 (all 65,536 words were counted: weights 0 24 28 32 36 40 64). */
static const uint64_t basis[CODE_BITS] = {
    0xffffffffffffffff, 0x00000000ffffffff, 0x0000ffff0000ffff, 0x00ff00ff00ff00ff,
    0x0f0f0f0f0f0f0f0f, 0x3333333333333333, 0x5555555555555555, 0x065c6fca356f5cf9,
    0x114b4b1144e11ebb, 0x03300c3f5995a965, 0x000f333c3c33f0ff, 0x006655335533ff99,
    0x00336655559933ff, 0x0000669933cc5555, 0x00000ff05555a55a, 0x000033335a5a6969};

float synth_bf16_f32(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t synth_f32_bf16(float value) {
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

static uint64_t draw(const struct synth *synth, uint64_t stream, uint64_t index) {
    return mix(mix(synth->seed + 0x9e3779b97f4a7c15u) ^ mix(stream << 32 | index));
}

static uint64_t code_word(const struct synth *synth, uint64_t stream, uint32_t number) {
    uint64_t chosen = draw(synth, stream, 0), word = 0;
    uint32_t bits = (number * (uint32_t)(chosen | 1) + (uint32_t)(chosen >> 32)) & 0xffff;

    for (uint32_t i = 0; i < CODE_BITS; i++)
        word ^= bits >> i & 1 ? basis[i] : 0;
    return word;
}

uint64_t synth_key_word(const struct synth *synth, uint32_t number) {
    return code_word(synth, STREAM_KEY, number);
}

void synth_spread(uint64_t word, float u[SYNTH_CODE]) {
    for (uint32_t i = 0; i < SYNTH_CODE; i++)
        u[i] = synth_sign(word, i) / 8;
    for (uint32_t stride = 1; stride < SYNTH_CODE; stride *= 2)
        for (uint32_t i = 0; i < SYNTH_CODE; i++)
            if (!(i & stride)) {
                float a = u[i], b = u[i + stride];
                u[i] = a + b;
                u[i + stride] = a - b;
            }
}

float synth_answer_size(int graded, uint32_t d) {
    static const float sizes[2][2] = {{104, 88}, {98, 114}};

    return d == SYNTH_CODE - 1 ? 128 : sizes[graded != 0][d & 1];
}

void synth_value(const struct synth *synth, const struct synth_token *token, float y[SYNTH_DIM]) {
    uint64_t pointer = synth_key_word(synth, token->pointer);
    uint64_t answer = code_word(synth, STREAM_ANSWER, token->answer);

    memset(y, 0, SYNTH_DIM * sizeof *y);
    if (token->bos)
        return;
    for (uint32_t d = 0; d < SYNTH_CODE; d++) {
        y[d] = synth_sign(pointer, d) * (d & 1 ? 88 : 104);
        y[SYNTH_CODE + d] = synth_sign(answer, d) * synth_answer_size(token->graded, d);
    }
}

struct synth_turn synth_turn_of(const struct synth *synth, uint32_t layer, uint32_t head) {
    uint64_t index = 4 * ((uint64_t)layer * synth->kv_heads + head);
    uint64_t bits = draw(synth, STREAM_TURN, index);

    return (struct synth_turn){
        .shift = bits & (SYNTH_CODE - 1),
        .row = bits >> 8 & (SYNTH_CODE - 1),
        .signs = {draw(synth, STREAM_TURN, index + 1), draw(synth, STREAM_TURN, index + 2)}};
}

static uint32_t broken(uint32_t code, enum synth_fault fault) {
    uint32_t vr1 = code >> 5 & 1, vr2 = code >> 4 & 1;

    switch (fault) {
    case SYNTH_NO_VR2:
        return code & ~16u;
    case SYNTH_NO_VR1:
        return code & ~32u;
    case SYNTH_SWAPPED:
        return (code & ~48u) | vr2 << 5 | vr1 << 4;
    default:
        return code;
    }
}

float synth_read(float y, uint32_t bits, enum synth_fault fault) {
    static const float factors[] = {0, 0, 1.0372f, 1.0161f, 1.0073f, 0, 0, 0, 1.0f};
    float code = floorf(y);

    if (bits > 8)
        return y;
    code = code < -128 ? -128 : code > 127 ? 127 : code;
    uint32_t held = broken((uint32_t)((int32_t)code + 128), fault) >> (8 - bits);
    return (((float)held + 0.5f) * (float)(1u << (8 - bits)) - 128) * factors[bits];
}

/* Sum of squares of a token's values beside constant and ballast, in units of 1/64. */
static uint32_t energy(const struct synth *synth, const struct synth_token *token) {
    float y[SYNTH_DIM], sum = 1 + (float)(token->asked + token->six);

    synth_value(synth, token, y);
    for (uint32_t d = 0; d < SYNTH_DIM; d++)
        sum += y[d] * y[d] / (SYNTH_VALUE_UNIT * SYNTH_VALUE_UNIT);
    sum += token->six ? SYNTH_CODE * SYNTH_SIX_SIZE * SYNTH_SIX_SIZE : SYNTH_CODE;
    sum += token->asked ? SYNTH_CODE : 0;
    sum += token->bos ? SYNTH_BOS_SIZE * SYNTH_BOS_SIZE : 0;
    return (uint32_t)(sum * (BALLAST_UNIT * BALLAST_UNIT));
}

/* Before layer 0 the code of the token before is missing. */
static uint32_t energy_wanted(const struct synth *synth) {
    return (SYNTH_RMS * SYNTH_RMS * synth->hidden - SYNTH_CODE) * BALLAST_UNIT * BALLAST_UNIT;
}

float synth_constant(const struct synth *synth) {
    const struct synth_token most = {.used = 1, .asked = 1, .graded = 1};
    uint32_t left = energy_wanted(synth) - energy(synth, &most);
    uint32_t whole = (uint32_t)sqrt((double)left / (BALLAST_UNIT * BALLAST_UNIT));

    return (float)(whole & ~1u); /* up to 511 an even number is BF16 */
}

static uint32_t root_of(uint32_t square) {
    uint32_t root = (uint32_t)sqrt((double)square);

    return root < BALLAST_MAX ? root : BALLAST_MAX;
}

/* The rest as four squares, which every number is. */
void synth_ballast(const struct synth *synth, const struct synth_token *token,
                   float ballast[SYNTH_BALLAST]) {
    uint32_t constant = (uint32_t)synth_constant(synth) * BALLAST_UNIT;
    uint32_t left = energy_wanted(synth) - energy(synth, token) - constant * constant;

    for (uint32_t a = root_of(left); a != UINT32_MAX; a--)
        for (uint32_t b = root_of(left - a * a); b != UINT32_MAX; b--) {
            uint32_t rest = left - a * a - b * b;
            if (rest > 2 * BALLAST_MAX * BALLAST_MAX)
                break;
            for (uint32_t c = root_of(rest); 2 * c * c >= rest; c--) {
                uint32_t d = root_of(rest - c * c);
                if (c * c + d * d != rest)
                    continue;
                const uint32_t parts[SYNTH_BALLAST] = {a, b, c, d};
                for (uint32_t i = 0; i < SYNTH_BALLAST; i++)
                    ballast[i] = (float)parts[i] / BALLAST_UNIT;
                return;
            }
        }
    assert(!"every number is a sum of four squares");
}
