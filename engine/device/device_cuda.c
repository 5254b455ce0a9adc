/* engine/device/device_cuda.c - a CUDA GPU as a device.
 *
 * Responsible for: one reservation of memory, a stream for each lane with a ring of pinned memory,
 * errors, weights as BF16, uploading plans, steps recorded as graphs.
 * Not responsible for: the arithmetic (kernels/cuda/).
 *
 * Operations are enqueued on the stream of DEVICE_STEP and run after the call has returned. A call
 * that CUDA refuses fails the next fetch; an error that sticks to the context is a lost device.
 */
#include "engine/device/arena.h"
#include "engine/device/device.h"
#include "engine/device/pinned.h"
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
    SLICES = 4, /* of a lane's ring, this large each */
    SLICE_BYTES = 4 << 20,
    GRAPHS_MAX = 64,
    RECORD_AFTER = 8,
    BATCH_FIRST = CUDA_OPS_COPIES_MAX / 16,
    DIGEST_EXTENTS_MAX = 64,
    DIGEST_PIECES_MAX = 131072,
    UNUSABLE_SHARE = 16 /* without a limit, 1 / so much of the free memory is left to others */
};

struct lane {
    cudaStream_t stream;
    pthread_mutex_t lock;
    uint8_t *ring; /* [SLICES][SLICE_BYTES], pinned */
    cudaEvent_t used[SLICES];
    uint32_t next;
    int failed;
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
    int index, graphs_wanted, multiprocessors;
    char kind[32], details[64 + sizeof BUILD_CUDA_FLAGS + CUDA_GEMM_TEXT_BYTES];
    struct arena arena;
    struct lane lanes[DEVICE_LANE_COUNT];
    struct pinned pinned;
    cudaEvent_t filled; /* the last fill has ended */

    struct cuda_kvops_device kvops;
    struct cuda_ops_device ops;
    struct cuda_gemm gemm;
    struct scratch matmul_scratch, top_scratch;

    struct plan plans[DEVICE_PLANS], *planned; /* the one that was asked for last */
    struct graph graphs[GRAPHS_MAX];
    uint32_t graph_count;
    struct graph *recording;

    uint8_t *digest_host, *digest_at; /* extents, owners, then on the device pieces and digests */
};

static struct cuda *cuda_of(struct device *device) {
    return (struct cuda *)device;
}

/* --- errors */

/* An error of a call, or of work before it. What stays behind after it was asked for belongs to
 * the context: the device is lost. */
static enum kv_err note(struct cuda *cuda, enum device_lane lane, cudaError_t error,
                        const char *what) {
    if (error == cudaSuccess)
        return KV_OK;
    snprintf(cuda->device.trouble, sizeof cuda->device.trouble, "%s: %s", what,
             cudaGetErrorString(error));
    (void)cudaGetLastError();
    if (cudaDeviceSynchronize() != cudaSuccess || cudaGetLastError() != cudaSuccess)
        cuda->device.lost = 1;
    cuda->lanes[lane].failed = 1;
    cuda->device.faults += lane == DEVICE_STEP;
    return KV_ERR_DEVICE;
}

/* Of an operation; during a recording nothing may wait. */
static void check(struct cuda *cuda, cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return;
    if (!cuda->recording) {
        (void)note(cuda, DEVICE_STEP, error, what);
        return;
    }
    snprintf(cuda->device.trouble, sizeof cuda->device.trouble, "%s: %s", what,
             cudaGetErrorString(error));
    cuda->lanes[DEVICE_STEP].failed = 1;
}

/* What failed in the lane since this was asked last. */
static enum kv_err taken(struct cuda *cuda, enum device_lane lane) {
    int failed = cuda->lanes[lane].failed || cuda->device.lost;
    cuda->lanes[lane].failed = 0;
    return failed ? KV_ERR_DEVICE : KV_OK;
}

static enum kv_err finish(struct cuda *cuda, enum device_lane lane, const char *what) {
    (void)note(cuda, lane, cudaStreamSynchronize(cuda->lanes[lane].stream), what);
    return taken(cuda, lane);
}

static struct lane *enter(struct cuda *cuda, enum device_lane lane) {
    pthread_mutex_lock(&cuda->lanes[lane].lock);
    (void)cudaSetDevice(cuda->index);
    return &cuda->lanes[lane];
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

static void *pin(void *context, uint64_t bytes) {
    void *at = NULL;
    (void)cudaSetDevice(((const struct cuda *)context)->index);
    if (cudaHostAlloc(&at, bytes, cudaHostAllocPortable) != cudaSuccess)
        at = NULL;
    (void)cudaGetLastError();
    return at;
}

static void unpin(void *context, void *at) {
    (void)context, (void)cudaFreeHost(at);
}

/* What is there already; with 0 bytes it is let go. */
static int pin_there(void *context, void *at, uint64_t bytes) {
    (void)cudaSetDevice(((const struct cuda *)context)->index);
    cudaError_t error =
        bytes ? cudaHostRegister(at, bytes, cudaHostRegisterPortable) : cudaHostUnregister(at);
    (void)cudaGetLastError();
    return error == cudaSuccess;
}

static void cuda_fill(struct device *device, const struct device_fill *fill) {
    const struct cuda_ops_fill args = {fill->part_count, fill->pattern, fill->part_bytes,
                                       fill->part};
    struct cuda *cuda = cuda_of(device);
    struct lane *lane = enter(cuda, DEVICE_STEP);
    check(cuda, cuda_ops_fill(&args, lane->stream), "fill");
    check(cuda, cudaEventRecord(cuda->filled, lane->stream), "fill");
    pthread_mutex_unlock(&lane->lock);
}

/* --- copies */

/* The next slice of the ring, once what it was used for last has ended. */
static uint8_t *next_slice(struct cuda *cuda, enum device_lane index) {
    struct lane *lane = &cuda->lanes[index];

    (void)note(cuda, index, cudaEventSynchronize(lane->used[lane->next]), "copy");
    return lane->ring + (uint64_t)lane->next * SLICE_BYTES;
}

static void use_slice(struct cuda *cuda, enum device_lane index) {
    struct lane *lane = &cuda->lanes[index];

    (void)note(cuda, index, cudaEventRecord(lane->used[lane->next], lane->stream), "copy");
    lane->next = (lane->next + 1) % SLICES;
}

/* Direct copies of one call go in batches: the next is twice as large and handed over meanwhile. */
struct batch {
    struct cuda_ops_copies copies;
    uint32_t limit;
};

static void send(struct cuda *cuda, enum device_lane index, struct batch *batch) {
    if (index == DEVICE_LENT) /* few wait: a step's own copies come behind them */
        (void)next_slice(cuda, index);
    (void)note(cuda, index, cuda_ops_copy(&batch->copies, cuda->lanes[index].stream), "copies");
    if (index == DEVICE_LENT)
        use_slice(cuda, index);
    batch->copies.count = 0;
    batch->limit += batch->limit < CUDA_OPS_COPIES_MAX ? batch->limit : 0;
}

static void add(struct cuda *cuda, enum device_lane index, struct batch *batch,
                const struct device_copy *copy) {
    uint32_t i = batch->copies.count++;

    batch->copies.to[i] = copy->to;
    batch->copies.from[i] = copy->from;
    batch->copies.bytes[i] = copy->bytes;
    if (batch->copies.count == batch->limit)
        send(cuda, index, batch);
}

static void copy_in_by_ring(struct cuda *cuda, enum device_lane index,
                            const struct device_copy *copy) {
    for (uint64_t done = 0, each; done < copy->bytes; done += each) {
        uint8_t *slice = next_slice(cuda, index);
        each = copy->bytes - done < SLICE_BYTES ? copy->bytes - done : SLICE_BYTES;
        memcpy(slice, (const uint8_t *)copy->from + done, each);
        (void)note(cuda, index,
                   cudaMemcpyAsync((uint8_t *)copy->to + done, slice, each, cudaMemcpyHostToDevice,
                                   cuda->lanes[index].stream),
                   "copy to the device");
        use_slice(cuda, index);
    }
}

static enum kv_err cuda_copy_in(struct device *device, enum device_lane index,
                                const struct device_copy *copies, uint32_t count) {
    struct cuda *cuda = cuda_of(device);
    struct lane *lane = enter(cuda, index);
    struct batch batch = {.limit = BATCH_FIRST};
    int direct = 0;

    if (index != DEVICE_STEP)
        (void)note(cuda, index, cudaStreamWaitEvent(lane->stream, cuda->filled, 0), "copy");
    for (uint32_t i = 0; i < count; i++) {
        if (!copies[i].bytes)
            continue;
        if (pinned_has(&cuda->pinned, copies[i].from, copies[i].bytes)) {
            direct = index != DEVICE_LENT;
            add(cuda, index, &batch, &copies[i]);
        } else {
            copy_in_by_ring(cuda, index, &copies[i]);
        }
    }
    send(cuda, index, &batch);
    enum kv_err err =
        direct || cuda->device.lost ? finish(cuda, index, "copy to the device") : KV_OK;
    pthread_mutex_unlock(&lane->lock);
    return err;
}

static void copy_out_by_ring(struct cuda *cuda, enum device_lane index,
                             const struct device_copy *copy) {
    struct lane *lane = &cuda->lanes[index];

    for (uint64_t done = 0, each; done < copy->bytes; done += each) {
        uint8_t *slice = next_slice(cuda, index);
        each = copy->bytes - done < SLICE_BYTES ? copy->bytes - done : SLICE_BYTES;
        (void)note(cuda, index,
                   cudaMemcpyAsync(slice, (const uint8_t *)copy->from + done, each,
                                   cudaMemcpyDeviceToHost, lane->stream),
                   "copy from the device");
        (void)note(cuda, index, cudaStreamSynchronize(lane->stream), "copy from the device");
        memcpy((uint8_t *)copy->to + done, slice, each);
    }
}

static enum kv_err cuda_copy_out(struct device *device, enum device_lane index,
                                 const struct device_copy *copies, uint32_t count) {
    struct cuda *cuda = cuda_of(device);
    struct lane *lane = enter(cuda, index);
    struct batch batch = {.limit = BATCH_FIRST};
    enum kv_err err;

    for (uint32_t i = count; i-- > 0;) { /* the last one is the large one, small ones wait for it */
        if (!copies[i].bytes)
            continue;
        if (pinned_has(&cuda->pinned, copies[i].to, copies[i].bytes)) {
            add(cuda, index, &batch, &copies[i]);
            continue;
        }
        send(cuda, index, &batch);
        copy_out_by_ring(cuda, index, &copies[i]);
    }
    send(cuda, index, &batch);
    err = finish(cuda, index, "work of the device");
    pthread_mutex_unlock(&lane->lock);
    return err;
}

static enum kv_err cuda_wait(struct device *device, enum device_lane index) {
    return cuda_copy_out(device, index, NULL, 0);
}

/* --- digests. Host and device: extents, then owners; the device alone: pieces, then digests. */

enum {
    DIGEST_OWNERS_OFF = DIGEST_EXTENTS_MAX * sizeof(struct cuda_kvops_extent),
    DIGEST_PIECES_OFF = DIGEST_OWNERS_OFF + DIGEST_PIECES_MAX * 4,
    DIGEST_OUT_OFF = DIGEST_PIECES_OFF + DIGEST_PIECES_MAX * 8,
    DIGEST_BYTES = DIGEST_OUT_OFF + DIGEST_EXTENTS_MAX * KV_DIGEST_BYTES
};

/* As many of the extents as fit into one launch; returns how many. */
static uint32_t fill_digests(struct cuda *cuda, const struct device_extent *extents, uint32_t count,
                             struct cuda_kvops_digest *args) {
    struct cuda_kvops_extent *to = (struct cuda_kvops_extent *)cuda->digest_host;
    uint32_t *owner = (uint32_t *)(cuda->digest_host + DIGEST_OWNERS_OFF);
    uint32_t taken_count = 0;

    *args =
        (struct cuda_kvops_digest){.extents = (const struct cuda_kvops_extent *)cuda->digest_at,
                                   .pieces = (uint64_t *)(cuda->digest_at + DIGEST_PIECES_OFF),
                                   .owner = (const uint32_t *)(cuda->digest_at + DIGEST_OWNERS_OFF),
                                   .digests = cuda->digest_at + DIGEST_OUT_OFF};
    for (; taken_count < count && taken_count < DIGEST_EXTENTS_MAX; taken_count++) {
        const struct device_extent *from = &extents[taken_count];
        uint64_t bytes = from->part_bytes * from->part_count;
        uint64_t pieces = (bytes + CUDA_KVOPS_PIECE_BYTES - 1) / CUDA_KVOPS_PIECE_BYTES;
        struct cuda_kvops_extent *extent = &to[taken_count];
        if (pieces > DIGEST_PIECES_MAX - args->piece_count)
            break;
        *extent = (struct cuda_kvops_extent){args->piece_count, bytes, from->part_bytes, {NULL}};
        memcpy(extent->part, from->part, from->part_count * sizeof extent->part[0]);
        for (uint64_t i = 0; i < pieces; i++)
            owner[args->piece_count++] = taken_count;
    }
    args->extent_count = taken_count;
    return taken_count;
}

static enum kv_err cuda_digest(struct device *device, enum device_lane index,
                               const struct device_extent *extents, uint32_t count,
                               struct kv_digest *digests_out) {
    struct cuda *cuda = cuda_of(device);
    struct lane *lane = enter(cuda, index);
    enum kv_err err = KV_OK;

    assert(index == DEVICE_CHECK);
    for (uint32_t done = 0, each; done < count && err == KV_OK; done += each) {
        struct cuda_kvops_digest args;
        each = fill_digests(cuda, extents + done, count - done, &args);
        if (!each) {
            err = note(cuda, index, cudaErrorInvalidValue, "digest of so large an extent");
            break;
        }
        uint64_t told = DIGEST_OWNERS_OFF + args.piece_count * 4ull;
        (void)note(cuda, index,
                   cudaMemcpyAsync(cuda->digest_at, cuda->digest_host, told, cudaMemcpyHostToDevice,
                                   lane->stream),
                   "digest");
        (void)note(cuda, index, cuda_kvops_digest(&args, lane->stream), "digest");
        (void)note(cuda, index,
                   cudaMemcpyAsync(cuda->digest_host, args.digests, each * KV_DIGEST_BYTES,
                                   cudaMemcpyDeviceToHost, lane->stream),
                   "digest");
        err = finish(cuda, index, "digest");
        for (uint32_t i = 0; i < each; i++)
            memcpy(digests_out[done + i].bytes, cuda->digest_host + i * KV_DIGEST_BYTES,
                   KV_DIGEST_BYTES);
    }
    pthread_mutex_unlock(&lane->lock);
    return err;
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
        check(cuda, cuda_ops_weight_rows(&held, rows, cuda->lanes[DEVICE_STEP].stream), "rounding");
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
    (void)cudaStreamSynchronize(cuda->lanes[DEVICE_STEP].stream);
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
    plan->known[0] *= !cuda->lanes[DEVICE_STEP].failed;
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
    struct lane *lane = enter(cuda, DEVICE_STEP);
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
    cudaStream_t stream = cuda->lanes[DEVICE_STEP].stream;
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
    return cuda_of(device)->lanes[DEVICE_STEP].stream;
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
    return note(cuda_of(device), DEVICE_STEP, cuda_kvops_append(args, step_of(device)), "K and V");
}

/* --- opening */

static void cuda_close(struct device *device) {
    struct cuda *cuda = cuda_of(device);

    (void)cudaSetDevice(cuda->index);
    (void)cudaDeviceSynchronize();
    drop_graphs(cuda);
    cuda_gemm_close(&cuda->gemm);
    for (uint32_t i = 0; i < DEVICE_LANE_COUNT; i++) {
        struct lane *lane = &cuda->lanes[i];
        for (uint32_t k = 0; k < SLICES; k++)
            if (lane->used[k])
                (void)cudaEventDestroy(lane->used[k]);
        (void)cudaFreeHost(lane->ring);
        if (lane->stream)
            (void)cudaStreamDestroy(lane->stream);
        pthread_mutex_destroy(&lane->lock);
    }
    if (cuda->filled)
        (void)cudaEventDestroy(cuda->filled);
    pinned_release(&cuda->pinned);
    (void)cudaFreeHost(cuda->digest_host);
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

static cudaError_t open_lane(struct lane *lane, int priority) {
    cudaError_t error =
        cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, priority);
    if (error == cudaSuccess)
        error = cudaHostAlloc((void **)&lane->ring, (size_t)SLICES * SLICE_BYTES,
                              cudaHostAllocPortable);
    for (uint32_t i = 0; i < SLICES && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&lane->used[i], cudaEventDisableTiming);
    return error;
}

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
        error = cudaHostAlloc((void **)&cuda->digest_host, DIGEST_BYTES, cudaHostAllocPortable);
    if (error == cudaSuccess)
        cuda->digest_at = cuda_get(&cuda->device, DIGEST_BYTES);
    if (error != cudaSuccess || !cuda->digest_at)
        return kv_diag_set(diag, KV_ERR_DEVICE, "%s gives no %llu bytes: %s", cuda->device.name,
                           (unsigned long long)bytes, cudaGetErrorString(error));
    return KV_OK;
}

static enum kv_err open_cuda(struct cuda *cuda, const struct device_cuda_settings *settings,
                             struct kv_diag *diag) {
    struct cudaDeviceProp properties;
    const char *missing;
    int least = 0, greatest = 0;
    cudaError_t error = cudaSetDevice(cuda->index);

    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&properties, cuda->index);
    if (error != cudaSuccess)
        return kv_diag_set(diag, KV_ERR_DEVICE, "CUDA device %d: %s", cuda->index,
                           cudaGetErrorString(error));
    snprintf(cuda->device.name, sizeof cuda->device.name, "%.100s (cuda:%d)", properties.name,
             cuda->index);
    snprintf(cuda->kind, sizeof cuda->kind, "cuda-sm%d%d", properties.major, properties.minor);
    cuda->multiprocessors = properties.multiProcessorCount;
    if (properties.major * 10 + properties.minor < 80)
        return kv_diag_set(diag, KV_ERR_DEVICE,
                           "%s has compute capability %d.%d: 8.0 or newer is needed",
                           cuda->device.name, properties.major, properties.minor);
    (void)cudaDeviceGetStreamPriorityRange(&least, &greatest);
    for (uint32_t i = 0; i < DEVICE_LANE_COUNT && error == cudaSuccess; i++)
        error = open_lane(&cuda->lanes[i], i == DEVICE_STEP ? greatest : least);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&cuda->filled, cudaEventDisableTiming);
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
    cuda->index = (int)settings->index;
    cuda->graphs_wanted = settings->graphs;
    cuda->device = (struct device){.ops = &cuda_ops,
                                   .clock = settings->clock,
                                   .kind = cuda->kind,
                                   .weight_path = "weights rounded to BF16, tensor cores",
                                   .details = cuda->details,
                                   .simd_name = "cuda",
                                   .threads = 1,
                                   .apart = 1};
    cuda->device.pinned = &cuda->pinned;
    pinned_init(&cuda->pinned, pin, unpin, cuda);
    pinned_large(&cuda->pinned, cuda->alloc, pin_there);
    for (uint32_t i = 0; i < DEVICE_LANE_COUNT; i++)
        pthread_mutex_init(&cuda->lanes[i].lock, NULL);
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
