/* engine/device/device.c - the calls of the door, with the time each class of operation takes.
 *
 * Responsible for: passing calls on to the device's table and adding up busy time.
 * Not responsible for: doing them (device_host.c).
 */
#include "engine/device/device.h"

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

void device_fill(struct device *device, void *at, uint16_t pattern, uint64_t bytes) {
    assert(bytes % 2 == 0);
    device->ops->fill(device, at, pattern, bytes);
}

enum kv_err device_scratch(struct device *device, uint64_t bytes) {
    return device->ops->scratch(device, bytes);
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

void device_matmul(struct device *device, const struct device_matmuls *args) {
    uint64_t begin_ns = start(device);

    assert(args->count >= 1 && args->count <= DEVICE_MATMULS_MAX);
    device->ops->matmul(device, args);
    stop(device, args->class, begin_ns);
}

void device_rope(struct device *device, const struct ops_rope *args) {
    uint64_t begin_ns = start(device);

    device->ops->rope(device, args);
    stop(device, DEVICE_ROPE, begin_ns);
}

void device_swiglu(struct device *device, const struct ops_swiglu *args) {
    uint64_t begin_ns = start(device);

    device->ops->swiglu(device, args);
    stop(device, DEVICE_SWIGLU, begin_ns);
}

void device_prefill(struct device *device, const struct kvops_attend *args) {
    uint64_t begin_ns = start(device);

    device->ops->prefill(device, args);
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

void device_append(struct device *device, const struct device_append *args) {
    uint64_t begin_ns = start(device);

    assert(args->count >= 1 && args->page_token + args->count <= LAYOUT_PAGE_TOKENS);
    device->ops->append(device, args);
    stop(device, DEVICE_APPEND, begin_ns);
}

uint64_t device_fma_rate(struct device *device, uint64_t iterations) {
    return device->ops->fma_rate(device, iterations);
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
                                                          [DEVICE_APPEND] = "append"};

    return (unsigned)class < DEVICE_CLASS_COUNT ? names[class] : "unknown";
}
