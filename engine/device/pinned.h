/* engine/device/pinned.h - buffers of the processor that an accelerator copies from and to.
 *
 * Responsible for: keeping buffers that were given back, the one that fits best, whether an address
 * is within one.
 * Not responsible for: getting, pinning and freeing their memory: the calls of the device.
 *
 * Pinning costs a millisecond per 4 MiB and unpinning waits for the device, so buffers are kept,
 * and large ones are rounded up so that they serve again.
 *
 * Threads: any.
 * Units: bytes.
 */
#ifndef ENGINE_DEVICE_PINNED_H
#define ENGINE_DEVICE_PINNED_H

#include "engine/device/slabs.h"
#include "store/base/alloc.h"

#include <pthread.h>
#include <stdint.h>

/* One for each of 64 requests that wake a session, and for blocks that a save's helpers hold. */
enum { PINNED_MAX = 96, PINNED_SPARE_BYTES = 4 << 20 };

/* Initialised by pinned_init; the two calls are made without its lock, by one thread or more. */
struct pinned {
    pthread_mutex_t lock;
    void *(*take)(void *context, uint64_t bytes); /* NULL: there is none */
    void (*give)(void *context, void *at);
    void *context;
    const struct kv_alloc *alloc; /* of large ones; NULL: those are taken, too */
    int (*fix)(void *context, void *at, uint64_t bytes);
    struct {
        uint8_t *at;
        uint64_t bytes;
        int taken, fixed;
    } buffers[PINNED_MAX];
    struct slabs slabs; /* for what is kept for long: pinned_keep */
};

void pinned_init(struct pinned *pinned, void *(*take)(void *, uint64_t),
                 void (*give)(void *, void *), void *context);
/* Before the first get: buffers of KV_ALLOC_LARGE_BYTES and more are kv_alloc_large's, so that a
 * disk moves them faster, and `fix` pins them where they are, or lets go of them with 0 bytes; 0:
 * it cannot, and the buffer is taken as a small one is. */
void pinned_large(struct pinned *pinned, const struct kv_alloc *alloc,
                  int (*fix)(void *, void *, uint64_t));
/* Frees all of them, taken or not. */
void pinned_release(struct pinned *pinned);

/* At least `bytes`; NULL: no memory, or PINNED_MAX are taken. A kept one serves unless it is larger
 * than four times `bytes` + PINNED_SPARE_BYTES: 16 MiB of slack for the smallest. */
void *pinned_get(struct pinned *pinned, uint64_t bytes);
/* The same for any number of pieces that stay for long; see slabs.h. */
void *pinned_keep(struct pinned *pinned, uint64_t bytes);
void pinned_put(struct pinned *pinned, const void *at); /* NULL is allowed */
/* 1 when all of [at, at + bytes) is within one buffer. */
int pinned_has(struct pinned *pinned, const void *at, uint64_t bytes);

#endif
