/* engine/image.h - the portable description of a session: what snapshot writes and restore reads.
 *
 * Responsible for: the struct, its canonical encoding and the root digest over it.
 * Not responsible for: keys and index values (record.h), planes and pages themselves (extents).
 *
 * The encoding is canonical: equal images give equal bytes. Every part is required; a missing one
 * is KV_ERR_CORRUPT naming the part. A newer version is KV_ERR_VERSION naming the version needed.
 *
 * Threads: pure.
 * Units: tokens and positions absolute; digests as store/base/digest.h.
 */
#ifndef ENGINE_IMAGE_H
#define ENGINE_IMAGE_H

#include "kernels/layout.h"
#include "store/base/alloc.h"
#include "store/base/diag.h"
#include "store/base/digest.h"

enum {
    IMAGE_VERSION = 4, /* the oldest one that can say it is written; 4: recipes fp8 and v1 */
    IMAGE_NAME_BYTES_MAX = 128,
    IMAGE_OWNER_BYTES = 16, /* whose session it is: kept with its name, not in the image */
    IMAGE_TOKENS_MAX = 1048576,
    IMAGE_NEEDLES_MAX = 256,
    IMAGE_SPANS_MAX = 8, /* statements of one needle's fact */
    IMAGE_AGES_MAX = 4,
    IMAGE_POLICIES_MAX = 64, /* changes of policy in one session */
    IMAGE_PAGES_MAX = 8,     /* window pages */
    IMAGE_TOP = 10,
    IMAGE_PROBES_MAX = 64,
    IMAGE_PROBE_TOKENS_MAX = 64, /* question and answer of a probe */
    IMAGE_TEXT_BYTES_MAX = 4096  /* question, expected answer, statement */
};

enum image_recipe {
    IMAGE_RECIPE_BF16 = 1,
    IMAGE_RECIPE_V3 = 2,
    IMAGE_RECIPE_V2 = 3,
    IMAGE_RECIPE_FP8 = 4,
    IMAGE_RECIPE_V1 = 5
};
enum image_role { IMAGE_SYSTEM = 1, IMAGE_USER = 2, IMAGE_ASSISTANT = 3, IMAGE_RAW = 4 };

/* What must be equal for stored KV to mean the same; a difference refuses the restore and names
 * both values. `numerics` alone may differ: then proof is by top-10 and bound, not by bits. */
struct image_model {
    char architecture[16];
    struct layout_geometry geometry;
    uint32_t q_heads, context_tokens, rope_pairing; /* 1: adjacent pairs */
    float rope_base;
    struct kv_digest tensors, tokenizer, chat_template;
    uint32_t code_id, layout_id; /* RECORD_CODE_PLANES, RECORD_LAYOUT_ID; of all recipes */
    struct kv_digest numerics;
};

/* The ladder of a recipe is K8V4, K6V4, K6V3, K6V2 (v3) or K8V4, K8V3, K8V2 (v2); `top_k8v8` puts
 * K8V8 in front. bf16, fp8 and v1 (tier K8I4) have one tier. A step goes from one tier to the next;
 * steps count from 0. */
struct image_policy {
    enum image_recipe recipe;
    uint32_t age_count;            /* steps that come at some distance; 0 under pressure */
    uint64_t ages[IMAGE_AGES_MAX]; /* distance at which step i comes */
    int top_k8v8;
    int pressure;                  /* 0: by age, and by nothing else */
    uint32_t ends[IMAGE_AGES_MAX]; /* under pressure: blocks [0, ends[i]) have taken step i; they
                                      do not rise, and are 0 behind the ladder's last step */
};
/* The tier that attention reads block `block` at when `n_kv` tokens have KV (DESIGN 4.3). */
enum layout_tier image_tier(const struct image_policy *policy, uint64_t block, uint64_t n_kv);
enum layout_tier image_top(const struct image_policy *policy); /* what a block is sealed at */
enum layout_tier image_floor(const struct image_policy *policy);
/* Steps of the policy's ladder, 0 … IMAGE_AGES_MAX, and its tier after `step` of them. */
uint32_t image_steps(const struct image_policy *policy);
enum layout_tier image_step_tier(const struct image_policy *policy, uint32_t step);
/* `tier`, or the next one down the policy's ladder that reads none of the streams `absent`. */
enum layout_tier image_tier_without(const struct image_policy *policy, enum layout_tier tier,
                                    uint32_t absent);
/* NULL, or what is wrong with it, as a sentence for the user. */
const char *image_policy_wrong(const struct image_policy *policy);
const char *image_recipe_name(enum image_recipe recipe); /* "v3"; "" for one that is not known */
/* The recipe of that name; 0: there is none. Every name, for help: image_recipe_names. */
enum image_recipe image_recipe_of(const char *name);
extern const char image_recipe_names[]; /* "v3, v2, …" */

struct image_sampler {
    float temperature, top_p;
    uint32_t top_k; /* vocabulary size or more: no limit */
    uint64_t seed;
};
struct image_policy_change {
    uint64_t from_n_kv;
    struct image_policy policy;
};
struct image_span {
    enum image_role role;
    uint64_t first, end;
};
struct image_page { /* dense bytes [layer][kv_head][K,V][tokens][dim] BF16 */
    uint64_t first; /* absolute position of its first token */
    uint32_t tokens;
    uint64_t page_id; /* record.h */
    struct kv_digest digest;
};
struct image_fingerprint {
    uint64_t n_kv;
    struct kv_digest logits; /* of the raw fp32 logits [vocab] */
    uint32_t top_ids[IMAGE_TOP];
    float top_logits[IMAGE_TOP];
};
struct image_needle {
    char *key, *ask, *answer_prefix, *expect; /* owned text */
    uint32_t span_count;
    struct image_span spans[IMAGE_SPANS_MAX]; /* every place where the fact stands */
    int kept, passed;                         /* as of the last asking */
    uint64_t asked_n_kv;
    float logp, logp_hole; /* of the expected answer, nats */
};

/* A span of the session's own text that it is asked for: only such as can fail, see probe.h. */
struct image_probe {
    uint64_t first, answer, end; /* the question is [first, answer), the answer [answer, end) */
    uint64_t asked_n_kv;
    float logp, logp_hole; /* of the answer, nats */
};

struct image {
    struct image_model model;
    char name[IMAGE_NAME_BYTES_MAX + 1];
    struct image_sampler sampler;
    struct image_policy_change *policies; /* in order; the last one is in force */
    uint32_t policy_count;
    uint32_t *ids; /* [n]; those of sealed blocks are encoded with their blocks, not in the image */
    uint64_t n, n_kv; /* n - n_kv is 0 or 1 */
    struct image_span *roles;
    uint32_t role_count;
    uint64_t lineage;
    uint32_t block_count;
    uint32_t *absent;             /* [block_count] or NULL: masks of streams that have left the
                                     stored blocks; not encoded, as the ids of these blocks */
    struct kv_digest block_chain; /* record.h: over every extent digest of every block, in order */
    struct image_page sinks;      /* tokens 0 … 63 */
    struct image_page pages[IMAGE_PAGES_MAX];
    uint32_t page_count;
    struct image_fingerprint fingerprint, fingerprint_floor;
    struct image_needle *needles;
    uint32_t needle_count;
    struct image_probe probes[IMAGE_PROBES_MAX];
    uint32_t probe_count;
    struct kv_digest parent; /* root of the snapshot before; zero for the first */
    uint64_t created_ns;
};

void image_init(struct image *image);
void image_release(struct image *image, const struct kv_alloc *alloc);
/* LIMIT when a count passes its maximum, NOMEM. Caller frees *bytes_out through `alloc`. */
enum kv_err image_encode(const struct image *image, const struct kv_alloc *alloc,
                         uint8_t **bytes_out, size_t *size_out, struct kv_diag *diag);
/* Never trusts a length; on error `image_out` is empty. The ids of sealed blocks are 0 until the
 * caller has read them from the block records. CORRUPT, VERSION, LIMIT, NOMEM. */
enum kv_err image_decode(const void *bytes, size_t size, const struct kv_alloc *alloc,
                         struct image *image_out, struct kv_diag *diag);
/* The root digest: of the canonical bytes. */
struct kv_digest image_root(const void *bytes, size_t size);
int image_policy_equal(const struct image_policy *a, const struct image_policy *b);
/* Token from which answers were computed over coarser planes than the policy of their time gives
 * (mixed history): where the tier history repeats a policy. 0: never. */
uint64_t image_mixed_from(const struct image_policy_change *policies, uint32_t count);
/* MISMATCH naming the field and both values when `saved` cannot run on `here`. */
enum kv_err image_compatible(const struct image_model *saved, const struct image_model *here,
                             struct kv_diag *diag);

#endif
