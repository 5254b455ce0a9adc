/* engine/receipt.h - the account that every save and restore returns.
 *
 * Responsible for: the one schema, as plain data that snapshot/ and restore/ fill in.
 * Not responsible for: JSON or tables (tools/receipt_print.c), or keeping receipts.
 *
 * Fields that do not apply to an operation are 0 or empty. Counts are measured where the work is
 * done, never copied from a plan.
 *
 * Threads: plain data.
 * Units: bytes, tokens, nanoseconds of monotonic time.
 */
#ifndef ENGINE_RECEIPT_H
#define ENGINE_RECEIPT_H

#include "engine/image.h"
#include "kernels/layout.h"

enum { RECEIPT_VERSION = 1 };
/* REFINE: what came behind a session that was woken eagerly. */
enum receipt_operation { RECEIPT_SAVE = 1, RECEIPT_SLEEP, RECEIPT_RESTORE, RECEIPT_REFINE };
/* A restore reads the whole tier map; the ladder's floor, and the rest behind; or only the floor,
 * since there were too few slots. */
enum receipt_tiers { RECEIPT_TIERS_EXACT, RECEIPT_TIERS_EAGER, RECEIPT_TIERS_FLOOR };
enum receipt_stage {
    RECEIPT_PLAN, /* looking up and checking what is to be done */
    RECEIPT_RESERVE,
    RECEIPT_FREEZE,
    RECEIPT_READ,
    RECEIPT_UNZIP,
    RECEIPT_COPY, /* between memory of the processor and of the device */
    RECEIPT_DIGEST,
    RECEIPT_PUBLISH,
    RECEIPT_PROVE,
    RECEIPT_ZIP, /* of a save; of each thread on the average, the longest extent at least */
    RECEIPT_WRITE,
    RECEIPT_SYNC,
    RECEIPT_STAGE_COUNT
};
enum receipt_proof { RECEIPT_NOT_ASKED, RECEIPT_BITS_EQUAL, RECEIPT_TOP_EQUAL, RECEIPT_DIFFERENT };

/* Tokens [first, end) were sampled while no block was read at less than `coarsest`, and at most
 * `coarse_blocks` at less than the policy gives. */
enum { RECEIPT_SEEN_MAX = 8 };
struct receipt_seen {
    uint64_t first, end;
    enum layout_tier coarsest;
    uint32_t coarse_blocks;
};

/* Of a wake from the RAM tier whose proof follows its layers, since it began; all 0 otherwise. */
struct receipt_layers {
    uint64_t published_ns;
    uint64_t sent_ns, first_ns, copied_ns; /* layers: the first handed over; the first there, all */
    uint64_t proof_ns, last_ns, proven_ns; /* its begin, that of its last layers, its end */
    uint64_t digested_ns;                  /* the last digest */
};

struct receipt {
    enum receipt_operation operation;
    enum kv_err err; /* KV_OK, or why it was refused */
    char name[IMAGE_NAME_BYTES_MAX + 1];
    char reason[256]; /* the diag's text when err is set */
    uint64_t snapshot, parent, lineage;
    struct kv_digest root;
    char architecture[16];
    struct kv_digest model, numerics;
    struct image_policy policy;
    uint32_t
        history_count; /* changes of policy, the last one in force; older ones are not listed */
    struct image_policy_change history[IMAGE_POLICIES_MAX];
    uint64_t tokens;           /* in the snapshot */
    uint64_t tokens_reused;    /* with KV read back (restore) or found durable already (save) */
    uint64_t tokens_prefilled; /* 0 unless asked for */
    uint32_t blocks, pages;    /* written or read */
    uint32_t tier_blocks[16];  /* by enum layout_tier, as attention reads them */
    uint32_t slots;
    uint64_t raw_bytes[LAYOUT_STREAM_COUNT];        /* by stream, before compression */
    uint64_t stored_bytes[LAYOUT_STREAM_COUNT];     /* by stream, read or written */
    uint64_t image_bytes, record_bytes, door_bytes; /* door: everything through the I/O door */
    uint64_t ram_bytes;                             /* raw, taken from the RAM tier instead */
    uint32_t digests_checked, digests_failed;
    enum receipt_proof fingerprint;
    int fingerprint_floor;    /* 1: compared at the ladder's floor, since planes are gone */
    uint32_t degraded_blocks; /* read at less than the policy gives: planes have left the store */
    uint64_t mixed_from;      /* token from which answers saw coarser planes; 0 never */
    enum receipt_tiers tiers; /* of a restore */
    uint32_t coarse_blocks;   /* read at less than the policy gives, for whatever reason */
    uint32_t seen_count;      /* tokens since the session woke coarse, the newest runs last */
    struct receipt_seen seen[RECEIPT_SEEN_MAX];
    /* What the byte budget made go, so that this save found room. */
    uint32_t lowered_sessions, removed_snapshots, removed_sessions;
    uint64_t given_bytes;
    float fingerprint_max_diff; /* over the recorded top logits */
    uint32_t needles_recorded, needles_asked, needles_passed, needles_kept;
    uint32_t probes_tried, probes_kept;     /* save: spans asked, and those that can fail */
    uint32_t probes_asked, probes_passed;   /* restore: of those kept */
    uint64_t probes_ns;                     /* part of the proof's time */
    uint64_t stage_ns[RECEIPT_STAGE_COUNT]; /* busy time; of several threads each one's share */
    uint64_t blocked_ns;                    /* of a save: nobody steps for that long at most */
    uint64_t wall_ns;
    /* Of wall: a restore's read, unzip, copy and digest, side by side; of those of a proof that
     * follows the layers only what it does not hide. */
    uint64_t load_ns;
    struct receipt_layers layers;
    uint32_t unzip_threads;      /* that shared that stage */
    enum receipt_stage bound_by; /* the busiest stage */
    char door[16];               /* "io_uring" or "posix" */
    int direct;                  /* O_DIRECT really in force */
    uint32_t in_flight_most;
};

const char *receipt_operation_name(enum receipt_operation operation);
const char *receipt_tiers_name(enum receipt_tiers tiers);
const char *receipt_stage_name(enum receipt_stage stage);
const char *receipt_proof_name(enum receipt_proof proof);
/* Sets bound_by from stage_ns. */
void receipt_finish(struct receipt *receipt);
/* Fills policy and history. `count` is 1 … IMAGE_POLICIES_MAX. */
void receipt_history(struct receipt *receipt, const struct image_policy_change *policies,
                     uint32_t count);

#endif
