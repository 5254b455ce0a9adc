/* engine/model/synth_words.c - the vocabulary of a synth model.
 *
 * Responsible for: which id is what, and how it is spelled.
 * Not responsible for: codes (synth_code.c).
 */
#include "engine/model/synth_inner.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum {
    BYTE_FIRST = 4,
    BREAK = BYTE_FIRST + 256, /* two line breaks, then the roles of a chat */
    ROLES = 3,
    KIND_NORMAL = 1,
    KIND_CONTROL = 3,
    NOWHERE_NUMBERS = 16000, /* key codes that no token has */
    SYLLABLES = 3
};

static const char *const controls[BYTE_FIRST] = {"<|begin_of_text|>", "<|start_header_id|>",
                                                 "<|end_header_id|>", "<|eot_id|>"};
static const char *const roles[ROLES] = {"system", "user", "assistant"};
static const char *const readings[SYNTH_READINGS] = {"IV", "III", "II", "Wa", "Wb", "Wc",
                                                     "Wd", "We",  "Wf", "Wg", "Wh"};

_Static_assert(BREAK + 1 + ROLES == SYNTH_NOTHING, "ids follow each other");

uint32_t synth_id(enum synth_kind kind, uint32_t word) {
    return SYNTH_WORD_FIRST + word * SYNTH_WORD_IDS + 2 * (uint32_t)kind;
}

uint32_t synth_answer_id(uint32_t word) {
    return synth_id(SYNTH_VALUE, word) + 1;
}

static uint32_t reading_first(const struct synth *synth) {
    return synth_id(SYNTH_KEY, synth->words);
}

uint32_t synth_reading_id(const struct synth *synth, uint32_t word, uint32_t reading) {
    return reading_first(synth) + (word - (synth->words - synth->families)) * SYNTH_READINGS +
           reading;
}

/* Key codes: one for each id before the words, three for each word, the rest for pointers that lead
 * nowhere. Answers: the words first. */
struct synth_token synth_token_of(const struct synth *synth, uint32_t id) {
    uint32_t nowhere = SYNTH_WORD_FIRST + 3 * synth->words, word;
    struct synth_token token = {.used = 1, .bos = id == SYNTH_BOS, .key = id};

    token.pointer = nowhere + id % NOWHERE_NUMBERS;
    token.answer = synth->words + id % NOWHERE_NUMBERS;
    if (id < SYNTH_WORD_FIRST)
        return token;
    word = (id - SYNTH_WORD_FIRST) / SYNTH_WORD_IDS;
    if (word >= synth->words) {
        token.used = 0;
        return token;
    }
    token.key = SYNTH_WORD_FIRST + 3 * word;
    switch ((enum synth_kind)((id - SYNTH_WORD_FIRST) % SYNTH_WORD_IDS / 2)) {
    case SYNTH_KEY:
        break;
    case SYNTH_SIX:
        token.six = 1;
        break;
    case SYNTH_VALUE:
        token.pointer = token.key++;
        token.answer = word;
        token.graded = word >= synth->words - synth->families;
        break;
    case SYNTH_QUESTION:
        token.asked = 1;
        token.ask = token.key;
        token.key += 2;
        break;
    }
    return token;
}

/* Three syllables of a consonant and a vowel, the same whatever the seed. */
static void spell(uint32_t word, char text[2 * SYLLABLES + 1]) {
    static const char consonants[] = "bdfgjklmnprstvwz", vowels[] = "aeio";
    uint32_t mixed = (word * 40503u + 20011u) & ((1u << 6 * SYLLABLES) - 1);

    for (uint32_t i = 0; i < SYLLABLES; i++, mixed >>= 6) {
        text[2 * i] = consonants[mixed >> 2 & 15];
        text[2 * i + 1] = vowels[mixed & 3];
    }
    text[2 * SYLLABLES] = 0;
}

/* GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards. */
static size_t spell_byte(uint32_t byte, char *at) {
    uint32_t code = 256;

    for (uint32_t other = 0; other < byte; other++)
        code += !((other >= 33 && other <= 126) || (other >= 161 && other != 173));
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173))
        code = byte;
    if (code < 128) {
        at[0] = (char)code;
        return 1;
    }
    at[0] = (char)(0xc0 | code >> 6);
    at[1] = (char)(0x80 | (code & 63));
    return 2;
}

static size_t spell_word(const struct synth *synth, uint32_t id, char text[SYNTH_TEXT_BYTES]) {
    uint32_t readings_first = reading_first(synth);
    int reading = id >= readings_first;
    uint32_t off = reading ? id - readings_first : id - SYNTH_WORD_FIRST;
    uint32_t word =
        reading ? synth->words - synth->families + off / SYNTH_READINGS : off / SYNTH_WORD_IDS;
    enum synth_kind kind = reading ? SYNTH_VALUE : (enum synth_kind)(off % SYNTH_WORD_IDS / 2);
    int bare = reading || off & 1;
    const char *ending = reading ? readings[off % SYNTH_READINGS] : kind == SYNTH_SIX ? "VI" : "";
    char letters[2 * SYLLABLES + 1];

    spell(word, letters);
    for (uint32_t i = 0; letters[i] != 0; i++)
        if (kind == SYNTH_QUESTION || (kind == SYNTH_VALUE && i == 0))
            letters[i] = (char)toupper((unsigned char)letters[i]);
    return (size_t)snprintf(text, SYNTH_TEXT_BYTES, "%s%s%s", bare ? "" : "\xc4\xa0", letters,
                            ending);
}

size_t synth_text(const struct synth *synth, uint32_t id, char text[SYNTH_TEXT_BYTES],
                  uint32_t *kind_out) {
    *kind_out = KIND_NORMAL;
    if (id >= BYTE_FIRST && id < BREAK)
        return spell_byte(id - BYTE_FIRST, text);
    if (id == BREAK)
        return (size_t)snprintf(text, SYNTH_TEXT_BYTES, "\xc4\x8a\xc4\x8a");
    if (id > BREAK && id < SYNTH_NOTHING)
        return (size_t)snprintf(text, SYNTH_TEXT_BYTES, "%s", roles[id - BREAK - 1]);
    if (id == SYNTH_NOTHING)
        return (size_t)snprintf(text, SYNTH_TEXT_BYTES, "Nothing");
    if (id >= SYNTH_WORD_FIRST && id < synth_reading_id(synth, synth->words, 0))
        return spell_word(synth, id, text);
    *kind_out = KIND_CONTROL;
    if (id < BYTE_FIRST)
        return (size_t)snprintf(text, SYNTH_TEXT_BYTES, "%s", controls[id]);
    return (size_t)snprintf(text, SYNTH_TEXT_BYTES, "<|unused_%u|>", id);
}
