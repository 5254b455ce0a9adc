/* engine/image_code.c - canonical bytes of a session's image.
 *
 * Responsible for: the encoding and a decoder that trusts no count, length or value.
 * Not responsible for: what an image means to a session (transfer.h) or to this model
 * (image_compatible).
 *
 * Bytes: magic "CPIM", version (u32), part count (u32), then every part in the order of `parts`
 * below: tag (4 bytes), length (u64), content. All little-endian. No part is optional, so deleting
 * any one is found and named; version 1 ends before the last one, and is written where that would
 * be empty; version 3 says what versions 1 and 2 cannot of a tier policy, version 4 names recipes
 * that version 3 does not know. What follows from other parts (tier map, page places) is stored and
 * compared, because a reader must notice when writer and reader disagree about it.
 */
#include "engine/image.h"

#include "store/base/bytes.h"

#include <math.h>
#include <string.h>

struct get_args {
    struct image *image;
    uint32_t version;
    const struct kv_alloc *alloc;
    struct kv_diag *diag;
};

struct part {
    char tag[5];
    const char *name;
    void (*put)(const struct image *image, struct kv_writer *writer);
    enum kv_err (*get)(const struct get_args *args, struct kv_reader *reader);
};

static void put_digest(struct kv_writer *writer, const struct kv_digest *digest) {
    kv_write_bytes(writer, digest->bytes, KV_DIGEST_BYTES);
}

static void get_digest(struct kv_reader *reader, struct kv_digest *digest_out) {
    const uint8_t *at = kv_read_bytes(reader, KV_DIGEST_BYTES);
    if (at != NULL)
        memcpy(digest_out->bytes, at, KV_DIGEST_BYTES);
}

static enum kv_err broken(const struct get_args *args, const char *what) {
    return kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: %s", what);
}

/* --- model */

static void put_model(const struct image *image, struct kv_writer *writer) {
    const struct image_model *model = &image->model;
    char architecture[sizeof model->architecture] = "";
    memcpy(architecture, model->architecture,
           strnlen(model->architecture, sizeof model->architecture - 1));
    kv_write_bytes(writer, architecture, sizeof architecture);
    kv_write_u32(writer, model->geometry.layers);
    kv_write_u32(writer, model->geometry.kv_heads);
    kv_write_u32(writer, model->geometry.head_dim);
    kv_write_u32(writer, model->q_heads);
    kv_write_u32(writer, model->context_tokens);
    kv_write_u32(writer, model->rope_pairing);
    kv_write_f32(writer, model->rope_base);
    put_digest(writer, &model->tensors);
    put_digest(writer, &model->tokenizer);
    put_digest(writer, &model->chat_template);
    kv_write_u32(writer, model->code_id);
    kv_write_u32(writer, model->layout_id);
    put_digest(writer, &model->numerics);
}

static enum kv_err get_model(const struct get_args *args, struct kv_reader *reader) {
    struct image_model *model = &args->image->model;
    const uint8_t *architecture = kv_read_bytes(reader, sizeof model->architecture);
    if (architecture == NULL || architecture[sizeof model->architecture - 1] != 0)
        return broken(args, "the architecture's name does not end");
    memcpy(model->architecture, architecture, sizeof model->architecture);
    model->geometry.layers = kv_read_u32(reader);
    model->geometry.kv_heads = kv_read_u32(reader);
    model->geometry.head_dim = kv_read_u32(reader);
    model->q_heads = kv_read_u32(reader);
    model->context_tokens = kv_read_u32(reader);
    model->rope_pairing = kv_read_u32(reader);
    model->rope_base = kv_read_f32(reader);
    get_digest(reader, &model->tensors);
    get_digest(reader, &model->tokenizer);
    get_digest(reader, &model->chat_template);
    model->code_id = kv_read_u32(reader);
    model->layout_id = kv_read_u32(reader);
    get_digest(reader, &model->numerics);
    if (!reader->failed && !layout_geometry_valid(&model->geometry))
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: impossible geometry (%u layers, %u KV heads, "
                           "dimension %u)",
                           model->geometry.layers, model->geometry.kv_heads,
                           model->geometry.head_dim);
    return KV_OK;
}

/* --- name, sampler, policies */

static void put_name(const struct image *image, struct kv_writer *writer) {
    size_t length = strnlen(image->name, IMAGE_NAME_BYTES_MAX);
    kv_write_u32(writer, (uint32_t)length);
    kv_write_bytes(writer, image->name, length);
}

static enum kv_err get_name(const struct get_args *args, struct kv_reader *reader) {
    uint32_t length = kv_read_u32(reader);
    if (length == 0 || length > IMAGE_NAME_BYTES_MAX)
        return broken(args, "the session's name is empty or too long");
    const uint8_t *at = kv_read_bytes(reader, length);
    if (at == NULL)
        return KV_OK;
    if (memchr(at, 0, length) != NULL)
        return broken(args, "the session's name holds a zero byte");
    memcpy(args->image->name, at, length);
    args->image->name[length] = 0;
    return KV_OK;
}

static void put_sampler(const struct image *image, struct kv_writer *writer) {
    kv_write_f32(writer, image->sampler.temperature);
    kv_write_f32(writer, image->sampler.top_p);
    kv_write_u32(writer, image->sampler.top_k);
    kv_write_u64(writer, image->sampler.seed);
}

static enum kv_err get_sampler(const struct get_args *args, struct kv_reader *reader) {
    struct image_sampler *sampler = &args->image->sampler;
    sampler->temperature = kv_read_f32(reader);
    sampler->top_p = kv_read_f32(reader);
    sampler->top_k = kv_read_u32(reader);
    sampler->seed = kv_read_u64(reader);
    if (!reader->failed && (!isfinite(sampler->temperature) || sampler->temperature < 0 ||
                            !(sampler->top_p > 0 && sampler->top_p <= 1) || sampler->top_k == 0))
        return broken(args, "the sampler settings are out of range");
    return KV_OK;
}

enum { VERSION_AGES = 3, FLAG_TOP = 1, FLAG_PRESSURE = 2 };

static int is_control(enum image_recipe recipe) {
    return recipe == IMAGE_RECIPE_FP8 || recipe == IMAGE_RECIPE_V1;
}

/* The oldest version that can say the policies; 1 and 2 say the same ones. */
static uint32_t policies_version(const struct image *image) {
    uint32_t version = 1;
    for (uint32_t i = 0; i < image->policy_count; i++) {
        const struct image_policy *policy = &image->policies[i].policy;
        int is_new = policy->recipe == IMAGE_RECIPE_V2 || policy->top_k8v8 || policy->pressure ||
                     policy->age_count > VERSION_AGES;
        if (is_control(policy->recipe))
            version = 4;
        else if (is_new && version < 3)
            version = 3;
    }
    return version;
}

static uint32_t version_of(const struct image *image) {
    uint32_t version = policies_version(image);
    return version > 1 ? version : image->probe_count == 0 ? 1 : 2;
}

static void put_policies(const struct image *image, struct kv_writer *writer) {
    int is_new = policies_version(image) >= 3;
    kv_write_u32(writer, image->policy_count);
    for (uint32_t i = 0; i < image->policy_count; i++) {
        const struct image_policy_change *change = &image->policies[i];
        const struct image_policy *policy = &change->policy;
        kv_write_u64(writer, change->from_n_kv);
        kv_write_u32(writer, policy->recipe);
        kv_write_u32(writer, policy->age_count);
        if (is_new)
            kv_write_u32(writer, (policy->top_k8v8 ? FLAG_TOP : 0) |
                                     (policy->pressure ? FLAG_PRESSURE : 0));
        for (uint32_t k = 0; k < (is_new ? IMAGE_AGES_MAX : VERSION_AGES); k++)
            kv_write_u64(writer, policy->pressure        ? policy->ends[k]
                                 : k < policy->age_count ? policy->ages[k]
                                                         : 0);
    }
}

static enum kv_err get_policy_change(const struct get_args *args, struct kv_reader *reader,
                                     struct image_policy_change *change) {
    int is_new = args->version >= 3;
    change->from_n_kv = kv_read_u64(reader);
    uint32_t recipe = kv_read_u32(reader);
    uint32_t age_count = kv_read_u32(reader);
    uint32_t flags = is_new ? kv_read_u32(reader) : 0;
    if (recipe != IMAGE_RECIPE_BF16 && recipe != IMAGE_RECIPE_V3 &&
        !(is_new && recipe == IMAGE_RECIPE_V2) &&
        !(args->version >= 4 && is_control((enum image_recipe)recipe)))
        return kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: unknown recipe %u", recipe);
    if (age_count > (is_new ? IMAGE_AGES_MAX : VERSION_AGES))
        return broken(args, "a tier policy has too many ages");
    if (flags > (FLAG_TOP | FLAG_PRESSURE))
        return broken(args, "a tier policy has an unknown flag");
    change->policy = (struct image_policy){.recipe = recipe,
                                           .age_count = age_count,
                                           .top_k8v8 = flags & FLAG_TOP ? 1 : 0,
                                           .pressure = flags & FLAG_PRESSURE ? 1 : 0};
    for (uint32_t k = 0; k < (is_new ? IMAGE_AGES_MAX : VERSION_AGES); k++) {
        uint64_t value = kv_read_u64(reader);
        if (change->policy.pressure && value > IMAGE_TOKENS_MAX / LAYOUT_BLOCK_TOKENS)
            return broken(args, "a step of the ladder is taken by impossible blocks");
        if (change->policy.pressure) {
            change->policy.ends[k] = (uint32_t)value;
            continue;
        }
        change->policy.ages[k] = value;
        if (k >= age_count && value != 0)
            return broken(args, "a tier policy has an age that is not counted");
    }
    /* Older versions were written without this look, and nothing depends on it in them. */
    if (is_new && !reader->failed && image_policy_wrong(&change->policy) != NULL)
        return broken(args, image_policy_wrong(&change->policy));
    return KV_OK;
}

static enum kv_err get_policies(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    uint32_t count = kv_read_u32(reader);
    if (count == 0 || count > IMAGE_POLICIES_MAX)
        return broken(args, "the tier history is empty or too long");
    image->policies = kv_alloc_zeroed(args->alloc, count, sizeof *image->policies);
    if (image->policies == NULL)
        return KV_ERR_NOMEM;
    image->policy_count = count;
    for (uint32_t i = 0; i < count; i++) {
        enum kv_err err = get_policy_change(args, reader, &image->policies[i]);
        if (err != KV_OK)
            return err;
        if (i > 0 && image->policies[i].from_n_kv < image->policies[i - 1].from_n_kv)
            return broken(args, "the tier history is out of order");
    }
    if (args->version >= 3 && !reader->failed && policies_version(image) != args->version)
        return broken(args, "a tier history that an older version can say");
    return KV_OK;
}

/* --- tokens and roles */

/* The ids of sealed blocks stand in their records: a save writes what is new, not all of it. */
static uint64_t blocks_end(const struct image *image) {
    return image->block_count == 0
               ? 0
               : LAYOUT_SINK_TOKENS + (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS;
}

/* The first position at or behind this one whose id stands here. */
static uint64_t listed(const struct image *image, uint64_t position) {
    uint64_t end = blocks_end(image);
    return position >= LAYOUT_SINK_TOKENS && position < end ? end : position;
}

static void put_tokens(const struct image *image, struct kv_writer *writer) {
    for (uint64_t i = 0; (i = listed(image, i)) < image->n; i++)
        kv_write_u32(writer, image->ids[i]);
}

static enum kv_err get_tokens(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    image->ids = kv_alloc_zeroed(args->alloc, image->n, sizeof *image->ids);
    if (image->ids == NULL)
        return KV_ERR_NOMEM;
    for (uint64_t i = 0; (i = listed(image, i)) < image->n; i++)
        image->ids[i] = kv_read_u32(reader);
    return KV_OK;
}

static void put_position(const struct image *image, struct kv_writer *writer) {
    kv_write_u64(writer, image->n);
    kv_write_u64(writer, image->n_kv);
}

static enum kv_err get_position(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    image->n = kv_read_u64(reader);
    image->n_kv = kv_read_u64(reader);
    if (image->n == 0 || image->n > IMAGE_TOKENS_MAX)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: impossible number of token ids: %llu",
                           (unsigned long long)image->n);
    if (image->n_kv == 0 || image->n_kv > image->n || image->n - image->n_kv > 1)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: position %llu does not fit %llu token ids",
                           (unsigned long long)image->n_kv, (unsigned long long)image->n);
    return KV_OK;
}

static void put_span(struct kv_writer *writer, const struct image_span *span) {
    kv_write_u32(writer, span->role);
    kv_write_u64(writer, span->first);
    kv_write_u64(writer, span->end);
}

static enum kv_err get_span(const struct get_args *args, struct kv_reader *reader,
                            struct image_span *span) {
    uint32_t role = kv_read_u32(reader);
    span->first = kv_read_u64(reader);
    span->end = kv_read_u64(reader);
    if (role < IMAGE_SYSTEM || role > IMAGE_RAW || span->first >= span->end ||
        span->end > args->image->n)
        return broken(args, "a span lies outside of the tokens or has no role");
    span->role = role;
    return KV_OK;
}

static void put_roles(const struct image *image, struct kv_writer *writer) {
    kv_write_u32(writer, image->role_count);
    for (uint32_t i = 0; i < image->role_count; i++)
        put_span(writer, &image->roles[i]);
}

static enum kv_err get_roles(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    uint32_t count = kv_read_u32(reader);
    if (count > image->n || count > kv_reader_left(reader) / 20)
        return broken(args, "more roles than tokens");
    if (count == 0)
        return KV_OK;
    image->roles = kv_alloc_zeroed(args->alloc, count, sizeof *image->roles);
    if (image->roles == NULL)
        return KV_ERR_NOMEM;
    image->role_count = count;
    for (uint32_t i = 0; i < count; i++) {
        enum kv_err err = get_span(args, reader, &image->roles[i]);
        if (err != KV_OK)
            return err;
        if (i > 0 && image->roles[i].first < image->roles[i - 1].end)
            return broken(args, "roles overlap");
    }
    return KV_OK;
}

/* --- blocks, tier map, pages */

static void put_blocks(const struct image *image, struct kv_writer *writer) {
    kv_write_u64(writer, image->lineage);
    kv_write_u32(writer, image->block_count);
    put_digest(writer, &image->block_chain);
}

static enum kv_err get_blocks(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    image->lineage = kv_read_u64(reader);
    image->block_count = kv_read_u32(reader);
    get_digest(reader, &image->block_chain);
    if (image->lineage == 0 || image->block_count != layout_sealed_blocks(image->n_kv))
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: %u blocks, but %llu tokens have %llu",
                           image->block_count, (unsigned long long)image->n_kv,
                           (unsigned long long)layout_sealed_blocks(image->n_kv));
    return KV_OK;
}

static enum layout_tier tier_of(const struct image *image, uint32_t block) {
    return image_tier(&image->policies[image->policy_count - 1].policy, block, image->n_kv);
}

static void put_tiers(const struct image *image, struct kv_writer *writer) {
    for (uint32_t b = 0; b < image->block_count; b++)
        kv_write_u8(writer, (uint8_t)tier_of(image, b));
}

static enum kv_err get_tiers(const struct get_args *args, struct kv_reader *reader) {
    for (uint32_t b = 0; b < args->image->block_count; b++) {
        uint8_t tier = kv_read_u8(reader);
        if (reader->failed)
            break;
        if (tier != (uint8_t)tier_of(args->image, b))
            return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                               "snapshot image: the tier map has %s for block %u, its policy "
                               "gives %s",
                               layout_tier_name(tier), b,
                               layout_tier_name(tier_of(args->image, b)));
    }
    return KV_OK;
}

static void put_page(struct kv_writer *writer, const struct image_page *page) {
    kv_write_u64(writer, page->first);
    kv_write_u32(writer, page->tokens);
    kv_write_u64(writer, page->page_id);
    put_digest(writer, &page->digest);
}

static void get_page(struct kv_reader *reader, struct image_page *page) {
    page->first = kv_read_u64(reader);
    page->tokens = kv_read_u32(reader);
    page->page_id = kv_read_u64(reader);
    get_digest(reader, &page->digest);
}

static void put_sinks(const struct image *image, struct kv_writer *writer) {
    put_page(writer, &image->sinks);
}

static enum kv_err get_sinks(const struct get_args *args, struct kv_reader *reader) {
    struct image_page *sinks = &args->image->sinks;
    get_page(reader, sinks);
    if (sinks->first != 0 || sinks->tokens != layout_sink_tokens(args->image->n_kv) ||
        sinks->page_id == 0)
        return broken(args, "the sinks do not fit the position");
    return KV_OK;
}

static void put_pages(const struct image *image, struct kv_writer *writer) {
    kv_write_u32(writer, image->page_count);
    for (uint32_t i = 0; i < image->page_count; i++)
        put_page(writer, &image->pages[i]);
}

static enum kv_err get_pages(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    uint32_t count = kv_read_u32(reader);
    if (count > IMAGE_PAGES_MAX || count != layout_window_pages(image->n_kv))
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: %u window pages, but %llu tokens have %u", count,
                           (unsigned long long)image->n_kv, layout_window_pages(image->n_kv));
    uint64_t at = LAYOUT_SINK_TOKENS + (uint64_t)image->block_count * LAYOUT_BLOCK_TOKENS;
    for (uint32_t i = 0; i < count; i++) {
        struct image_page *page = &image->pages[i];
        get_page(reader, page);
        uint64_t left = image->n_kv - at;
        uint32_t tokens = left < LAYOUT_PAGE_TOKENS ? (uint32_t)left : LAYOUT_PAGE_TOKENS;
        if (page->first != at || page->tokens != tokens || page->page_id == 0)
            return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                               "snapshot image: window page %u does not fit the position", i);
        at += tokens;
    }
    image->page_count = count;
    return KV_OK;
}

/* --- proof */

static void put_print(struct kv_writer *writer, const struct image_fingerprint *print) {
    kv_write_u64(writer, print->n_kv);
    put_digest(writer, &print->logits);
    for (uint32_t i = 0; i < IMAGE_TOP; i++) {
        kv_write_u32(writer, (uint32_t)print->top_ids[i]);
        kv_write_f32(writer, print->top_logits[i]);
    }
}

static enum kv_err get_print(const struct get_args *args, struct kv_reader *reader,
                             struct image_fingerprint *print) {
    print->n_kv = kv_read_u64(reader);
    get_digest(reader, &print->logits);
    for (uint32_t i = 0; i < IMAGE_TOP; i++) {
        print->top_ids[i] = (int32_t)kv_read_u32(reader);
        print->top_logits[i] = kv_read_f32(reader);
    }
    if (!reader->failed && print->n_kv != args->image->n_kv)
        return broken(args, "a fingerprint is of another position");
    return KV_OK;
}

static void put_print_tiers(const struct image *image, struct kv_writer *writer) {
    put_print(writer, &image->fingerprint);
}

static enum kv_err get_print_tiers(const struct get_args *args, struct kv_reader *reader) {
    return get_print(args, reader, &args->image->fingerprint);
}

static void put_print_floor(const struct image *image, struct kv_writer *writer) {
    put_print(writer, &image->fingerprint_floor);
}

static enum kv_err get_print_floor(const struct get_args *args, struct kv_reader *reader) {
    return get_print(args, reader, &args->image->fingerprint_floor);
}

static void put_text(struct kv_writer *writer, const char *text) {
    size_t length = strlen(text);
    kv_write_u32(writer, (uint32_t)length);
    kv_write_bytes(writer, text, length);
}

static enum kv_err get_text(const struct get_args *args, struct kv_reader *reader,
                            char **text_out) {
    uint32_t length = kv_read_u32(reader);
    if (length > IMAGE_TEXT_BYTES_MAX)
        return broken(args, "a needle's text is too long");
    const uint8_t *at = kv_read_bytes(reader, length);
    if (at == NULL)
        return broken(args, "a needle's text is cut off");
    if (memchr(at, 0, length) != NULL)
        return broken(args, "a needle's text holds a zero byte");
    *text_out = kv_alloc_copy(args->alloc, at, length);
    return *text_out == NULL ? KV_ERR_NOMEM : KV_OK;
}

static void put_needles(const struct image *image, struct kv_writer *writer) {
    kv_write_u32(writer, image->needle_count);
    for (uint32_t i = 0; i < image->needle_count; i++) {
        const struct image_needle *needle = &image->needles[i];
        put_text(writer, needle->key);
        put_text(writer, needle->ask);
        put_text(writer, needle->answer_prefix);
        put_text(writer, needle->expect);
        kv_write_u32(writer, needle->span_count);
        for (uint32_t k = 0; k < needle->span_count; k++)
            put_span(writer, &needle->spans[k]);
        kv_write_u8(writer, needle->kept != 0);
        kv_write_u8(writer, needle->passed != 0);
        kv_write_u64(writer, needle->asked_n_kv);
        kv_write_f32(writer, needle->logp);
        kv_write_f32(writer, needle->logp_hole);
    }
}

static enum kv_err get_needle(const struct get_args *args, struct kv_reader *reader,
                              struct image_needle *needle) {
    char **const texts[] = {&needle->key, &needle->ask, &needle->answer_prefix, &needle->expect};
    enum kv_err err = KV_OK;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0] && err == KV_OK; i++)
        err = get_text(args, reader, texts[i]);
    if (err != KV_OK)
        return err;
    uint32_t count = kv_read_u32(reader);
    if (count > IMAGE_SPANS_MAX)
        return broken(args, "a needle has too many spans");
    needle->span_count = count;
    for (uint32_t k = 0; k < count && err == KV_OK; k++)
        err = get_span(args, reader, &needle->spans[k]);
    if (err != KV_OK)
        return err;
    uint8_t kept = kv_read_u8(reader);
    uint8_t passed = kv_read_u8(reader);
    needle->asked_n_kv = kv_read_u64(reader);
    needle->logp = kv_read_f32(reader);
    needle->logp_hole = kv_read_f32(reader);
    if (kept > 1 || passed > 1 || needle->asked_n_kv > args->image->n_kv)
        return broken(args, "a needle's record is impossible");
    needle->kept = kept;
    needle->passed = passed;
    return KV_OK;
}

static enum kv_err get_needles(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    uint32_t count = kv_read_u32(reader);
    if (count > IMAGE_NEEDLES_MAX)
        return broken(args, "too many needles");
    if (count == 0)
        return KV_OK;
    image->needles = kv_alloc_zeroed(args->alloc, count, sizeof *image->needles);
    if (image->needles == NULL)
        return KV_ERR_NOMEM;
    image->needle_count = count;
    for (uint32_t i = 0; i < count; i++) {
        enum kv_err err = get_needle(args, reader, &image->needles[i]);
        if (err != KV_OK)
            return err;
    }
    return KV_OK;
}

static void put_origin(const struct image *image, struct kv_writer *writer) {
    put_digest(writer, &image->parent);
    kv_write_u64(writer, image->created_ns);
}

static enum kv_err get_origin(const struct get_args *args, struct kv_reader *reader) {
    get_digest(reader, &args->image->parent);
    args->image->created_ns = kv_read_u64(reader);
    return KV_OK;
}

static void put_probes(const struct image *image, struct kv_writer *writer) {
    kv_write_u32(writer, image->probe_count);
    for (uint32_t i = 0; i < image->probe_count; i++) {
        const struct image_probe *probe = &image->probes[i];
        kv_write_u64(writer, probe->first);
        kv_write_u64(writer, probe->answer);
        kv_write_u64(writer, probe->end);
        kv_write_u64(writer, probe->asked_n_kv);
        kv_write_f32(writer, probe->logp);
        kv_write_f32(writer, probe->logp_hole);
    }
}

static enum kv_err get_probes(const struct get_args *args, struct kv_reader *reader) {
    struct image *image = args->image;
    uint32_t count = kv_read_u32(reader);
    if ((count == 0 && args->version < 3) || count > IMAGE_PROBES_MAX)
        return broken(args, "an impossible number of probes");
    for (uint32_t i = 0; i < count; i++) {
        struct image_probe *probe = &image->probes[i];
        probe->first = kv_read_u64(reader);
        probe->answer = kv_read_u64(reader);
        probe->end = kv_read_u64(reader);
        probe->asked_n_kv = kv_read_u64(reader);
        probe->logp = kv_read_f32(reader);
        probe->logp_hole = kv_read_f32(reader);
        if (reader->failed)
            return KV_OK;
        if (probe->first < LAYOUT_SINK_TOKENS || probe->first >= probe->answer ||
            probe->answer >= probe->end || probe->end > image->n_kv ||
            probe->end - probe->first > IMAGE_PROBE_TOKENS_MAX || probe->asked_n_kv > image->n_kv)
            return broken(args, "a probe's span is impossible");
    }
    image->probe_count = count;
    return KV_OK;
}

/* The order is stored: a decoder may use what earlier parts said. */
static const struct part parts[] = {
    {"MODL", "model identity", put_model, get_model},
    {"NAME", "session name", put_name, get_name},
    {"SAMP", "sampler settings", put_sampler, get_sampler},
    {"POLI", "tier history", put_policies, get_policies},
    {"POSN", "position", put_position, get_position},
    {"BLKS", "blocks", put_blocks, get_blocks},
    {"TOKS", "token ids", put_tokens, get_tokens},
    {"ROLE", "roles", put_roles, get_roles},
    {"TIER", "tier map", put_tiers, get_tiers},
    {"SINK", "sinks", put_sinks, get_sinks},
    {"PAGE", "window pages", put_pages, get_pages},
    {"FPTM", "fingerprint at the tier map", put_print_tiers, get_print_tiers},
    {"FPFL", "fingerprint at the floor", put_print_floor, get_print_floor},
    {"NEED", "needles", put_needles, get_needles},
    {"ORIG", "origin", put_origin, get_origin},
    {"PROB", "probes", put_probes, get_probes},
};
enum { PART_COUNT = sizeof parts / sizeof parts[0] };

static uint32_t part_count(uint32_t version) {
    return version == 1 ? PART_COUNT - 1 : PART_COUNT;
}

static void put_all(const struct image *image, struct kv_writer *writer) {
    kv_write_bytes(writer, "CPIM", 4);
    uint32_t version = version_of(image);
    kv_write_u32(writer, version);
    kv_write_u32(writer, part_count(version));
    for (size_t i = 0; i < part_count(version); i++) {
        struct kv_writer size;
        kv_writer_init(&size, NULL, 0);
        parts[i].put(image, &size);
        kv_write_bytes(writer, parts[i].tag, 4);
        kv_write_u64(writer, size.off);
        parts[i].put(image, writer);
    }
}

static enum kv_err check_limits(const struct image *image, struct kv_diag *diag) {
    const struct {
        const char *what;
        uint64_t count, max;
    } limits[] = {
        {"tokens", image->n, IMAGE_TOKENS_MAX},
        {"changes of tier policy", image->policy_count, IMAGE_POLICIES_MAX},
        {"window pages", image->page_count, IMAGE_PAGES_MAX},
        {"needles", image->needle_count, IMAGE_NEEDLES_MAX},
        {"probes", image->probe_count, IMAGE_PROBES_MAX},
        {"roles", image->role_count, image->n},
        {"bytes of name", strnlen(image->name, sizeof image->name), IMAGE_NAME_BYTES_MAX},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        if (limits[i].count > limits[i].max)
            return kv_diag_set(diag, KV_ERR_LIMIT, "a session's image holds %llu %s, at most %llu",
                               (unsigned long long)limits[i].count, limits[i].what,
                               (unsigned long long)limits[i].max);
    for (uint32_t i = 0; i < image->needle_count; i++) {
        const struct image_needle *needle = &image->needles[i];
        const char *const texts[] = {needle->key, needle->ask, needle->answer_prefix,
                                     needle->expect};
        for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++)
            if (strlen(texts[k]) > IMAGE_TEXT_BYTES_MAX)
                return kv_diag_set(diag, KV_ERR_LIMIT,
                                   "a needle's text is longer than %d bytes: shorten it",
                                   IMAGE_TEXT_BYTES_MAX);
        if (needle->span_count > IMAGE_SPANS_MAX)
            return kv_diag_set(diag, KV_ERR_LIMIT, "needle %s has more than %d spans", needle->key,
                               IMAGE_SPANS_MAX);
    }
    return KV_OK;
}

enum kv_err image_encode(const struct image *image, const struct kv_alloc *alloc,
                         uint8_t **bytes_out, size_t *size_out, struct kv_diag *diag) {
    enum kv_err err = check_limits(image, diag);
    if (err != KV_OK)
        return err;
    struct kv_writer writer;
    kv_writer_init(&writer, NULL, 0);
    put_all(image, &writer);
    size_t size = writer.off;
    uint8_t *bytes = kv_alloc_zeroed(alloc, 1, size);
    if (bytes == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu bytes of session image", size);
    kv_writer_init(&writer, bytes, size);
    put_all(image, &writer);
    *bytes_out = bytes;
    *size_out = size;
    return KV_OK;
}

static enum kv_err get_part(const struct part *part, const struct get_args *args,
                            struct kv_reader *reader) {
    const uint8_t *tag = kv_read_bytes(reader, 4);
    uint64_t size = kv_read_u64(reader);
    if (reader->failed || memcmp(tag, part->tag, 4) != 0)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: the %s is missing",
                           part->name);
    const uint8_t *bytes = size <= kv_reader_left(reader) ? kv_read_bytes(reader, size) : NULL;
    if (bytes == NULL)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: the %s needs %llu bytes, %zu are left", part->name,
                           (unsigned long long)size, kv_reader_left(reader));
    struct kv_reader content;
    kv_reader_init(&content, bytes, size);
    enum kv_err err = part->get(args, &content);
    if (err == KV_ERR_NOMEM)
        return kv_diag_set(args->diag, err, "no memory for the image's %s", part->name);
    if (err == KV_OK && content.failed)
        err = kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: the content is cut off");
    if (err == KV_OK && kv_reader_left(&content) != 0)
        err = kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: %zu bytes too many",
                          kv_reader_left(&content));
    if (err != KV_OK)
        kv_diag_prefix(args->diag, "%s", part->name);
    return err;
}

static enum kv_err get_all(struct get_args *args, struct kv_reader *reader) {
    const uint8_t *magic = kv_read_bytes(reader, 4);
    uint32_t version = kv_read_u32(reader);
    uint32_t count = kv_read_u32(reader);
    if (magic == NULL || memcmp(magic, "CPIM", 4) != 0)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: these bytes are no image");
    if (!reader->failed && version > IMAGE_VERSION)
        return kv_diag_set(args->diag, KV_ERR_VERSION,
                           "the snapshot image needs version %u, this program reads up to %d: "
                           "use a newer program",
                           version, IMAGE_VERSION);
    if (reader->failed || version == 0)
        return broken(args, "the head is cut off or impossible");
    uint32_t expected = part_count(version);
    args->version = version;
    for (size_t i = 0; i < expected; i++) {
        enum kv_err err = get_part(&parts[i], args, reader);
        if (err != KV_OK)
            return err;
    }
    if (count != expected)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT, "snapshot image: %u parts, expected %u",
                           count, expected);
    if (kv_reader_left(reader) != 0)
        return kv_diag_set(args->diag, KV_ERR_CORRUPT,
                           "snapshot image: %zu bytes behind the last part",
                           kv_reader_left(reader));
    return KV_OK;
}

enum kv_err image_decode(const void *bytes, size_t size, const struct kv_alloc *alloc,
                         struct image *image_out, struct kv_diag *diag) {
    image_init(image_out);
    struct kv_reader reader;
    kv_reader_init(&reader, bytes, size);
    struct get_args args = {image_out, 0, alloc, diag};
    enum kv_err err = get_all(&args, &reader);
    if (err != KV_OK)
        image_release(image_out, alloc);
    return err;
}
