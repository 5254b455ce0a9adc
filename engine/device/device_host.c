/* engine/device/device_host.c - the processor as a device.
 *
 * Responsible for: memory out of struct kv_alloc, choosing plain C or AVX2 once, splitting the
 * items of each operation over the worker threads, scratch per thread.
 * Not responsible for: the arithmetic (kernels/host/).
 */
#include "engine/device/device.h"
#include "engine/device/workers.h"
#include "store/base/bytes.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

enum { SCRATCH_ROUND_BYTES = 4096, SCRATCH_ALIGN_BYTES = 64, SMALL_VALUES = 16384 };

struct host {
    struct device device;
    const struct kv_alloc *alloc;
    const struct ops_table *ops;
    const struct kvops_table *kvops;
    struct workers *workers;
    uint8_t *scratch; /* [thread][scratch_bytes] */
    uint64_t scratch_bytes;
};

static struct host *host_of(struct device *device) {
    return (struct host *)device;
}

static void *scratch_of(struct host *host, uint32_t thread) {
    return host->scratch + thread * host->scratch_bytes;
}

static void host_close(struct device *device) {
    struct host *host = host_of(device);

    workers_drop(host->workers);
    kv_alloc_release(host->alloc, host->scratch);
    kv_alloc_release(host->alloc, host);
}

/* Attention jumps from page to page of a stream: with small pages of memory the look-up of
 * addresses costs about as much as the bytes. */
static void *host_get(struct device *device, uint64_t bytes) {
    return kv_alloc_large(host_of(device)->alloc, bytes);
}

static void host_put(struct device *device, void *memory) {
    kv_alloc_release(host_of(device)->alloc, memory);
}

static uint64_t host_room(struct device *device) {
    (void)device;
    return UINT64_MAX;
}

static void *host_mapped(struct device *device, void *at) {
    (void)device;
    return at;
}

static enum kv_err host_copy(struct device *device, enum device_lane lane,
                             const struct device_copy *copies, uint32_t count) {
    (void)device;
    (void)lane;
    for (uint32_t i = 0; i < count; i++)
        memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    return KV_OK;
}

static enum kv_err host_digest(struct device *device, enum device_lane lane,
                               const struct device_extent *extents, uint32_t count,
                               struct kv_digest *digests_out) {
    (void)device;
    (void)lane;
    for (uint32_t i = 0; i < count; i++) {
        struct kv_digest_state state;
        kv_digest_init(&state);
        for (uint32_t part = 0; part < extents[i].part_count; part++)
            kv_digest_update(&state, extents[i].part[part], extents[i].part_bytes);
        digests_out[i] = kv_digest_final(&state);
    }
    return KV_OK;
}

static enum kv_err host_wait(struct device *device, enum device_lane lane) {
    (void)device;
    (void)lane;
    return KV_OK;
}

static uint64_t host_weight_bytes(enum device_use use, enum ops_type type, uint32_t n, uint32_t k) {
    (void)use;
    return ops_weight_bytes(type, n, k);
}

static enum kv_err host_weight_load(struct device *device, enum device_use use,
                                    struct ops_weight *weight, const uint8_t *tensor) {
    (void)device;
    (void)use;
    ops_weight_pack(weight, tensor, (uint8_t *)weight->bytes, 0,
                    (weight->n + OPS_PANEL - 1) / OPS_PANEL);
    return KV_OK;
}

static int host_repeat_begin(struct device *device, uint64_t shape) {
    (void)device;
    (void)shape;
    return 1;
}

static void host_repeat_end(struct device *device) {
    (void)device;
}

static void host_plan(struct device *device, uint32_t plan, const struct kvops_attend *singles) {
    (void)device;
    (void)plan;
    (void)singles;
}

static void host_fill(struct device *device, const struct device_fill *fill) {
    (void)device;
    for (uint32_t part = 0; part < fill->part_count; part++) {
        uint16_t *values = (uint16_t *)fill->part[part];
        for (uint64_t i = 0; i < fill->part_bytes / 2; i++)
            values[i] = fill->pattern;
    }
}

static enum kv_err host_scratch(struct device *device, uint64_t bytes) {
    struct host *host = host_of(device);
    uint64_t total;
    uint8_t *scratch;

    bytes = kv_round_up(bytes, SCRATCH_ROUND_BYTES);
    if (bytes <= host->scratch_bytes)
        return KV_OK;
    if (!kv_mul_u64(bytes, device->threads, &total))
        return KV_ERR_NOMEM;
    scratch = kv_alloc_aligned(host->alloc, total, SCRATCH_ALIGN_BYTES);
    if (!scratch)
        return KV_ERR_NOMEM;
    kv_alloc_release(host->alloc, host->scratch);
    host->scratch = scratch;
    host->scratch_bytes = bytes;
    return KV_OK;
}

/* Each operation is a small adapter from (context, items, thread) to the kernel's call. */
struct task {
    struct host *host;
    const void *args;
};

static void embed_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    (void)thread;
    task->host->ops->embed(task->args, first, end, NULL);
}

static void rmsnorm_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    (void)thread;
    task->host->ops->rmsnorm(task->args, first, end, NULL);
}

static void rope_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    (void)thread;
    task->host->ops->rope(task->args, first, end, NULL);
}

static void swiglu_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    (void)thread;
    task->host->ops->swiglu(task->args, first, end, NULL);
}

/* Items of several products stand one after another. */
static void matmul_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;
    const struct device_matmuls *all = task->args;
    uint32_t base = 0;

    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t items = ops_matmul_items(&all->args[i]);
        uint32_t from = first > base ? first - base : 0;
        uint32_t to = end > base ? end - base : 0;
        to = to < items ? to : items;
        if (from < to)
            task->host->ops->matmul(&all->args[i], from, to, scratch_of(task->host, thread));
        base += items;
    }
}

static void prefill_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    task->host->kvops->prefill(task->args, first, end, scratch_of(task->host, thread));
}

static void decode_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    task->host->kvops->decode(task->args, first, end, scratch_of(task->host, thread));
}

static void combine_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    task->host->kvops->combine(task->args, first, end, scratch_of(task->host, thread));
}

static void seal_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    task->host->kvops->seal(task->args, first, end, scratch_of(task->host, thread));
}

static void append_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    (void)thread;
    task->host->kvops->append(task->args, first, end);
}

static void finite_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct task *task = context;

    (void)thread;
    task->host->ops->finite(task->args, first, end, NULL);
}

static void run(struct device *device, uint32_t items, uint32_t grain, workers_call call,
                const void *args) {
    struct task task = {host_of(device), args};

    workers_run(task.host->workers, items, grain, call, &task);
}

/* Items per part such that a part is worth handing to another thread. */
static uint32_t grain_of(uint64_t values_per_item) {
    uint64_t grain = SMALL_VALUES / (values_per_item ? values_per_item : 1);

    return grain ? (uint32_t)grain : 1;
}

static void host_embed(struct device *device, const struct ops_embed *args) {
    run(device, ops_embed_items(args), grain_of(args->table.k), embed_items, args);
}

static void host_rmsnorm(struct device *device, const struct ops_rmsnorm *args) {
    run(device, ops_rmsnorm_items(args), grain_of(args->width), rmsnorm_items, args);
}

static void host_matmul(struct device *device, const struct device_matmuls *args) {
    uint32_t items = 0;

    for (uint32_t i = 0; i < args->count; i++) {
        assert(ops_matmul_scratch_bytes(&args->args[i]) <= host_of(device)->scratch_bytes);
        items += ops_matmul_items(&args->args[i]);
    }
    run(device, items, 1, matmul_items, args);
}

static void host_rope(struct device *device, const struct ops_rope *args) {
    uint64_t width = (uint64_t)(args->q_heads + 2 * args->kv_heads) * args->head_dim;

    run(device, ops_rope_items(args), grain_of(width), rope_items, args);
}

static void host_swiglu(struct device *device, const struct ops_swiglu *args) {
    uint32_t items = ops_swiglu_items(args);

    run(device, items, grain_of(items ? args->count / items * 4 : 1), swiglu_items, args);
}

static void host_finite(struct device *device, const struct ops_finite *args) {
    run(device, ops_finite_items(args), grain_of(args->width), finite_items, args);
}

static void host_prefill(struct device *device, const struct kvops_attend *args, uint32_t rows_max,
                         enum layout_tier tier) {
    (void)rows_max;
    (void)tier;
    assert(kvops_prefill_scratch_bytes(args) <= host_of(device)->scratch_bytes);
    run(device, kvops_prefill_items(args), 1, prefill_items, args);
}

static void host_decode(struct device *device, const struct kvops_attend *args) {
    assert(kvops_decode_scratch_bytes(args) <= host_of(device)->scratch_bytes);
    assert(kvops_combine_scratch_bytes(args) <= host_of(device)->scratch_bytes);
    run(device, kvops_decode_items(args), 1, decode_items, args);
    run(device, kvops_combine_items(args), 4, combine_items, args);
}

static void host_seal(struct device *device, const struct kvops_seal *args) {
    assert(kvops_seal_scratch_bytes(args) <= host_of(device)->scratch_bytes);
    run(device, kvops_seal_items(args), 1, seal_items, args);
}

static enum kv_err host_append(struct device *device, const struct kvops_append *args) {
    const struct layout_geometry *geometry = &args->pool.geometry;
    uint64_t values = 2ull * geometry->kv_heads * geometry->head_dim * args->count;

    run(device, kvops_append_items(args), grain_of(values), append_items, args);
    return KV_OK;
}

struct rate {
    struct host *host;
    uint64_t iterations;
    _Atomic uint64_t operations;
};

static void rate_items(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    struct rate *rate = context;

    (void)thread;
    for (uint32_t i = first; i < end; i++)
        atomic_fetch_add(&rate->operations, rate->host->ops->fma_rate(rate->iterations));
}

static uint64_t host_fma_rate(struct device *device, uint64_t iterations) {
    struct rate rate = {host_of(device), iterations / 16 + 1, 0};

    workers_run(rate.host->workers, 16 * device->threads, 1, rate_items, &rate);
    return rate.operations;
}

static const struct device_ops host_ops = {
    .close = host_close,
    .get = host_get,
    .put = host_put,
    .room = host_room,
    .host_get = host_get,
    .host_put = host_put,
    .mapped = host_mapped,
    .fill = host_fill,
    .copy_in = host_copy,
    .copy_out = host_copy,
    .digest = host_digest,
    .wait = host_wait,
    .scratch = host_scratch,
    .weight_bytes = host_weight_bytes,
    .weight_load = host_weight_load,
    .repeat_begin = host_repeat_begin,
    .repeat_end = host_repeat_end,
    .plan = host_plan,
    .embed = host_embed,
    .rmsnorm = host_rmsnorm,
    .matmul = host_matmul,
    .rope = host_rope,
    .swiglu = host_swiglu,
    .finite = host_finite,
    .prefill = host_prefill,
    .decode = host_decode,
    .seal = host_seal,
    .append = host_append,
    .fma_rate = host_fma_rate,
};

enum kv_err device_host_open(const struct device_host_settings *settings,
                             struct device **device_out, struct kv_diag *diag) {
    int avx2 = settings->simd != DEVICE_SIMD_C && ops_cpu_has_avx2();
    struct host *host;
    enum kv_err err;

    if (settings->simd == DEVICE_SIMD_AVX2 && !avx2)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "this processor has no AVX2, FMA and F16C: use plain C");
    host = kv_alloc_zeroed(settings->alloc, 1, sizeof *host);
    if (!host)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the device");
    host->alloc = settings->alloc;
    host->ops = avx2 ? ops_host_avx2() : ops_host_c();
    host->kvops = avx2 ? kvops_host_avx2() : kvops_host_c();
    host->device = (struct device){.ops = &host_ops,
                                   .clock = settings->clock,
                                   .kind = avx2 ? "host-avx2" : "host-c",
                                   .weight_path = "weights as held, fp32 rows, k ascending",
                                   .details = "",
                                   .simd_name = avx2 ? "avx2" : "c",
                                   .name = "the processor",
                                   .threads = settings->threads};
    err = workers_make(settings->alloc, settings->threads, &host->workers, diag);
    if (err != KV_OK) {
        kv_alloc_release(settings->alloc, host);
        return err;
    }
    *device_out = &host->device;
    return KV_OK;
}
