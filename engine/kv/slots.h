/* engine/kv/slots.h - the pool of equal slots that every part of every session lives in.
 *
 * Responsible for: one arena of slots and META frames, the free list, the reserve, poison and the
 * order in which slots are given out.
 * Not responsible for: what stands in a slot, or who gives one up when they run out.
 *
 * Slots that hold planes which only wait for their write ("waiting") are charged to the reserve:
 * growth may use `free` minus what of the reserve they do not use already.
 *
 * Threads: the scheduler thread.
 * Units: slots and frames are indices and counts; sizes in bytes.
 * Errors: NO_SLOTS (the budget holds no session), LIMIT (budget too large), NOMEM.
 */
#ifndef ENGINE_KV_SLOTS_H
#define ENGINE_KV_SLOTS_H

#include "engine/device/device.h"
#include "kernels/kvops.h"
#include "store/base/alloc.h"
#include "store/base/diag.h"

enum {
    SLOTS_PER_FRAME = 8,
    SLOTS_POISON = 0x7fff, /* NaN as BF16 and as fp16 */
    SLOTS_GATHERED_MAX = 512
};

struct slots_settings {
    const struct kv_alloc *alloc;
    struct device *device;
    struct layout_geometry geometry;
    uint64_t budget_bytes;
    uint32_t reserve;
    int poison;
    uint64_t shuffle_seed; /* 0: ascending order */
};

struct slots {
    struct slots_settings settings;
    struct kvops_pool pool;
    uint64_t slot_bytes, frame_bytes, pool_bytes;
    uint32_t total, frames;
    uint32_t *free_list; /* taken from the end */
    uint32_t free_count;
    uint32_t waiting; /* slots of planes that nobody reads and that are not durable yet */
    uint32_t peak_used;
    int gathering; /* what is to be poisoned waits in one of these */
    void *gathered[SLOTS_GATHERED_MAX], *gathered_frames[SLOTS_GATHERED_MAX];
    uint32_t gathered_count, gathered_frame_count;
};

/* Writes `slots_out` also on failure, so that slots_release is always right after it. */
enum kv_err slots_init(const struct slots_settings *settings, struct slots *slots_out,
                       struct kv_diag *diag);
void slots_release(struct slots *slots);

/* How many a request that brings back `allowance` slots at its end may take now. */
uint32_t slots_available(const struct slots *slots, uint32_t allowance);
/* Takes `count` that the caller has seen to be free. */
void slots_take(struct slots *slots, uint32_t count, uint32_t *taken_out);
void slots_put(struct slots *slots, const uint32_t *given, uint32_t count);
/* Slots of the streams in a mask of 1u << enum layout_stream. */
uint32_t slots_of(uint32_t streams);
uint8_t *slots_at(const struct slots *slots, uint32_t slot);
uint8_t *slots_frame(const struct slots *slots, uint32_t frame);
/* Poison for what is not free but holds nothing any more. */
void slots_spoil(struct slots *slots, const uint32_t *spoiled, uint32_t count);
void slots_spoil_frame(struct slots *slots, uint32_t frame);
/* Between the two poison for what becomes free waits, at most until something is taken, and goes
 * together: calls to the device for each block of a long session take longer than half a step. */
void slots_gather(struct slots *slots);
void slots_gather_end(struct slots *slots);

#endif
