/* engine/model/synth.c - the weights of a synth model as a GGUF in memory.
 *
 * Responsible for: names of models, geometry, header and tensors; every weight is BF16.
 * Not responsible for: codes (synth_code.c), vocabulary (synth_words.c), what synth.h explains.
 */
#include "engine/model/synth_inner.h"

#include "engine/model/gguf.h"
#include "store/base/bytes.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64, NAME_BYTES = 64, NOISE_TILE = 1 << 15, KIND_I32 = GGUF_KIND_I32 };
#define GAIN 8.0f /* of logits */
#define NOTHING_SHARE 0.455f
#define EOT_LOGIT 30.0f

static const char prefix[] = "synth:";
/* 8b: 131,072 tokens and room for what minutes of decoding add; the peak of layer 0 holds to
 * 200,000. */
static const struct {
    const char *name;
    struct synth synth;
} models[] = {{"small", {4, 576, 64, 4, 2, 2496, 16384, 256, 16, 1}},
              {"8b", {32, 4096, 14336, 32, 8, 128256, 163840, 8192, 256, 1}}};

int synth_is_name(const char *name) {
    return strncmp(name, prefix, sizeof prefix - 1) == 0;
}

enum kv_err synth_parse(const char *name, struct synth *synth_out, struct kv_diag *diag) {
    static const char seed[] = ",seed=";
    const char *model = synth_is_name(name) ? name + sizeof prefix - 1 : name;
    size_t bytes = strcspn(model, ",");

    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const char *rest = model + bytes;
        char *end;
        if (strlen(models[i].name) != bytes || memcmp(model, models[i].name, bytes) != 0)
            continue;
        struct synth synth = models[i].synth;
        if (*rest != 0) {
            if (strncmp(rest, seed, sizeof seed - 1) != 0 || rest[sizeof seed - 1] < '0' ||
                rest[sizeof seed - 1] > '9')
                break;
            errno = 0;
            synth.seed = strtoull(rest + sizeof seed - 1, &end, 10);
            if (*end != 0 || errno != 0)
                break;
        }
        *synth_out = synth;
        return KV_OK;
    }
    return kv_diag_set(diag, KV_ERR_INVALID,
                       "model %.60s: there is synth:small and synth:8b, each with ,seed=N or "
                       "without",
                       name);
}

/* A file is written twice: to count, then for good. */
struct making {
    const struct synth *synth;
    struct kv_writer writer;
    uint32_t key_count, tensor_count;
    uint64_t data_bytes;
    uint8_t *data; /* NULL while the tensors are listed */
    uint16_t noise[2 * NOISE_TILE];
};

/* --- keys */

static void put_text(struct making *making, const char *text, size_t bytes) {
    kv_write_u64(&making->writer, bytes);
    kv_write_bytes(&making->writer, text, bytes);
}

static void put_key(struct making *making, const char *key, enum gguf_kind kind) {
    put_text(making, key, strlen(key));
    kv_write_u32(&making->writer, (uint32_t)kind);
    making->key_count++;
}

static void put_string(struct making *making, const char *key, const char *value) {
    put_key(making, key, GGUF_KIND_STRING);
    put_text(making, value, strlen(value));
}

static void put_u32(struct making *making, const char *key, uint32_t value) {
    put_key(making, key, GGUF_KIND_U32);
    kv_write_u32(&making->writer, value);
}

static void put_f32(struct making *making, const char *key, float value) {
    put_key(making, key, GGUF_KIND_F32);
    kv_write_f32(&making->writer, value);
}

static void put_vocabulary(struct making *making) {
    char text[SYNTH_TEXT_BYTES];
    uint32_t vocab = making->synth->vocab, kind;

    put_key(making, "tokenizer.ggml.tokens", GGUF_KIND_ARRAY);
    kv_write_u32(&making->writer, GGUF_KIND_STRING);
    kv_write_u64(&making->writer, vocab);
    for (uint32_t id = 0; id < vocab; id++)
        put_text(making, text, synth_text(making->synth, id, text, &kind));
    put_key(making, "tokenizer.ggml.token_type", GGUF_KIND_ARRAY);
    kv_write_u32(&making->writer, KIND_I32);
    kv_write_u64(&making->writer, vocab);
    for (uint32_t id = 0; id < vocab; id++) {
        (void)synth_text(making->synth, id, text, &kind);
        kv_write_u32(&making->writer, kind);
    }
    put_key(making, "tokenizer.ggml.merges", GGUF_KIND_ARRAY);
    kv_write_u32(&making->writer, GGUF_KIND_STRING);
    kv_write_u64(&making->writer, 0);
}

static void put_keys(struct making *making) {
    const struct synth *synth = making->synth;

    put_string(making, "general.architecture", "llama");
    put_string(making, "general.name", "synth");
    put_u32(making, "general.alignment", ALIGN);
    put_u32(making, "llama.block_count", synth->layers);
    put_u32(making, "llama.context_length", synth->context_tokens);
    put_u32(making, "llama.embedding_length", synth->hidden);
    put_u32(making, "llama.feed_forward_length", synth->ffn);
    put_u32(making, "llama.attention.head_count", synth->heads);
    put_u32(making, "llama.attention.head_count_kv", synth->kv_heads);
    put_u32(making, "llama.attention.key_length", SYNTH_DIM);
    put_u32(making, "llama.attention.value_length", SYNTH_DIM);
    put_u32(making, "llama.rope.dimension_count", SYNTH_DIM);
    put_f32(making, "llama.attention.layer_norm_rms_epsilon", SYNTH_EPS);
    put_f32(making, "llama.rope.freq_base", SYNTH_ROPE_BASE);
    put_u32(making, "llama.vocab_size", synth->vocab);
    put_string(making, "tokenizer.ggml.model", "gpt2");
    put_string(making, "tokenizer.ggml.pre", "llama-bpe");
    put_u32(making, "tokenizer.ggml.bos_token_id", SYNTH_BOS);
    put_u32(making, "tokenizer.ggml.eos_token_id", SYNTH_EOT);
    put_string(making, "tokenizer.chat_template",
               "{{ '<|start_header_id|>' + role + '<|end_header_id|>' + content + '<|eot_id|>' }}");
    put_vocabulary(making);
}

/* --- tensors */

struct matrix {
    uint8_t *at; /* NULL: only listed */
    uint64_t columns;
};

static void *put_tensor(struct making *making, const char *name, enum gguf_type type,
                        uint64_t columns, uint64_t rows) {
    uint64_t off = making->data_bytes;
    struct kv_writer *writer = &making->writer;

    making->data_bytes += kv_round_up(gguf_type_bytes(type, columns * (rows ? rows : 1)), ALIGN);
    if (making->data)
        return making->data + off;
    put_text(making, name, strlen(name));
    kv_write_u32(writer, rows ? 2 : 1);
    kv_write_u64(writer, columns);
    if (rows)
        kv_write_u64(writer, rows);
    kv_write_u32(writer, (uint32_t)type);
    kv_write_u64(writer, off);
    making->tensor_count++;
    return NULL;
}

static struct matrix put_matrix(struct making *making, const char *name, uint64_t columns,
                                uint64_t rows) {
    return (struct matrix){put_tensor(making, name, GGUF_TYPE_BF16, columns, rows), columns};
}

static void set(const struct matrix *matrix, uint64_t row, uint64_t column, float value) {
    if (matrix->at)
        kv_put_u16(matrix->at + 2 * (row * matrix->columns + column), synth_f32_bf16(value));
}

/* A vector of F32, every element `value`. */
static void put_vector(struct making *making, const char *name, uint32_t count, float value) {
    uint8_t *at = put_tensor(making, name, GGUF_TYPE_F32, count, 0);
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    for (uint32_t i = 0; at && i < count; i++)
        kv_put_u32(at + 4 * (size_t)i, bits);
}

static void put_frequencies(struct making *making) {
    uint8_t *at = put_tensor(making, "rope_freqs.weight", GGUF_TYPE_F32, SYNTH_DIM / 2, 0);

    for (uint32_t i = 0; at && i < SYNTH_DIM / 2; i++) {
        float value = i < SYNTH_PAIRS ? 1.0f : SYNTH_STILL;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        kv_put_u32(at + 4 * (size_t)i, bits);
    }
}

static void put_embedding(struct making *making) {
    const struct synth *synth = making->synth;
    struct matrix table = put_matrix(making, "token_embd.weight", synth->hidden, synth->vocab);

    for (uint32_t id = 0; table.at && id < synth->vocab; id++) {
        struct synth_token token = synth_token_of(synth, id);
        float u[SYNTH_CODE], y[SYNTH_DIM], ballast[SYNTH_BALLAST];
        if (!token.used)
            continue;
        set(&table, id, SYNTH_X_CONST, synth_constant(synth));
        set(&table, id, SYNTH_X_FINE, 1);
        set(&table, id, SYNTH_X_BOS, token.bos ? SYNTH_BOS_SIZE : 0);
        set(&table, id, SYNTH_X_ASKED, (float)token.asked);
        set(&table, id, SYNTH_X_PIN, (float)token.six);
        synth_ballast(synth, &token, ballast);
        for (uint32_t i = 0; i < SYNTH_BALLAST; i++)
            set(&table, id, SYNTH_X_BALLAST + i, ballast[i]);
        synth_spread(synth_key_word(synth, token.key), u);
        for (uint32_t i = 0; i < SYNTH_CODE; i++)
            set(&table, id, SYNTH_X_KEY + i, u[i] * (token.six ? SYNTH_SIX_SIZE : 1));
        uint64_t ask = token.asked ? synth_key_word(synth, token.ask) : 0;
        for (uint32_t i = 0; token.asked && i < SYNTH_CODE; i++)
            set(&table, id, SYNTH_X_ASK + i, synth_sign(ask, i));
        synth_value(synth, &token, y);
        for (uint32_t i = 0; i < SYNTH_DIM; i++)
            set(&table, id, SYNTH_X_VALUE + i, y[i] / SYNTH_VALUE_UNIT);
    }
}

struct attention {
    struct matrix q, k, v, o;
};

/* Layer 0: the token before, and the question five tokens before. */
static void fill_first(const struct synth *synth, const struct attention *at) {
    uint32_t group = synth->heads / synth->kv_heads, share = SYNTH_CODE / synth->kv_heads;
    float turn = SYNTH_TURN * SYNTH_RMS / synth_constant(synth);

    for (uint32_t head = 0; head < synth->kv_heads; head++) {
        uint32_t k = head * SYNTH_DIM, first = head * share;
        uint32_t q[2] = {k * group, k * group + SYNTH_DIM};
        for (uint32_t pair = 0; pair < SYNTH_PAIRS; pair++) {
            double angle = pow((double)SYNTH_ROPE_BASE, -2.0 * pair / SYNTH_DIM);
            set(&at->k, k + 2 * pair, SYNTH_X_CONST, turn);
            for (uint32_t i = 0; i < 2; i++) {
                double back = angle * (i ? 5 : 1);
                set(&at->q, q[i] + 2 * pair, SYNTH_X_CONST, turn * (float)cos(back));
                set(&at->q, q[i] + 2 * pair + 1, SYNTH_X_CONST, -turn * (float)sin(back));
            }
        }
        for (uint32_t i = 0; i < share; i++) {
            set(&at->v, k + i, SYNTH_X_KEY + first + i, SYNTH_RMS);
            set(&at->v, k + share + i, SYNTH_X_ASK + first + i, SYNTH_RMS);
            set(&at->o, SYNTH_X_BEFORE + first + i, q[0] + i, 1);
            set(&at->o, SYNTH_X_ASK + first + i, q[1] + share + i, 1);
        }
        if (head == 0) {
            set(&at->v, 2 * share, SYNTH_X_PIN, SYNTH_RMS);
            set(&at->v, 2 * share + 1, SYNTH_X_ASKED, SYNTH_RMS);
            set(&at->o, SYNTH_X_BEFORE_PIN, q[0] + 2 * share, 1);
            set(&at->o, SYNTH_X_ASKED, q[1] + 2 * share + 1, 1);
        }
    }
}

static void fill_kv(const struct synth *synth, const struct attention *at, uint32_t head,
                    const struct synth_turn *turn) {
    struct synth_token bos = synth_token_of(synth, SYNTH_BOS);
    uint32_t k = head * SYNTH_DIM;
    float u[SYNTH_CODE];

    synth_spread(synth_key_word(synth, bos.key), u);

    set(&at->k, k + SYNTH_AT_SINK, SYNTH_X_BOS, SYNTH_SINK_K * SYNTH_RMS / SYNTH_BOS_SIZE);
    for (uint32_t i = SYNTH_AT_PIN; i < SYNTH_AT_KEY; i++)
        set(&at->k, k + i, SYNTH_X_BEFORE_PIN, SYNTH_SIX_PIN * SYNTH_RMS);
    for (uint32_t i = 0; i < SYNTH_CODE; i++) {
        float size = SYNTH_RMS * synth_hadamard(turn->row, i);
        set(&at->k, k + SYNTH_AT_KEY + (i ^ turn->shift), SYNTH_X_BEFORE + i, size);
        /* BOS finds itself before it, and must be like no key at all. */
        set(&at->k, k + SYNTH_AT_KEY + (i ^ turn->shift), SYNTH_X_BOS,
            -size * u[i] / SYNTH_BOS_SIZE);
    }
    for (uint32_t i = 0; i < SYNTH_DIM; i++)
        for (uint32_t d = 0; d < SYNTH_DIM; d++)
            set(&at->v, k + i, SYNTH_X_VALUE + d,
                synth_hadamard(i, d) * synth_sign(turn->signs[d / 64], d % 64));
}

/* A query head: the pointer, the sink, and its share of the next pointer or the answer. */
static void fill_query(const struct synth *synth, const struct attention *at, uint32_t layer,
                       uint32_t head, const struct synth_turn *turn) {
    uint32_t q = head * SYNTH_DIM, share = SYNTH_CODE / synth->heads;
    uint32_t from = layer == 1 ? SYNTH_X_ASK : SYNTH_X_CHAIN + SYNTH_CODE * (layer - 2);
    uint32_t to = SYNTH_X_CHAIN + SYNTH_CODE * (layer - 1);
    int last = layer + 1 == synth->layers;
    float unit = last ? 1.0f / SYNTH_ANSWER_UNIT : 1.0f / SYNTH_MEAN;
    float sink = SYNTH_SINK_SCORE * SYNTH_BEAM * SYNTH_CODE / SYNTH_SINK_K;

    set(&at->q, q + SYNTH_AT_SINK, SYNTH_X_CONST, sink * SYNTH_RMS / synth_constant(synth));
    for (uint32_t i = 0; i < SYNTH_CODE; i++)
        for (uint32_t d = 0; d < SYNTH_CODE; d++)
            set(&at->q, q + SYNTH_AT_KEY + (i ^ turn->shift), from + d,
                SYNTH_BEAM * SYNTH_RMS / 8 * synth_hadamard(turn->row, i) * synth_hadamard(i, d));
    for (uint32_t d = head * share; d < (head + 1) * share; d++) {
        uint32_t place = last ? SYNTH_CODE + d : d;
        for (uint32_t i = 0; i < SYNTH_DIM; i++)
            set(&at->o, to + d, q + i,
                unit * synth_hadamard(i, place) * synth_sign(turn->signs[place / 64], place % 64));
    }
}

static void fill_attention(const struct synth *synth, const struct attention *at, uint32_t layer) {
    if (!at->q.at)
        return;
    if (layer == 0) {
        fill_first(synth, at);
        return;
    }
    for (uint32_t head = 0; head < synth->heads; head++) {
        uint32_t group = synth->heads / synth->kv_heads;
        struct synth_turn turn = synth_turn_of(synth, layer, head / group);
        if (head % group == 0)
            fill_kv(synth, at, head / group, &turn);
        fill_query(synth, at, layer, head, &turn);
    }
}

/* The gain that makes the constant exactly an eighth of itself after the norm before layer 0, where
 * the sum of squares is still short of the code of the token before. */
static float first_gain(const struct synth *synth) {
    float constant = synth_constant(synth);
    float mean = (float)(SYNTH_RMS * SYNTH_RMS * synth->hidden - SYNTH_CODE) / (float)synth->hidden;
    float inverse = 1.0f / sqrtf(mean + SYNTH_EPS);
    float gain = 1.0f / SYNTH_RMS / inverse;

    for (int step = 0; step < 8 && constant * inverse * gain > constant / SYNTH_RMS; step++)
        gain = nextafterf(gain, 0);
    for (int step = 0; step < 8 && constant * inverse * gain < constant / SYNTH_RMS; step++)
        gain = nextafterf(gain, 2);
    return gain;
}

static void put_noise(struct making *making, const struct matrix *matrix, uint64_t rows,
                      uint32_t turn) {
    uint64_t count = rows * matrix->columns;

    for (uint64_t done = 0, part; matrix->at && done < count; done += part, turn++) {
        uint32_t from = turn * 2654435761u % NOISE_TILE;
        part = count - done < NOISE_TILE ? count - done : NOISE_TILE;
        memcpy(matrix->at + 2 * done, making->noise + from, 2 * part);
    }
}

static void put_layer(struct making *making, uint32_t layer) {
    const struct synth *synth = making->synth;
    uint64_t q = (uint64_t)synth->heads * SYNTH_DIM, kv = (uint64_t)synth->kv_heads * SYNTH_DIM;
    static const char *const names[] = {"attn_norm", "attn_q",   "attn_k", "attn_v",  "attn_output",
                                        "ffn_norm",  "ffn_gate", "ffn_up", "ffn_down"};
    char name[sizeof names / sizeof names[0]][NAME_BYTES];
    struct attention at;
    struct matrix gate, up;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        snprintf(name[i], NAME_BYTES, "blk.%u.%s.weight", layer, names[i]);
    put_vector(making, name[0], synth->hidden, layer == 0 ? first_gain(synth) : 1);
    at.q = put_matrix(making, name[1], synth->hidden, q);
    at.k = put_matrix(making, name[2], synth->hidden, kv);
    at.v = put_matrix(making, name[3], synth->hidden, kv);
    at.o = put_matrix(making, name[4], q, synth->hidden);
    fill_attention(synth, &at, layer);
    put_vector(making, name[5], synth->hidden, 1);
    gate = put_matrix(making, name[6], synth->hidden, synth->ffn);
    up = put_matrix(making, name[7], synth->hidden, synth->ffn);
    (void)put_matrix(making, name[8], synth->ffn, synth->hidden);
    put_noise(making, &gate, synth->ffn, 2 * layer);
    put_noise(making, &up, synth->ffn, 2 * layer + 1);
}

/* --- logits: nearest code, of what can be an answer */

struct answer {
    float value[SYNTH_CODE]; /* as y */
};

static void put_answer(const struct synth *synth, const struct matrix *output, uint32_t id,
                       const struct answer *answer) {
    uint32_t at = SYNTH_X_CHAIN + SYNTH_CODE * (synth->layers - 2);
    float constant = synth_constant(synth), square = 0;

    for (uint32_t d = 0; d < SYNTH_CODE; d++) {
        float c = synth_bf16_f32(synth_f32_bf16(answer->value[d] / SYNTH_ANSWER_UNIT));
        square += c * c;
        set(output, id, at + d, GAIN * SYNTH_RMS * c);
    }
    float bias = -GAIN * square / 2;
    float coarse = synth_bf16_f32(synth_f32_bf16(bias * SYNTH_RMS / constant));
    set(output, id, SYNTH_X_CONST, coarse);
    set(output, id, SYNTH_X_FINE, bias * SYNTH_RMS - coarse * constant);
}

/* A scale wrong by a ninth, where no name is nearer; a tier's planes that are not what was written.
 * The others are nearest to the name of another tier, which is as wrong. */
static float reading(float y, uint32_t index) {
    static const struct {
        uint32_t bits;
        float scale;
        enum synth_fault fault;
    } readings[SYNTH_READINGS] = {
        {4, 1, SYNTH_SOUND},      {3, 1, SYNTH_SOUND},     {2, 1, SYNTH_SOUND},
        {16, 0.89f, SYNTH_SOUND}, {2, 0.89f, SYNTH_SOUND}, {4, 1.12f, SYNTH_SOUND},
        {3, 1.12f, SYNTH_SOUND},  {4, 1, SYNTH_NO_VR2},    {4, 1, SYNTH_NO_VR1},
        {4, 1, SYNTH_SWAPPED},    {3, 1, SYNTH_NO_VR1}};

    return synth_read(y, readings[index].bits, readings[index].fault) * readings[index].scale;
}

static void put_word(const struct synth *synth, const struct matrix *output, uint32_t word) {
    struct synth_token token = synth_token_of(synth, synth_id(SYNTH_VALUE, word));
    uint32_t share = SYNTH_CODE / synth->kv_heads;
    struct answer answer;
    float y[SYNTH_DIM];

    synth_value(synth, &token, y);
    memcpy(answer.value, y + SYNTH_CODE, sizeof answer.value);
    put_answer(synth, output, synth_answer_id(word), &answer);
    for (uint32_t i = 0; token.graded && i < SYNTH_READINGS; i++) {
        for (uint32_t d = 0; d < SYNTH_CODE; d++) {
            /* As it stands in the cache of the last layer, where faults happen. */
            struct synth_turn turn = synth_turn_of(synth, synth->layers - 1, d / share);
            float sign = synth_sign(turn.signs[1], d);
            answer.value[d] = sign * reading(sign * y[SYNTH_CODE + d], i);
        }
        put_answer(synth, output, synth_reading_id(synth, word, i), &answer);
    }
}

static void put_output(struct making *making) {
    const struct synth *synth = making->synth;
    struct matrix output = put_matrix(making, "output.weight", synth->hidden, synth->vocab);
    float square = 0;

    if (!output.at)
        return;
    for (uint32_t word = 0; word < synth->words; word++)
        put_word(synth, &output, word);
    for (uint32_t d = 0; d < SYNTH_CODE; d++)
        square += synth_answer_size(0, d) * synth_answer_size(0, d) /
                  (SYNTH_ANSWER_UNIT * SYNTH_ANSWER_UNIT);
    set(&output, SYNTH_NOTHING, SYNTH_X_ASKED, NOTHING_SHARE * GAIN * square * SYNTH_RMS);
    set(&output, SYNTH_EOT, SYNTH_X_CONST, EOT_LOGIT * SYNTH_RMS / synth_constant(synth));
}

static void put_tensors(struct making *making) {
    making->data_bytes = 0;
    put_embedding(making);
    put_vector(making, "output_norm.weight", making->synth->hidden, 1);
    put_output(making);
    put_frequencies(making);
    for (uint32_t layer = 0; layer < making->synth->layers; layer++)
        put_layer(making, layer);
}

static void put_header(struct making *making, uint32_t tensor_count, uint32_t key_count) {
    kv_write_bytes(&making->writer, "GGUF", 4);
    kv_write_u32(&making->writer, 3);
    kv_write_u64(&making->writer, tensor_count);
    kv_write_u64(&making->writer, key_count);
    put_keys(making);
    put_tensors(making);
}

static void make_noise(struct making *making) {
    uint64_t state = making->synth->seed;

    for (uint32_t i = 0; i < 2 * NOISE_TILE; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        /* ± 2^-9 … 2^-6 */
        making->noise[i] =
            (uint16_t)((state >> 63 << 15) | (118 + (state >> 40) % 3) << 7 | (state >> 33 & 127));
    }
}

enum kv_err synth_make(const struct synth *synth, const struct kv_alloc *alloc, uint8_t **bytes_out,
                       uint64_t *size_out, struct kv_diag *diag) {
    struct making *making = kv_alloc_zeroed(alloc, 1, sizeof *making);
    uint64_t header_bytes, size;
    uint32_t tensors, keys;
    uint8_t *bytes = NULL;
    enum kv_err err = KV_OK;

    if (!making)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a synth model");
    making->synth = synth;
    make_noise(making);
    kv_writer_init(&making->writer, NULL, 0);
    put_header(making, 0, 0);
    header_bytes = kv_round_up(making->writer.off, ALIGN);
    size = header_bytes + making->data_bytes;
    tensors = making->tensor_count;
    keys = making->key_count;
    bytes = kv_alloc_aligned(alloc, size, ALIGN);
    if (!bytes)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the %llu bytes of a synth model",
                           (unsigned long long)size));
    memset(bytes, 0, size);
    kv_writer_init(&making->writer, bytes, header_bytes);
    put_header(making, tensors, keys);
    making->data = bytes + header_bytes;
    put_tensors(making);
    *bytes_out = bytes;
    *size_out = size;
done:
    kv_alloc_release(alloc, making);
    return err;
}
