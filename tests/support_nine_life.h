/* tests/support_nine_life.h - more sessions than are awake: random sleep and wake beside decoding.
 *
 * Responsible for: putting one to sleep and waking another, over and over, with rests between; what
 * each wake proved; a plain reader of the same bytes.
 * Not responsible for: who they are (support_nine.h), who decodes meanwhile and gaps between steps
 * (support_nine_decode.h), printing (nine.c).
 *
 * Threads: the caller's, which has the baton while it sleeps and wakes sessions, and one more.
 * Units: nanoseconds, bytes.
 */
#ifndef TESTS_SUPPORT_NINE_LIFE_H
#define TESTS_SUPPORT_NINE_LIFE_H

#include "tests/support_nine_decode.h"

enum { NINE_WAKES_MAX = 4096, NINE_PAIRS = 9 };

struct nine_move {
    uint64_t sleep_ns, wake_ns, sleep_bytes, wake_bytes;
};
struct nine_plain {
    uint64_t ns, bytes;
    int direct; /* 0: the file system refuses O_DIRECT */
};
struct nine_life {
    struct nine_seen seen;
    struct nine_move moves[NINE_WAKES_MAX];
    uint32_t move_count;
    uint32_t wakes, proven;
    char first_unproven[NINE_TEXT_BYTES];
    struct receipt last;     /* of the last wake */
    struct nine_score score; /* of all sessions, at the end */
};

/* 1 when a receipt of a wake proves it: digests, equal bits, nothing prefilled, all needles. */
int nine_wake_proven(const struct receipt *receipt, char text_out[NINE_TEXT_BYTES]);
/* 1 when all needles were asked plain and with the hole before it slept, passed and were kept. */
int nine_sleep_kept(const struct receipt *receipt);

/* Lives for `seconds` with everybody of `users` who is awake, then asks all sessions everything.
 * All exist, at least one is awake and one asleep; the store is open. */
enum kv_err nine_live(struct nine *nine, double seconds, struct nine_life *life,
                      struct kv_diag *diag);
/* Counted in nine->sleeps and, when it kept all needles, in sleeps_kept. */
enum kv_err nine_sleep(struct nine *nine, uint32_t index, struct receipt *receipt_out,
                       struct kv_diag *diag);
/* Reads `bytes` of the store's segments, one thread, 1 MiB at a time, O_DIRECT. */
enum kv_err nine_read_plain(const struct nine *nine, uint64_t bytes, struct nine_plain *plain_out,
                            struct kv_diag *diag);
void nine_life_release(struct nine_life *life);

#endif
