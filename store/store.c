/* store/store.c - looking up records, and the rules that the whole folder keeps.
 *
 * Responsible for: store_get, store_exists, store_next, stats.
 * Not responsible for: opening (store_open.c, recover.c, rebuild.c), batches (store_batch.c),
 * extents (store_read.c).
 *
 * Invariants:
 * 1. An index entry never refers to bytes that have not been synced.
 * 2. The digest lives with the referrer (index entry and batch record), never only beside the
 * bytes.
 * 3. Bytes that nobody refers to are garbage.
 * 4. A read returns bytes that match the digest, or an error, never anything else.
 * 5. Each index entry ends with XXH3-64 over key and value.
 */
#include "store/store_inner.h"

#include "store/store_gone.h"
#include "store/store_reserve.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* One core reads, the others unzip; what a disk gives needs a few of them. */
static uint32_t usual_helpers(void) {
    const long most = 12;
    long others = sysconf(_SC_NPROCESSORS_ONLN) - 1;
    return (uint32_t)(others < 1 ? 1 : others < most ? others : most);
}

struct store_options store_options_usual(const char *dir, const char *program) {
    return (struct store_options){
        .dir = dir,
        .read_only = 0,
        .create = 1,
        .direct_wanted = 1,
        .bytes_max = STORE_BYTES_UNLIMITED,
        .segment_bytes = (uint64_t)64 << 20,
        .deadline_ns = (uint64_t)30 * 1000000000u,
        .helpers = usual_helpers(),
        .program = program,
        .door = io_best_door(),
        .alloc = kv_alloc_system(),
        .clock = kv_clock_system(),
    };
}

void store_options_limit(struct store_options *options, uint64_t bytes_max) {
    const uint64_t reserve_most = (uint64_t)32 << 20;
    const uint64_t segment_least = (uint64_t)1 << 20;
    options->bytes_max = bytes_max;
    options->reserve_bytes = 0;
    if (bytes_max == STORE_BYTES_UNLIMITED)
        return;
    uint64_t segment = bytes_max / 16 / STORE_PAGE_BYTES * STORE_PAGE_BYTES;
    options->reserve_bytes = bytes_max / 8 < reserve_most ? bytes_max / 8 : reserve_most;
    if (segment < options->segment_bytes)
        options->segment_bytes = segment > segment_least ? segment : segment_least;
}

static enum kv_err check_key(size_t key_bytes, struct kv_diag *diag) {
    if (key_bytes == 0 || key_bytes > STORE_KEY_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "a key has %zu bytes: it must have 1 to %d",
                           key_bytes, STORE_KEY_BYTES_MAX);
    return KV_OK;
}

/* The copy becomes a record in one allocation: extents first, they need the alignment. */
static enum kv_err make_record(struct store *store, const struct index_copy *copy,
                               struct store_record *out, struct kv_diag *diag) {
    struct fmt_entry entry;
    enum kv_err err = fmt_entry_decode(copy->bytes, copy->key_bytes, copy->total_bytes, &entry);
    if (err != KV_OK)
        return kv_diag_set(diag, err,
                           "an index entry fails its check: open the store for writing once, which "
                           "rebuilds the index from the segments");
    size_t extents_bytes = entry.extent_count * sizeof *out->extents;
    void *memory = kv_alloc_aligned(store->options.alloc, extents_bytes + entry.value_bytes + 1,
                                    _Alignof(struct store_extent));
    if (memory == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a record");
    memset(out, 0, sizeof *out);
    memcpy(out->key, copy->bytes, copy->key_bytes);
    out->key_bytes = (uint32_t)copy->key_bytes;
    out->value_bytes = entry.value_bytes;
    out->extent_count = entry.extent_count;
    out->memory = memory;
    out->extents = memory;
    out->value = (uint8_t *)memory + extents_bytes;
    for (uint32_t i = 0; i < entry.extent_count; i++)
        out->extents[i] = fmt_entry_extent(&entry, i);
    memcpy(out->value, entry.value, entry.value_bytes);
    out->value[entry.value_bytes] = 0;
    return KV_OK;
}

enum kv_err store_get(struct store *store, const void *key, size_t key_bytes,
                      struct store_record *out, struct kv_diag *diag) {
    struct index_copy copy = {0};
    enum kv_err err = check_key(key_bytes, diag);
    if (err == KV_OK)
        err = index_get(store->index, key, key_bytes, &copy, diag);
    if (err == KV_ERR_NOT_FOUND)
        kv_diag_set(diag, err, "no such record");
    if (err == KV_OK)
        err = make_record(store, &copy, out, diag);
    index_copy_release(store->options.alloc, &copy);
    return err;
}

enum kv_err store_exists(struct store *store, const void *key, size_t key_bytes, int *exists_out,
                         struct kv_diag *diag) {
    struct index_copy copy = {0};
    enum kv_err err = check_key(key_bytes, diag);
    if (err == KV_OK)
        err = index_get(store->index, key, key_bytes, &copy, diag);
    index_copy_release(store->options.alloc, &copy);
    if (err != KV_OK && err != KV_ERR_NOT_FOUND)
        return err;
    *exists_out = err == KV_OK;
    return KV_OK;
}

void store_record_release(struct store *store, struct store_record *record) {
    kv_alloc_release(store->options.alloc, record->memory);
    memset(record, 0, sizeof *record);
}

/* What the store keeps for itself. */
static int is_own(const struct index_copy *copy) {
    return copy->key_bytes >= STORE_GONE_OWN_BYTES &&
           memcmp(copy->bytes, STORE_GONE_OWN_PREFIX, STORE_GONE_OWN_BYTES) == 0;
}

enum kv_err store_next(struct store *store, struct store_walk *walk, struct store_record *out,
                       struct kv_diag *diag) {
    struct index_copy copy = {0};
    if (walk->prefix_bytes > STORE_KEY_BYTES_MAX || walk->after_bytes > STORE_KEY_BYTES_MAX)
        return check_key(STORE_KEY_BYTES_MAX + 1, diag);
    struct index_range range = {walk->prefix, walk->prefix_bytes, walk->after, walk->after_bytes};
    enum kv_err err = index_next(store->index, &range, &copy, diag);
    while (err == KV_OK && is_own(&copy)) {
        memcpy(walk->after, copy.bytes, copy.key_bytes);
        range.after_bytes = walk->after_bytes = copy.key_bytes;
        err = index_next(store->index, &range, &copy, diag);
    }
    if (err == KV_OK) {
        memcpy(walk->after, copy.bytes, copy.key_bytes);
        walk->after_bytes = copy.key_bytes;
        err = make_record(store, &copy, out, diag);
    } else if (err == KV_ERR_NOT_FOUND) {
        kv_diag_set(diag, err, "no further record");
    }
    index_copy_release(store->options.alloc, &copy);
    return err;
}

void store_hold(struct store *store) {
    pthread_mutex_lock(&store->lock);
    store->hold_count++;
    pthread_mutex_unlock(&store->lock);
}

void store_unhold(struct store *store) {
    pthread_mutex_lock(&store->lock);
    assert(store->hold_count != 0);
    store->hold_count--;
    pthread_mutex_unlock(&store->lock);
}

uint64_t store_written(struct store *store) {
    pthread_mutex_lock(&store->lock);
    uint64_t bytes = store->written_bytes;
    pthread_mutex_unlock(&store->lock);
    return bytes;
}

uint64_t store_sequence(struct store *store) {
    struct fmt_state state;
    return index_state(store->index, &state, NULL) == KV_OK ? state.sequence : 0;
}

int store_look(struct store *store, struct store_look *look, enum kv_err err,
               struct kv_diag *diag) {
    int again = look->count > 0;
    uint64_t before = look->sequence;
#ifdef BREAK_LOOK
    if (again)
        return 0;
#endif
    if (again && (err != KV_ERR_CORRUPT || look->count >= STORE_LOOKS_MAX))
        return 0;
    look->sequence = store_sequence(store);
    if (again && look->sequence == before)
        return 0;
    look->count++;
    kv_diag_clear(diag);
    return 1;
}

/* Records that walks do not show are not counted either. */
static uint64_t own_records(struct store *store) {
    struct store_walk walk = {.prefix = STORE_GONE_OWN_PREFIX,
                              .prefix_bytes = STORE_GONE_OWN_BYTES};
    struct index_copy copy = {0};
    uint64_t count = 0;
    for (;;) {
        struct index_range range = {walk.prefix, walk.prefix_bytes, walk.after, walk.after_bytes};
        if (index_next(store->index, &range, &copy, NULL) != KV_OK)
            break;
        memcpy(walk.after, copy.bytes, copy.key_bytes);
        walk.after_bytes = copy.key_bytes;
        count++;
    }
    index_copy_release(store->options.alloc, &copy);
    return count;
}

void store_stats_get(struct store *store, struct store_stats *out) {
    uint64_t index_size = index_bytes(store->index);
    uint64_t own = own_records(store);
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&store->lock);
    out->door_name = store->door_name;
    out->direct = store->direct;
    memcpy(out->fallback, store->fallback, sizeof out->fallback);
    memcpy(out->opened, store->opened, sizeof out->opened);
    out->records = store->state.record_count > own ? store->state.record_count - own : 0;
    out->live_bytes = store->state.live_bytes;
    out->segment_bytes = store->segment_bytes;
    if (store->segment_bytes > store->state.live_bytes)
        out->garbage_bytes = store->segment_bytes - store->state.live_bytes;
    out->batches = store->state.sequence;
    out->segments = store->segment_count;
    out->refuses_writes = store->refuses_writes;
    memcpy(out->written, store->written, sizeof out->written);
    pthread_mutex_unlock(&store->lock);
    out->index_bytes = index_size;
    out->kept_bytes = store_reserve_taken(store);
    out->bytes_max = store->options.bytes_max;
    uint64_t used =
        out->segment_bytes + index_size + store->options.reserve_bytes + store_reserve_bytes(store);
    out->room_bytes = out->bytes_max;
    if (out->bytes_max != STORE_BYTES_UNLIMITED)
        out->room_bytes = used < out->bytes_max ? out->bytes_max - used : 0;
}
