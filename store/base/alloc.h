/* store/base/alloc.h - the door to memory.
 *
 * Responsible for: one small interface that every handle is opened with, so that a test can fail
 * the k-th allocation or count what is left.
 * Not responsible for: device memory (engine/device) or pools inside it (engine/kv).
 *
 * Threads: kv_alloc_system may be used from any thread; a test allocator locks for itself.
 * Units: bytes.
 */
#ifndef STORE_BASE_ALLOC_H
#define STORE_BASE_ALLOC_H

#include <stddef.h>

struct kv_alloc {
    /* NULL when there is no memory. `align_bytes` is a power of two. Content is undefined. */
    void *(*get)(void *context, size_t bytes, size_t align_bytes);
    void (*put)(void *context, void *memory);
    void *context;
};

const struct kv_alloc *kv_alloc_system(void);

/* Zeroed memory aligned to max_align_t; NULL when there is none or count × bytes overflows. */
void *kv_alloc_zeroed(const struct kv_alloc *alloc, size_t count, size_t bytes);

/* Uninitialised memory with the given alignment; NULL when there is none. */
void *kv_alloc_aligned(const struct kv_alloc *alloc, size_t bytes, size_t align_bytes);

/* The same for what a disk reads and writes, and for what is jumped about in: aligned to 4 KiB, and
 * from KV_ALLOC_LARGE_BYTES on in large pages where the system has them. One request names a piece
 * for each run of pages that lie together, and a virtual disk moves about three times as many bytes
 * with one of 2 MiB as with those of 4 KiB. */
enum { KV_ALLOC_LARGE_BYTES = 8 << 20 };
void *kv_alloc_large(const struct kv_alloc *alloc, size_t bytes);

/* A copy of `bytes` bytes followed by a zero byte; NULL when there is no memory. */
void *kv_alloc_copy(const struct kv_alloc *alloc, const void *from, size_t bytes);

/* Grows `*items` (of *capacity elements) so that at least `needed` fit, doubling. The old content
 * is kept. Returns 0 and changes nothing when there is no memory or a size overflows. */
int kv_alloc_grow(const struct kv_alloc *alloc, void **items, size_t *capacity, size_t needed,
                  size_t item_bytes);

/* NULL is allowed. */
void kv_alloc_release(const struct kv_alloc *alloc, void *memory);

#endif
