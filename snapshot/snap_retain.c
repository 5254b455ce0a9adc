/* snapshot/snap_retain.c - which stored bytes go, in which order.
 *
 * Responsible for: the contract of snap_retain.h, in agreement with this invariant (6 to 9 stand in
 * snap_commit.c and snap_lower.c):
 *
 *  10. The newest snapshot of a session goes only with the whole session, in one batch, and only
 *      when `expire` has named it since its last save. An older one goes in one batch with its uses
 *      of pages, its blocks that no other snapshot counts, and the pointer of the next newer one.
 *
 * Not responsible for: the log's bytes (snap_retain_log.c).
 */
#include "snapshot/snap_retain_inner.h"

#include "snapshot/snap_lower.h"
#include "snapshot/snap_map.h"
#include "snapshot/snap_remove.h"
#include "snapshot/snap_room.h"
#include "snapshot/snapshot.h"
#include "store/base/bytes.h"

#include <stdlib.h>
#include <string.h>

enum { CHAIN_MAX = 1 << 20 };

static const uint8_t ladder[] = {LAYOUT_VX, LAYOUT_KL, LAYOUT_VR2, LAYOUT_VR1};
enum { STEPS = sizeof ladder / sizeof ladder[0] };

/* A lineage that may be lowered. */
struct cold {
    uint64_t lineage, updated_ns;
    uint32_t blocks, name; /* of those who use it the one used last */
};

struct retaining {
    const struct snap_retain_args *args;
    struct snap_map map;
    struct cold *cold; /* the longest unused first */
    size_t cold_count, cold_capacity;
    size_t step, next; /* of the ladder, of cold */
    uint64_t freed;    /* since segments were last emptied */
    struct snap_retain_sum *sum;
    struct kv_diag *diag;
};

static int is_busy(const struct retaining *retaining, uint32_t name) {
    const struct snap_retain_args *args = retaining->args;
    if (retaining->map.names[name].pinned)
        return 1;
#ifdef BREAK_RESIDENT
    return 0;
#endif
    return args->is_busy != NULL &&
           args->is_busy(args->context, retaining->map.names[name].text) != 0;
}

static int by_age(const void *a, const void *b) {
    const struct cold *x = a;
    const struct cold *y = b;
    if (x->updated_ns != y->updated_ns)
        return x->updated_ns < y->updated_ns ? -1 : 1;
    return x->lineage < y->lineage ? -1 : x->lineage > y->lineage;
}

/* Lineages of which no user is busy, by the time at which one of them was last saved. */
static enum kv_err list_cold(struct retaining *retaining) {
    const struct snap_map *map = &retaining->map;
    retaining->cold_count = retaining->step = retaining->next = 0;
    for (size_t i = 0; i < map->use_count;) {
        size_t count = 0;
        const struct snap_map_use *use =
            snap_map_find(map, map->uses[i].kind, map->uses[i].id, &count);
        struct cold cold = {.lineage = use->id, .name = use->name};
        int busy = 0;
        i += count;
        if (use->kind != 'l')
            continue;
        for (size_t k = 0; k < count; k++) {
            const struct snap_map_name *name = &map->names[use[k].name];
            busy |= is_busy(retaining, use[k].name);
            cold.blocks = use[k].blocks > cold.blocks ? use[k].blocks : cold.blocks;
            if (name->updated_ns < cold.updated_ns)
                continue;
            cold.updated_ns = name->updated_ns;
            cold.name = use[k].name;
        }
        void *items = retaining->cold;
        if (busy || cold.blocks == 0)
            continue;
        if (!kv_alloc_grow(retaining->args->alloc, &items, &retaining->cold_capacity,
                           retaining->cold_count + 1, sizeof *retaining->cold))
            return kv_diag_set(retaining->diag, KV_ERR_NOMEM, "no memory for the list of sessions");
        retaining->cold = items;
        retaining->cold[retaining->cold_count++] = cold;
    }
    if (retaining->cold_count != 0)
        qsort(retaining->cold, retaining->cold_count, sizeof *retaining->cold, by_age);
    return KV_OK;
}

static enum kv_err look_around(struct retaining *retaining) {
    snap_map_release(&retaining->map);
    enum kv_err err = snap_map_make(retaining->args->store, retaining->args->alloc, NULL, NULL,
                                    &retaining->map, retaining->diag);
    return err == KV_OK ? list_cold(retaining) : err;
}

static void count(struct retaining *retaining, const struct snap_retain_action *action) {
    struct snap_retain_sum *sum = retaining->sum;
    sum->lowered += action->kind == SNAP_RETAIN_PLANES;
    sum->snapshots += action->kind == SNAP_RETAIN_SNAPSHOT;
    sum->sessions += action->kind == SNAP_RETAIN_SESSION;
    sum->bytes += action->bytes;
    retaining->freed += action->bytes;
}

static struct snap_retain_action action_of(const struct retaining *retaining,
                                           enum snap_retain_kind kind, uint32_t name) {
    struct snap_retain_action action = {.kind = kind,
                                        .at_ns = kv_clock_wall_ns(retaining->args->clock)};
    memcpy(action.name, retaining->map.names[name].text, sizeof action.name);
    return action;
}

/* --- planes */

static enum kv_err tell_alone(struct retaining *retaining,
                              const struct snap_retain_action *action) {
    struct store_batch *batch = NULL;
    enum kv_err err = store_batch_begin_removal(retaining->args->store, &batch, retaining->diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(batch, STORE_CAUSE_REMOVAL);
    err = snap_retain_add(retaining->args->store, batch, action, retaining->diag);
    if (err == KV_OK)
        return store_batch_commit(batch, NULL, retaining->diag);
    store_batch_abandon(batch);
    return err;
}

/* The next plane of the next session; *done_out 1 when one went. */
static enum kv_err lower_next(struct retaining *retaining, int *done_out) {
    for (; retaining->step < STEPS; retaining->step++, retaining->next = 0) {
        while (retaining->next < retaining->cold_count) {
            const struct cold *cold = &retaining->cold[retaining->next++];
            const struct snap_lower_args args = {
                .store = retaining->args->store,
                .alloc = retaining->args->alloc,
                .lineage = cold->lineage,
                .blocks = cold->blocks,
                /* What an interrupted run left above goes along: the order holds. */
                .streams = 1u << ladder[retaining->step]};
            struct snap_lower_sum sum;
            enum kv_err err = snap_lower_lineage(&args, &sum, retaining->diag);
            if (err != KV_OK || sum.blocks == 0) {
                if (err != KV_OK)
                    return err;
                continue;
            }
            struct snap_retain_action action = action_of(retaining, SNAP_RETAIN_PLANES, cold->name);
            action.stream = ladder[retaining->step];
            action.blocks = sum.blocks;
            action.bytes = sum.bytes;
            count(retaining, &action);
            *done_out = 1;
            return tell_alone(retaining, &action);
        }
    }
    return KV_OK;
}

/* --- snapshots */

struct older {
    uint32_t name;
    uint64_t id;
    struct record_snapshot record;
};

#ifndef BREAK_LAST_SNAPSHOT
enum { OLDEST_FROM = 1 }; /* place in the chain: the newest never goes */
#else
enum { OLDEST_FROM = 0 };
#endif

static enum kv_err find_oldest(struct retaining *retaining, struct older *oldest_out) {
    struct store *store = retaining->args->store;
    memset(oldest_out, 0, sizeof *oldest_out);
    for (uint32_t i = 0; i < retaining->map.name_count; i++) {
        if (retaining->map.names[i].pinned)
            continue;
        struct older at = {.name = i, .id = retaining->map.names[i].snapshot};
        for (int place = 0; at.id != 0 && place < CHAIN_MAX; place++) {
            struct kv_diag own = {""};
            enum kv_err err = snap_gc_snapshot(store, at.id, &at.record, &own);
            if (err == KV_ERR_IO || err == KV_ERR_NOMEM)
                return kv_diag_set(retaining->diag, err, "%s", own.text);
            if (err != KV_OK)
                break;
            if (place >= OLDEST_FROM && at.record.tag[0] == 0 &&
                (oldest_out->id == 0 || at.record.created_ns < oldest_out->record.created_ns))
                *oldest_out = at;
            at.id = at.record.parent;
        }
    }
    return KV_OK;
}

struct telling {
    struct retaining *retaining;
    struct snap_retain_action *action;
};

static enum kv_err tell_along(void *context, struct store_batch *batch, uint64_t bytes,
                              struct kv_diag *diag) {
    const struct telling *telling = context;
    telling->action->bytes = bytes;
    return snap_retain_add(telling->retaining->args->store, batch, telling->action, diag);
}

static enum kv_err remove_oldest(struct retaining *retaining, int *done_out) {
    struct older older;
    enum kv_err err = find_oldest(retaining, &older);
    if (err != KV_OK || older.id == 0)
        return err;
    struct snap_retain_action action = action_of(retaining, SNAP_RETAIN_SNAPSHOT, older.name);
    struct telling telling = {retaining, &action};
    action.tokens = older.record.n;
    action.blocks = older.record.block_count;
    const struct snap_remove_args args = {.store = retaining->args->store,
                                          .alloc = retaining->args->alloc,
                                          .name = retaining->map.names[older.name].text,
                                          .snapshot = older.id,
                                          .is_busy = is_busy(retaining, older.name),
                                          .also = tell_along,
                                          .context = &telling};
    err = snap_remove_one(&args, retaining->diag);
    if (err != KV_OK)
        return err;
    count(retaining, &action);
    *done_out = 1;
    return look_around(retaining);
}

/* --- whole sessions */

static enum kv_err remove_expired(struct retaining *retaining, int *done_out) {
    const struct snap_map *map = &retaining->map;
    size_t found = map->name_count;
    struct snapshot_entry entry;
    for (size_t i = 0; i < map->name_count; i++)
        if (map->names[i].may_expire && !is_busy(retaining, (uint32_t)i) &&
            (found == map->name_count || map->names[i].updated_ns < map->names[found].updated_ns))
            found = i;
    if (found == map->name_count)
        return KV_OK;
    struct snap_retain_action action = action_of(retaining, SNAP_RETAIN_SESSION, (uint32_t)found);
    if (snapshot_find(retaining->args->store, retaining->args->alloc, action.name, &entry, NULL) ==
        KV_OK) {
        action.bytes = entry.stored_bytes;
        action.tokens = entry.head.n;
        action.blocks = entry.head.block_count;
    }
    enum kv_err err = snapshot_remove(retaining->args->store, retaining->args->alloc, action.name,
                                      retaining->diag);
    if (err != KV_OK)
        return err;
    count(retaining, &action);
    *done_out = 1;
    err = tell_alone(retaining, &action);
    return err == KV_OK ? look_around(retaining) : err;
}

/* --- all of it */

static enum kv_err give_up_one(struct retaining *retaining, int *done_out) {
    enum kv_err err = remove_expired(retaining, done_out);
    if (err == KV_OK && !*done_out && retaining->args->may_degrade)
        err = lower_next(retaining, done_out);
    if (err == KV_OK && !*done_out && retaining->args->may_degrade)
        err = remove_oldest(retaining, done_out);
    return err;
}

/* Of the byte budget still wanted; without one it is not known, and one action is tried. */
static uint64_t missing(const struct snap_retain_args *args) {
    struct store_stats stats;
    store_stats_get(args->store, &stats);
    return stats.room_bytes < args->need_bytes ? args->need_bytes - stats.room_bytes : 0;
}

enum kv_err snap_retain_make_room(const struct snap_retain_args *args, struct snap_retain_sum *sum,
                                  int *changed_out, struct kv_diag *diag) {
    struct retaining retaining = {.args = args, .sum = sum, .diag = diag};
    int more = 1;
    *changed_out = 0;
    enum kv_err err = look_around(&retaining);
    while (err == KV_OK && more) {
        uint64_t wanted = missing(args);
        do {
            more = 0;
            err = give_up_one(&retaining, &more);
            *changed_out |= more;
        } while (err == KV_OK && more && retaining.freed < wanted);
        if (retaining.freed != 0)
            (void)snap_room_empty(args->store, SNAP_ROOM_LOWERED_PERCENT);
        retaining.freed = 0;
        if (missing(args) == 0)
            break;
    }
    snap_map_release(&retaining.map);
    kv_alloc_release(args->alloc, retaining.cold);
    return err;
}

/* --- for writers that are no saves */

/* Kept back by the store for the growth of its index and for removals; and what its count of a
 * batch may be above the sum of the parts: keys and values stand in the record and in the index. */
enum { KEPT_BACK_BYTES = 1 << 20, COUNT_BYTES = 64 << 10 };

static int is_busy_for(void *context, const char *session) {
    const struct snap_retain_writer *writer = context;
    const struct snap_retain_leave *leave = writer->leave;
    if (writer->session != NULL && strcmp(session, writer->session) == 0)
        return 1;
    return leave != NULL && leave->is_busy != NULL && leave->is_busy(leave->context, session);
}

static int let_go(const struct snap_retain_writer *writer, uint64_t worst_bytes) {
    struct snap_retain_writer own = *writer;
    struct snap_retain_sum sum = {0};
    int changed = 0;
    const struct snap_retain_args args = {.store = writer->store,
                                          .alloc = writer->alloc,
                                          .clock = writer->clock,
                                          .may_degrade =
                                              writer->leave != NULL && writer->leave->may_degrade,
                                          .need_bytes = worst_bytes + KEPT_BACK_BYTES,
                                          .is_busy = is_busy_for,
                                          .context = &own};
    (void)snap_retain_make_room(&args, &sum, &changed, NULL);
    return changed;
}

enum kv_err snap_retain_begin(const struct snap_retain_writer *writer, uint64_t worst_bytes,
                              struct store_batch **out, struct kv_diag *diag) {
    struct store_stats stats;
    worst_bytes += COUNT_BYTES + worst_bytes / 16;
    enum kv_err err = store_batch_begin(writer->store, worst_bytes, out, diag);
#ifndef BREAK_WRITER_ROOM
    while (err == KV_ERR_NO_SPACE &&
           (snap_room_make(writer->store) || let_go(writer, worst_bytes))) {
        kv_diag_clear(diag);
        err = store_batch_begin(writer->store, worst_bytes, out, diag);
    }
#endif
    if (err != KV_ERR_NO_SPACE)
        return err;
    store_stats_get(writer->store, &stats);
    return kv_diag_set(
        diag, KV_ERR_LIMIT,
        "%s may need %llu bytes, of %llu (store-max) %llu are left: remove sessions, name one "
        "with `coldplane expire`, %sor raise store-max",
        writer->what, (unsigned long long)(worst_bytes + KEPT_BACK_BYTES),
        (unsigned long long)stats.bytes_max, (unsigned long long)stats.room_bytes,
        writer->leave != NULL && writer->leave->may_degrade ? "" : "allow --may-degrade, ");
}

enum kv_err snap_retain_expire(struct store *store, const char *name, int may_expire,
                               struct kv_diag *diag) {
    struct record_name record;
    struct store_batch *batch = NULL;
    uint8_t value[RECORD_OUT_BYTES];
    enum kv_err err = session_check_name(name, diag);
    if (err == KV_OK)
        err = snap_gc_name(store, name, &record, diag);
    if (err == KV_OK && may_expire && record.pinned)
        err =
            kv_diag_set(diag, KV_ERR_BUSY, "session %s is pinned and stays: unpin it first", name);
    if (err != KV_OK || record.may_expire == may_expire)
        return err;
    record.may_expire = may_expire != 0;
    err = store_batch_begin_removal(store, &batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(batch, STORE_CAUSE_CARE);
    const struct record_key key = record_key_name(name);
    uint32_t size = record_put_name(&record, value);
    err = store_batch_update(batch, key.bytes, key.size, value, size, diag);
    if (err == KV_OK)
        return store_batch_commit(batch, NULL, diag);
    store_batch_abandon(batch);
    return err;
}
