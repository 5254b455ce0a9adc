/* store/store_reserve.c - blocks taken and given back.
 *
 * Responsible for: the contract of store_reserve.h.
 * Not responsible for: when (store_batch.c).
 */
#include "store/store_reserve.h"

#include "store/store_inner.h"

#include <errno.h>

static const char name[] = "RESERVE";

uint64_t store_reserve_bytes(const struct store *store) {
    uint64_t share = store->options.bytes_max / 32 / STORE_PAGE_BYTES * STORE_PAGE_BYTES;
    return share < STORE_RESERVE_BYTES ? share : STORE_RESERVE_BYTES;
}

uint64_t store_reserve_taken(const struct store *store) {
    const struct io_door *door = store->options.door;
    struct io_file_info info = {0};
    return door->info_at(door->context, store->dir, name, &info) == 0 ? info.stored_bytes : 0;
}

enum kv_err store_reserve_open(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    struct io_file_info info = {0};
    int error =
        door->open(door->context, store->dir, name, IO_WRITE | IO_CREATE, &store->reserve_file);
    if (error == ENOSPC || error == EDQUOT || error == EFBIG)
        return KV_OK;
    if (error == 0)
        error = door->info(door->context, store->reserve_file, &info);
    if (error == ELOOP)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s is a symbolic link: refused", name);
    if (error != 0)
        return kv_diag_errno(diag, error == ENOMEM ? KV_ERR_NOMEM : KV_ERR_IO, error,
                             "cannot open %s", name);
    store->reserve_taken = info.size_bytes == store_reserve_bytes(store);
    return KV_OK;
}

void store_reserve_close(struct store *store) {
    const struct io_door *door = store->options.door;
    if (store->reserve_file >= 0)
        door->close(door->context, store->reserve_file);
    store->reserve_file = -1;
}

void store_reserve_take(struct store *store) {
    const struct io_door *door = store->options.door;
    uint64_t bytes = store_reserve_bytes(store);
    if (store->reserve_file < 0 || store->reserve_taken || bytes == 0)
        return;
    /* What an allocation that failed has got all the same is given back. */
    (void)door->truncate(door->context, store->reserve_file, 0);
    int error = door->allocate(door->context, store->reserve_file, bytes);
    if (error != 0)
        (void)door->truncate(door->context, store->reserve_file, 0);
    store->reserve_taken = error == 0;
}

void store_reserve_give(struct store *store) {
    const struct io_door *door = store->options.door;
#ifdef BREAK_RESERVE
    return;
#endif
    if (store->reserve_file < 0 || !store->reserve_taken)
        return;
    store->reserve_taken = door->truncate(door->context, store->reserve_file, 0) != 0;
}
