/* kernels/cuda/cuda_bench.h - speed of decode attention, alone and inside a whole decode step.
 *
 * Responsible for: this card's copy and read rates; attention of 32 layers at several tiers and
 * batch sizes; the decode step of the Llama-3.1-8B geometry with random weights in one CUDA graph;
 * prefill, seal, digest and copies of slots; checks of the same run's answers; the goals.
 * Not responsible for: printing, other programs' kernels (tools/gpu_peer.py).
 *
 * A case is reported only if its answers were checked and right: attention against the host twin,
 * sampled outputs of the matrix products against double precision, norm, SwiGLU and seal bit for
 * bit, the logits of the first sequence in every batch bit for bit, a known digest. Two are not:
 * CUDA_BENCH_COPY_WHOLE is reported before anything is looked at, and the blocks that
 * CUDA_BENCH_STEP_SEAL seals are not compared (CUDA_BENCH_SEAL's are). Stored bytes are those of
 * the tiers read, META, window and sinks. Owns all its memory; of the card as much as the cases
 * need.
 *
 * Threads: one call at a time.
 * Units: bytes, milliseconds, bytes per second.
 */
#ifndef KERNELS_CUDA_CUDA_BENCH_H
#define KERNELS_CUDA_CUDA_BENCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_BENCH_BATCH_MAX = 9, CUDA_BENCH_TOKENS_MAX = 131072, CUDA_BENCH_REPEATS_MAX = 1000 };

struct cuda_bench_device {
    char name[256];
    uint32_t multiprocessors;
    uint32_t sm_mhz_max;
    uint32_t memory_mhz;
    double sm_mhz;    /* measured, at work */
    double copy_rate; /* device to device, read plus written */
    double read_rate; /* the best pure-read kernel */
};

enum cuda_bench_kind {
    CUDA_BENCH_ATTENTION,    /* 32 layers one behind the other */
    CUDA_BENCH_STEP,         /* a decode step */
    CUDA_BENCH_IN_STEP,      /* the step less the step without attention */
    CUDA_BENCH_STEP_SEAL,    /* the step, and a block of each sequence sealed */
    CUDA_BENCH_BITS,         /* no time: each sequence of the batch alone, floats that differ */
    CUDA_BENCH_PREFILL,      /* 256 rows that end at `tokens`, 32 layers */
    CUDA_BENCH_SEAL,         /* one block, 32 layers */
    CUDA_BENCH_DIGEST,       /* several GiB … */
    CUDA_BENCH_DIGEST_BLOCK, /* … and one block */
    CUDA_BENCH_COPY_WHOLE,   /* host to device at once … */
    CUDA_BENCH_COPY_SLOTS,   /* … and as slots, to places scattered at random */
    CUDA_BENCH_KINDS
};
static inline const char *cuda_bench_kind_name(enum cuda_bench_kind kind) {
    static const char *const names[CUDA_BENCH_KINDS] = {
        "attention",    "step",   "attention in step", "step and seal", "bits",    "prefill",
        "seal a block", "digest", "digest of a block", "one copy in",   "slots in"};
    return names[kind];
}

struct cuda_bench_result {
    enum cuda_bench_kind kind;
    const char *tier; /* "K8V4", "K6V4", "K6V2", "BF16", "by age", "mixed"; NULL: of none */
    uint32_t batch;   /* sequences; 0: of none */
    uint32_t tokens;  /* of each, at most when ragged */
    int ragged;       /* sequences of nine lengths, a thirty-second of `tokens` to all of it */
    double kv_bytes;  /* stored, read per step */
    double all_bytes; /* with weights where the case reads them */
    double median_ms;
    double p99_ms;
    double of_copy; /* all_bytes at the copy rate over the time */
    double of_read;
    double error;     /* relative, attention to the host twin; 0 where the bits are compared */
    size_t different; /* CUDA_BENCH_BITS */
    double sm_mhz;    /* right after it */
    uint32_t repeats;
};

/* Another program's attention, timed beside this run (tools/gpu_peer.py). */
struct cuda_bench_peer {
    char name[24]; /* "flash", "cudnn" */
    uint32_t rows, tokens;
    double median_us, p99_us; /* of one layer */
};

/* What was aimed at and what was measured, side by side; the sizes of the goals are
 * CUDA_BENCH_TOKENS_MAX tokens and nine sequences. */
struct cuda_bench_goal {
    const char *what;
    double goal, stretch;
    int at_most;  /* 1: a smaller value is better */
    int measured; /* 0: this run had no such case */
    double value;
    int hit;
};

struct cuda_bench_options {
    uint32_t tokens;    /* 1024 .. CUDA_BENCH_TOKENS_MAX, a multiple of 256 */
    uint32_t batch_max; /* 1 .. CUDA_BENCH_BATCH_MAX; less where the memory ends sooner */
    uint32_t repeats;   /* 3 .. CUDA_BENCH_REPEATS_MAX */
    void (*device)(void *context, const struct cuda_bench_device *device); /* first and once */
    const struct cuda_bench_peer *peers;
    uint32_t peer_count;
    /* NULL: only the device and its rates */
    void (*result)(void *context, const struct cuda_bench_result *result);
    void (*goal)(void *context, const struct cuda_bench_goal *goal); /* last, the same every run */
    void *context;
};

int cuda_bench_built(void);
/* NULL, or what went wrong (static text): a CUDA error, no device, too little memory, or "wrong
 * answer: ...". After a wrong answer no further case is reported. */
const char *cuda_bench_run(const struct cuda_bench_options *options);

#ifdef __cplusplus
}
#endif

#endif
