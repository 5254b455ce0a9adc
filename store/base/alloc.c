/* store/base/alloc.c - the system allocator behind the door, and the helpers on top of the door.
 *
 * Responsible for: the only calls of the C library's allocator in the tree.
 * Not responsible for: limits; callers check their named maxima first.
 */
#include "store/base/alloc.h"

#include "store/base/bytes.h"

#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SMALL_PAGE_BYTES = 4096,
    LARGE_PAGE_BYTES = 2 << 20 /* of x86-64, and of ARM with 4 KiB pages */
};

static void *system_get(void *context, size_t bytes, size_t align_bytes) {
    (void)context;
    void *memory = NULL;
    if (align_bytes < sizeof(void *))
        align_bytes = sizeof(void *);
    if (posix_memalign(&memory, align_bytes, bytes == 0 ? 1 : bytes) != 0)
        return NULL;
    return memory;
}

static void system_put(void *context, void *memory) {
    (void)context;
    free(memory);
}

static const struct kv_alloc system_alloc = {system_get, system_put, NULL};

const struct kv_alloc *kv_alloc_system(void) {
    return &system_alloc;
}

void *kv_alloc_aligned(const struct kv_alloc *alloc, size_t bytes, size_t align_bytes) {
    return alloc->get(alloc->context, bytes, align_bytes);
}

/* Below that rounding to large pages would be felt. Where the system gives none nothing changes, so
 * its answer does not matter. */
void *kv_alloc_large(const struct kv_alloc *alloc, size_t bytes) {
    int large = bytes >= KV_ALLOC_LARGE_BYTES;
#ifdef BREAK_ALLOC_LARGE
    large = 0;
#endif
    void *memory = kv_alloc_aligned(alloc, bytes, large ? LARGE_PAGE_BYTES : SMALL_PAGE_BYTES);
    if (memory != NULL && large)
        (void)madvise(memory, bytes & ~(size_t)(LARGE_PAGE_BYTES - 1), MADV_HUGEPAGE);
    return memory;
}

void *kv_alloc_zeroed(const struct kv_alloc *alloc, size_t count, size_t bytes) {
    uint64_t total = 0;
    if (!kv_mul_u64(count, bytes, &total) || total > SIZE_MAX)
        return NULL;
    void *memory = alloc->get(alloc->context, (size_t)total, alignof(max_align_t));
    if (memory != NULL)
        memset(memory, 0, (size_t)total);
    return memory;
}

void *kv_alloc_copy(const struct kv_alloc *alloc, const void *from, size_t bytes) {
    if (bytes == SIZE_MAX)
        return NULL;
    char *memory = alloc->get(alloc->context, bytes + 1, alignof(max_align_t));
    if (memory == NULL)
        return NULL;
    if (bytes != 0)
        memcpy(memory, from, bytes);
    memory[bytes] = 0;
    return memory;
}

int kv_alloc_grow(const struct kv_alloc *alloc, void **items, size_t *capacity, size_t needed,
                  size_t item_bytes) {
    if (needed <= *capacity)
        return 1;
    size_t wanted = *capacity < 8 ? 8 : *capacity;
    while (wanted < needed) {
        if (wanted > SIZE_MAX / 2)
            return 0;
        wanted *= 2;
    }
    uint64_t total = 0;
    if (!kv_mul_u64(wanted, item_bytes, &total) || total > SIZE_MAX)
        return 0;
    void *grown = alloc->get(alloc->context, (size_t)total, alignof(max_align_t));
    if (grown == NULL)
        return 0;
    if (*capacity != 0)
        memcpy(grown, *items, *capacity * item_bytes);
    kv_alloc_release(alloc, *items);
    *items = grown;
    *capacity = wanted;
    return 1;
}

void kv_alloc_release(const struct kv_alloc *alloc, void *memory) {
    if (memory != NULL)
        alloc->put(alloc->context, memory);
}
