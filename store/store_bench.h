/* store/store_bench.h - how fast this store is on this disk, beside plain I/O.
 *
 * Responsible for: writing and reading back incompressible extents through a fresh store, and the
 * same amount of bytes through a plain file on the same file system, in one run.
 * Not responsible for: printing; deciding whether the figure is good.
 *
 * Threads: one call at a time.
 * Units: bytes, nanoseconds.
 */
#ifndef STORE_STORE_BENCH_H
#define STORE_STORE_BENCH_H

#include "store/store.h"

struct store_bench_options {
    struct store_options store; /* `dir` must not exist: it is made and removed again */
    uint64_t total_bytes;       /* [16 MiB, 64 GiB], rounded down to whole extents */
    uint64_t extent_bytes;      /* a multiple of 4 KiB up to 16 MiB */
    uint64_t batch_bytes;       /* committed at a time */
    uint64_t seed;
};

struct store_bench_rate {
    uint64_t bytes;
    uint64_t ns; /* never 0 on KV_OK */
    uint64_t operations;
    uint64_t in_flight_max;
};

struct store_bench_result {
    const char *door_name;
    int direct;
    char fallback[160];
    struct store_bench_rate write;      /* put to acknowledged commit, all batches */
    struct store_bench_rate read;       /* store_read without digests */
    struct store_bench_rate read_check; /* store_read with digests */
    struct store_bench_rate
        plain_write; /* one thread, O_DIRECT where possible, 1 MiB, one fdatasync */
    struct store_bench_rate plain_read;
    int plain_direct;
};

/* KV_ERR_INVALID sizes, KV_ERR_EXISTS dir is there, KV_ERR_PROOF nothing was measured (a figure
 * without bytes is never reported), else as store_open, store_batch_commit and store_read. */
enum kv_err store_bench(const struct store_bench_options *options, struct store_bench_result *out,
                        struct kv_diag *diag);

#endif
