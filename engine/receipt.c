/* engine/receipt.c - names in receipts, and what bound an operation.
 *
 * Responsible for: the words of the schema and the busiest stage.
 * Not responsible for: measuring, or printing.
 */
#include "engine/receipt.h"

#include <string.h>

const char *receipt_operation_name(enum receipt_operation operation) {
    switch (operation) {
    case RECEIPT_SAVE:
        return "save";
    case RECEIPT_SLEEP:
        return "sleep";
    case RECEIPT_RESTORE:
        return "restore";
    case RECEIPT_REFINE:
        return "refine";
    }
    return "unknown";
}

const char *receipt_tiers_name(enum receipt_tiers tiers) {
    return tiers == RECEIPT_TIERS_EAGER ? "eager" : tiers == RECEIPT_TIERS_FLOOR ? "fit" : "exact";
}

const char *receipt_stage_name(enum receipt_stage stage) {
    static const char *const names[RECEIPT_STAGE_COUNT] = {
        [RECEIPT_PLAN] = "plan",       [RECEIPT_RESERVE] = "reserve", [RECEIPT_FREEZE] = "freeze",
        [RECEIPT_READ] = "read",       [RECEIPT_UNZIP] = "unzip",     [RECEIPT_DIGEST] = "digest",
        [RECEIPT_PUBLISH] = "publish", [RECEIPT_PROVE] = "prove",     [RECEIPT_COPY] = "copy",
        [RECEIPT_ZIP] = "zip",         [RECEIPT_WRITE] = "write",     [RECEIPT_SYNC] = "sync",
    };
    return (unsigned)stage < RECEIPT_STAGE_COUNT ? names[stage] : "unknown";
}

const char *receipt_proof_name(enum receipt_proof proof) {
    switch (proof) {
    case RECEIPT_NOT_ASKED:
        return "not-asked";
    case RECEIPT_BITS_EQUAL:
        return "bits-equal";
    case RECEIPT_TOP_EQUAL:
        return "top-equal";
    case RECEIPT_DIFFERENT:
        return "different";
    }
    return "unknown";
}

void receipt_finish(struct receipt *receipt) {
    receipt->bound_by = RECEIPT_PLAN;
    for (int stage = RECEIPT_PLAN; stage < RECEIPT_STAGE_COUNT; stage++)
        if (receipt->stage_ns[stage] > receipt->stage_ns[receipt->bound_by])
            receipt->bound_by = (enum receipt_stage)stage;
}

void receipt_history(struct receipt *receipt, const struct image_policy_change *policies,
                     uint32_t count) {
    memcpy(receipt->history, policies, count * sizeof *policies);
    receipt->history_count = count;
    receipt->policy = policies[count - 1].policy;
}
