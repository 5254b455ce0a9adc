/* engine/device/device_cuda_lanes.c - streams of a CUDA GPU: what is copied beside steps.
 *
 * Responsible for: what device_cuda_lanes.h says.
 * Not responsible for: operations (device_cuda.c).
 */
#include "engine/device/device_cuda_lanes.h"

#include "kernels/cuda/cuda_kvops.h"
#include "kernels/cuda/cuda_ops.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum {
    SLICES = DEVICE_CUDA_LANES_SLICES,
    SLICE_BYTES = 4 << 20,
    BATCH_FIRST = CUDA_OPS_COPIES_MAX / 16,
    LENT_BYTES = 8 << 20, /* of a batch of DEVICE_LENT; SLICES of them may wait */
    DIGEST_EXTENTS_MAX = 256,
    DIGEST_PIECES_MAX = 131072
};

/* --- errors */

/* What stays behind after an error was asked for belongs to the context. */
enum kv_err device_cuda_lanes_note(struct device_cuda_lanes *lanes, enum device_lane lane,
                                   cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return KV_OK;
    snprintf(lanes->device->trouble, sizeof lanes->device->trouble, "%s: %s", what,
             cudaGetErrorString(error));
    (void)cudaGetLastError();
    if (cudaDeviceSynchronize() != cudaSuccess || cudaGetLastError() != cudaSuccess)
        lanes->device->lost = 1;
    lanes->of[lane].failed = 1;
    lanes->device->faults += lane == DEVICE_STEP;
    return KV_ERR_DEVICE;
}

/* What failed in the lane since this was asked last. */
static enum kv_err taken(struct device_cuda_lanes *lanes, enum device_lane lane) {
    int failed = lanes->of[lane].failed || lanes->device->lost;
    lanes->of[lane].failed = 0;
    return failed ? KV_ERR_DEVICE : KV_OK;
}

static enum kv_err finish(struct device_cuda_lanes *lanes, enum device_lane lane,
                          const char *what) {
    (void)device_cuda_lanes_note(lanes, lane, cudaStreamSynchronize(lanes->of[lane].stream), what);
    return taken(lanes, lane);
}

struct device_cuda_lane *device_cuda_lanes_enter(struct device_cuda_lanes *lanes,
                                                 enum device_lane lane) {
    pthread_mutex_lock(&lanes->of[lane].lock);
    (void)cudaSetDevice(lanes->index);
    return &lanes->of[lane];
}

/* --- pinned memory */

static void *pin(void *context, uint64_t bytes) {
    void *at = NULL;
    (void)cudaSetDevice(((const struct device_cuda_lanes *)context)->index);
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
    (void)cudaSetDevice(((const struct device_cuda_lanes *)context)->index);
    cudaError_t error =
        bytes ? cudaHostRegister(at, bytes, cudaHostRegisterPortable) : cudaHostUnregister(at);
    (void)cudaGetLastError();
    return error == cudaSuccess;
}

/* --- copies */

/* The next slice of the ring, once what it was used for last has ended. */
static uint8_t *next_slice(struct device_cuda_lanes *lanes, enum device_lane index) {
    struct device_cuda_lane *lane = &lanes->of[index];
    uint64_t next = lane->sent % SLICES;

    (void)device_cuda_lanes_note(lanes, index, cudaEventSynchronize(lane->used[next]), "copy");
    return lane->ring + next * SLICE_BYTES;
}

static void use_slice(struct device_cuda_lanes *lanes, enum device_lane index) {
    struct device_cuda_lane *lane = &lanes->of[index];

    (void)device_cuda_lanes_note(
        lanes, index, cudaEventRecord(lane->used[lane->sent % SLICES], lane->stream), "copy");
    lane->sent++;
}

/* Direct copies of one call go in batches: the next is twice as large and handed over meanwhile. */
struct batch {
    struct cuda_ops_copies copies;
    uint64_t bytes;
    uint32_t limit;
};

static void send(struct device_cuda_lanes *lanes, enum device_lane index, struct batch *batch) {
    if (batch->copies.count == 0)
        return;
    if (index == DEVICE_LENT) /* few wait at a time */
        (void)next_slice(lanes, index);
    (void)device_cuda_lanes_note(lanes, index,
                                 cuda_ops_copy(&batch->copies, lanes->of[index].stream), "copies");
    if (index == DEVICE_LENT)
        use_slice(lanes, index);
    batch->copies.count = 0;
    batch->bytes = 0;
    batch->limit += batch->limit < CUDA_OPS_COPIES_MAX ? batch->limit : 0;
}

static void add(struct device_cuda_lanes *lanes, enum device_lane index, struct batch *batch,
                const struct device_copy *copy) {
    uint32_t i = batch->copies.count++;

    batch->copies.to[i] = copy->to;
    batch->copies.from[i] = copy->from;
    batch->copies.bytes[i] = copy->bytes;
    batch->bytes += copy->bytes;
    if (batch->copies.count == batch->limit || (index == DEVICE_LENT && batch->bytes >= LENT_BYTES))
        send(lanes, index, batch);
}

/* From pinned memory. Lent memory keeps the engine for copies busy for a tenth of a second at a
 * time, and what is small must not wait for it. More than that would take threads from steps. */
static void move_in(struct device_cuda_lanes *lanes, enum device_lane index,
                    const struct device_copy *copy, int small) {
    cudaStream_t stream = lanes->of[index].stream;
    cudaError_t error =
        small ? cuda_ops_read(copy->to, copy->from, copy->bytes, stream)
              : cudaMemcpyAsync(copy->to, copy->from, copy->bytes, cudaMemcpyHostToDevice, stream);
    (void)device_cuda_lanes_note(lanes, index, error, "copy to the device");
}

static void copy_in_by_ring(struct device_cuda_lanes *lanes, enum device_lane index,
                            const struct device_copy *copy, int small) {
    for (uint64_t done = 0, each; done < copy->bytes; done += each) {
        uint8_t *slice = next_slice(lanes, index);
        each = copy->bytes - done < SLICE_BYTES ? copy->bytes - done : SLICE_BYTES;
        memcpy(slice, (const uint8_t *)copy->from + done, each);
        const struct device_copy part = {(uint8_t *)copy->to + done, slice, each};
        move_in(lanes, index, &part, small);
        use_slice(lanes, index);
    }
}

enum kv_err device_cuda_lanes_copy_in(struct device_cuda_lanes *lanes, enum device_lane index,
                                      const struct device_copy *copies, uint32_t count) {
    struct device_cuda_lane *lane = device_cuda_lanes_enter(lanes, index);
    struct batch batch = {.limit = index == DEVICE_LENT ? CUDA_OPS_COPIES_MAX : BATCH_FIRST};
    uint64_t bytes = 0;
    int direct = 0;

    for (uint32_t i = 0; i < count; i++)
        bytes += copies[i].bytes;
    int small = index != DEVICE_LENT && bytes <= DEVICE_SMALL_BYTES;
    if (index != DEVICE_STEP)
        (void)device_cuda_lanes_note(lanes, index,
                                     cudaStreamWaitEvent(lane->stream, lanes->filled, 0), "copy");
    for (uint32_t i = 0; i < count; i++) {
        if (!copies[i].bytes)
            continue;
        int pinned = pinned_has(&lanes->pinned, copies[i].from, copies[i].bytes);
        direct |= pinned && index != DEVICE_LENT;
        if (!pinned)
            copy_in_by_ring(lanes, index, &copies[i], small);
        else if (small)
            move_in(lanes, index, &copies[i], 1);
        else
            add(lanes, index, &batch, &copies[i]);
    }
    send(lanes, index, &batch);
    enum kv_err err =
        direct || lanes->device->lost ? finish(lanes, index, "copy to the device") : KV_OK;
    pthread_mutex_unlock(&lane->lock);
    return err;
}

static void copy_out_by_ring(struct device_cuda_lanes *lanes, enum device_lane index,
                             const struct device_copy *copy) {
    struct device_cuda_lane *lane = &lanes->of[index];

    for (uint64_t done = 0, each; done < copy->bytes; done += each) {
        uint8_t *slice = next_slice(lanes, index);
        each = copy->bytes - done < SLICE_BYTES ? copy->bytes - done : SLICE_BYTES;
        (void)device_cuda_lanes_note(lanes, index,
                                     cudaMemcpyAsync(slice, (const uint8_t *)copy->from + done,
                                                     each, cudaMemcpyDeviceToHost, lane->stream),
                                     "copy from the device");
        (void)device_cuda_lanes_note(lanes, index, cudaStreamSynchronize(lane->stream),
                                     "copy from the device");
        memcpy((uint8_t *)copy->to + done, slice, each);
    }
}

enum kv_err device_cuda_lanes_copy_out(struct device_cuda_lanes *lanes, enum device_lane index,
                                       const struct device_copy *copies, uint32_t count) {
    struct device_cuda_lane *lane = device_cuda_lanes_enter(lanes, index);
    struct batch batch = {.limit = BATCH_FIRST};
    enum kv_err err;

    for (uint32_t i = count; i-- > 0;) { /* the last one is the large one, small ones wait for it */
        if (!copies[i].bytes)
            continue;
        if (pinned_has(&lanes->pinned, copies[i].to, copies[i].bytes)) {
            add(lanes, index, &batch, &copies[i]);
            continue;
        }
        send(lanes, index, &batch);
        copy_out_by_ring(lanes, index, &copies[i]);
    }
    send(lanes, index, &batch);
    err = finish(lanes, index, "work of the device");
    pthread_mutex_unlock(&lane->lock);
    return err;
}

uint64_t device_cuda_lanes_sent(struct device_cuda_lanes *lanes, enum device_lane index) {
    struct device_cuda_lane *lane = device_cuda_lanes_enter(lanes, index);
    uint64_t sent = lane->sent;

    pthread_mutex_unlock(&lane->lock);
    return sent;
}

/* What is SLICES behind was waited for when its slice was used again. */
enum kv_err device_cuda_lanes_wait_sent(struct device_cuda_lanes *lanes, enum device_lane index,
                                        uint64_t sent) {
    struct device_cuda_lane *lane = device_cuda_lanes_enter(lanes, index);

    assert(sent <= lane->sent);
    if (sent > 0 && lane->sent - sent < SLICES)
        (void)device_cuda_lanes_note(
            lanes, index, cudaEventSynchronize(lane->used[(sent - 1) % SLICES]), "copies");
    enum kv_err err = lane->failed || lanes->device->lost ? KV_ERR_DEVICE : KV_OK;
    pthread_mutex_unlock(&lane->lock);
    return err;
}

/* --- digests. Host and device: extents, then owners; the device alone: pieces, then digests. */

enum {
    DIGEST_OWNERS_OFF = DIGEST_EXTENTS_MAX * sizeof(struct cuda_kvops_extent),
    DIGEST_PIECES_OFF = DIGEST_OWNERS_OFF + DIGEST_PIECES_MAX * 4,
    DIGEST_OUT_OFF = DIGEST_PIECES_OFF + DIGEST_PIECES_MAX * 8,
    DIGEST_BYTES = DIGEST_OUT_OFF + DIGEST_EXTENTS_MAX * KV_DIGEST_BYTES
};

uint64_t device_cuda_lanes_digest_bytes(void) {
    return DIGEST_BYTES;
}

/* As many of the extents as fit into one launch; returns how many. */
static uint32_t fill_digests(struct device_cuda_lanes *lanes, const struct device_extent *extents,
                             uint32_t count, struct cuda_kvops_digest *args) {
    struct cuda_kvops_extent *to = (struct cuda_kvops_extent *)lanes->digest_host;
    uint32_t *owner = (uint32_t *)(lanes->digest_host + DIGEST_OWNERS_OFF);
    uint32_t taken_count = 0;

    *args = (struct cuda_kvops_digest){
        .extents = (const struct cuda_kvops_extent *)lanes->digest_at,
        .pieces = (uint64_t *)(lanes->digest_at + DIGEST_PIECES_OFF),
        .owner = (const uint32_t *)(lanes->digest_at + DIGEST_OWNERS_OFF),
        .digests = lanes->digest_at + DIGEST_OUT_OFF};
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

enum kv_err device_cuda_lanes_digest(struct device_cuda_lanes *lanes,
                                     const struct device_extent *extents, uint32_t count,
                                     struct kv_digest *digests_out) {
    struct device_cuda_lane *lane = device_cuda_lanes_enter(lanes, DEVICE_CHECK);
    enum kv_err err = KV_OK;

    for (uint32_t done = 0, each; done < count && err == KV_OK; done += each) {
        struct cuda_kvops_digest args;
        each = fill_digests(lanes, extents + done, count - done, &args);
        if (!each) {
            err = device_cuda_lanes_note(lanes, DEVICE_CHECK, cudaErrorInvalidValue,
                                         "digest of so large an extent");
            break;
        }
        uint64_t told = DIGEST_OWNERS_OFF + args.piece_count * 4ull;
        const struct device_copy list = {lanes->digest_at, lanes->digest_host, told};
        move_in(lanes, DEVICE_CHECK, &list, 1);
        (void)device_cuda_lanes_note(lanes, DEVICE_CHECK, cuda_kvops_digest(&args, lane->stream),
                                     "digest");
        (void)device_cuda_lanes_note(lanes, DEVICE_CHECK,
                                     cudaMemcpyAsync(lanes->digest_host, args.digests,
                                                     each * KV_DIGEST_BYTES, cudaMemcpyDeviceToHost,
                                                     lane->stream),
                                     "digest");
        err = finish(lanes, DEVICE_CHECK, "digest");
        for (uint32_t i = 0; i < each; i++)
            memcpy(digests_out[done + i].bytes, lanes->digest_host + i * KV_DIGEST_BYTES,
                   KV_DIGEST_BYTES);
    }
    pthread_mutex_unlock(&lane->lock);
    return err;
}

/* --- opening */

static cudaError_t open_lane(struct device_cuda_lane *lane, int priority) {
    cudaError_t error =
        cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, priority);
    if (error == cudaSuccess)
        error = cudaHostAlloc((void **)&lane->ring, (size_t)SLICES * SLICE_BYTES,
                              cudaHostAllocPortable);
    for (uint32_t i = 0; i < SLICES && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&lane->used[i], cudaEventDisableTiming);
    return error;
}

void device_cuda_lanes_init(struct device_cuda_lanes *lanes, struct device *device, int index,
                            const struct kv_alloc *alloc) {
    lanes->device = device;
    lanes->index = index;
    pinned_init(&lanes->pinned, pin, unpin, lanes);
    pinned_large(&lanes->pinned, alloc, pin_there);
    for (uint32_t i = 0; i < DEVICE_LANE_COUNT; i++)
        pthread_mutex_init(&lanes->of[i].lock, NULL);
}

cudaError_t device_cuda_lanes_open(struct device_cuda_lanes *lanes) {
    int least = 0, greatest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);

    for (uint32_t i = 0; i < DEVICE_LANE_COUNT && error == cudaSuccess; i++)
        error = open_lane(&lanes->of[i], i == DEVICE_STEP ? greatest : least);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&lanes->filled, cudaEventDisableTiming);
    if (error == cudaSuccess)
        error = cudaHostAlloc((void **)&lanes->digest_host, DIGEST_BYTES, cudaHostAllocPortable);
    return error;
}

void device_cuda_lanes_close(struct device_cuda_lanes *lanes) {
    for (uint32_t i = 0; i < DEVICE_LANE_COUNT; i++) {
        struct device_cuda_lane *lane = &lanes->of[i];
        for (uint32_t k = 0; k < SLICES; k++)
            if (lane->used[k])
                (void)cudaEventDestroy(lane->used[k]);
        (void)cudaFreeHost(lane->ring);
        if (lane->stream)
            (void)cudaStreamDestroy(lane->stream);
        pthread_mutex_destroy(&lane->lock);
    }
    if (lanes->filled)
        (void)cudaEventDestroy(lanes->filled);
    pinned_release(&lanes->pinned);
    (void)cudaFreeHost(lanes->digest_host);
}
