/* engine/device/device.h - the door to what computes: memory and one call per operation.
 *
 * Responsible for: the operation table that host and accelerator fill in, and the time per class of
 * operation.
 * Not responsible for: what is computed (kernels/ops.h, kernels/kvops.h), or when.
 *
 * A call may return before its work is done only on a device that says so in its own file; on the
 * host every call returns with the result in place.
 *
 * Threads: the scheduler thread.
 * Units: bytes; nanoseconds.
 * Errors: NOMEM (memory, threads), INVALID (settings), DEVICE (the machine failed).
 */
#ifndef ENGINE_DEVICE_DEVICE_H
#define ENGINE_DEVICE_DEVICE_H

#include "kernels/kvops.h"
#include "kernels/ops.h"
#include "store/base/alloc.h"
#include "store/base/clock.h"
#include "store/base/diag.h"

enum device_class {
    DEVICE_EMBED,
    DEVICE_NORM,
    DEVICE_MATMUL,
    DEVICE_HEAD, /* the matrix product that gives logits */
    DEVICE_ROPE,
    DEVICE_PREFILL, /* attention of a chunk */
    DEVICE_DECODE,  /* attention of single rows, combine included */
    DEVICE_SWIGLU,
    DEVICE_SEAL,
    DEVICE_APPEND,
    DEVICE_CLASS_COUNT
};

/* Rows of a chunk into one BF16 page: tokens [page_token, page_token + count) of the page, at most
 * up to its end. chunk is [layer][K, V][kv_head][chunk_rows][dim]. Item: a layer. */
struct device_append {
    struct kvops_pool pool;
    const uint16_t *chunk;
    uint32_t chunk_rows;
    uint32_t first_row;
    uint32_t count;
    struct kvops_page page;
    uint32_t page_token;
};

struct device_matmuls { /* products that do not depend on each other */
    const struct ops_matmul *args;
    uint32_t count; /* 1 … DEVICE_MATMULS_MAX */
    enum device_class class;
};
enum { DEVICE_MATMULS_MAX = 4 };

struct device;
struct device_ops {
    void (*close)(struct device *device);
    void *(*get)(struct device *device, uint64_t bytes);
    void (*put)(struct device *device, void *memory);
    void (*fill)(struct device *device, void *at, uint16_t pattern, uint64_t bytes);
    enum kv_err (*scratch)(struct device *device, uint64_t bytes);
    void (*embed)(struct device *device, const struct ops_embed *args);
    void (*rmsnorm)(struct device *device, const struct ops_rmsnorm *args);
    void (*matmul)(struct device *device, const struct device_matmuls *args);
    void (*rope)(struct device *device, const struct ops_rope *args);
    void (*swiglu)(struct device *device, const struct ops_swiglu *args);
    void (*prefill)(struct device *device, const struct kvops_attend *args);
    void (*decode)(struct device *device, const struct kvops_attend *args);
    void (*seal)(struct device *device, const struct kvops_seal *args);
    void (*append)(struct device *device, const struct device_append *args);
    uint64_t (*fma_rate)(struct device *device, uint64_t iterations);
};

/* The head of every device; an implementation has it as its first member. */
struct device {
    const struct device_ops *ops;
    const struct kv_clock *clock;
    const char *kind;      /* "host-c", "host-avx2": part of the numerics id */
    const char *simd_name; /* "c", "avx2" */
    uint32_t threads;
    uint64_t busy_ns[DEVICE_CLASS_COUNT]; /* since open or device_profile_reset */
};

enum device_simd { DEVICE_SIMD_AUTO, DEVICE_SIMD_C, DEVICE_SIMD_AVX2 };
struct device_host_settings {
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    enum device_simd simd;
    uint32_t threads;
};
/* INVALID also when AVX2 is asked for on a machine without it. */
enum kv_err device_host_open(const struct device_host_settings *settings,
                             struct device **device_out, struct kv_diag *diag);
void device_close(struct device *device); /* NULL is allowed */

/* Device memory, 4 KiB aligned, content undefined; NULL when there is none. */
void *device_get(struct device *device, uint64_t bytes);
void device_put(struct device *device, void *memory);
/* Fills with a 16-bit pattern; bytes is even. */
void device_fill(struct device *device, void *at, uint16_t pattern, uint64_t bytes);
/* From now on operations may need up to `bytes` of scratch per thread. NOMEM. */
enum kv_err device_scratch(struct device *device, uint64_t bytes);

void device_embed(struct device *device, const struct ops_embed *args);
void device_rmsnorm(struct device *device, const struct ops_rmsnorm *args);
void device_matmul(struct device *device, const struct device_matmuls *args);
void device_rope(struct device *device, const struct ops_rope *args);
void device_swiglu(struct device *device, const struct ops_swiglu *args);
void device_prefill(struct device *device, const struct kvops_attend *args);
/* Partial sums and their combination. */
void device_decode(struct device *device, const struct kvops_attend *args);
void device_seal(struct device *device, const struct kvops_seal *args);
void device_append(struct device *device, const struct device_append *args);
/* ops_table.fma_rate on every thread at once; floating-point operations done. */
uint64_t device_fma_rate(struct device *device, uint64_t iterations);

void device_profile_reset(struct device *device);
const char *device_class_name(enum device_class class);

#endif
