/* engine/device/pinned.c - buffers of the processor that an accelerator copies from and to.
 *
 * Responsible for: what pinned.h says.
 * Not responsible for: speed of finding one: there are few.
 */
#include "engine/device/pinned.h"

#include <assert.h>
#include <string.h>

void pinned_init(struct pinned *pinned, void *(*take)(void *, uint64_t),
                 void (*give)(void *, void *), void *context) {
    memset(pinned, 0, sizeof *pinned);
    pthread_mutex_init(&pinned->lock, NULL);
    pinned->take = take;
    pinned->give = give;
    pinned->context = context;
    slabs_init(&pinned->slabs, take, give, context);
}

void pinned_large(struct pinned *pinned, const struct kv_alloc *alloc,
                  int (*fix)(void *, void *, uint64_t)) {
    pinned->alloc = alloc;
    pinned->fix = fix;
}

static uint8_t *take(struct pinned *pinned, uint64_t bytes, int *fixed_out) {
    uint8_t *at = NULL;

    if (pinned->alloc && bytes >= KV_ALLOC_LARGE_BYTES)
        at = kv_alloc_large(pinned->alloc, bytes);
    *fixed_out = at && pinned->fix(pinned->context, at, bytes);
    if (*fixed_out)
        return at;
    if (at)
        kv_alloc_release(pinned->alloc, at);
    return pinned->take(pinned->context, bytes);
}

static void give(struct pinned *pinned, uint8_t *at, int fixed) {
    if (at && !fixed)
        pinned->give(pinned->context, at);
    if (!at || !fixed)
        return;
#ifndef BREAK_PINNED_FIXED
    (void)pinned->fix(pinned->context, at, 0);
#endif
    kv_alloc_release(pinned->alloc, at);
}

void pinned_release(struct pinned *pinned) {
    for (uint32_t i = 0; i < PINNED_MAX; i++)
        give(pinned, pinned->buffers[i].at, pinned->buffers[i].fixed);
    slabs_release(&pinned->slabs);
    pthread_mutex_destroy(&pinned->lock);
}

/* The smallest free one that fits and is not far too large; PINNED_MAX: none. */
static uint32_t best_of(const struct pinned *pinned, uint64_t bytes) {
    uint32_t best = PINNED_MAX;

    for (uint32_t i = 0; i < PINNED_MAX; i++) {
        uint64_t has = pinned->buffers[i].bytes;
        if (pinned->buffers[i].taken || has < bytes || has / 4 > bytes + PINNED_SPARE_BYTES)
            continue;
        if (best == PINNED_MAX || has < pinned->buffers[best].bytes)
            best = i;
    }
    return best;
}

/* The smallest that nobody has; PINNED_MAX: none. */
static uint32_t spare_of(const struct pinned *pinned) {
    uint32_t spare = PINNED_MAX;

    for (uint32_t i = 0; i < PINNED_MAX; i++)
        if (!pinned->buffers[i].taken &&
            (spare == PINNED_MAX || pinned->buffers[i].bytes < pinned->buffers[spare].bytes))
            spare = i;
    return spare;
}

/* A large one is rounded up by an eighth at most, so that it serves for a little more too. */
static uint64_t rounded(uint64_t bytes) {
    uint64_t step = 1;

    while (bytes >= PINNED_SPARE_BYTES && step < bytes / 16)
        step *= 2;
    return (bytes + step - 1) / step * step;
}

/* A new one in the place of `spare`. Pinning takes long and whoever copies looks at the list, so it
 * is done without the lock; meanwhile the place is taken and has no memory. */
static void renew(struct pinned *pinned, uint32_t spare, uint64_t bytes) {
    int old_fixed = pinned->buffers[spare].fixed, fixed;
    uint8_t *old = pinned->buffers[spare].at, *at;

    pinned->buffers[spare].at = NULL;
    pinned->buffers[spare].bytes = 0;
    pinned->buffers[spare].taken = 1;
#ifndef BREAK_PINNED_LOCK
    pthread_mutex_unlock(&pinned->lock);
#endif
    give(pinned, old, old_fixed);
    at = take(pinned, bytes, &fixed);
#ifndef BREAK_PINNED_LOCK
    pthread_mutex_lock(&pinned->lock);
#endif
    pinned->buffers[spare].at = at;
    pinned->buffers[spare].fixed = fixed;
    pinned->buffers[spare].bytes = at ? bytes : 0;
    pinned->buffers[spare].taken = at != NULL;
}

void *pinned_get(struct pinned *pinned, uint64_t bytes) {
    void *at = NULL;
    uint32_t which;

    pthread_mutex_lock(&pinned->lock);
    which = best_of(pinned, bytes);
    if (which == PINNED_MAX) {
        which = spare_of(pinned);
        if (which < PINNED_MAX)
            renew(pinned, which, rounded(bytes));
    }
    if (which < PINNED_MAX && pinned->buffers[which].at) {
        pinned->buffers[which].taken = 1;
#ifdef BREAK_PINNED_TAKEN
        pinned->buffers[which].taken = 0;
#endif
        at = pinned->buffers[which].at;
    }
    pthread_mutex_unlock(&pinned->lock);
    return at;
}

void *pinned_keep(struct pinned *pinned, uint64_t bytes) {
    return slabs_get(&pinned->slabs, bytes);
}

void pinned_put(struct pinned *pinned, const void *at) {
    if (at && slabs_put(&pinned->slabs, at))
        return;
    pthread_mutex_lock(&pinned->lock);
    for (uint32_t i = 0; i < PINNED_MAX && at; i++)
        pinned->buffers[i].taken &= pinned->buffers[i].at != at;
    pthread_mutex_unlock(&pinned->lock);
}

int pinned_has(struct pinned *pinned, const void *at, uint64_t bytes) {
    uint64_t first = (uintptr_t)at;
    int found = 0;

    pthread_mutex_lock(&pinned->lock);
    for (uint32_t i = 0; i < PINNED_MAX; i++) {
        uint64_t begin = (uintptr_t)pinned->buffers[i].at, size = pinned->buffers[i].bytes;
#ifdef BREAK_PINNED_END
        bytes = 0;
#endif
        found |=
            begin && first >= begin && first - begin <= size && bytes <= size - (first - begin);
    }
    pthread_mutex_unlock(&pinned->lock);
    return found || slabs_has(&pinned->slabs, at, bytes);
}
