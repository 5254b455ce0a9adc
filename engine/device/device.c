/* engine/device/device.c - the calls of the door, with the time each class of operation takes.
 *
 * Responsible for: passing calls on to the device's table and adding up busy time.
 * Not responsible for: doing them (device_host.c, device_cuda.c).
 */
#include "engine/device/device.h"

#include "engine/device/pinned.h"

#include <assert.h>
#include <string.h>

static uint64_t start(struct device *device) {
    return kv_clock_now_ns(device->clock);
}

static void stop(struct device *device, enum device_class class, uint64_t begin_ns) {
    device->busy_ns[class] += kv_clock_now_ns(device->clock) - begin_ns;
}

void device_close(struct device *device) {
    if (device)
        device->ops->close(device);
}

void *device_get(struct device *device, uint64_t bytes) {
    return device->ops->get(device, bytes);
}

void device_put(struct device *device, void *memory) {
    device->ops->put(device, memory);
}

uint64_t device_room(struct device *device) {
    return device->ops->room(device);
}

void *device_host_get(struct device *device, uint64_t bytes) {
    return device->ops->host_get ? device->ops->host_get(device, bytes)
                                 : pinned_get(device->pinned, bytes);
}

void *device_host_keep(struct device *device, uint64_t bytes) {
    if (device->ops->host_keep)
        return device->ops->host_keep(device, bytes);
    return device->pinned ? pinned_keep(device->pinned, bytes) : NULL;
}

void device_host_put(struct device *device, void *memory) {
    if (memory && device->ops->host_put)
        device->ops->host_put(device, memory);
    else if (memory)
        pinned_put(device->pinned, memory);
}

void *device_mapped(struct device *device, void *at) {
    return device->ops->mapped ? device->ops->mapped(device, at) : NULL;
}

void device_fill(struct device *device, const struct device_fill *fill) {
    assert(fill->part_bytes % 16 == 0);
    if (fill->part_count)
        device->ops->fill(device, fill);
}

enum kv_err device_copy_in(struct device *device, enum device_lane lane,
                           const struct device_copy *copies, uint32_t count) {
    return device->ops->copy_in(device, lane, copies, count);
}

/* Time is counted where the scheduler waits: other lanes have threads of their own. */
enum kv_err device_copy_out(struct device *device, enum device_lane lane,
                            const struct device_copy *copies, uint32_t count) {
    uint64_t begin_ns = start(device);
    enum kv_err err = device->ops->copy_out(device, lane, copies, count);

    if (lane == DEVICE_STEP)
        stop(device, DEVICE_WAIT, begin_ns);
    return err;
}

enum kv_err device_digest(struct device *device, enum device_lane lane,
                          const struct device_extent *extents, uint32_t count,
                          struct kv_digest *digests_out) {
    return device->ops->digest(device, lane, extents, count, digests_out);
}

enum kv_err device_wait(struct device *device, enum device_lane lane) {
    return device->ops->wait(device, lane);
}

uint64_t device_sent(struct device *device, enum device_lane lane) {
    return device->ops->sent ? device->ops->sent(device, lane) : 0;
}

enum kv_err device_wait_sent(struct device *device, enum device_lane lane, uint64_t sent) {
    return device->ops->sent ? device->ops->wait_sent(device, lane, sent) : KV_OK;
}

enum kv_err device_scratch(struct device *device, uint64_t bytes) {
    return device->ops->scratch ? device->ops->scratch(device, bytes) : KV_OK;
}

uint64_t device_weight_bytes(struct device *device, enum device_use use, enum ops_type type,
                             uint32_t n, uint32_t k) {
    return device->ops->weight_bytes(use, type, n, k);
}

enum kv_err device_weight_load(struct device *device, enum device_use use,
                               struct ops_weight *weight, const uint8_t *tensor) {
    return device->ops->weight_load(device, use, weight, tensor);
}

int device_repeat_begin(struct device *device, uint64_t shape) {
    return device->ops->repeat_begin(device, shape);
}

void device_repeat_end(struct device *device) {
    device->ops->repeat_end(device);
}

void device_plan(struct device *device, uint32_t plan, const struct kvops_attend *singles) {
    assert(plan < DEVICE_PLANS);
    device->ops->plan(device, plan, singles);
}

void device_embed(struct device *device, const struct ops_embed *args) {
    uint64_t begin_ns = start(device);

    device->ops->embed(device, args);
    stop(device, DEVICE_EMBED, begin_ns);
}

void device_rmsnorm(struct device *device, const struct ops_rmsnorm *args) {
    uint64_t begin_ns = start(device);

    device->ops->rmsnorm(device, args);
    stop(device, DEVICE_NORM, begin_ns);
}

static void multiply(struct device *device, const struct device_matmuls *args) {
    uint64_t begin_ns = start(device);

    device->ops->matmul(device, args);
    stop(device, args->class, begin_ns);
}

static void multiply_by_gate(struct device *device, const struct ops_swiglu *args) {
    uint64_t begin_ns = start(device);

    device->ops->swiglu(device, args);
    stop(device, DEVICE_SWIGLU, begin_ns);
}

void device_matmul(struct device *device, const struct device_matmuls *args) {
    struct device_matmuls alone = {args->args, args->count, args->singles, args->class, NULL, NULL};

    assert(args->count >= 1 && args->count <= DEVICE_MATMULS_MAX);
    assert(!args->glu || args->count == 2);
    if (device->ops->matmul_around) {
        multiply(device, args);
        return;
    }
    if (args->norm)
        device_rmsnorm(device, args->norm);
    multiply(device, &alone);
    if (args->glu) {
        const struct ops_matmul *both = args->args;
        struct ops_swiglu swiglu = {both[0].y, both[1].y, args->glu,
                                    (size_t)both[0].rows * both[0].weight.n};
        multiply_by_gate(device, &swiglu);
    }
}

void device_rope(struct device *device, const struct ops_rope *args) {
    uint64_t begin_ns = start(device);

    device->ops->rope(device, args);
    stop(device, DEVICE_ROPE, begin_ns);
}

void device_finite(struct device *device, const struct ops_finite *args) {
    uint64_t begin_ns = start(device);

    device->ops->finite(device, args);
    stop(device, DEVICE_FINITE, begin_ns);
}

int device_has_top(const struct device *device) {
    return device->ops->top != NULL;
}

void device_top(struct device *device, const struct ops_top *args) {
    uint64_t begin_ns = start(device);

    device->ops->top(device, args);
    stop(device, DEVICE_TOP, begin_ns);
}

void device_prefill(struct device *device, const struct kvops_attend *args, uint32_t rows_max,
                    enum layout_tier tier) {
    uint64_t begin_ns = start(device);

    device->ops->prefill(device, args, rows_max, tier);
    stop(device, DEVICE_PREFILL, begin_ns);
}

void device_decode(struct device *device, const struct kvops_attend *args) {
    uint64_t begin_ns = start(device);

    device->ops->decode(device, args);
    stop(device, DEVICE_DECODE, begin_ns);
}

void device_seal(struct device *device, const struct kvops_seal *args) {
    uint64_t begin_ns = start(device);

    device->ops->seal(device, args);
    stop(device, DEVICE_SEAL, begin_ns);
}

enum kv_err device_append(struct device *device, const struct kvops_append *args) {
    uint64_t begin_ns = start(device);
    enum kv_err err;

    assert(args->count >= 1 && args->page_token + args->count <= LAYOUT_PAGE_TOKENS);
    err = device->ops->append(device, args);
    stop(device, DEVICE_APPEND, begin_ns);
    return err;
}

uint64_t device_fma_rate(struct device *device, uint64_t iterations) {
    return device->ops->fma_rate ? device->ops->fma_rate(device, iterations) : 0;
}

void device_profile_reset(struct device *device) {
    memset(device->busy_ns, 0, sizeof device->busy_ns);
}

const char *device_class_name(enum device_class class) {
    static const char *const names[DEVICE_CLASS_COUNT] = {[DEVICE_EMBED] = "embed",
                                                          [DEVICE_NORM] = "norm",
                                                          [DEVICE_MATMUL] = "matmul",
                                                          [DEVICE_HEAD] = "head",
                                                          [DEVICE_ROPE] = "rope",
                                                          [DEVICE_PREFILL] = "attention of chunks",
                                                          [DEVICE_DECODE] = "attention of rows",
                                                          [DEVICE_SWIGLU] = "swiglu",
                                                          [DEVICE_SEAL] = "seal",
                                                          [DEVICE_APPEND] = "append",
                                                          [DEVICE_FINITE] = "finite",
                                                          [DEVICE_TOP] = "best tokens",
                                                          [DEVICE_WAIT] = "waiting"};

    return (unsigned)class < DEVICE_CLASS_COUNT ? names[class] : "unknown";
}
