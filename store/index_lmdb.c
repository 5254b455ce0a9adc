/* store/index_lmdb.c - the index in LMDB.
 *
 * Responsible for: two named databases, short transactions that copy out, a map that doubles when
 * it is full and follows when another process has doubled it.
 * Not responsible for: checking entries (fmt.c) or deciding what a missing one means.
 *
 * LMDB wants no transaction of this process active while the map changes size: every transaction
 * holds `resize` shared, a change of size holds it alone. Nothing waits for a device meanwhile but
 * LMDB's own commit.
 */
#include "store/index.h"

#include "store/index_pages.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <lmdb.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The file grows with use, the map is address space only. */
static const size_t map_bytes_first = (size_t)16 << 20;
static const size_t map_bytes_end = (size_t)1 << 40;
/* Look-ups at the same time, of all programs together; 64 bytes of lock.mdb each. LMDB's own 126
 * are fewer than the connections of one daemon. */
enum { APPLIES_PER_CHECK = 64, READERS_MAX = 1022, FULL_BYTES = 1 << 20 };

struct index {
    const struct kv_alloc *alloc;
    const struct io_door *door;
    int dir;
    int reads_only;
    MDB_env *env;
    MDB_dbi records;
    MDB_dbi states;
    pthread_rwlock_t resize;
    uint8_t *old_entry; /* scratch of the applying thread */
    uint64_t applied;   /* by the same, since it was opened */
};

static enum kv_err translate(int rc, struct kv_diag *diag, const char *what) {
    enum kv_err err = KV_ERR_IO;
    switch (rc) {
    case 0:
        return KV_OK;
    case MDB_NOTFOUND:
        return KV_ERR_NOT_FOUND;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        err = KV_ERR_NO_SPACE;
        break;
    case ENOMEM:
        err = KV_ERR_NOMEM;
        break;
    case EINVAL: /* LMDB's word for a file whose flags or sizes cannot be */
        err = KV_ERR_CORRUPT;
        break;
    case MDB_READERS_FULL:
        return kv_diag_set(diag, KV_ERR_IO,
                           "index: too many programs read this store at once: end some of them");
    case MDB_MAP_FULL:
    case MDB_MAP_RESIZED:
        break;
    default: /* its other codes say that the file is not what it wrote */
        err = rc < 0 ? KV_ERR_CORRUPT : KV_ERR_IO;
        break;
    }
    if (rc > 0)
        return kv_diag_errno(diag, err, rc, "index: cannot %s", what);
    return kv_diag_set(diag, err, "index: cannot %s: %s", what, mdb_strerror(rc));
}

/* LMDB opens its files by path and follows links, so they are looked at first, and the path leads
 * through our own descriptor of the directory. */
static enum kv_err look_at_files(const struct index_options *options, int dir,
                                 struct kv_diag *diag) {
    static const char *const names[2] = {"data.mdb", "lock.mdb"};
    const struct io_door *door = options->door;
    for (int i = 0; i < 2; i++) {
        struct io_file_info info;
        int error = door->info_at(door->context, dir, names[i], &info);
        if (error == ENOENT && i == 0 && options->mode != INDEX_CREATE)
            return kv_diag_set(diag, KV_ERR_NOT_FOUND, "index: %s is missing", names[i]);
        if (error == ENOENT)
            continue;
        if (error != 0)
            return kv_diag_errno(diag, KV_ERR_IO, error, "index: cannot look at %s", names[i]);
        if (!info.is_regular)
            return kv_diag_set(diag, KV_ERR_CORRUPT,
                               "index: %s is a %s: refused, remove it and open the store again",
                               names[i], info.is_symlink ? "symbolic link" : "special file");
        if (i == 0 && info.size_bytes == 0 && options->mode != INDEX_CREATE)
            return kv_diag_set(diag, KV_ERR_NOT_FOUND, "index: %s is empty", names[i]);
    }
    return KV_OK;
}

static enum kv_err open_dir(const struct index_options *options, int *dir_out,
                            struct kv_diag *diag) {
    const struct io_door *door = options->door;
    if (options->mode == INDEX_CREATE) {
        int error = door->make_dir(door->context, options->dir, options->name);
        if (error != 0 && error != EEXIST)
            return kv_diag_errno(diag, error == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, error,
                                 "cannot make the directory %s", options->name);
    }
    int error =
        door->open(door->context, options->dir, options->name, IO_READ | IO_DIRECTORY, dir_out);
    if (error == ENOENT)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "the directory %s is missing", options->name);
    if (error == ELOOP || error == ENOTDIR)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "%s is not a directory of its own (a symbolic link or a file): refused",
                           options->name);
    if (error != 0)
        return kv_diag_errno(diag, KV_ERR_IO, error, "cannot open the directory %s", options->name);
    return KV_OK;
}

static int open_databases(struct index *index, enum index_mode mode) {
    MDB_txn *txn = NULL;
    int create = mode == INDEX_CREATE;
    int rc = mdb_txn_begin(index->env, NULL, create ? 0 : MDB_RDONLY, &txn);
    if (rc != 0)
        return rc;
    unsigned flags = create ? MDB_CREATE : 0;
    rc = mdb_dbi_open(txn, "records", flags, &index->records);
    if (rc == 0)
        rc = mdb_dbi_open(txn, "state", flags, &index->states);
    if (rc != 0) {
        mdb_txn_abort(txn);
        return rc;
    }
    return mdb_txn_commit(txn);
}

/* A map longer than its file would end this process by SIGBUS when it is read. */
static int file_is_whole(struct index *index) {
    MDB_envinfo info;
    MDB_stat stat;
    int fd = -1;
    if (mdb_env_info(index->env, &info) != 0 || mdb_env_stat(index->env, &stat) != 0 ||
        mdb_env_get_fd(index->env, &fd) != 0)
        return 0;
    off_t size = lseek(fd, 0, SEEK_END);
    return size >= 0 && (uint64_t)size >= ((uint64_t)info.me_last_pgno + 1) * stat.ms_psize;
}

static int open_env(struct index *index, const struct index_options *options, unsigned extra) {
    char path[4096];
    snprintf(path, sizeof path, "/proc/self/fd/%d", index->dir);
    if (access(path, X_OK) != 0 &&
        snprintf(path, sizeof path, "%s/%s", options->dir_path, options->name) >= (int)sizeof path)
        return ENAMETOOLONG;
    int rc = mdb_env_create(&index->env);
    if (rc == 0)
        rc = mdb_env_set_maxdbs(index->env, 2);
    if (rc == 0)
        rc = mdb_env_set_mapsize(index->env, map_bytes_first);
#ifndef BREAK_READERS
    if (rc == 0)
        rc = mdb_env_set_maxreaders(index->env, READERS_MAX);
#endif
    if (rc == 0)
        rc = mdb_env_open(index->env, path, MDB_NOTLS | MDB_NORDAHEAD | extra, 0600);
    if (rc != 0) {
        mdb_env_close(index->env);
        index->env = NULL;
    }
    return rc;
}

/* Slots of readers that were killed would fill the table, and one that was killed while it read
 * keeps every page that was freed since from being used again. */
static void clear_stale(struct index *index) {
#ifndef BREAK_STALE_READERS
    int dead = 0;
    (void)mdb_reader_check(index->env, &dead);
#else
    (void)index;
#endif
}

static enum kv_err open_lmdb(struct index *index, const struct index_options *options,
                             struct kv_diag *diag) {
    unsigned extra = options->mode == INDEX_READ ? MDB_RDONLY : 0;
    if (options->mode == INDEX_CREATE)
        extra |= MDB_NOSYNC;
    int rc = open_env(index, options, extra);
    /* A reader that may not write the lock file reads without one: there can be no writer either.
     */
    if (options->mode == INDEX_READ && (rc == EACCES || rc == EPERM || rc == EROFS))
        rc = open_env(index, options, extra | MDB_NOLOCK);
    if (rc == ENOENT)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND, "index: data.mdb was taken away just now");
    if (rc != 0)
        return translate(rc, diag, "open it");
    if (options->mode == INDEX_WRITE)
        clear_stale(index);
    if (!file_is_whole(index))
        return kv_diag_set(diag, KV_ERR_CORRUPT, "index: data.mdb is shorter than it says");
    rc = open_databases(index, options->mode);
    if (rc == MDB_NOTFOUND)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "index: data.mdb has no records database");
    return translate(rc, diag, "open its databases");
}

enum kv_err index_open(const struct index_options *options, struct index **out,
                       struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct index *index = kv_alloc_zeroed(options->alloc, 1, sizeof *index);
    if (index == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the index");
    index->alloc = options->alloc;
    index->door = options->door;
    index->reads_only = options->mode == INDEX_READ;
    index->dir = -1;
    pthread_rwlock_init(&index->resize, NULL);
    if (options->mode != INDEX_READ) {
        index->old_entry =
            kv_alloc_aligned(options->alloc, STORE_KEY_BYTES_MAX + FMT_ENTRY_BYTES_MAX, 64);
        if (index->old_entry == NULL)
            KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the index"));
    }
    KV_TRY(open_dir(options, &index->dir, diag));
    KV_TRY(look_at_files(options, index->dir, diag));
    if (options->mode != INDEX_CREATE)
        KV_TRY(index_pages_check(options->door, index->dir, options->alloc, diag));
    KV_TRY(open_lmdb(index, options, diag));
    *out = index;
    index = NULL;
done:
    index_close(index);
    return err;
}

void index_close(struct index *index) {
    if (index == NULL)
        return;
    if (index->env != NULL)
        mdb_env_close(index->env);
    if (index->dir >= 0)
        index->door->close(index->door->context, index->dir);
    pthread_rwlock_destroy(&index->resize);
    kv_alloc_release(index->alloc, index->old_entry);
    kv_alloc_release(index->alloc, index);
}

void index_copy_release(const struct kv_alloc *alloc, struct index_copy *copy) {
    kv_alloc_release(alloc, copy->bytes);
    *copy = (struct index_copy){0};
}

/* Size 0: take over what another process has set. */
static int resize_map(struct index *index, size_t bytes) {
    pthread_rwlock_wrlock(&index->resize);
    int rc = mdb_env_set_mapsize(index->env, bytes);
    pthread_rwlock_unlock(&index->resize);
    return rc;
}

/* 1 when a writer of another process has put a new index in the place of this one, which says where
 * everything was before. */
static int is_replaced(const struct index *index) {
    struct io_file_info info;
    return index->reads_only &&
           index->door->info_at(index->door->context, index->dir, "data.mdb", &info) == ENOENT;
}

static enum kv_err read_refused(int rc, struct kv_diag *diag) {
    if (rc == ESTALE)
        return kv_diag_set(diag, KV_ERR_IO,
                           "the index was made anew by another program meanwhile: run this again");
    return translate(rc, diag, "read");
}

/* On 0 the caller holds `resize` shared and ends with end_read. */
static int begin_read(struct index *index, MDB_txn **txn_out) {
#ifndef BREAK_REPLACED_UNSEEN
    if (is_replaced(index))
        return ESTALE;
#endif
    for (int attempt = 0;; attempt++) {
        pthread_rwlock_rdlock(&index->resize);
        int rc = mdb_txn_begin(index->env, NULL, MDB_RDONLY, txn_out);
        if (rc == 0)
            return 0;
        pthread_rwlock_unlock(&index->resize);
        if (attempt == 8 || (rc != MDB_MAP_RESIZED && rc != MDB_READERS_FULL))
            return rc;
        if (rc == MDB_READERS_FULL)
            clear_stale(index);
        else if ((rc = resize_map(index, 0)) != 0)
            return rc;
    }
}

static void end_read(struct index *index, MDB_txn *txn) {
    mdb_txn_abort(txn);
    pthread_rwlock_unlock(&index->resize);
}

static enum kv_err copy_out(struct index *index, const MDB_val *key, const MDB_val *data,
                            struct index_copy *copy, struct kv_diag *diag) {
    if (key->mv_size > STORE_KEY_BYTES_MAX || data->mv_size > FMT_ENTRY_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "index: an entry has an impossible length");
    size_t total = key->mv_size + data->mv_size;
    if (total > copy->capacity) {
        void *bytes = kv_alloc_aligned(index->alloc, total, 64);
        if (bytes == NULL)
            return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for an index entry");
        kv_alloc_release(index->alloc, copy->bytes);
        copy->bytes = bytes;
        copy->capacity = total;
    }
    memcpy(copy->bytes, key->mv_data, key->mv_size);
    memcpy(copy->bytes + key->mv_size, data->mv_data, data->mv_size);
    copy->key_bytes = key->mv_size;
    copy->total_bytes = total;
    return KV_OK;
}

enum kv_err index_get(struct index *index, const void *key, size_t key_bytes,
                      struct index_copy *copy, struct kv_diag *diag) {
    MDB_txn *txn = NULL;
    MDB_val name = {key_bytes, (void *)(uintptr_t)key};
    MDB_val data;
    int rc = begin_read(index, &txn);
    if (rc != 0)
        return read_refused(rc, diag);
    rc = mdb_get(txn, index->records, &name, &data);
    enum kv_err err = translate(rc, diag, "look up a key");
    if (err == KV_OK)
        err = copy_out(index, &name, &data, copy, diag);
    end_read(index, txn);
    return err;
}

static int seek(MDB_cursor *cursor, const struct index_range *range, MDB_val *key, MDB_val *data) {
    int from_after = range->after_bytes != 0;
    const void *from = from_after ? range->after : range->prefix;
    size_t from_bytes = from_after ? range->after_bytes : range->prefix_bytes;
    if (from_bytes == 0)
        return mdb_cursor_get(cursor, key, data, MDB_FIRST);
    *key = (MDB_val){from_bytes, (void *)(uintptr_t)from};
    int rc = mdb_cursor_get(cursor, key, data, MDB_SET_RANGE);
    if (rc == 0 && from_after && key->mv_size == from_bytes &&
        memcmp(key->mv_data, from, from_bytes) == 0)
        rc = mdb_cursor_get(cursor, key, data, MDB_NEXT);
    return rc;
}

static int is_after(const MDB_val *key, const struct index_range *range) {
    size_t shorter = key->mv_size < range->after_bytes ? key->mv_size : range->after_bytes;
    int order = shorter == 0 ? 0 : memcmp(key->mv_data, range->after, shorter);
    return order > 0 || (order == 0 && key->mv_size > range->after_bytes);
}

enum kv_err index_next(struct index *index, const struct index_range *range,
                       struct index_copy *copy, struct kv_diag *diag) {
    MDB_txn *txn = NULL;
    MDB_cursor *cursor = NULL;
    MDB_val key = {0, NULL};
    MDB_val data = {0, NULL};
    int rc = begin_read(index, &txn);
    if (rc != 0)
        return read_refused(rc, diag);
    rc = mdb_cursor_open(txn, index->records, &cursor);
    if (rc == 0)
        rc = seek(cursor, range, &key, &data);
    enum kv_err err = translate(rc, diag, "walk its keys");
    if (err == KV_OK && (key.mv_size < range->prefix_bytes ||
                         (range->prefix_bytes != 0 &&
                          memcmp(key.mv_data, range->prefix, range->prefix_bytes) != 0)))
        err = KV_ERR_NOT_FOUND;
    /* Keys out of order would make a walk go round for ever. */
    if (err == KV_OK && !is_after(&key, range))
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "index: its keys are out of order");
    if (err == KV_OK)
        err = copy_out(index, &key, &data, copy, diag);
    if (cursor != NULL)
        mdb_cursor_close(cursor);
    end_read(index, txn);
    return err;
}

static MDB_val state_key(void) {
    static const char name[] = "state";
    return (MDB_val){sizeof name - 1, (void *)(uintptr_t)name};
}

enum kv_err index_state(struct index *index, struct fmt_state *out, struct kv_diag *diag) {
    MDB_txn *txn = NULL;
    MDB_val key = state_key();
    MDB_val data;
    int rc = begin_read(index, &txn);
    if (rc != 0)
        return read_refused(rc, diag);
    rc = mdb_get(txn, index->states, &key, &data);
    enum kv_err err = translate(rc, diag, "read its state");
    if (err == KV_OK) {
        err = fmt_state_decode(data.mv_data, data.mv_size, out);
        if (err != KV_OK)
            kv_diag_set(diag, err, "index: its state is %s",
                        err == KV_ERR_VERSION ? "of a newer version" : "damaged");
    }
    end_read(index, txn);
    return err;
}

/* What an entry that is about to go kept alive; one that is damaged counts as nothing. */
static int old_live_bytes(struct index *index, MDB_txn *txn, const struct fmt_op *op,
                          uint64_t *bytes_out, int *there_out) {
    MDB_val key = {op->key_bytes, (void *)(uintptr_t)op->key};
    MDB_val data;
    *bytes_out = 0;
    *there_out = 0;
    int rc = mdb_get(txn, index->records, &key, &data);
    if (rc == MDB_NOTFOUND)
        return 0;
    if (rc != 0)
        return rc;
    *there_out = 1;
    struct fmt_entry entry;
    if (data.mv_size > FMT_ENTRY_BYTES_MAX)
        return 0;
    memcpy(index->old_entry, op->key, op->key_bytes);
    memcpy(index->old_entry + op->key_bytes, data.mv_data, data.mv_size);
    if (fmt_entry_decode(index->old_entry, op->key_bytes, op->key_bytes + data.mv_size, &entry) ==
        KV_OK)
        *bytes_out = fmt_entry_live_bytes(&entry);
    return 0;
}

static int apply_op(struct index *index, MDB_txn *txn, const struct fmt_op *op,
                    struct fmt_state *state) {
    uint64_t old_bytes = 0;
    int there = 0;
    int rc = old_live_bytes(index, txn, op, &old_bytes, &there);
    if (rc != 0)
        return rc;
    MDB_val key = {op->key_bytes, (void *)(uintptr_t)op->key};
    if (op->type == FMT_OP_PUT) {
        MDB_val data = {op->entry_bytes, (void *)(uintptr_t)op->entry_at};
        rc = mdb_put(txn, index->records, &key, &data, 0);
        state->live_bytes += fmt_entry_live_bytes(&op->entry);
        state->record_count += !there;
    } else if (there) {
        rc = mdb_del(txn, index->records, &key, NULL);
        state->record_count--;
    }
#ifndef BREAK_LIVE_BYTES
    state->live_bytes -= old_bytes < state->live_bytes ? old_bytes : state->live_bytes;
#endif
    return rc;
}

static int apply_all(struct index *index, MDB_txn *txn, struct kv_reader reader,
                     struct fmt_state *state) {
    while (kv_reader_left(&reader) != 0) {
        struct fmt_op op;
        enum kv_err err = fmt_op_decode(&reader, &op);
        assert(err == KV_OK); /* the caller has checked or made them */
        int rc = apply_op(index, txn, &op, state);
        if (rc != 0)
            return rc;
    }
    uint8_t bytes[FMT_STATE_BYTES];
    fmt_state_encode(state, bytes);
    MDB_val key = state_key();
    MDB_val data = {sizeof bytes, bytes};
    return mdb_put(txn, index->states, &key, &data, 0);
}

static int apply_once(struct index *index, struct kv_reader reader, struct fmt_state *state) {
    MDB_txn *txn = NULL;
    pthread_rwlock_rdlock(&index->resize);
    int rc = mdb_txn_begin(index->env, NULL, 0, &txn);
    if (rc == 0) {
        rc = apply_all(index, txn, reader, state);
        if (rc == 0)
            rc = mdb_txn_commit(txn);
        else
            mdb_txn_abort(txn);
    }
    pthread_rwlock_unlock(&index->resize);
    return rc;
}

/* A write of which only a part has found room is EIO in LMDB's words. */
static int full_disk(const struct index *index, int rc) {
    uint64_t bytes = UINT64_MAX;
#ifdef BREAK_SHORT_COMMIT
    return rc;
#endif
    return rc == EIO && index->door->free_space(index->door->context, index->dir, &bytes) == 0 &&
                   bytes < FULL_BYTES
               ? ENOSPC
               : rc;
}

enum kv_err index_apply(struct index *index, const uint8_t *ops, size_t ops_bytes,
                        struct fmt_state *state, struct kv_diag *diag) {
    struct kv_reader reader;
    kv_reader_init(&reader, ops, ops_bytes);
    if (++index->applied % APPLIES_PER_CHECK == 0)
        clear_stale(index);
    for (;;) {
        struct fmt_state next = *state;
        int rc = apply_once(index, reader, &next);
        if (rc == 0) {
            *state = next;
            return KV_OK;
        }
        MDB_envinfo info;
        if (rc == MDB_MAP_FULL && mdb_env_info(index->env, &info) == 0 &&
            info.me_mapsize < map_bytes_end) {
            rc = resize_map(index, info.me_mapsize * 2);
            if (rc == 0)
                continue;
        }
        return translate(full_disk(index, rc), diag, "commit");
    }
}

enum kv_err index_sync(struct index *index, struct kv_diag *diag) {
    pthread_rwlock_rdlock(&index->resize);
    int rc = mdb_env_sync(index->env, 1);
    pthread_rwlock_unlock(&index->resize);
    return translate(rc, diag, "sync");
}

void index_replace(struct index *index, struct index *fresh) {
    int dir = index->dir;
    MDB_env *env = index->env;
    pthread_rwlock_wrlock(&index->resize);
    /* From now on a commit is durable when it returns. */
    (void)mdb_env_set_flags(fresh->env, MDB_NOSYNC, 0);
    index->env = fresh->env;
    index->records = fresh->records;
    index->states = fresh->states;
    index->dir = fresh->dir;
    fresh->env = env;
    fresh->dir = dir;
    pthread_rwlock_unlock(&index->resize);
}

uint64_t index_bytes(struct index *index) {
    MDB_envinfo info;
    MDB_stat stat;
    pthread_rwlock_rdlock(&index->resize);
    int rc = mdb_env_info(index->env, &info);
    if (rc == 0)
        rc = mdb_env_stat(index->env, &stat);
    pthread_rwlock_unlock(&index->resize);
    return rc == 0 ? ((uint64_t)info.me_last_pgno + 1) * stat.ms_psize : 0;
}

uint64_t index_commits(struct index *index) {
    MDB_envinfo info;
    pthread_rwlock_rdlock(&index->resize);
    int rc = mdb_env_info(index->env, &info);
    pthread_rwlock_unlock(&index->resize);
    return rc == 0 ? info.me_last_txnid : 0;
}
