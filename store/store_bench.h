/* store/store_bench.h - how fast this store is on this disk, beside plain I/O.
 *
 * Responsible for: writing and reading back incompressible extents through a fresh store, and the
 * same bytes through plain files on the same file system, in turns; counting syncs and commits.
 * Not responsible for: printing; deciding whether the figure is good.
 *
 * Threads: one call at a time.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_BENCH_H
#define STORE_STORE_BENCH_H

#include "store/store.h"

enum { STORE_BENCH_PAIRS_MIN = 12, STORE_BENCH_PAIRS_MAX = 128, STORE_BENCH_SESSIONS = 9 };

struct store_bench_options {
    struct store_options store; /* `dir` must not exist: it is made and removed again */
    uint64_t total_bytes;       /* [16 MiB, 64 GiB] */
    uint64_t extent_bytes;      /* a multiple of 4 KiB up to 16 MiB */
    uint64_t batch_bytes;       /* committed at a time; total ÷ batch pairs are measured, within
                                   the limits above */
    uint64_t seed;
    void (*progress)(void *context, uint64_t done, uint64_t all); /* pairs; NULL is allowed */
    void *context;
};

struct store_bench_rate {
    uint64_t bytes;
    uint64_t ns; /* never 0 on KV_OK */
    uint64_t operations;
    uint64_t in_flight_max;
};

/* Over all pairs; `p99` is on the bad side: 99 of 100 pairs are at least as good. */
struct store_bench_ratio {
    double median;
    double p99;
};

struct store_bench_result {
    const char *door_name;
    int direct;
    char fallback[160];
    uint32_t pairs; /* the two sides of each in turns, which first taking turns too */
    uint64_t batch_bytes;
    struct store_bench_rate write; /* begin of a batch to acknowledged commit */
    uint64_t write_wait_ns, write_sync_ns, write_index_ns; /* of its time: waiting for writes,
                                                              fdatasync, index commit */
    struct store_bench_rate read;                          /* store_read without digests */
    struct store_bench_rate read_check;                    /* store_read with digests */
    /* One thread, 1 MiB at a time, O_DIRECT where possible; a new file for every pair, its space
     * taken, written and synced by one fdatasync. */
    struct store_bench_rate plain_write;
    struct store_bench_rate plain_read;
    int plain_direct;
    /* Speed over the plain file's: more is better. */
    struct store_bench_ratio write_speed, read_speed, read_check_speed;
    /* Wall of one batch with the changes of nine sessions over one with those of one session: less
     * is better. A session's change is 64 KiB (a turn without a new block), where the commit is
     * what costs, or 2 MiB (a block), where nine times the bytes cost nine times as much. There the
     * last one counts: the same batch over a plain file of as many bytes. */
    struct store_bench_ratio nine_turns, nine_blocks, nine_blocks_plain;
    /* Counted over all batches above. */
    uint64_t batches, index_commits, segments, syncs;
};

/* KV_ERR_INVALID sizes, KV_ERR_EXISTS dir is there, KV_ERR_PROOF nothing was measured (a figure
 * without bytes is never reported) or a batch took more syncs or commits than it may, else as
 * store_open, store_batch_commit and store_read. */
enum kv_err store_bench(const struct store_bench_options *options, struct store_bench_result *out,
                        struct kv_diag *diag);

#endif
