/* engine/device/device.h - the door to what computes: memory and one call per operation.
 *
 * Responsible for: the operation table that host and accelerator fill in, memory, copies, digests
 * where bytes lie, and the time per class of operation.
 * Not responsible for: what is computed (kernels/ops.h, kernels/kvops.h), or when.
 *
 * What device_get returns is an address of the device: only device calls may follow it. Every
 * pointer in an argument struct, and in what it points at, is such an address. The structs
 * themselves are read during the call.
 *
 * Operations run in order, maybe after the call has returned. Copies and digests belong to a lane:
 * those of DEVICE_STEP keep the order of operations, the other lanes run beside them and see what
 * operations did before the last wait or copy out of DEVICE_STEP, and what each other copied before
 * its last wait. An operation that fails makes the next copy out, digest or wait of its lane return
 * DEVICE; after device->lost every one does.
 *
 * Threads: the scheduler thread; each other lane one thread at a time.
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
#include "store/base/digest.h"

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
    DEVICE_FINITE,
    DEVICE_TOP,
    DEVICE_WAIT, /* waiting for work that was enqueued before */
    DEVICE_CLASS_COUNT
};

enum device_lane {
    DEVICE_STEP,
    DEVICE_OUT,
    DEVICE_IN,
    DEVICE_LENT,  /* copies in of memory that stays as it is until the lane was waited for */
    DEVICE_CHECK, /* digests */
    DEVICE_LANE_COUNT
};

struct device_copy {
    void *to;
    const void *from;
    uint64_t bytes;
};

/* An extent in equal parts, in order (store/base/digest.h); bytes a multiple of 1,024. */
struct device_extent {
    const void *part[LAYOUT_BLOCK_SLOTS];
    uint64_t part_bytes;
    uint32_t part_count;
};

/* A 16-bit pattern for equal parts, read during the call; part_bytes a multiple of 16. */
struct device_fill {
    void *const *part;
    uint32_t part_count;
    uint16_t pattern;
    uint64_t part_bytes;
};

/* How a weight is used, which decides how it is held: rows looked up, or a factor. */
enum device_use { DEVICE_TABLE, DEVICE_FACTOR };

struct pinned;
struct device_matmuls { /* products that do not depend on each other */
    const struct ops_matmul *args;
    uint32_t count; /* 1 … DEVICE_MATMULS_MAX */
    /* So many leading rows are single, the others of chunks. A row's bits depend on x, the weights
     * and, where the device says so, which of the two it is: never on the rows beside it. */
    uint32_t singles;
    enum device_class class;
    /* NULL, or the norm that makes the x of all: done first; its y may stay unwritten. */
    const struct ops_rmsnorm *norm;
    /* NULL, or [rows][n] SwiGLU of exactly two, gate and up: done last; their y, contiguous rows,
     * may stay unwritten. The bits are those of the separate operations. */
    float *glu;
};
enum { DEVICE_MATMULS_MAX = 4, DEVICE_TEXT_BYTES = 192 };

struct device;
struct device_ops {
    void (*close)(struct device *device);
    void *(*get)(struct device *device, uint64_t bytes);
    void (*put)(struct device *device, void *memory);
    uint64_t (*room)(struct device *device);
    /* NULL: out of the device's `pinned`; without that none is kept that is special. */
    void *(*host_get)(struct device *device, uint64_t bytes);
    void *(*host_keep)(struct device *device, uint64_t bytes);
    void (*host_put)(struct device *device, void *memory);
    void *(*mapped)(struct device *device, void *at); /* NULL: the processor reaches nothing */
    void (*fill)(struct device *device, const struct device_fill *fill);
    enum kv_err (*copy_in)(struct device *device, enum device_lane lane,
                           const struct device_copy *copies, uint32_t count);
    enum kv_err (*copy_out)(struct device *device, enum device_lane lane,
                            const struct device_copy *copies, uint32_t count);
    enum kv_err (*digest)(struct device *device, enum device_lane lane,
                          const struct device_extent *extents, uint32_t count,
                          struct kv_digest *digests_out);
    enum kv_err (*wait)(struct device *device, enum device_lane lane);
    uint64_t (*sent)(struct device *device, enum device_lane lane); /* NULL: copies never wait */
    enum kv_err (*wait_sent)(struct device *device, enum device_lane lane, uint64_t sent);
    enum kv_err (*scratch)(struct device *device, uint64_t bytes); /* NULL: none is needed */
    uint64_t (*weight_bytes)(enum device_use use, enum ops_type type, uint32_t n, uint32_t k);
    enum kv_err (*weight_load)(struct device *device, enum device_use use,
                               struct ops_weight *weight, const uint8_t *tensor);
    int (*repeat_begin)(struct device *device, uint64_t shape);
    void (*repeat_end)(struct device *device);
    void (*plan)(struct device *device, uint32_t plan, const struct kvops_attend *singles);
    void (*embed)(struct device *device, const struct ops_embed *args);
    void (*rmsnorm)(struct device *device, const struct ops_rmsnorm *args);
    void (*matmul)(struct device *device, const struct device_matmuls *args);
    int matmul_around; /* 1 when it does norm and glu; otherwise it never sees them */
    void (*rope)(struct device *device, const struct ops_rope *args);
    void (*swiglu)(struct device *device, const struct ops_swiglu *args);
    void (*finite)(struct device *device, const struct ops_finite *args);
    void (*top)(struct device *device, const struct ops_top *args); /* NULL: see device_has_top */
    void (*prefill)(struct device *device, const struct kvops_attend *args, uint32_t rows_max,
                    enum layout_tier tier);
    void (*decode)(struct device *device, const struct kvops_attend *args);
    void (*seal)(struct device *device, const struct kvops_seal *args);
    enum kv_err (*append)(struct device *device, const struct kvops_append *args);
    uint64_t (*fma_rate)(struct device *device, uint64_t iterations); /* NULL: not measured */
};

/* The head of every device; an implementation has it as its first member. */
struct device {
    const struct device_ops *ops;
    const struct kv_clock *clock;
    struct pinned *pinned;        /* memory of the processor; or NULL */
    const char *kind;             /* "host-c", "cuda-sm90": part of the numerics id … */
    const char *weight_path;      /* … as is how weights are multiplied with … */
    const char *details;          /* … and what else decides the bits: "" on the host */
    const char *simd_name;        /* "c", "avx2", "cuda" */
    char name[DEVICE_TEXT_BYTES]; /* for people … */
    char note[DEVICE_TEXT_BYTES]; /* … as is what makes it slower than it could be, or "" */
    uint32_t threads;
    int apart;                            /* a table and a factor never share one weight */
    int lost;                             /* nothing works any more: close and open again */
    uint64_t faults;                      /* of operations so far, whoever was told of them */
    char trouble[DEVICE_TEXT_BYTES];      /* what failed last */
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

struct device_cuda_settings {
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    uint32_t index;
    uint64_t memory_bytes; /* reserved at once, at most; UINT64_MAX: nearly all that is free */
    uint64_t enough_bytes; /* as much will do; UINT64_MAX: unknown */
    int graphs;            /* 0: every step is enqueued call by call; the bits are the same */
};
/* NOT_FOUND: no such device, or a program built without CUDA. */
enum kv_err device_cuda_open(const struct device_cuda_settings *settings,
                             struct device **device_out, struct kv_diag *diag);
int device_cuda_built(void);
void device_close(struct device *device); /* NULL is allowed */

/* Device memory, 4 KiB aligned, content undefined; NULL when there is none. */
void *device_get(struct device *device, uint64_t bytes);
void device_put(struct device *device, void *memory);
/* Bytes that device_get could still give in one piece; UINT64_MAX: nobody knows. */
uint64_t device_room(struct device *device);
/* Memory of the processor, 4 KiB aligned, from and to which copies are fastest. */
void *device_host_get(struct device *device, uint64_t bytes);
/* The same for very many that stay long; NULL: ordinary memory serves as well, or none is left. */
void *device_host_keep(struct device *device, uint64_t bytes);
void device_host_put(struct device *device, void *memory);
/* Where the processor itself reads and writes what lies at `at`; NULL where it cannot. */
void *device_mapped(struct device *device, void *at);
/* In the order of operations and before whatever a later call copies in. Many parts at once cost
 * hardly more than one. */
void device_fill(struct device *device, const struct device_fill *fill);
/* From the processor's memory, whose content has been taken when it returns, or is lent. What is
 * lent may keep others waiting for as long as it takes, but not a call of up to so many bytes. */
enum { DEVICE_SMALL_BYTES = 1 << 20 };
enum kv_err device_copy_in(struct device *device, enum device_lane lane,
                           const struct device_copy *copies, uint32_t count);
/* To the processor's memory; the bytes are there when it returns KV_OK. */
enum kv_err device_copy_out(struct device *device, enum device_lane lane,
                            const struct device_copy *copies, uint32_t count);
enum kv_err device_digest(struct device *device, enum device_lane lane,
                          const struct device_extent *extents, uint32_t count,
                          struct kv_digest *digests_out);
/* Everything of the lane has ended. */
enum kv_err device_wait(struct device *device, enum device_lane lane);
/* How much DEVICE_LENT was given so far, in a unit of the device's own; and what was given up to
 * then has ended, while more may be on its way. DEVICE is said, and said again by device_wait. */
uint64_t device_sent(struct device *device, enum device_lane lane);
enum kv_err device_wait_sent(struct device *device, enum device_lane lane, uint64_t sent);
/* From now on operations may need up to `bytes` of scratch per thread. NOMEM. */
enum kv_err device_scratch(struct device *device, uint64_t bytes);

/* Bytes as the device holds it, or 0 when it cannot. load fills device memory at weight->bytes from
 * the tensor as the file has it, and may change weight->type to the one it holds. */
uint64_t device_weight_bytes(struct device *device, enum device_use use, enum ops_type type,
                             uint32_t n, uint32_t k);
enum kv_err device_weight_load(struct device *device, enum device_use use,
                               struct ops_weight *weight, const uint8_t *tensor);

/* A sequence of operations that comes again with equal arguments (what they point at may differ)
 * whenever `shape` and the plan are of the same form. 0: a recording has been run in its place, and
 * neither the operations nor device_repeat_end are to be called. */
int device_repeat_begin(struct device *device, uint64_t shape);
void device_repeat_end(struct device *device);

/* Before the layers of a step: its single rows as the processor sees them, host pointers all
 * through. Layer, q, out and partials are not looked at. DEVICE_PLANS are kept, so that who takes
 * turns needs no other each time; what repeats is of plan 0. */
enum { DEVICE_PLANS = 2 };
void device_plan(struct device *device, uint32_t plan, const struct kvops_attend *singles);
void device_embed(struct device *device, const struct ops_embed *args);
void device_rmsnorm(struct device *device, const struct ops_rmsnorm *args);
void device_matmul(struct device *device, const struct device_matmuls *args);
void device_rope(struct device *device, const struct ops_rope *args);
void device_finite(struct device *device, const struct ops_finite *args);
/* Worth it only where logits are far from who samples: 0 where they are as quick to read. */
int device_has_top(const struct device *device);
void device_top(struct device *device, const struct ops_top *args);
/* rows_max: the largest row_count of the sequences. tier: of any of their blocks; all are FP8, all
 * K8I4, or none is either. */
void device_prefill(struct device *device, const struct kvops_attend *args, uint32_t rows_max,
                    enum layout_tier tier);
/* Partial sums and their combination, of the sequences planned last. */
void device_decode(struct device *device, const struct kvops_attend *args);
void device_seal(struct device *device, const struct kvops_seal *args);
/* DEVICE: the rows are not there. */
enum kv_err device_append(struct device *device, const struct kvops_append *args);
/* ops_table.fma_rate on every thread at once; floating-point operations done, 0: not measured. */
uint64_t device_fma_rate(struct device *device, uint64_t iterations);

void device_profile_reset(struct device *device);
const char *device_class_name(enum device_class class);

#endif
