/* store/store_reserve.h - a little of the disk kept back, so that a full one can be emptied.
 *
 * Responsible for: the file RESERVE, which holds blocks and no content: taken when a writer opens
 * the store, before ordinary batches and when holes were punched, given back before batches that
 * remove.
 * Not responsible for: the byte budget's own reserve (store_batch.c).
 *
 * A removal on a full disk needs a page for its batch record and a few for the index; punching
 * needs none, and gives room for the next reserve.
 *
 * Threads: the thread that owns batches.
 * Units: bytes.
 */
#ifndef STORE_STORE_RESERVE_H
#define STORE_STORE_RESERVE_H

#include "store/base/diag.h"

#include <stdint.h>

struct store;

enum { STORE_RESERVE_BYTES = 512 * 1024 };

/* The file itself; its blocks come with store_reserve_take. KV_ERR_IO, KV_ERR_NOMEM, KV_ERR_CORRUPT
 * a symbolic link; a disk too full for the name is no error. */
enum kv_err store_reserve_open(struct store *store, struct kv_diag *diag);
void store_reserve_close(struct store *store);

/* Both only try: a disk without room has no reserve until there is some again. */
void store_reserve_take(struct store *store);
void store_reserve_give(struct store *store);

/* What it takes of the disk now; any thread. */
uint64_t store_reserve_taken(const struct store *store);
/* What the reserve may take of the byte budget, taken or not. */
uint64_t store_reserve_bytes(const struct store *store);

#endif
