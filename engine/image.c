/* engine/image.c - tiers, memory and compatibility of a session's image.
 *
 * Responsible for: which tier a block has, releasing what an image owns, the root digest, and
 * whether a saved model is the one that is here.
 * Not responsible for: bytes (image_code.c).
 */
#include "engine/image.h"

#include <assert.h>
#include <string.h>

void image_init(struct image *image) {
    memset(image, 0, sizeof *image);
}

void image_release(struct image *image, const struct kv_alloc *alloc) {
    kv_alloc_release(alloc, image->policies);
    kv_alloc_release(alloc, image->ids);
    kv_alloc_release(alloc, image->roles);
    kv_alloc_release(alloc, image->absent);
    for (uint32_t i = 0; image->needles != NULL && i < image->needle_count; i++) {
        kv_alloc_release(alloc, image->needles[i].key);
        kv_alloc_release(alloc, image->needles[i].ask);
        kv_alloc_release(alloc, image->needles[i].answer_prefix);
        kv_alloc_release(alloc, image->needles[i].expect);
    }
    kv_alloc_release(alloc, image->needles);
    image_init(image);
}

/* --- ladders */

static const enum layout_tier ladder_bf16[] = {LAYOUT_TIER_BF16};
static const enum layout_tier ladder_fp8[] = {LAYOUT_TIER_FP8};
static const enum layout_tier ladder_v1[] = {LAYOUT_TIER_K8I4};
static const enum layout_tier ladder_v2[] = {LAYOUT_K8V8, LAYOUT_K8V4, LAYOUT_K8V3, LAYOUT_K8V2};
static const enum layout_tier ladder_v3[] = {LAYOUT_K8V8, LAYOUT_K8V4, LAYOUT_K6V4, LAYOUT_K6V3,
                                             LAYOUT_K6V2};

struct ladder {
    const enum layout_tier *tiers;
    uint32_t count;
};

static struct ladder ladder_of(const struct image_policy *policy) {
    uint32_t skip = policy->top_k8v8 ? 0 : 1;

    switch (policy->recipe) {
    case IMAGE_RECIPE_BF16:
        return (struct ladder){ladder_bf16, 1};
    case IMAGE_RECIPE_FP8:
        return (struct ladder){ladder_fp8, 1};
    case IMAGE_RECIPE_V1:
        return (struct ladder){ladder_v1, 1};
    case IMAGE_RECIPE_V2:
        return (struct ladder){ladder_v2 + skip, sizeof ladder_v2 / sizeof *ladder_v2 - skip};
    default:
        return (struct ladder){ladder_v3 + skip, sizeof ladder_v3 / sizeof *ladder_v3 - skip};
    }
}

uint32_t image_steps(const struct image_policy *policy) {
    return ladder_of(policy).count - 1;
}

enum layout_tier image_step_tier(const struct image_policy *policy, uint32_t step) {
    struct ladder ladder = ladder_of(policy);
    return ladder.tiers[step < ladder.count ? step : ladder.count - 1];
}

enum layout_tier image_top(const struct image_policy *policy) {
    return image_step_tier(policy, 0);
}

enum layout_tier image_floor(const struct image_policy *policy) {
    return image_step_tier(policy, IMAGE_AGES_MAX);
}

enum layout_tier image_tier(const struct image_policy *policy, uint64_t block, uint64_t n_kv) {
    uint64_t end = LAYOUT_SINK_TOKENS + (block + 1) * LAYOUT_BLOCK_TOKENS;
    uint64_t distance = n_kv > end ? n_kv - end : 0;
    uint32_t step = 0;
    assert(policy->age_count <= IMAGE_AGES_MAX);
    if (policy->pressure)
        while (step < IMAGE_AGES_MAX && block < policy->ends[step])
            step++;
    else
        while (step < policy->age_count && distance >= policy->ages[step])
            step++;
    return image_step_tier(policy, step);
}

enum layout_tier image_tier_without(const struct image_policy *policy, enum layout_tier tier,
                                    uint32_t absent) {
    struct ladder ladder = ladder_of(policy);
    uint32_t step = 0;
    while (step < ladder.count && ladder.tiers[step] != tier)
        step++;
    while (step + 1 < ladder.count && (layout_tier_streams(ladder.tiers[step]) & absent) != 0)
        step++;
    return step < ladder.count ? ladder.tiers[step] : tier;
}

static const char *const recipe_names[] = {[IMAGE_RECIPE_BF16] = "bf16",
                                           [IMAGE_RECIPE_V3] = "v3",
                                           [IMAGE_RECIPE_V2] = "v2",
                                           [IMAGE_RECIPE_FP8] = "fp8",
                                           [IMAGE_RECIPE_V1] = "v1"};
enum { RECIPE_END = sizeof recipe_names / sizeof recipe_names[0] };

const char image_recipe_names[] = "v3, v2, v1, fp8 or bf16";

const char *image_recipe_name(enum image_recipe recipe) {
    int number = (int)recipe;
    return number >= IMAGE_RECIPE_BF16 && number < RECIPE_END ? recipe_names[number] : "";
}

enum image_recipe image_recipe_of(const char *name) {
    for (int i = IMAGE_RECIPE_BF16; i < RECIPE_END; i++)
        if (strcmp(name, recipe_names[i]) == 0)
            return (enum image_recipe)i;
    return (enum image_recipe)0;
}

const char *image_policy_wrong(const struct image_policy *policy) {
    uint32_t steps;
    if (image_recipe_name(policy->recipe)[0] == 0)
        return "the recipe is not known: use v3, v2, v1, fp8 or bf16";
    steps = image_steps(policy);
    if (steps == 0 && (policy->top_k8v8 || policy->pressure))
        return "this recipe has one tier only: neither policy pressure nor top k8v8 goes with it";
    if (policy->recipe != IMAGE_RECIPE_BF16 && policy->age_count > steps)
        return "more ages than the recipe's ladder has steps";
    if (policy->age_count > IMAGE_AGES_MAX || (policy->pressure && policy->age_count > 0))
        return "ages go with policy age only, at most one for each step of the ladder";
    for (uint32_t i = 1; i < policy->age_count; i++)
        if (policy->ages[i] < policy->ages[i - 1])
            return "ages must rise";
    for (uint32_t i = 0; i < IMAGE_AGES_MAX; i++)
        if ((policy->ends[i] > 0 && (!policy->pressure || i >= steps)) ||
            (i > 0 && policy->ends[i] > policy->ends[i - 1]))
            return "steps of the ladder are taken out of order";
    return NULL;
}

int image_policy_equal(const struct image_policy *a, const struct image_policy *b) {
    int equal = a->recipe == b->recipe && a->age_count == b->age_count &&
                !a->top_k8v8 == !b->top_k8v8 && !a->pressure == !b->pressure;
    for (uint32_t i = 0; equal && i < a->age_count; i++)
        equal = a->ages[i] == b->ages[i];
    for (uint32_t i = 0; equal && i < IMAGE_AGES_MAX; i++)
        equal = a->ends[i] == b->ends[i];
    return equal;
}

uint64_t image_mixed_from(const struct image_policy_change *policies, uint32_t count) {
    for (uint32_t i = 1; i < count; i++)
        if (image_policy_equal(&policies[i].policy, &policies[i - 1].policy))
            return policies[i].from_n_kv;
    return 0;
}

struct kv_digest image_root(const void *bytes, size_t size) {
    return kv_digest_of(bytes, size);
}

static enum kv_err differ_number(struct kv_diag *diag, const char *field, uint64_t saved,
                                 uint64_t here) {
    return kv_diag_set(diag, KV_ERR_MISMATCH,
                       "the snapshot was made with %s %llu, this model has %llu: "
                       "use the model it was made with",
                       field, (unsigned long long)saved, (unsigned long long)here);
}

static enum kv_err differ_digest(struct kv_diag *diag, const char *field,
                                 const struct kv_digest *saved, const struct kv_digest *here) {
    char saved_text[KV_DIGEST_HEX_BYTES];
    char here_text[KV_DIGEST_HEX_BYTES];
    kv_digest_hex(saved, saved_text);
    kv_digest_hex(here, here_text);
    return kv_diag_set(diag, KV_ERR_MISMATCH,
                       "the snapshot was made with %s %s, this model has %s: "
                       "use the model it was made with",
                       field, saved_text, here_text);
}

enum kv_err image_compatible(const struct image_model *saved, const struct image_model *here,
                             struct kv_diag *diag) {
    if (strncmp(saved->architecture, here->architecture, sizeof saved->architecture) != 0)
        return kv_diag_set(diag, KV_ERR_MISMATCH,
                           "the snapshot was made with architecture %.16s, this model has %.16s: "
                           "use the model it was made with",
                           saved->architecture, here->architecture);
    const struct {
        const char *field;
        uint64_t saved, here;
    } numbers[] = {
        {"layer count", saved->geometry.layers, here->geometry.layers},
        {"KV head count", saved->geometry.kv_heads, here->geometry.kv_heads},
        {"head dimension", saved->geometry.head_dim, here->geometry.head_dim},
        {"query head count", saved->q_heads, here->q_heads},
        {"context length", saved->context_tokens, here->context_tokens},
        {"RoPE pairing", saved->rope_pairing, here->rope_pairing},
        {"code id", saved->code_id, here->code_id},
        {"layout id", saved->layout_id, here->layout_id},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].saved != numbers[i].here)
            return differ_number(diag, numbers[i].field, numbers[i].saved, numbers[i].here);
    if (memcmp(&saved->rope_base, &here->rope_base, sizeof saved->rope_base) != 0)
        return kv_diag_set(diag, KV_ERR_MISMATCH,
                           "the snapshot was made with RoPE base %.9g, this model has %.9g: "
                           "use the model it was made with",
                           (double)saved->rope_base, (double)here->rope_base);
    const struct {
        const char *field;
        const struct kv_digest *saved, *here;
    } digests[] = {
        {"tokenizer", &saved->tokenizer, &here->tokenizer},
        {"chat template", &saved->chat_template, &here->chat_template},
        {"weights (tensor digest)", &saved->tensors, &here->tensors},
    };
    for (size_t i = 0; i < sizeof digests / sizeof digests[0]; i++)
        if (memcmp(digests[i].saved, digests[i].here, sizeof *digests[i].saved) != 0)
            return differ_digest(diag, digests[i].field, digests[i].saved, digests[i].here);
    return KV_OK;
}
