/* engine/device/slabs.c - much memory of the processor that an accelerator copies from and to.
 *
 * Responsible for: what slabs.h says.
 * Not responsible for: a minimum of gaps: extents come in a few sizes, and whole sessions go.
 *
 * A piece keeps its account at its own end: which units are taken, and for a range's first unit how
 * long it is.
 */
#include "engine/device/slabs.h"

#include <assert.h>
#include <string.h>

struct slab {
    uint8_t *at;
    uint32_t free, least_failed;   /* units; no gap has this length or more */
    uint16_t lengths[SLABS_UNITS]; /* of the range that begins here, 0: none does */
};

enum { SLAB_TAKE_BYTES = SLABS_BYTES + (int)sizeof(struct slab) };
_Static_assert(SLABS_UNITS <= UINT16_MAX, "a range's length fits");

void slabs_init(struct slabs *slabs, void *(*take)(void *, uint64_t), void (*give)(void *, void *),
                void *context) {
    memset(slabs, 0, sizeof *slabs);
    pthread_mutex_init(&slabs->lock, NULL);
    pthread_mutex_init(&slabs->growing, NULL);
    slabs->take = take;
    slabs->give = give;
    slabs->context = context;
}

void slabs_release(struct slabs *slabs) {
    while (slabs->count != 0)
        slabs->give(slabs->context, slabs->slabs[--slabs->count]->at);
    pthread_mutex_destroy(&slabs->lock);
    pthread_mutex_destroy(&slabs->growing);
}

/* The first gap of one piece; SLABS_UNITS: none. */
static uint32_t gap_of(struct slab *slab, uint32_t units) {
    uint32_t begin = 0;

    if (units > slab->free || units >= slab->least_failed)
        return SLABS_UNITS;
    for (uint32_t at = 0; at < SLABS_UNITS;) {
        if (slab->lengths[at] == 0) {
            at++;
#ifndef BREAK_SLABS_GAP
            if (at - begin == units)
                return begin;
            continue;
#else
            return begin;
#endif
        }
        at += slab->lengths[at];
        begin = at;
    }
    slab->least_failed = units;
    return SLABS_UNITS;
}

static void *cut(struct slabs *slabs, uint32_t units) {
    void *at = NULL;

    pthread_mutex_lock(&slabs->lock);
    for (uint32_t i = 0; i < slabs->count && !at; i++) {
        struct slab *slab = slabs->slabs[i];
        uint32_t begin = gap_of(slab, units);
        if (begin == SLABS_UNITS)
            continue;
        slab->lengths[begin] = (uint16_t)units;
        slab->free -= units;
        at = slab->at + (uint64_t)begin * SLABS_UNIT_BYTES;
    }
    pthread_mutex_unlock(&slabs->lock);
    return at;
}

/* One more piece; 0: there is none. */
static int grow(struct slabs *slabs) {
    uint8_t *at = slabs->count < SLABS_MAX ? slabs->take(slabs->context, SLAB_TAKE_BYTES) : NULL;

    if (!at)
        return 0;
    struct slab *slab = (struct slab *)(void *)(at + SLABS_BYTES);
    memset(slab, 0, sizeof *slab);
    slab->at = at;
    slab->free = SLABS_UNITS;
    slab->least_failed = SLABS_UNITS + 1;
    pthread_mutex_lock(&slabs->lock);
    slabs->slabs[slabs->count++] = slab;
    pthread_mutex_unlock(&slabs->lock);
    return 1;
}

void *slabs_get(struct slabs *slabs, uint64_t bytes) {
    void *at = NULL;

    if (bytes == 0 || bytes > SLABS_BYTES)
        return NULL;
    uint32_t units = (uint32_t)((bytes + SLABS_UNIT_BYTES - 1) / SLABS_UNIT_BYTES);
    if ((at = cut(slabs, units)))
        return at;
    pthread_mutex_lock(&slabs->growing);
    do
        at = cut(slabs, units); /* another thread may have grown it */
    while (!at && grow(slabs));
    pthread_mutex_unlock(&slabs->growing);
    return at;
}

static struct slab *slab_of(const struct slabs *slabs, const void *at, uint64_t bytes) {
    uint64_t first = (uintptr_t)at;

    for (uint32_t i = 0; i < slabs->count; i++) {
        uint64_t begin = (uintptr_t)slabs->slabs[i]->at;
        if (first >= begin && first - begin <= SLABS_BYTES &&
            bytes <= SLABS_BYTES - (first - begin))
            return slabs->slabs[i];
    }
    return NULL;
}

int slabs_put(struct slabs *slabs, const void *at) {
    pthread_mutex_lock(&slabs->lock);
    struct slab *slab = slab_of(slabs, at, SLABS_UNIT_BYTES);
    if (slab) {
        uint64_t begin = (uint64_t)((const uint8_t *)at - slab->at) / SLABS_UNIT_BYTES;
        assert(slab->lengths[begin] != 0);
        slab->free += slab->lengths[begin];
        slab->least_failed = SLABS_UNITS + 1;
        slab->lengths[begin] = 0;
    }
    pthread_mutex_unlock(&slabs->lock);
    return slab != NULL;
}

int slabs_has(struct slabs *slabs, const void *at, uint64_t bytes) {
    pthread_mutex_lock(&slabs->lock);
    int found = slab_of(slabs, at, bytes) != NULL;
    pthread_mutex_unlock(&slabs->lock);
    return found;
}
