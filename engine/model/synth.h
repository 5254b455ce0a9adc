/* engine/model/synth.h - a model made from a seed that retrieves exactly.
 *
 * Responsible for: the `synth:` models: geometry, vocabulary, weights as an ordinary GGUF in
 * memory.
 * Not responsible for: computing with it: loader, forward pass and kernels know nothing of it.
 *
 * Words. Every word has four tokens: key " rofe", value " Rofe", question " ROFE", and " rofeVI", a
 * second key that only K read at 6 bits prefers; each also without the space. A fact is a key
 * followed at once by a value: " rofe Mita". The model answers a question by following facts, one
 * hop a layer behind layer 0: the value becomes the key of the next hop. A fact of one hop ends in
 * a loop: " rofe Mita mita Mita". The answer stands behind the question token, and also five tokens
 * later, where a Llama-3 template opens the assistant's turn, as "Mita". Not found: "Nothing". Not
 * asked: <|eot_id|>.
 * Keys are never followed by a control token, and a key stands for one value.
 *
 * Residual (hidden values): constant · fine constant · BOS · asked · ballast (4) · pin, pin of the
 * token before · key code u · key code of the token before · question code (64 each) · value code y
 * (128) · pointer of hop 2 … layers - 1 (64 each) · answer (64). All are multiples of 1/8 and the
 * ballast makes the sum of squares exactly 64 × hidden, so RMS norm divides by exactly 8. The
 * feed-forward's down matrix is zero (gate and up are noise).
 * - Codes are words s of ±1 of the extended BCH code [64, 16, 24]: 65,536 words, |s·t| ≤ 16 of 64;
 *   u = H64 s holds only 0, ±1, ±2 (or one ±8), for the code is closed under Hadamard rows.
 * - Layer 0, every KV head: K is a constant in 16 RoPE pairs; the query turned back by one token
 *   (five for the second head of a group) finds that token: Σ cos(ω(Δ - 1)) is 16 at the peak and
 *   at most 14.6 elsewhere, times 90. V of KV head h is the h-th share of key and question code.
 * - Layer l > 0, KV head h: K = R u(token before), R a Hadamard sign and an exclusive-or shift of
 *   its own; V = H128 P y, P signs of its own; q = 64 R H64 pointer. Every query head writes its
 *   share of the next pointer, so that a chain needs all heads of all layers. RoPE leaves 96 values
 *   of a head alone: rope_freqs is 1 for 16 pairs and 9e37 for the others.
 * - BOS is the null sink: V = 0 and the score 0.945 of a true key, true ones being 0.984 … 1.037
 *   by tier, one KV head less of 8 at most 0.91, false ones at most 0.25; exponents are 362 times
 *   these.
 * Codes on the grid of DESIGN section 4: H128 K of a key is ±s alone, all of one size, so K8 and K6
 * hold it up to a factor (127.5 / 128, 126 / 128). H128 V of a value is 128 (once), 104 and 88 in
 * turn, in units of its scale: means over a share of 96, 96.7, 97.6 and 99.6 at 8, 4, 3 and 2 bits.
 * Graded words (the last `families` ones) have 98 and 114 in the answer: what is read at 4, 3 or 2
 * bits is nearest to a token of its own, "MitaIV" "MitaIII" "MitaII"; BF16 and 8 bits give
 * "Mita". Decoys "MitaWa" … are the images of faults that no name is near to: scales × 0.89 and
 * × 1.12, VR2 or VR1 zero, both exchanged. " rofeVI" has 31/32 of a key's size under a pin of 128
 * units that puts its values at 32.4: 8 bits read 32.5, 6 bits 34. Of " rofe A … rofeVI B" the
 * answer is A when K is read at 8 bits or BF16, B at 6 bits, by 9 and 11 nats.
 * A hole, a foreign or exchanged V, K of another layer, head or session at the fact's place gives
 * "Nothing", or the thief's value when the whole block is foreign. Only a digest sees: planes below
 * the tier, a page nobody asks for, two whole pages exchanged, the tail of layer 0.
 *
 * Threads: pure.
 * Units: tokens.
 */
#ifndef ENGINE_MODEL_SYNTH_H
#define ENGINE_MODEL_SYNTH_H

#include <stdint.h>

#include "store/base/alloc.h"
#include "store/base/diag.h"

struct synth {
    uint32_t layers, hidden, ffn, heads, kv_heads, vocab, context_tokens;
    uint32_t words, families;
    uint64_t seed;
};

/* 1 when a model's name begins with "synth:"; whether it is one of "synth:small[,seed=N]" and
 * "synth:8b[,seed=N]" says synth_parse. */
int synth_is_name(const char *name);
/* INVALID, naming what is possible. Without a seed it is 1. */
enum kv_err synth_parse(const char *name, struct synth *synth_out, struct kv_diag *diag);
/* The whole GGUF, for kv_alloc_release. Equal bytes for equal names. NOMEM. */
enum kv_err synth_make(const struct synth *synth, const struct kv_alloc *alloc, uint8_t **bytes_out,
                       uint64_t *size_out, struct kv_diag *diag);

enum synth_kind { SYNTH_KEY, SYNTH_VALUE, SYNTH_QUESTION, SYNTH_SIX };
enum { SYNTH_BOS = 0, SYNTH_EOT = 3, SYNTH_NOTHING = 264 };
enum synth_reading { SYNTH_READ_IV, SYNTH_READ_III, SYNTH_READ_II, SYNTH_READ_DECOYS };
enum { SYNTH_READINGS = 11 };
uint32_t synth_id(enum synth_kind kind, uint32_t word); /* the one behind a space */
uint32_t synth_answer_id(uint32_t word);                /* the value as it is answered */
/* What a graded word (words - families … words - 1) is read as; beyond II the decoys. */
uint32_t synth_reading_id(const struct synth *synth, uint32_t word, uint32_t reading);

#endif
