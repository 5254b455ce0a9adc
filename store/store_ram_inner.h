/* store/store_ram_inner.h - what reads, batches and store_close ask of the extents in memory.
 *
 * Responsible for: the calls between the files of the store.
 * Not responsible for: anything outside store/.
 *
 * Threads: any.
 * Units: bytes.
 */
#ifndef STORE_STORE_RAM_INNER_H
#define STORE_STORE_RAM_INNER_H

#include "store/store_ram.h"

/* Copies the extent into the pieces of a read; 0 when it is not here. Not checked. */
int store_ram_inner_take(struct store *store, const struct store_read *read);
void store_ram_inner_forget(struct store *store, const struct store_extent *extent);
/* Before a batch's operations are applied: what they delete or replace goes. */
void store_ram_inner_batch(struct store *store, const uint8_t *ops, size_t ops_bytes,
                           uint32_t op_count);
/* The index and the sequence say so too, or it failed. */
void store_ram_inner_batch_over(struct store *store);
void store_ram_inner_close(struct store *store);

#endif
