/* store/index_pages.h - is a file one that LMDB can be trusted with?
 *
 * Responsible for: walking the pages of an LMDB 0.9 file by plain reads, so that damage is found
 * here instead of ending the process inside LMDB, which believes what it maps.
 * Not responsible for: keys and values (fmt.c checks those one by one).
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef STORE_INDEX_PAGES_H
#define STORE_INDEX_PAGES_H

#include "store/base/alloc.h"
#include "store/base/diag.h"
#include "store/io.h"

/* KV_ERR_CORRUPT a page that LMDB cannot have written, KV_ERR_IO, KV_ERR_NOMEM. When another
 * process commits during the walk nothing can be said, and the answer is KV_OK. */
enum kv_err index_pages_check(const struct io_door *door, int dir, const struct kv_alloc *alloc,
                              struct kv_diag *diag);

#endif
