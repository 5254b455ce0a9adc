/* engine/device/device_cuda_lanes.h - streams of a CUDA GPU: what is copied beside steps.
 *
 * Responsible for: a stream for each lane with a ring of pinned memory, errors of the lanes, pinned
 * buffers, copies, digests.
 * Not responsible for: memory of the device, operations (device_cuda.c).
 *
 * Threads: as device.h says of lanes; a lane's lock is held during each call for it.
 * Units: bytes.
 * Errors: DEVICE.
 */
#ifndef ENGINE_DEVICE_DEVICE_CUDA_LANES_H
#define ENGINE_DEVICE_DEVICE_CUDA_LANES_H

#include "engine/device/device.h"
#include "engine/device/pinned.h"

#include <cuda_runtime_api.h>

#include <pthread.h>

enum { DEVICE_CUDA_LANES_SLICES = 4 };

struct device_cuda_lane {
    cudaStream_t stream;
    pthread_mutex_t lock;
    uint8_t *ring; /* in slices of 4 MiB, pinned */
    cudaEvent_t used[DEVICE_CUDA_LANES_SLICES];
    uint64_t sent; /* slices used so far: the next is number sent % SLICES */
    int failed;
};

struct device_cuda_lanes {
    struct device *device;
    int index;
    struct device_cuda_lane of[DEVICE_LANE_COUNT];
    struct pinned pinned;
    cudaEvent_t filled;               /* the last fill has ended: other lanes copy behind it */
    uint8_t *digest_host, *digest_at; /* extents, owners, then on the device pieces and digests */
};

/* Of zeroed memory; close may follow whatever open has said. digest_at, of device memory of so many
 * bytes, is given by the caller before the first digest. */
void device_cuda_lanes_init(struct device_cuda_lanes *lanes, struct device *device, int index,
                            const struct kv_alloc *alloc);
cudaError_t device_cuda_lanes_open(struct device_cuda_lanes *lanes);
uint64_t device_cuda_lanes_digest_bytes(void);
void device_cuda_lanes_close(struct device_cuda_lanes *lanes);

/* With its lock, which the caller gives back, on the lane's device. */
struct device_cuda_lane *device_cuda_lanes_enter(struct device_cuda_lanes *lanes,
                                                 enum device_lane lane);
/* An error of a call, or of work before it: the lane has failed, and the device is lost where the
 * error sticks to the context. */
enum kv_err device_cuda_lanes_note(struct device_cuda_lanes *lanes, enum device_lane lane,
                                   cudaError_t error, const char *what);

/* As in device.h. */
enum kv_err device_cuda_lanes_copy_in(struct device_cuda_lanes *lanes, enum device_lane index,
                                      const struct device_copy *copies, uint32_t count);
enum kv_err device_cuda_lanes_copy_out(struct device_cuda_lanes *lanes, enum device_lane index,
                                       const struct device_copy *copies, uint32_t count);
uint64_t device_cuda_lanes_sent(struct device_cuda_lanes *lanes, enum device_lane index);
enum kv_err device_cuda_lanes_wait_sent(struct device_cuda_lanes *lanes, enum device_lane index,
                                        uint64_t sent);
/* In DEVICE_CHECK. */
enum kv_err device_cuda_lanes_digest(struct device_cuda_lanes *lanes,
                                     const struct device_extent *extents, uint32_t count,
                                     struct kv_digest *digests_out);

#endif
