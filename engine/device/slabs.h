/* engine/device/slabs.h - much memory of the processor that an accelerator copies from and to.
 *
 * Responsible for: cutting ranges out of large pieces, the first gap that fits, and taking them
 * back; whether an address is within a piece.
 * Not responsible for: getting and freeing the pieces: the two calls of the device.
 *
 * Pinning takes long and unpinning waits for the device, so a piece stays until the release and
 * serves again: what is held is what was handed out at most, and the gaps between.
 *
 * Threads: any.
 * Units: bytes; of SLABS_UNIT_BYTES each inside.
 */
#ifndef ENGINE_DEVICE_SLABS_H
#define ENGINE_DEVICE_SLABS_H

#include <pthread.h>
#include <stdint.h>

enum {
    SLABS_MAX = 4096,
    SLABS_UNIT_BYTES = 4096,
    SLABS_BYTES = 64 << 20, /* of a piece */
    SLABS_UNITS = SLABS_BYTES / SLABS_UNIT_BYTES
};

struct slab;
/* Initialised by slabs_init; the two calls are made without its lock, and one at a time. */
struct slabs {
    pthread_mutex_t lock, growing;
    void *(*take)(void *context, uint64_t bytes); /* NULL: there is none */
    void (*give)(void *context, void *at);
    void *context;
    struct slab *slabs[SLABS_MAX];
    uint32_t count;
};

void slabs_init(struct slabs *slabs, void *(*take)(void *, uint64_t), void (*give)(void *, void *),
                void *context);
/* Frees all pieces, whatever is still out. */
void slabs_release(struct slabs *slabs);

/* A multiple of SLABS_UNIT_BYTES from the piece; NULL: no memory, or more than SLABS_BYTES. */
void *slabs_get(struct slabs *slabs, uint64_t bytes);
/* 0: it is not of a piece. */
int slabs_put(struct slabs *slabs, const void *at);
/* 1 when all of [at, at + bytes) is within one piece. */
int slabs_has(struct slabs *slabs, const void *at, uint64_t bytes);

#endif
