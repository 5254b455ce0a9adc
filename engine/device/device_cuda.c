/* engine/device/device_cuda.c - a CUDA GPU as a device.
 *
 * Responsible for: one reservation of memory, weights as BF16, uploading plans, steps recorded as
 * graphs.
 * Not responsible for: the arithmetic (kernels/cuda/), copies and digests (device_cuda_lanes.h).
 *
 * Operations are enqueued on the stream of DEVICE_STEP and run after the call has returned. A call
 * that CUDA refuses fails the next fetch; an error that sticks to the context is a lost device.
 */
#include "engine/device/arena.h"
#include "engine/device/device.h"
#include "engine/device/device_cuda_lanes.h"
#include "kernels/cuda/cuda_kvops.h"
#include "kernels/cuda/cuda_ops.h"
#include "store/base/bytes.h"

#include "build_id.h"

#include <cuda_runtime_api.h>

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    GRAPHS_MAX = 64,
    RECORD_AFTER = 8,
    UNUSABLE_SHARE = 16 /* without a limit, 1 / so much of the free memory is left to others */
};

/* A recorded step. Recording one takes as long as it saves in some ten steps, so a form that comes
 * by rarely is not worth it; and kernels are loaded by then. */
struct graph {
    struct graph_key {
        uint64_t shape;
        uint32_t ctas, form;
    } key;
    uint32_t seen;
    cudaGraphExec_t exec;
};

struct scratch { /* of operations; it grows and never shrinks */
    uint8_t *at;
    uint64_t bytes;
};

/* Units begin at an address of their own, so that every step of one form has them there. */
struct plan {
    struct cuda_kvops_plan made;
    uint64_t bytes, known[CUDA_KVOPS_PLAN_KNOWN];
    uint8_t *host, *head, *units; /* `bytes` each; the last two on the device */
};

struct cuda {
    struct device device;
    const struct kv_alloc *alloc;
    int graphs_wanted, multiprocessors;
    char kind[32], details[64 + sizeof BUILD_CUDA_FLAGS + CUDA_GEMM_TEXT_BYTES];
    struct arena arena;
    struct device_cuda_lanes lanes;

    struct cuda_kvops_device kvops;
    struct cuda_ops_device ops;
    struct cuda_gemm gemm;
    struct scratch matmul_scratch, top_scratch;

    struct plan plans[DEVICE_PLANS], *planned; /* the one that was asked for last */
    struct graph graphs[GRAPHS_MAX];
    uint32_t graph_count;
    struct graph *recording;
};

static struct cuda *cuda_of(struct device *device) {
    return (struct cuda *)device;
}

/* --- errors */

/* Of an operation; during a recording nothing may wait. */
static void check(struct cuda *cuda, cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return;
    if (!cuda->recording) {
        (void)device_cuda_lanes_note(&cuda->lanes, DEVICE_STEP, error, what);
        return;
    }
    snprintf(cuda->device.trouble, sizeof cuda->device.trouble, "%s: %s", what,
             cudaGetErrorString(error));
    cuda->lanes.of[DEVICE_STEP].failed = 1;
}

/* --- memory */

static void *cuda_get(struct device *device, uint64_t bytes) {
    return arena_get(&cuda_of(device)->arena, bytes);
}

static void cuda_put(struct device *device, void *memory) {
    arena_put(&cuda_of(device)->arena, memory);
}

static uint64_t cuda_room(struct device *device) {
    return arena_room(&cuda_of(device)->arena);
}

static void cuda_fill(struct device *device, const struct device_fill *fill) {
    const struct cuda_ops_fill args = {fill->part_count, fill->pattern, fill->part_bytes,
                                       fill->part};
    struct cuda *cuda = cuda_of(device);
    struct device_cuda_lane *lane = device_cuda_lanes_enter(&cuda->lanes, DEVICE_STEP);
    check(cuda, cuda_ops_fill(&args, lane->stream), "fill");
    check(cuda, cudaEventRecord(cuda->lanes.filled, lane->stream), "fill");
    pthread_mutex_unlock(&lane->lock);
}

/* --- copies and digests */

static enum kv_err cuda_copy_in(struct device *device, enum device_lane lane,
                                const struct device_copy *copies, uint32_t count) {
    return device_cuda_lanes_copy_in(&cuda_of(device)->lanes, lane, copies, count);
}

static enum kv_err cuda_copy_out(struct device *device, enum device_lane lane,
                                 const struct device_copy *copies, uint32_t count) {
    return device_cuda_lanes_copy_out(&cuda_of(device)->lanes, lane, copies, count);
}

static enum kv_err cuda_wait(struct device *device, enum device_lane lane) {
    return device_cuda_lanes_copy_out(&cuda_of(device)->lanes, lane, NULL, 0);
}

static uint64_t cuda_sent(struct device *device, enum device_lane lane) {
    return device_cuda_lanes_sent(&cuda_of(device)->lanes, lane);
}

static enum kv_err cuda_wait_sent(struct device *device, enum device_lane lane, uint64_t sent) {
    return device_cuda_lanes_wait_sent(&cuda_of(device)->lanes, lane, sent);
}

static enum kv_err cuda_digest(struct device *device, enum device_lane lane,
                               const struct device_extent *extents, uint32_t count,
                               struct kv_digest *digests_out) {
    assert(lane == DEVICE_CHECK);
    return device_cuda_lanes_digest(&cuda_of(device)->lanes, extents, count, digests_out);
}

/* --- weights */

static uint64_t cuda_weight_bytes(enum device_use use, enum ops_type type, uint32_t n, uint32_t k) {
    uint64_t packed = ops_weight_bytes(type, n, k);

    return packed && use == DEVICE_FACTOR ? 2ull * n * k : packed;
}

static void write_details(struct cuda *cuda) {
    snprintf(cuda->details, sizeof cuda->details, "%d multiprocessors\ncuda %d\n%s\n%s",
             cuda->multiprocessors, CUDART_VERSION, BUILD_CUDA_FLAGS, cuda->gemm.text);
}

/* A factor is packed here, widened and rounded on the device, unless it is BF16 in the file. */
static enum kv_err cuda_weight_load(struct device *device, enum device_use use,
                                    struct ops_weight *weight, const uint8_t *tensor) {
    struct cuda *cuda = cuda_of(device);
    int whole = use == DEVICE_FACTOR && weight->type == OPS_BF16;
    enum device_use as = whole ? DEVICE_FACTOR : DEVICE_TABLE;
    uint64_t bytes = cuda_weight_bytes(as, weight->type, weight->n, weight->k);
    uint8_t *packed = whole ? NULL : kv_alloc_aligned(cuda->alloc, bytes, 64);
    uint8_t *at = use == as ? (uint8_t *)weight->bytes : cuda_get(device, bytes);
    struct device_copy copy = {at, whole ? tensor : packed, bytes};
    struct ops_weight held = {weight->type, weight->n, weight->k, at};
    enum kv_err err;

    snprintf(cuda->device.trouble, sizeof cuda->device.trouble, "no memory to load a weight");
    if (packed)
        ops_weight_pack(weight, tensor, packed, 0, (weight->n + OPS_PANEL - 1) / OPS_PANEL);
    err = copy.from && at ? cuda_copy_in(device, DEVICE_STEP, &copy, 1) : KV_ERR_DEVICE;
    if (err == KV_OK && use != as) {
        uint16_t *rows = (uint16_t *)weight->bytes;
        check(cuda, cuda_ops_weight_rows(&held, rows, cuda->lanes.of[DEVICE_STEP].stream),
              "rounding");
        err = cuda_wait(device, DEVICE_STEP);
        weight->type = OPS_BF16;
    }
    if (err == KV_OK && use == DEVICE_FACTOR) {
        cuda_gemm_pin(&cuda->gemm, weight->n, weight->k);
        write_details(cuda);
    }
    if (at && use != as)
        cuda_put(device, at);
    kv_alloc_release(cuda->alloc, packed);
    return err;
}

/* --- plans and graphs */

static void drop_graphs(struct cuda *cuda) {
    for (uint32_t i = 0; i < cuda->graph_count; i++)
        if (cuda->graphs[i].exec)
            (void)cudaGraphExecDestroy(cuda->graphs[i].exec);
    cuda->graph_count = 0;
}

/* `known`: recorded steps have its address. None of them looks for the best tokens. */
static uint8_t *grow(struct cuda *cuda, uint8_t *old, uint64_t bytes, int known) {
    (void)cudaStreamSynchronize(cuda->lanes.of[DEVICE_STEP].stream);
    if (known)
        drop_graphs(cuda);
    if (old)
        cuda_put(&cuda->device, old);
    return cuda_get(&cuda->device, bytes);
}

static void *scratch(struct cuda *cuda, struct scratch *scratch, uint64_t bytes) {
    if (bytes > scratch->bytes) {
        assert(!cuda->recording);
        scratch->at = grow(cuda, scratch->at, bytes, scratch != &cuda->top_scratch);
        scratch->bytes = scratch->at ? bytes : 0;
    }
    return bytes ? scratch->at : NULL;
}

static int plan_room(struct cuda *cuda, struct plan *plan, uint64_t bytes) {
    if (bytes <= plan->bytes)
        return 1;
    bytes *= 2;
    kv_alloc_release(cuda->alloc, plan->host);
    plan->host = kv_alloc_aligned(cuda->alloc, bytes, ARENA_UNIT_BYTES);
    plan->head = grow(cuda, plan->head, bytes, plan == cuda->plans);
    plan->units = grow(cuda, plan->units, bytes, plan == cuda->plans);
    plan->bytes = plan->host && plan->head && plan->units ? bytes : 0;
    return plan->bytes != 0;
}

static void cuda_plan(struct device *device, uint32_t index, const struct kvops_attend *singles) {
    struct cuda *cuda = cuda_of(device);
    struct plan *plan = cuda->planned = &cuda->plans[index];

    if (cuda_kvops_plan_same(singles, plan->known) && plan->bytes)
        return;
    if (!plan_room(cuda, plan, cuda_kvops_plan_bytes(singles, &cuda->kvops))) {
        check(cuda, cudaErrorMemoryAllocation, "a plan");
        return;
    }
    uint64_t used =
        cuda_kvops_plan_make(singles, &cuda->kvops, 0, plan->host, plan->head, &plan->made);
    uint64_t head = (uint64_t)((const uint8_t *)plan->made.units - plan->head);
    struct device_copy copies[2] = {{plan->head, plan->host, head},
                                    {plan->units, plan->host + head, used - head}};
    plan->made.units = (const struct cuda_kvops_unit *)plan->units;
    (void)cuda_copy_in(device, DEVICE_STEP, copies, 2);
    plan->known[0] *= !cuda->lanes.of[DEVICE_STEP].failed;
}

static struct graph *find_graph(struct cuda *cuda, uint64_t shape) {
    const struct cuda_kvops_plan *made = &cuda->plans[0].made;
    const struct graph_key key = {shape, made->ctas, made->form};

    for (uint32_t i = 0; i < cuda->graph_count; i++)
        if (memcmp(&cuda->graphs[i].key, &key, sizeof key) == 0)
            return &cuda->graphs[i];
    if (cuda->graph_count == GRAPHS_MAX) /* forms change as sessions grow: old ones rarely return */
        drop_graphs(cuda);
    cuda->graphs[cuda->graph_count] = (struct graph){.key = key};
    return &cuda->graphs[cuda->graph_count++];
}

static int cuda_repeat_begin(struct device *device, uint64_t shape) {
    struct cuda *cuda = cuda_of(device);
    struct device_cuda_lane *lane = device_cuda_lanes_enter(&cuda->lanes, DEVICE_STEP);
    struct graph *graph = cuda->graphs_wanted ? find_graph(cuda, shape) : NULL;
    int run = !graph || !graph->exec;

    if (!run) {
        check(cuda, cudaGraphLaunch(graph->exec, lane->stream), "a recorded step");
    } else if (graph && graph->seen++ == RECORD_AFTER) {
        cudaError_t error = cudaStreamBeginCapture(lane->stream, cudaStreamCaptureModeThreadLocal);
        check(cuda, error, "recording a step");
        cuda->recording = error == cudaSuccess ? graph : NULL;
    }
    pthread_mutex_unlock(&lane->lock);
    return run;
}

static void cuda_repeat_end(struct device *device) {
    struct cuda *cuda = cuda_of(device);
    struct graph *graph = cuda->recording;
    cudaStream_t stream = cuda->lanes.of[DEVICE_STEP].stream;
    cudaGraph_t recorded = NULL;

    if (!graph)
        return;
    cuda->recording = NULL;
    check(cuda, cudaStreamEndCapture(stream, &recorded), "recording a step");
    if (recorded)
        check(cuda, cudaGraphInstantiate(&graph->exec, recorded, 0), "recording a step");
    (void)(recorded && cudaGraphDestroy(recorded));
    if (graph->exec)
        check(cuda, cudaGraphLaunch(graph->exec, stream), "a recorded step");
    else
        cuda->graphs_wanted = 0; /* steps are computed one call at a time from now on */
}

/* --- operations */

static cudaStream_t step_of(struct device *device) {
    return cuda_of(device)->lanes.of[DEVICE_STEP].stream;
}

static void cuda_embed(struct device *device, const struct ops_embed *args) {
    check(cuda_of(device), cuda_ops_embed(args, step_of(device)), "embedding");
}

static void cuda_rmsnorm(struct device *device, const struct ops_rmsnorm *args) {
    check(cuda_of(device), cuda_ops_rmsnorm(args, step_of(device)), "RMS norm");
}

static void cuda_matmul(struct device *device, const struct device_matmuls *args) {
    struct cuda *cuda = cuda_of(device);
    uint64_t bytes =
        cuda_ops_matmul_scratch_bytes(args->args->rows, args->singles, args->args->weight.k);
    void *at = scratch(cuda, &cuda->matmul_scratch, bytes);
    struct cuda_ops_matmul launch = {&cuda->ops, args->args,      args->count, args->singles,
                                     at,         step_of(device), args->norm,  args->glu};

    check(cuda, bytes && !at ? cudaErrorMemoryAllocation : cuda_ops_matmul(&launch),
          "matrix product");
}

static void cuda_top(struct device *device, const struct ops_top *args) {
    struct cuda *cuda = cuda_of(device);
    struct ops_top most = *args;
    void *at;

    most.k = OPS_TOP_MAX; /* so that one with more candidates finds the memory there */
    most.rows *= 2;
    at = scratch(cuda, &cuda->top_scratch, cuda_ops_top_scratch_bytes(&most));
    check(cuda, at ? cuda_ops_top(args, at, step_of(device)) : cudaErrorMemoryAllocation,
          "the best tokens");
}

static void cuda_rope(struct device *device, const struct ops_rope *args) {
    check(cuda_of(device), cuda_ops_rope(args, step_of(device)), "RoPE");
}

static void cuda_swiglu(struct device *device, const struct ops_swiglu *args) {
    check(cuda_of(device), cuda_ops_swiglu(args, step_of(device)), "SwiGLU");
}

static void cuda_finite(struct device *device, const struct ops_finite *args) {
    check(cuda_of(device), cuda_ops_finite(args, step_of(device)), "the check of values");
}

static void cuda_prefill(struct device *device, const struct kvops_attend *args, uint32_t rows_max,
                         enum layout_tier tier) {
    check(cuda_of(device), cuda_kvops_prefill(args, rows_max, tier, step_of(device)),
          "attention of a chunk");
}

static void cuda_decode(struct device *device, const struct kvops_attend *args) {
    struct cuda *cuda = cuda_of(device);
    struct cuda_kvops_launch launch = {args, &cuda->planned->made, step_of(device),
                                       (int)cuda->ops.overlap};

    check(cuda, cuda_kvops_decode(&launch), "attention");
    check(cuda, cuda_kvops_combine(&launch), "attention, combining");
}

static void cuda_seal(struct device *device, const struct kvops_seal *args) {
    check(cuda_of(device), cuda_kvops_seal(args, step_of(device)), "sealing");
}

static enum kv_err cuda_append(struct device *device, const struct kvops_append *args) {
    return device_cuda_lanes_note(&cuda_of(device)->lanes, DEVICE_STEP,
                                  cuda_kvops_append(args, step_of(device)), "K and V");
}

/* --- opening */

static void cuda_close(struct device *device) {
    struct cuda *cuda = cuda_of(device);

    (void)cudaSetDevice(cuda->lanes.index);
    (void)cudaDeviceSynchronize();
    drop_graphs(cuda);
    cuda_gemm_close(&cuda->gemm);
    device_cuda_lanes_close(&cuda->lanes);
    (void)cudaFree(cuda->arena.base);
    for (uint32_t i = 0; i < DEVICE_PLANS; i++)
        kv_alloc_release(cuda->alloc, cuda->plans[i].host);
    kv_alloc_release(cuda->alloc, cuda);
}

static const struct device_ops cuda_ops = {
    .close = cuda_close,
    .get = cuda_get,
    .put = cuda_put,
    .room = cuda_room,
    .fill = cuda_fill,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .digest = cuda_digest,
    .wait = cuda_wait,
    .sent = cuda_sent,
    .wait_sent = cuda_wait_sent,
    .weight_bytes = cuda_weight_bytes,
    .weight_load = cuda_weight_load,
    .repeat_begin = cuda_repeat_begin,
    .repeat_end = cuda_repeat_end,
    .plan = cuda_plan,
    .embed = cuda_embed,
    .rmsnorm = cuda_rmsnorm,
    .matmul = cuda_matmul,
    .matmul_around = 1,
    .rope = cuda_rope,
    .swiglu = cuda_swiglu,
    .finite = cuda_finite,
    .top = cuda_top,
    .prefill = cuda_prefill,
    .decode = cuda_decode,
    .seal = cuda_seal,
    .append = cuda_append,
};

static enum kv_err open_memory(struct cuda *cuda, const struct device_cuda_settings *settings,
                               struct kv_diag *diag) {
    size_t unused = 0, total = 0;
    cudaError_t error = cudaMemGetInfo(&unused, &total);
    uint64_t bytes = settings->memory_bytes == UINT64_MAX ? unused - unused / UNUSABLE_SHARE
                                                          : settings->memory_bytes;
    bytes = bytes < settings->enough_bytes ? bytes : settings->enough_bytes;
    if (error == cudaSuccess && bytes > unused)
        return kv_diag_set(
            diag, KV_ERR_DEVICE, "%s has %llu bytes free and --device-memory is %llu: give less",
            cuda->device.name, (unsigned long long)unused, (unsigned long long)bytes);
    cuda->arena.bytes = bytes & ~(uint64_t)(ARENA_UNIT_BYTES - 1);
    if (error == cudaSuccess)
        error = cudaMalloc((void **)&cuda->arena.base, cuda->arena.bytes);
    if (error == cudaSuccess)
        cuda->lanes.digest_at = cuda_get(&cuda->device, device_cuda_lanes_digest_bytes());
    if (error != cudaSuccess || !cuda->lanes.digest_at)
        return kv_diag_set(diag, KV_ERR_DEVICE, "%s gives no %llu bytes: %s", cuda->device.name,
                           (unsigned long long)bytes, cudaGetErrorString(error));
    return KV_OK;
}

static enum kv_err open_cuda(struct cuda *cuda, const struct device_cuda_settings *settings,
                             struct kv_diag *diag) {
    struct cudaDeviceProp properties;
    const char *missing;
    cudaError_t error = cudaSetDevice(cuda->lanes.index);

    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&properties, cuda->lanes.index);
    if (error != cudaSuccess)
        return kv_diag_set(diag, KV_ERR_DEVICE, "CUDA device %d: %s", cuda->lanes.index,
                           cudaGetErrorString(error));
    snprintf(cuda->device.name, sizeof cuda->device.name, "%.100s (cuda:%d)", properties.name,
             cuda->lanes.index);
    snprintf(cuda->kind, sizeof cuda->kind, "cuda-sm%d%d", properties.major, properties.minor);
    cuda->multiprocessors = properties.multiProcessorCount;
    if (properties.major * 10 + properties.minor < 80)
        return kv_diag_set(diag, KV_ERR_DEVICE,
                           "%s has compute capability %d.%d: 8.0 or newer is needed",
                           cuda->device.name, properties.major, properties.minor);
    error = device_cuda_lanes_open(&cuda->lanes);
    if (error == cudaSuccess)
        error = cuda_kvops_open(&cuda->kvops);
    if (error == cudaSuccess)
        error = cuda_ops_open(&cuda->ops);
    if (error != cudaSuccess)
        return kv_diag_set(diag, KV_ERR_DEVICE, "%s: %s", cuda->device.name,
                           cudaGetErrorString(error));
    missing = cuda_gemm_open(&cuda->gemm);
    if (missing)
        snprintf(cuda->device.note, DEVICE_TEXT_BYTES,
                 "%s: prompts are read at a third of the speed; it comes with the CUDA toolkit, "
                 "and LD_LIBRARY_PATH can name its folder",
                 missing);
    cuda->ops.gemm = missing ? NULL : &cuda->gemm;
    write_details(cuda);
    return open_memory(cuda, settings, diag);
}

enum kv_err device_cuda_open(const struct device_cuda_settings *settings,
                             struct device **device_out, struct kv_diag *diag) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    struct cuda *cuda;
    enum kv_err err;

    if (error != cudaSuccess || count == 0)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "no CUDA device was found (%s)",
                           error == cudaSuccess ? "none is there" : cudaGetErrorString(error));
    if (settings->index >= (uint32_t)count)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                           "there is no CUDA device %u: the last one is cuda:%d", settings->index,
                           count - 1);
    cuda = kv_alloc_zeroed(settings->alloc, 1, sizeof *cuda);
    if (!cuda)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the device");
    cuda->alloc = settings->alloc;
    cuda->graphs_wanted = settings->graphs;
    cuda->device = (struct device){.ops = &cuda_ops,
                                   .clock = settings->clock,
                                   .kind = cuda->kind,
                                   .weight_path = "weights rounded to BF16, tensor cores",
                                   .details = cuda->details,
                                   .simd_name = "cuda",
                                   .threads = 1,
                                   .apart = 1};
    cuda->device.pinned = &cuda->lanes.pinned;
    device_cuda_lanes_init(&cuda->lanes, &cuda->device, (int)settings->index, settings->alloc);
    err = open_cuda(cuda, settings, diag);
    if (err == KV_OK)
        *device_out = &cuda->device;
    else
        cuda_close(&cuda->device);
    return err;
}

int device_cuda_built(void) {
    return 1;
}
