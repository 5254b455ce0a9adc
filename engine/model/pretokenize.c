/* engine/model/pretokenize.c - pre-tokenizers as lists of PCRE2 expressions.
 *
 * Responsible for: the expressions, compiling them, cutting piece by piece.
 * Not responsible for: what becomes of a piece.
 */
#include "engine/model/pretokenize.h"

#include <assert.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/model/utf8.h"

enum { STAGES_MAX = 2 };

/* White space is written out: PCRE2's \s takes one character more than Unicode's White_Space. */
#define SPACE                                                                                      \
    "\\x{09}-\\x{0d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}"                             \
    "\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define OTHER "[^" SPACE "\\p{L}\\p{N}]"

#define GPT_2                                                                                      \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?" OTHER "+|[" SPACE "]+(?![^" SPACE "])"

#define TIKTOKEN(digits)                                                                           \
    "'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL]|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?" OTHER  \
    "+[\\r\\n]*|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

struct scheme {
    const char *name;
    const char *stages[STAGES_MAX];
    int whole_pieces;
    int adds_bos;
};

static const struct scheme schemes[] = {{"smollm", {"\\p{N}", GPT_2}, 0, 0},
                                        {"gpt-2", {GPT_2, NULL}, 0, 0},
                                        {"llama-bpe", {TIKTOKEN("\\p{N}{1,3}"), NULL}, 1, 1},
                                        {"qwen2", {TIKTOKEN("\\p{N}"), NULL}, 0, 0}};

struct pretokenize {
    const struct kv_alloc *alloc;
    const struct scheme *scheme;
    pcre2_general_context *memory;
    pcre2_match_context *limits;
    pcre2_code *stages[STAGES_MAX];
    int stage_count;
};

struct split {
    const struct pretokenize *pretokenize;
    pcre2_match_data *found[STAGES_MAX]; /* stages are nested, so each has its own */
    pretokenize_take take;
    void *context;
};

static void *memory_get(size_t bytes, void *alloc) {
    return kv_alloc_aligned(alloc, bytes, _Alignof(max_align_t));
}

static void memory_put(void *memory, void *alloc) {
    kv_alloc_release(alloc, memory);
}

static enum kv_err compile(struct pretokenize *pretokenize, const char *expression) {
    int code = 0;
    PCRE2_SIZE at = 0;
    pcre2_compile_context *context = pcre2_compile_context_create(pretokenize->memory);
    if (context == NULL)
        return KV_ERR_NOMEM;
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED,
                                         PCRE2_UTF | PCRE2_UCP, &code, &at, context);
    pcre2_compile_context_free(context);
    if (compiled == NULL) {
        /* The expressions are ours, so only memory can be missing. */
        assert(code == PCRE2_ERROR_HEAP_FAILED);
        return KV_ERR_NOMEM;
    }
    pretokenize->stages[pretokenize->stage_count++] = compiled;
    /* Where no machine code can be made, matching interprets: the same pieces, later. */
    (void)pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
    return KV_OK;
}

enum kv_err pretokenize_make(struct gguf_text name, const struct kv_alloc *alloc,
                             struct pretokenize **pretokenize_out, struct kv_diag *diag) {
    enum kv_err err = KV_ERR_NOMEM;
    const struct scheme *scheme = NULL;
    struct pretokenize *pretokenize = NULL;
    for (size_t i = 0; i < sizeof schemes / sizeof schemes[0]; i++) {
        if (gguf_text_equal(name, schemes[i].name))
            scheme = &schemes[i];
    }
    if (scheme == NULL)
        return kv_diag_set(diag, KV_ERR_MISMATCH,
                           "the model's pre-tokenizer \"%.*s\" is not supported; smollm, "
                           "llama-bpe, qwen2 and gpt-2 are",
                           (int)(name.size_bytes < 40 ? name.size_bytes : 40), name.bytes);
    pretokenize = kv_alloc_zeroed(alloc, 1, sizeof *pretokenize);
    if (pretokenize == NULL)
        goto done;
    pretokenize->alloc = alloc;
    pretokenize->scheme = scheme;
    pretokenize->memory = pcre2_general_context_create(memory_get, memory_put, (void *)alloc);
    if (pretokenize->memory == NULL)
        goto done;
    pretokenize->limits = pcre2_match_context_create(pretokenize->memory);
    if (pretokenize->limits == NULL)
        goto done;
    /* Giving back the end of a long run of spaces counts as many steps as the run is long. */
    pcre2_set_match_limit(pretokenize->limits, UINT32_MAX);
    for (int i = 0; i < STAGES_MAX && scheme->stages[i] != NULL; i++)
        KV_TRY(compile(pretokenize, scheme->stages[i]));
    *pretokenize_out = pretokenize;
    pretokenize = NULL;
    err = KV_OK;
done:
    if (err == KV_ERR_NOMEM)
        kv_diag_set(diag, err, "no memory for the pre-tokenizer");
    pretokenize_drop(pretokenize);
    return err;
}

void pretokenize_drop(struct pretokenize *pretokenize) {
    if (pretokenize == NULL)
        return;
    for (int i = 0; i < pretokenize->stage_count; i++)
        pcre2_code_free(pretokenize->stages[i]);
    pcre2_match_context_free(pretokenize->limits);
    pcre2_general_context_free(pretokenize->memory);
    kv_alloc_release(pretokenize->alloc, pretokenize);
}

int pretokenize_whole_pieces(const struct pretokenize *pretokenize) {
    return pretokenize->scheme->whole_pieces;
}

int pretokenize_adds_bos(const struct pretokenize *pretokenize) {
    return pretokenize->scheme->adds_bos;
}

/* place[0] is where to look from; the next match is [place[0], place[1]) afterwards, empty and at
 * the end when there is none. */
static enum kv_err find(const struct split *split, int stage, const uint8_t *text, size_t bytes,
                        size_t place[2]) {
    const struct pretokenize *p = split->pretokenize;
    size_t from = place[0];
    int count = pcre2_match(p->stages[stage], text, bytes, from, PCRE2_NO_UTF_CHECK,
                            split->found[stage], p->limits);
    if (count == PCRE2_ERROR_JIT_STACKLIMIT)
        count = pcre2_match(p->stages[stage], text, bytes, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                            split->found[stage], p->limits);
    if (count == PCRE2_ERROR_NOMATCH) {
        place[0] = place[1] = bytes;
        return KV_OK;
    }
    if (count < 0)
        return KV_ERR_NOMEM; /* the text is valid and no limit is set: only memory is left */
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(split->found[stage]);
    place[0] = found[0];
    place[1] = found[1];
    return KV_OK;
}

/* What lies between matches is a piece as well. */
static enum kv_err run_stage(const struct split *split, int stage, const uint8_t *text,
                             size_t bytes) {
    enum kv_err err = KV_OK;
    size_t done_bytes = 0;
    if (stage == split->pretokenize->stage_count)
        return split->take(split->context, text, bytes);
    while (done_bytes < bytes) {
        size_t place[2] = {done_bytes, 0};
        KV_TRY(find(split, stage, text, bytes, place));
        if (place[0] > done_bytes)
            KV_TRY(run_stage(split, stage + 1, text + done_bytes, place[0] - done_bytes));
        if (place[1] > place[0])
            KV_TRY(run_stage(split, stage + 1, text + place[0], place[1] - place[0]));
        done_bytes = place[1];
    }
done:
    return err;
}

enum kv_err pretokenize_split(const struct pretokenize *pretokenize, const void *text,
                              size_t text_bytes, pretokenize_take take, void *context) {
    struct split split = {.pretokenize = pretokenize, .take = take, .context = context};
    const uint8_t *bytes = text;
    enum kv_err err = KV_ERR_NOMEM;
    size_t first = 0;
    for (int i = 0; i < pretokenize->stage_count; i++) {
        split.found[i] = pcre2_match_data_create(1, pretokenize->memory);
        if (split.found[i] == NULL)
            goto done;
    }
    err = KV_OK;
    while (first < text_bytes) {
        size_t end = first;
        int length = 1;
        while (end < text_bytes && (length = utf8_length(bytes + end, text_bytes - end)) > 0)
            end += (size_t)length;
        if (end > first)
            KV_TRY(run_stage(&split, 0, bytes + first, end - first));
        if (end < text_bytes)
            KV_TRY(take(context, bytes + end++, 1));
        first = end;
    }
done:
    for (int i = 0; i < pretokenize->stage_count; i++)
        pcre2_match_data_free(split.found[i]);
    return err;
}
