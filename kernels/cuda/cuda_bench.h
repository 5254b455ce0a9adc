/* kernels/cuda/cuda_bench.h - speed of decode attention, alone and inside a whole decode step.
 *
 * Responsible for: this card's copy and read rates; attention of 32 layers at several tiers and
 * batch sizes; the decode step of the Llama-3.1-8B geometry with random weights in one CUDA graph;
 * checks of the same run's answers.
 * Not responsible for: printing, other programs' kernels (tools/gpu_peer.py).
 *
 * A case is reported only if its answers were checked and right: attention against the host twin,
 * sampled outputs of the matrix products against double precision, norm and SwiGLU bit for bit, and
 * the logits of the first sequence in every batch bit for bit. Stored bytes are those of the tiers
 * read, META, window and sinks. Owns all its memory; of the card as much as the cases need.
 *
 * Threads: one call at a time.
 * Units: bytes, milliseconds, bytes per second.
 */
#ifndef KERNELS_CUDA_CUDA_BENCH_H
#define KERNELS_CUDA_CUDA_BENCH_H

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
    double copy_rate; /* device to device, read plus written */
    double read_rate; /* the best pure-read kernel */
};

enum cuda_bench_kind { CUDA_BENCH_ATTENTION, CUDA_BENCH_STEP, CUDA_BENCH_IN_STEP, CUDA_BENCH_SEAL };

struct cuda_bench_result {
    enum cuda_bench_kind kind;
    const char *tier; /* "K8V4", "K6V4", "by age", "BF16" */
    uint32_t batch;   /* sequences */
    uint32_t tokens;  /* of each */
    double kv_bytes;  /* stored, read per step */
    double all_bytes; /* with weights where the case reads them */
    double median_ms;
    double p99_ms;
    double of_copy; /* step: all_bytes at the copy rate over the time; else that of kv_bytes */
    double of_read;
    double error; /* relative, attention to the host twin; 0 where the bits are compared */
    uint32_t repeats;
};

struct cuda_bench_options {
    uint32_t tokens;    /* 1024 .. CUDA_BENCH_TOKENS_MAX, a multiple of 256 */
    uint32_t batch_max; /* 1 .. CUDA_BENCH_BATCH_MAX; less where the memory ends sooner */
    uint32_t repeats;   /* 3 .. CUDA_BENCH_REPEATS_MAX */
    void (*device)(void *context, const struct cuda_bench_device *device); /* first and once */
    void (*result)(void *context, const struct cuda_bench_result *result);
    void *context;
};

/* NULL, or what went wrong (static text): a CUDA error, no device, too little memory, or "wrong
 * answer: ...". After a wrong answer no further case is reported. */
const char *cuda_bench_run(const struct cuda_bench_options *options);

#ifdef __cplusplus
}
#endif

#endif
