/* restore/rest_prove.c - fingerprint and needles after a load.
 *
 * Responsible for: what rest_prove.h promises.
 * Not responsible for: asking (engine/needle.h).
 *
 * Logits are compared with memcmp and never with kv_digest_equal: this check must still stand
 * where the comparison of stored bytes has been broken.
 */
#include "restore/rest_prove.h"

#include "engine/engine.h"
#include "engine/needle.h"
#include "engine/probe.h"

#include <math.h>
#include <string.h>

enum { NEEDLES_TOGETHER = 8 };

static int same_numerics(const struct rest_prove_args *args) {
    return memcmp(&args->image->model.numerics, &args->here->numerics,
                  sizeof args->here->numerics) == 0;
}

/* Ids that both have among their best, and the largest difference of their logits. */
static uint32_t overlap(const struct image_fingerprint *saved,
                        const struct image_fingerprint *found, float *diff_out) {
    uint32_t both = 0;
    *diff_out = 0;
    for (int i = 0; i < IMAGE_TOP; i++) {
        for (int k = 0; k < IMAGE_TOP; k++) {
            if (saved->top_ids[i] != found->top_ids[k])
                continue;
            float diff = fabsf(saved->top_logits[i] - found->top_logits[k]);
            both++;
            if (!(diff <= *diff_out))
                *diff_out = diff;
        }
    }
    return both;
}

static enum kv_err judge_fingerprint(const struct rest_prove_args *args, struct kv_diag *diag) {
    const struct image_fingerprint *saved =
        args->at_floor ? &args->image->fingerprint_floor : &args->image->fingerprint;
    struct receipt *receipt = args->receipt;
    struct image_fingerprint found;
    receipt->fingerprint_floor = args->at_floor;
    enum kv_err err = session_fingerprint_take(args->session, &found, diag);
    if (err != KV_OK)
        return err;
    uint32_t both = overlap(saved, &found, &receipt->fingerprint_max_diff);
    int bits = memcmp(&saved->logits, &found.logits, sizeof found.logits) == 0;
    if (bits) {
        receipt->fingerprint = RECEIPT_BITS_EQUAL;
        return KV_OK;
    }
    receipt->fingerprint = RECEIPT_DIFFERENT;
    if (same_numerics(args)) {
        char saved_text[KV_DIGEST_HEX_BYTES];
        char found_text[KV_DIGEST_HEX_BYTES];
        kv_digest_hex(&saved->logits, saved_text);
        kv_digest_hex(&found.logits, found_text);
        return kv_diag_set(diag, KV_ERR_PROOF,
                           "the fingerprint is %s, saved was %s (%u of %d best tokens agree, "
                           "largest difference %.3g): the memory is not the one that was saved",
                           found_text, saved_text, both, IMAGE_TOP,
                           (double)receipt->fingerprint_max_diff);
    }
    if (both < REST_PROVE_OVERLAP_MIN || !(receipt->fingerprint_max_diff <= REST_PROVE_DIFF_MAX))
        return kv_diag_set(diag, KV_ERR_PROOF,
                           "%u of %d best tokens agree (at least %d wanted), largest difference "
                           "%.3g (at most %.3g): the memory is not the one that was saved",
                           both, IMAGE_TOP, REST_PROVE_OVERLAP_MIN,
                           (double)receipt->fingerprint_max_diff, (double)REST_PROVE_DIFF_MAX);
    receipt->fingerprint = RECEIPT_TOP_EQUAL;
    return KV_OK;
}

static enum kv_err judge_needle(const struct rest_prove_args *args,
                                const struct image_needle *needle,
                                const struct needle_result *found, struct kv_diag *diag) {
    args->receipt->needles_asked++;
    args->receipt->needles_passed += found->passed != 0;
    /* A record carried forward from an earlier turn was asked at another length: the session that
     * never slept may have stopped answering too, so the receipt tells and nothing is refused. So
     * it is where less is read than was when it was saved. */
    if (needle->asked_n_kv != args->image->n_kv || args->at_floor)
        return KV_OK;
    if (!found->passed)
        return kv_diag_set(diag, KV_ERR_PROOF, "needle %s is kept but was not answered",
                           needle->key);
    if (same_numerics(args) && memcmp(&found->logp, &needle->logp, sizeof needle->logp) != 0)
        return kv_diag_set(diag, KV_ERR_PROOF,
                           "needle %s is answered with log-probability %.9g, saved was %.9g",
                           needle->key, (double)found->logp, (double)needle->logp);
    return KV_OK;
}

/* Some in one batch. One that has no room for its question any more counts as not asked. */
static enum kv_err prove_needles(const struct rest_prove_args *args, const struct needle_list *list,
                                 struct kv_diag *diag) {
    const struct needle_question question = {.with_hole = 0, .floor = 0, .update = 0};
    struct needle_result results[NEEDLES_TOGETHER];
    enum kv_err err = needle_check_all(args->session, list, &question, results, diag);
    for (uint32_t i = 0; err == KV_OK && i < list->count; i++)
        if (results[i].asked)
            err = judge_needle(args, &args->image->needles[list->indices[i]], &results[i], diag);
    return err;
}

/* All in one batch. A record that was carried forward from another length refuses nothing, as with
 * needles. */
static enum kv_err prove_probes(const struct rest_prove_args *args, struct kv_diag *diag) {
    struct probe_result results[IMAGE_PROBES_MAX];
    struct receipt *receipt = args->receipt;
    uint32_t count = args->image->probe_count;
    if (count > args->probes_max)
        count = args->probes_max;
    const struct probe_asking asking = {0, count, 0};
    uint64_t begun = kv_clock_now_ns(args->clock);
    enum kv_err err = probe_ask(args->session, &asking, results, diag);
    receipt->probes_ns = kv_clock_now_ns(args->clock) - begun;
    if (err == KV_ERR_LIMIT)
        return KV_OK;
    if (err != KV_OK)
        return err;
    receipt->probes_asked = count;
    for (uint32_t i = 0; i < count; i++)
        receipt->probes_passed += results[i].passed != 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct image_probe *probe = &args->image->probes[i];
        if (probe->asked_n_kv != args->image->n_kv || args->at_floor)
            continue;
        if (!results[i].passed)
            return kv_diag_set(
                diag, KV_ERR_PROOF,
                "the probe of tokens %llu to %llu was answered when it was saved and "
                "is not now: that memory cannot be reached",
                (unsigned long long)probe->first, (unsigned long long)probe->end);
        if (same_numerics(args) && memcmp(&results[i].logp, &probe->logp, sizeof probe->logp) != 0)
            return kv_diag_set(diag, KV_ERR_PROOF,
                               "the probe of tokens %llu to %llu is answered with log-probability "
                               "%.9g, saved was %.9g",
                               (unsigned long long)probe->first, (unsigned long long)probe->end,
                               (double)results[i].logp, (double)probe->logp);
    }
    return KV_OK;
}

static enum kv_err prove_all_needles(const struct rest_prove_args *args, struct kv_diag *diag) {
    const struct image *image = args->image;
    enum kv_err err = KV_OK;
    for (uint32_t i = 0; err == KV_OK && i < image->needle_count;) {
        uint32_t indices[NEEDLES_TOGETHER];
        struct needle_list list = {indices, 0};
        for (; i < image->needle_count && list.count < NEEDLES_TOGETHER; i++)
            if (image->needles[i].kept)
                indices[list.count++] = i;
        args->receipt->needles_kept += list.count;
        if (list.count == 0 || args->skip_needles)
            continue;
        session_ask_breathe(args->session);
        err = prove_needles(args, &list, diag);
    }
    return err;
}

/* The fingerprint goes with the first question, and what it says comes first. */
enum kv_err rest_prove(const struct rest_prove_args *args, struct kv_diag *diag) {
    struct kv_diag of_question = {""};
    args->receipt->needles_recorded = args->image->needle_count;
    args->receipt->probes_kept = args->image->probe_count;
    session_ask_begin(args->session);
    session_fingerprint_along(args->session, args->at_floor);
    enum kv_err err = prove_probes(args, &of_question);
    if (err == KV_OK)
        err = prove_all_needles(args, &of_question);
    enum kv_err print = judge_fingerprint(args, diag);
    session_ask_end(args->session);
    if (print != KV_OK || err == KV_OK)
        return print;
    return kv_diag_set(diag, err, "%s", of_question.text);
}
