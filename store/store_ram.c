/* store/store_ram.c - extents that stay in memory, within a byte budget.
 *
 * Responsible for: see store_ram.h.
 * Not responsible for: reading (store_read.c).
 *
 * Every extent is one piece of memory: its entry, then its bytes; or its bytes lie where
 * store_ram_memory says. It counts with the pages that it
 * may take of the allocator. Room is claimed under the lock before the memory is asked for, so that
 * no two threads can pass the budget together.
 */
#include "store/store_ram.h"

#include "store/base/bytes.h"
#include "store/store_inner.h"
#include "store/store_ram_inner.h"

#include <string.h>

enum { BUCKETS_MIN = 64, BUCKETS_MAX = 1 << 16, BUCKET_SHARE_BYTES = 1 << 16, BRING_EACH = 64 };

struct owner {
    struct owner *next;
    uint64_t number, used; /* used: the clock of the tier when it was last */
    struct kept *first;
};

struct kept {
    struct kept *next;                         /* of the bucket */
    struct kept *next_of_owner, **at_of_owner; /* at: what points here */
    struct owner *owner;
    uint64_t id, raw_bytes;
    struct kv_digest digest;
    uint32_t lent;
    uint8_t gone;   /* from the table, as soon as it is not lent any more it is freed */
    uint8_t apart;  /* lies in store_ram_memory */
    uint8_t *bytes; /* else behind this */
};

struct store_ram {
    pthread_mutex_t lock;
    pthread_cond_t settled;
    int in_batch; /* between store_ram_inner_batch and store_ram_inner_batch_over */
    struct kept **buckets;
    size_t bucket_count;
    struct owner *owners;
    uint64_t clock;
    struct store_ram_memory memory;
    struct store_ram_stats stats;
};

static const uint64_t owner_bytes = 64, chunk_bytes = 64; /* chunk: what malloc adds at most */

static uint64_t cost_of(const struct store_extent *extent) {
    uint64_t bytes = 0;
    if (!kv_add_u64(extent->raw_bytes, sizeof(struct kept) + chunk_bytes, &bytes))
        return UINT64_MAX;
    return kv_round_up(bytes, STORE_PAGE_BYTES);
}

enum kv_err store_ram_open(struct store *store, uint64_t bytes_max, struct kv_diag *diag) {
    const struct kv_alloc *alloc = store->options.alloc;
    size_t count = BUCKETS_MIN;
    if (bytes_max == 0)
        return KV_OK;
    while (count < BUCKETS_MAX && count < bytes_max / BUCKET_SHARE_BYTES)
        count *= 2;
    uint64_t tables = kv_round_up(sizeof(struct store_ram), STORE_PAGE_BYTES) +
                      kv_round_up(count * sizeof(struct kept *), STORE_PAGE_BYTES);
    if (tables > bytes_max)
        return kv_diag_set(diag, KV_ERR_LIMIT,
                           "a RAM tier of %llu bytes has no room for its tables; take 1MiB or more",
                           (unsigned long long)bytes_max);
    struct store_ram *ram = kv_alloc_zeroed(alloc, 1, sizeof *ram);
    if (ram != NULL)
        ram->buckets = kv_alloc_zeroed(alloc, count, sizeof *ram->buckets);
    if (ram == NULL || ram->buckets == NULL) {
        kv_alloc_release(alloc, ram);
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the RAM tier");
    }
    pthread_mutex_init(&ram->lock, NULL);
    pthread_cond_init(&ram->settled, NULL);
    ram->bucket_count = count;
    ram->stats =
        (struct store_ram_stats){.bytes_max = bytes_max, .bytes = tables, .bytes_peak = tables};
    store->ram = ram;
    return KV_OK;
}

/* --- under the lock */

static struct kept **place_of(struct store_ram *ram, uint64_t id) {
    struct kept **at = &ram->buckets[kv_digest_short(&id, sizeof id) % ram->bucket_count];
    while (*at != NULL && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static struct kept *find(struct store_ram *ram, const struct store_extent *extent) {
    struct kept *kept = *place_of(ram, extent->id);
    return kept != NULL && kept->raw_bytes == extent->raw_bytes &&
                   memcmp(kept->digest.bytes, extent->digest.bytes, KV_DIGEST_BYTES) == 0
               ? kept
               : NULL;
}

static void unlink_from_owner(struct kept *kept) {
    *kept->at_of_owner = kept->next_of_owner;
    if (kept->next_of_owner != NULL)
        kept->next_of_owner->at_of_owner = kept->at_of_owner;
}

static void link_to_owner(struct kept *kept, struct owner *owner) {
    kept->owner = owner;
    kept->next_of_owner = owner->first;
    kept->at_of_owner = &owner->first;
    if (owner->first != NULL)
        owner->first->at_of_owner = &kept->next_of_owner;
    owner->first = kept;
}

static struct owner *owner_of(struct store_ram *ram, uint64_t number) {
    struct owner *owner = ram->owners;
    while (owner != NULL && owner->number != number)
        owner = owner->next;
    return owner;
}

/* An owner of nothing is none. */
static void drop_if_empty(struct store *store, struct owner *owner) {
    struct store_ram *ram = store->ram;
    struct owner **at = &ram->owners;
    if (owner->first != NULL)
        return;
    while (*at != owner)
        at = &(*at)->next;
    *at = owner->next;
    ram->stats.owners--;
    ram->stats.bytes -= owner_bytes;
    kv_alloc_release(store->options.alloc, owner);
}

/* Its bytes are somebody's chat: they do not stay in memory that others get. */
static void release(struct store *store, struct kept *kept) {
    explicit_bzero(kept->bytes, (size_t)kept->raw_bytes);
    if (kept->apart)
        store->ram->memory.put(store->ram->memory.context, kept->bytes);
    kv_alloc_release(store->options.alloc, kept);
}

static void forget_bytes(struct store *store, struct kept *kept) {
    struct store_ram *ram = store->ram;
    const struct store_extent extent = {.raw_bytes = kept->raw_bytes};
    ram->stats.bytes -= cost_of(&extent);
    ram->stats.apart_bytes -= kept->apart ? kept->raw_bytes : 0;
    release(store, kept);
}

static void drop(struct store *store, struct kept *kept) {
    struct store_ram *ram = store->ram;
    struct owner *owner = kept->owner;
    *place_of(ram, kept->id) = kept->next;
    unlink_from_owner(kept);
    ram->stats.extents--;
    kept->gone = 1;
#ifdef BREAK_RAM_LENT
    kept->lent = 0;
#endif
    if (kept->lent == 0)
        forget_bytes(store, kept);
    drop_if_empty(store, owner);
}

static void drop_owner(struct store *store, struct owner *owner) {
    /* The last one takes the owner along. */
    for (struct kept *kept = owner->first, *next; kept != NULL; kept = next) {
        next = kept->next_of_owner;
        drop(store, kept);
    }
}

static struct owner *used_longest_ago(struct store_ram *ram, uint64_t except) {
    struct owner *found = NULL;
    for (struct owner *owner = ram->owners; owner != NULL; owner = owner->next)
        if (owner->number != except && (found == NULL || owner->used < found->used))
            found = owner;
#ifdef BREAK_RAM_LRU
    for (struct owner *owner = ram->owners; owner != NULL; owner = owner->next)
        if (owner->number != except && owner->used > found->used)
            found = owner;
#endif
    return found;
}

/* Room for `bytes` more, claimed. */
static int claim(struct store_ram *ram, uint64_t bytes) {
    uint64_t after = 0;
    if (!kv_add_u64(ram->stats.bytes, bytes, &after))
        return 0;
#ifndef BREAK_RAM_BUDGET
    if (after > ram->stats.bytes_max)
        return 0;
#endif
    ram->stats.bytes = after;
    if (after > ram->stats.bytes_peak)
        ram->stats.bytes_peak = after;
    return 1;
}

static enum kv_err make_owner(struct store *store, uint64_t number, struct owner **owner_out) {
    struct store_ram *ram = store->ram;
    *owner_out = owner_of(ram, number);
    if (*owner_out != NULL)
        return KV_OK;
    if (!claim(ram, owner_bytes))
        return KV_ERR_LIMIT;
    struct owner *owner = kv_alloc_zeroed(store->options.alloc, 1, sizeof *owner);
    if (owner == NULL) {
        ram->stats.bytes -= owner_bytes;
        return KV_ERR_NOMEM;
    }
    owner->number = number;
    owner->used = ++ram->clock;
    owner->next = ram->owners;
    ram->owners = owner;
    ram->stats.owners++;
    *owner_out = owner;
    return KV_OK;
}

/* --- what is kept */

static struct kept *make_kept(struct store *store, size_t size) {
    const struct kv_alloc *alloc = store->options.alloc;
    struct store_ram *ram = store->ram;
    uint8_t *apart = ram->memory.get != NULL ? ram->memory.get(ram->memory.context, size) : NULL;
    struct kept *kept =
        kv_alloc_aligned(alloc, sizeof *kept + (apart == NULL ? size : 0), _Alignof(max_align_t));
    if (kept == NULL) {
        if (apart != NULL)
            ram->memory.put(ram->memory.context, apart);
        return NULL;
    }
    memset(kept, 0, sizeof *kept);
    kept->raw_bytes = size;
    kept->apart = apart != NULL;
    kept->bytes = apart != NULL ? apart : (uint8_t *)(kept + 1);
    return kept;
}

/* Memory for an extent that is not here, its room claimed; NULL with KV_OK: it is here, and the
 * owner's now. */
static enum kv_err prepare(struct store *store, uint64_t number, const struct store_extent *extent,
                           struct kept **kept_out) {
    struct store_ram *ram = store->ram;
    struct owner *owner = NULL;
    *kept_out = NULL;
    pthread_mutex_lock(&ram->lock);
    struct kept *here = find(ram, extent);
    enum kv_err err = here != NULL ? make_owner(store, number, &owner) : KV_OK;
    if (here != NULL && err == KV_OK && here->owner != owner) {
        struct owner *before = here->owner;
        unlink_from_owner(here);
        link_to_owner(here, owner);
        drop_if_empty(store, before);
    }
    if (here == NULL && !claim(ram, cost_of(extent)))
        err = KV_ERR_LIMIT;
    pthread_mutex_unlock(&ram->lock);
    if (err != KV_OK || here != NULL)
        return err;
    struct kept *kept = make_kept(store, (size_t)extent->raw_bytes);
    if (kept == NULL) {
        pthread_mutex_lock(&ram->lock);
        ram->stats.bytes -= cost_of(extent);
        pthread_mutex_unlock(&ram->lock);
        return KV_ERR_NOMEM;
    }
    kept->id = extent->id;
    kept->digest = extent->digest;
    *kept_out = kept;
    return KV_OK;
}

/* Its bytes are there. */
static enum kv_err insert(struct store *store, uint64_t number, struct kept *kept) {
    struct store_ram *ram = store->ram;
    const struct store_extent extent = {.raw_bytes = kept->raw_bytes};
    struct owner *owner = NULL;
    pthread_mutex_lock(&ram->lock);
    struct kept **at = place_of(ram, kept->id);
    if (*at != NULL) /* another thread was faster, or it was another extent by that id */
        drop(store, *at);
    enum kv_err err = make_owner(store, number, &owner);
    if (err == KV_OK) {
        at = place_of(ram, kept->id);
        kept->next = *at;
        *at = kept;
        link_to_owner(kept, owner);
        ram->stats.extents++;
        ram->stats.apart_bytes += kept->apart ? kept->raw_bytes : 0;
    } else {
        ram->stats.bytes -= cost_of(&extent);
    }
    pthread_mutex_unlock(&ram->lock);
    if (err != KV_OK)
        release(store, kept);
    return err;
}

static void give_up(struct store *store, struct kept *kept) {
    const struct store_extent extent = {.raw_bytes = kept->raw_bytes};
    pthread_mutex_lock(&store->ram->lock);
    store->ram->stats.bytes -= cost_of(&extent);
    pthread_mutex_unlock(&store->ram->lock);
    release(store, kept);
}

int store_ram_room(struct store *store, const struct store_ram_set *set) {
    struct store_ram *ram = store->ram;
    uint64_t all = owner_bytes, missing = owner_bytes, fixed;
    if (ram == NULL)
        return 0;
    pthread_mutex_lock(&ram->lock);
    for (size_t i = 0; i < set->count; i++) {
        uint64_t cost = cost_of(set->extents[i]);
        if (!kv_add_u64(all, cost, &all))
            all = UINT64_MAX;
        if (find(ram, set->extents[i]) == NULL && !kv_add_u64(missing, cost, &missing))
            missing = UINT64_MAX;
    }
    fixed = kv_round_up(sizeof *ram, STORE_PAGE_BYTES) +
            kv_round_up(ram->bucket_count * sizeof(struct kept *), STORE_PAGE_BYTES);
    int fits = all <= ram->stats.bytes_max - fixed;
#ifdef BREAK_RAM_LARGE
    fits = 1;
#endif
    while (fits && ram->stats.bytes_max - ram->stats.bytes < missing) {
        struct owner *oldest = used_longest_ago(ram, set->owner);
        struct owner *own = owner_of(ram, set->owner);
        if (oldest == NULL && own == NULL)
            break;
        /* With nobody else left it is the owner's own that are not wanted any more. */
        drop_owner(store, oldest != NULL ? oldest : own);
        ram->stats.evicted += oldest != NULL;
        if (oldest == NULL)
            missing = all;
    }
    pthread_mutex_unlock(&ram->lock);
    return fits;
}

enum kv_err store_ram_keep(struct store *store, uint64_t owner, const struct store_extent *extent,
                           const struct iovec *pieces, uint32_t piece_count) {
    struct kept *kept = NULL;
    if (store->ram == NULL)
        return KV_ERR_LIMIT;
    enum kv_err err = prepare(store, owner, extent, &kept);
    if (err != KV_OK || kept == NULL)
        return err;
    uint64_t done = 0;
    for (uint32_t i = 0; i < piece_count; i++) {
        uint64_t left = extent->raw_bytes - done;
        uint64_t take = pieces[i].iov_len < left ? pieces[i].iov_len : left;
        memcpy(kept->bytes + done, pieces[i].iov_base, (size_t)take);
        done += take;
    }
    if (done == extent->raw_bytes)
        return insert(store, owner, kept);
    give_up(store, kept);
    return KV_ERR_INVALID;
}

enum kv_err store_ram_fill(struct store *store, const struct store_ram_fill *args) {
    struct kept *kept = NULL;
    if (store->ram == NULL)
        return KV_ERR_LIMIT;
    enum kv_err err = prepare(store, args->owner, args->extent, &kept);
    if (err != KV_OK || kept == NULL)
        return err;
    err = args->fill(args->context, kept->bytes);
    if (err == KV_OK)
        return insert(store, args->owner, kept);
    give_up(store, kept);
    return err;
}

/* Some of those that are not here, in one call of store_read. */
struct bringing {
    struct kept *kept[BRING_EACH];
    struct iovec pieces[BRING_EACH];
    struct store_read reads[BRING_EACH];
    size_t count;
};

static enum kv_err bring_some(struct store *store, uint64_t owner, struct bringing *some,
                              struct store_read_stats *stats, struct kv_diag *diag) {
    const struct store_read_args args = {.reads = some->reads, .count = some->count, .helper = 1};
    struct store_read_stats one = {0};
    enum kv_err err = some->count == 0 ? KV_OK : store_read(store, &args, &one, diag);
    for (size_t i = 0; i < some->count; i++) {
        enum kv_err kept = some->reads[i].result;
        if (kept == KV_OK)
            kept = insert(store, owner, some->kept[i]);
        /* What a late read may still write to stays taken, and counted. */
        else if (!some->reads[i].in_doubt)
            give_up(store, some->kept[i]);
        err = err == KV_OK ? kept : err;
    }
    stats->read_bytes += one.read_bytes;
    stats->raw_bytes += one.raw_bytes;
    stats->digests += one.digests;
    stats->wait_ns += one.wait_ns;
    some->count = 0;
    return err;
}

enum kv_err store_ram_bring(struct store *store, const struct store_ram_set *set,
                            struct store_read_stats *stats_out, struct kv_diag *diag) {
    struct store_read_stats stats = {0};
    struct bringing *some = NULL;
    enum kv_err err = KV_OK;
    if (store->ram == NULL)
        return kv_diag_set(diag, KV_ERR_LIMIT, "nothing is kept in memory: give --ram-tier");
    some = kv_alloc_zeroed(store->options.alloc, 1, sizeof *some);
    if (some == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to bring extents");
    for (size_t i = 0; i < set->count && err == KV_OK; i++) {
        struct kept *kept = NULL;
        err = prepare(store, set->owner, set->extents[i], &kept);
        if (kept != NULL) {
            some->kept[some->count] = kept;
            some->pieces[some->count] = (struct iovec){kept->bytes, (size_t)kept->raw_bytes};
            some->reads[some->count] = (struct store_read){.extent = set->extents[i],
                                                           .pieces = &some->pieces[some->count],
                                                           .piece_count = 1,
                                                           .verify = 1};
            some->count++;
        } else if (err != KV_OK) {
            kv_diag_set(diag, err, "the RAM tier has no room for an extent of %llu bytes",
                        (unsigned long long)set->extents[i]->raw_bytes);
        }
        if (some->count == BRING_EACH && err == KV_OK)
            err = bring_some(store, set->owner, some, &stats, diag);
    }
    enum kv_err rest = bring_some(store, set->owner, some, &stats, err == KV_OK ? diag : NULL);
    kv_alloc_release(store->options.alloc, some);
    if (stats_out != NULL)
        *stats_out = stats;
    return err == KV_OK ? rest : err;
}

int store_ram_borrow(struct store *store, const struct store_extent *extent,
                     struct store_ram_loan *loan_out) {
    struct store_ram *ram = store->ram;
    *loan_out = (struct store_ram_loan){NULL, NULL};
    if (ram == NULL)
        return 0;
    pthread_mutex_lock(&ram->lock);
    struct kept *kept = find(ram, extent);
    if (kept != NULL) {
        kept->lent++;
        *loan_out = (struct store_ram_loan){kept->bytes, kept};
    }
    pthread_mutex_unlock(&ram->lock);
    return kept != NULL;
}

void store_ram_return(struct store *store, struct store_ram_loan *loan) {
    struct kept *kept = loan->kept;
    if (kept == NULL)
        return;
    pthread_mutex_lock(&store->ram->lock);
    if (--kept->lent == 0 && kept->gone)
        forget_bytes(store, kept);
    pthread_mutex_unlock(&store->ram->lock);
    *loan = (struct store_ram_loan){NULL, NULL};
}

void store_ram_lie(struct store *store, const struct store_ram_memory *memory) {
    if (store->ram != NULL)
        store->ram->memory = *memory;
}

void store_ram_settle(struct store *store) {
    struct store_ram *ram = store->ram;
    if (ram == NULL)
        return;
    pthread_mutex_lock(&ram->lock);
    while (ram->in_batch)
        pthread_cond_wait(&ram->settled, &ram->lock);
    pthread_mutex_unlock(&ram->lock);
}

void store_ram_touch(struct store *store, uint64_t number) {
    if (store->ram == NULL)
        return;
    pthread_mutex_lock(&store->ram->lock);
    struct owner *owner = owner_of(store->ram, number);
    if (owner != NULL)
        owner->used = ++store->ram->clock;
    pthread_mutex_unlock(&store->ram->lock);
}

void store_ram_forget(struct store *store, uint64_t number) {
    if (store->ram == NULL)
        return;
    pthread_mutex_lock(&store->ram->lock);
    struct owner *owner = owner_of(store->ram, number);
    if (owner != NULL)
        drop_owner(store, owner);
    pthread_mutex_unlock(&store->ram->lock);
}

int store_ram_has(struct store *store, uint64_t number) {
    if (store->ram == NULL)
        return 0;
    pthread_mutex_lock(&store->ram->lock);
    int has = owner_of(store->ram, number) != NULL;
    pthread_mutex_unlock(&store->ram->lock);
    return has;
}

void store_ram_stats(struct store *store, struct store_ram_stats *out) {
    *out = (struct store_ram_stats){0};
    if (store->ram == NULL)
        return;
    pthread_mutex_lock(&store->ram->lock);
    *out = store->ram->stats;
    pthread_mutex_unlock(&store->ram->lock);
}

/* --- for the other files of the store */

int store_ram_inner_take(struct store *store, const struct store_read *read) {
    struct store_ram *ram = store->ram;
    if (ram == NULL)
        return 0;
    pthread_mutex_lock(&ram->lock);
    const struct kept *kept = find(ram, read->extent);
    uint64_t done = 0;
    for (uint32_t i = 0; kept != NULL && i < read->piece_count; i++) {
        memcpy(read->pieces[i].iov_base, kept->bytes + done, read->pieces[i].iov_len);
        done += read->pieces[i].iov_len;
    }
    pthread_mutex_unlock(&ram->lock);
    return kept != NULL;
}

void store_ram_inner_forget(struct store *store, const struct store_extent *extent) {
    pthread_mutex_lock(&store->ram->lock);
    struct kept *kept = find(store->ram, extent);
    if (kept != NULL)
        drop(store, kept);
    pthread_mutex_unlock(&store->ram->lock);
}

static int stays(const struct fmt_op *op, const struct store_extent *extent) {
    for (uint32_t i = 0; op->type == FMT_OP_PUT && i < op->entry.extent_count; i++)
        if (fmt_entry_extent(&op->entry, i).id == extent->id)
            return 1;
    return 0;
}

/* What the record that an operation replaces or deletes has here; 0: nobody can tell. */
static int forget_replaced(struct store *store, const struct fmt_op *op, struct index_copy *copy) {
    struct fmt_entry entry;
    enum kv_err err = index_get(store->index, op->key, op->key_bytes, copy, NULL);
    if (err == KV_ERR_NOT_FOUND)
        return 1;
    if (err != KV_OK ||
        fmt_entry_decode(copy->bytes, copy->key_bytes, copy->total_bytes, &entry) != KV_OK)
        return 0;
    for (uint32_t e = 0; e < entry.extent_count; e++) {
        const struct store_extent extent = fmt_entry_extent(&entry, e);
        if (!stays(op, &extent))
            store_ram_inner_forget(store, &extent);
    }
    return 1;
}

static void forget_all(struct store *store) {
    struct store_ram *ram = store->ram;
    pthread_mutex_lock(&ram->lock);
    while (ram->owners != NULL)
        drop_owner(store, ram->owners);
    pthread_mutex_unlock(&ram->lock);
}

/* Also when the batch fails afterwards: it is on disk all the same, and was only quicker here. What
 * others have goes too when it cannot be told what a removed session has: that must not stay. */
void store_ram_inner_batch(struct store *store, const uint8_t *ops, size_t ops_bytes,
                           uint32_t op_count) {
    struct index_copy copy = {0};
    struct kv_reader reader;
    int known = 1;
    if (store->ram == NULL)
        return;
#ifdef BREAK_RAM_DELETE
    return;
#endif
    pthread_mutex_lock(&store->ram->lock);
    store->ram->in_batch = 1;
    pthread_mutex_unlock(&store->ram->lock);
    kv_reader_init(&reader, ops, ops_bytes);
    for (uint32_t i = 0; i < op_count && known; i++) {
        struct fmt_op op;
        known = fmt_op_decode(&reader, &op) == KV_OK && forget_replaced(store, &op, &copy);
    }
    index_copy_release(store->options.alloc, &copy);
#ifndef BREAK_RAM_UNKNOWN
    if (!known)
        forget_all(store);
#endif
}

void store_ram_inner_batch_over(struct store *store) {
    if (store->ram == NULL)
        return;
    pthread_mutex_lock(&store->ram->lock);
    store->ram->in_batch = 0;
    pthread_cond_broadcast(&store->ram->settled);
    pthread_mutex_unlock(&store->ram->lock);
}

void store_ram_inner_close(struct store *store) {
    struct store_ram *ram = store->ram;
    if (ram == NULL)
        return;
    forget_all(store);
    pthread_cond_destroy(&ram->settled);
    pthread_mutex_destroy(&ram->lock);
    kv_alloc_release(store->options.alloc, ram->buckets);
    kv_alloc_release(store->options.alloc, ram);
    store->ram = NULL;
}
