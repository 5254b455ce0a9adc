/* store/store_written.h - what was written, and why.
 *
 * Responsible for: user bytes and device bytes by cause, kept over openings as a record of the
 * store's own.
 * Not responsible for: the index's own pages, which LMDB writes past the I/O door.
 *
 * Threads: pure; the handle's copy is guarded by its lock.
 * Units: bytes.
 */
#ifndef STORE_STORE_WRITTEN_H
#define STORE_STORE_WRITTEN_H

#include "store/index.h"
#include "store/store.h"

enum { STORE_WRITTEN_BYTES = 8 + STORE_CAUSES * 24 };
/* Key of the record. */
extern const char store_written_key[];
enum { STORE_WRITTEN_KEY_BYTES = 14 };

void store_written_encode(const struct store_written_sum *sums, uint8_t out[STORE_WRITTEN_BYTES]);
/* Zeros when there is no such record or it means nothing: a count is not worth a failure. */
void store_written_load(struct index *index, const struct kv_alloc *alloc,
                        struct store_written_sum *sums_out);

#endif
