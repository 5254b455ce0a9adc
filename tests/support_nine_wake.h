/* tests/support_nine_wake.h - what a wake costs, and what it is measured against in the same run.
 *
 * Responsible for: this device's copy rate; a prefill of the same length; wakes of one session from
 * the disk, eagerly and from memory up to the first token, while nobody else works; in turns with
 * them a plain reader and a pinned copy of as many bytes.
 * Not responsible for: the plain reader itself (support_nine_life.h), printing (nine.c).
 *
 * Threads: the scheduler thread.
 * Units: nanoseconds, bytes, tokens.
 */
#ifndef TESTS_SUPPORT_NINE_WAKE_H
#define TESTS_SUPPORT_NINE_WAKE_H

#include "tests/support_nine_life.h"

/* Bytes read and written per second by a copy from device to device; 0: why says why not. */
double nine_copy_rate(enum engine_device device, const char **why_out);

/* Chunks of 256 tokens at several depths of one session under nine->policy. The time of a chunk is
 * taken to grow along straight lines from one depth to the next. */
enum { NINE_PREFILL_DEPTHS = 5, NINE_PREFILL_CHUNKS = 4 };
struct nine_prefill {
    uint64_t depths[NINE_PREFILL_DEPTHS]; /* the middle of what was prefilled there */
    double chunk_ms[NINE_PREFILL_DEPTHS]; /* the median */
    uint32_t chunks;                      /* prefilled at each depth */
    double seconds;                       /* of settings.tokens, added up from these */
};
enum kv_err nine_prefill_run(struct nine *nine, struct nine_prefill *prefill_out,
                             struct kv_diag *diag);
double nine_prefill_chunk_ms(const struct nine_prefill *prefill, uint64_t depth);

enum nine_wake_kind { NINE_EXACT, NINE_EAGER, NINE_RAM, NINE_WAKE_KINDS };
struct nine_wake {
    uint64_t wake_ns, first_ns;     /* until it is there; until its first token */
    uint64_t door_bytes, ram_bytes; /* read */
};
struct nine_wakes {
    uint32_t user;
    struct nine_wake kinds[NINE_WAKE_KINDS][NINE_PAIRS];
    struct receipt receipts[NINE_WAKE_KINDS]; /* the last ones */
    struct receipt_layers layers[NINE_PAIRS]; /* of those from memory */
    struct nine_plain plain[NINE_PAIRS];      /* after each exact wake, of its bytes */
    uint64_t copy_bytes, copy_ns[NINE_PAIRS];
    uint32_t wakes, proven;
    char first_unproven[NINE_TEXT_BYTES];
};
/* Of the longest user who is awake; the RAM tier is open. Afterwards it is awake and whole. */
enum nine_wakes_of { NINE_WAKES_DISK = 1, NINE_WAKES_MEMORY = 2 }; /* disk: eager too */
enum kv_err nine_wakes_run(struct nine *nine, uint32_t of, struct nine_wakes *wakes_out,
                           struct kv_diag *diag);
/* The median, by wake_ns. */
struct nine_wake nine_wakes_median(const struct nine_wakes *wakes, enum nine_wake_kind kind);

#endif
