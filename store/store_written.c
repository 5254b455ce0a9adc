/* store/store_written.c - the account of bytes as a record.
 *
 * Responsible for: the contract of store_written.h.
 * Not responsible for: when it is written (store_batch.c).
 */
#include "store/store_written.h"

#include "store/store_gone.h"

#include <string.h>

enum { VERSION = 1 };

const char store_written_key[] = STORE_GONE_OWN_PREFIX "written";
_Static_assert(sizeof store_written_key - 1 == STORE_WRITTEN_KEY_BYTES, "length of the key");

void store_written_encode(const struct store_written_sum *sums, uint8_t out[STORE_WRITTEN_BYTES]) {
    kv_put_u32(out, VERSION);
    kv_put_u32(out + 4, STORE_CAUSES);
    for (size_t i = 0; i < STORE_CAUSES; i++) {
        kv_put_u64(out + 8 + i * 24, sums[i].batches);
        kv_put_u64(out + 16 + i * 24, sums[i].user_bytes);
        kv_put_u64(out + 24 + i * 24, sums[i].device_bytes);
    }
}

void store_written_load(struct index *index, const struct kv_alloc *alloc,
                        struct store_written_sum *sums_out) {
    struct index_copy copy = {0};
    struct fmt_entry entry;
    memset(sums_out, 0, STORE_CAUSES * sizeof *sums_out);
    if (index_get(index, store_written_key, STORE_WRITTEN_KEY_BYTES, &copy, NULL) == KV_OK &&
        fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry) == KV_OK &&
        entry.value_bytes == STORE_WRITTEN_BYTES && kv_get_u32(entry.value) == VERSION &&
        kv_get_u32(entry.value + 4) == STORE_CAUSES)
        for (size_t i = 0; i < STORE_CAUSES; i++) {
            sums_out[i].batches = kv_get_u64(entry.value + 8 + i * 24);
            sums_out[i].user_bytes = kv_get_u64(entry.value + 16 + i * 24);
            sums_out[i].device_bytes = kv_get_u64(entry.value + 24 + i * 24);
        }
    index_copy_release(alloc, &copy);
}
