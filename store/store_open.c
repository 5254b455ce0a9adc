/* store/store_open.c - opening and closing the directory.
 *
 * Responsible for: FORMAT, LOCK, directories, refusing symbolic links, deciding between the index
 * as it is, rolling forward (recover.c) and rebuilding (rebuild.c).
 * Not responsible for: what is in the records.
 */
#include "store/index_probe.h"
#include "store/store_inner.h"
#include "store/store_ram_inner.h"
#include "store/store_reserve.h"
#include "store/store_written.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LOCK_TEXT_BYTES = 128, LOOKS_MAX = 400, LOOK_AGAIN_MS = 5 };

void store_inner_note(struct store *store, const char *format, ...) {
    size_t used = strlen(store->opened);
    va_list args;
    va_start(args, format);
    vsnprintf(store->opened + used, sizeof store->opened - used, format, args);
    va_end(args);
}

/* One sentence for every name in the directory that could not be used. */
static enum kv_err name_error(struct kv_diag *diag, int error, const char *what, const char *name) {
    switch (error) {
    case 0:
        return KV_OK;
    case ELOOP:
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s is a symbolic link: refused", name);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return kv_diag_errno(diag, KV_ERR_NO_SPACE, error, "cannot %s %s", what, name);
    case ENOMEM:
        return kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot %s %s", what, name);
    default:
        return kv_diag_errno(diag, KV_ERR_IO, error, "cannot %s %s", what, name);
    }
}

static enum kv_err check_options(const struct store_options *options, struct kv_diag *diag) {
    uint64_t segment = options->segment_bytes;
    if (options->dir == NULL || options->dir[0] == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "the store's directory has no name");
    if (segment % STORE_PAGE_BYTES != 0 || segment < (uint64_t)1 << 20 ||
        segment > (uint64_t)1 << 30)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "segment size %llu: it must be a multiple of 4096 from 1 MiB to 1 GiB",
                           (unsigned long long)segment);
    if (options->deadline_ns == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "the store's I/O deadline is 0");
    assert(options->door != NULL && options->alloc != NULL && options->clock != NULL);
    return KV_OK;
}

static enum kv_err no_store(struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                       "there is none; `coldplane chat` makes it, --store DIR names another");
}

static int may_create(const struct store *store) {
    return store->options.create && !store->options.read_only;
}

static enum kv_err open_dir(struct store *store, const char *path, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    int error = door->open(door->context, AT_FDCWD, path, IO_READ | IO_DIRECTORY, &store->dir);
    if (error == ENOENT && may_create(store)) {
        error = door->make_dir(door->context, AT_FDCWD, path);
        if (error == 0)
            error = door->open(door->context, AT_FDCWD, path, IO_READ | IO_DIRECTORY, &store->dir);
        return name_error(diag, error, "make the store directory", path);
    }
    if (error == ENOENT)
        return no_store(diag);
    if (error == ENOTDIR || error == ELOOP) {
        struct io_file_info info = {0};
        int there = door->info_at(door->context, AT_FDCWD, path, &info) == 0;
        return kv_diag_set(diag, KV_ERR_INVALID, "%s",
                           info.is_symlink ? "it is a symbolic link: give the directory itself"
                           : there
                               ? "it is no store but a file: give the directory of one"
                               : "a part of this path is a file: give the directory of a store");
    }
    return name_error(diag, error, "open the store directory", path);
}

struct link_search {
    const struct io_door *door;
    int dir;
    int foreign; /* names that a store without FORMAT cannot have */
    char found[64];
};

static int look_for_link(void *argument, const char *name) {
    struct link_search *search = argument;
    struct io_file_info info = {0};
    if (strcmp(name, "LOCK") != 0 && strcmp(name, "FORMAT.tmp") != 0 && strcmp(name, "seg") != 0 &&
        strcmp(name, "index.tmp") != 0)
        search->foreign = 1;
    if (search->door->info_at(search->door->context, search->dir, name, &info) == 0 &&
        info.is_symlink)
        snprintf(search->found, sizeof search->found, "%s", name);
    return search->found[0] != 0;
}

/* Every open refuses links by itself; this finds them before anything is opened or made. */
static enum kv_err refuse_links(struct store *store, const char *sub, int *foreign_out,
                                struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    struct link_search search = {.door = door, .dir = store->dir};
    if (sub != NULL) {
        int error = door->open(door->context, store->dir, sub, IO_READ | IO_DIRECTORY, &search.dir);
        if (error == ENOENT)
            return KV_OK;
        if (error == ENOTDIR)
            error = ELOOP;
        if (error != 0)
            return name_error(diag, error, "open", sub);
    }
    int error = door->list(door->context, search.dir, look_for_link, &search);
    if (sub != NULL)
        door->close(door->context, search.dir);
    if (foreign_out != NULL)
        *foreign_out = search.foreign;
    if (search.found[0] != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s%s%s is a symbolic link: refused",
                           sub != NULL ? sub : "", sub != NULL ? "/" : "", search.found);
    return name_error(diag, error, "list", sub != NULL ? sub : "the store directory");
}

static enum kv_err held_by(struct store *store, int file, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    char text[LOCK_TEXT_BYTES] = "";
    size_t got = 0;
    door->read(door->context, file, text, sizeof text - 1, 0, &got);
    text[strcspn(text, "\n")] = 0;
    return kv_diag_set(diag, KV_ERR_BUSY,
                       "the store is held by another program (%s): end it or wait for it",
                       text[0] != 0 ? text : "it has not written its name");
}

static enum kv_err take_lock(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    char text[LOCK_TEXT_BYTES] = "";
    int file = -1;
    int error = door->open(door->context, store->dir, "LOCK", IO_WRITE | IO_CREATE, &file);
    if (error != 0)
        return name_error(diag, error, "open for writing", "LOCK");
    error = door->lock(door->context, file);
#ifdef BREAK_LOCK
    error = 0;
#endif
    if (error != 0) {
        enum kv_err err = error == EWOULDBLOCK ? held_by(store, file, diag)
                                               : name_error(diag, error, "lock", "LOCK");
        door->close(door->context, file);
        return err;
    }
    const char *program = store->options.program;
    snprintf(text, sizeof text, "pid %ld %.64s\n", (long)getpid(), program ? program : "");
    /* Always the same length, so that a full disk has its place already; without one the lock holds
     * all the same. */
    error = door->write(door->context, file, text, sizeof text, 0);
    if (error != 0 && error != ENOSPC && error != EDQUOT && error != EFBIG) {
        door->close(door->context, file);
        return name_error(diag, error, "write", "LOCK");
    }
    store->lock_file = file;
    return KV_OK;
}

static void drop_lock(struct store *store) {
    const struct io_door *door = store->options.door;
    if (store->lock_file < 0)
        return;
    static const char nobody[LOCK_TEXT_BYTES] = "\n";
    door->write(door->context, store->lock_file, nobody, sizeof nobody, 0);
    door->close(door->context, store->lock_file);
    store->lock_file = -1;
}

/* A directory is there after a power cut only when the one above it is durable too. */
static int sync_above(struct store *store) {
    const struct io_door *door = store->options.door;
    int above = -1;
    int error = door->open(door->context, store->dir, "..", IO_READ | IO_DIRECTORY, &above);
    if (error != 0)
        return error;
#ifndef BREAK_SYNC_ABOVE
    error = door->sync(door->context, above);
#endif
    door->close(door->context, above);
    return error;
}

/* Segments without FORMAT are a store that lost it, for readers and writers alike. */
static enum kv_err refuse_lost_format(struct store *store, struct kv_diag *diag) {
    uint32_t *numbers = NULL;
    size_t count = 0;
    enum kv_err err = recover_segments(store, &numbers, &count, diag);
    kv_alloc_release(store->options.alloc, numbers);
    if (err == KV_OK && count != 0)
        err = kv_diag_set(diag, KV_ERR_CORRUPT,
                          "FORMAT is missing but segments are there: put FORMAT back from a copy "
                          "of this store, have it made anew with `coldplane fsck "
                          "--rebuild-index`, or use another directory");
    return err;
}

/* A store that lost FORMAT is recognised by its segments when its index is to be made anew. */
static enum kv_err choose_id(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    enum kv_err err = refuse_lost_format(store, diag);
    if (err == KV_OK)
        return name_error(diag, door->random(door->context, store->id, FMT_ID_BYTES), "write",
                          "FORMAT");
    if (err != KV_ERR_CORRUPT || !store->options.rebuild_index)
        return err;
    kv_diag_clear(diag);
    err = recover_id(store, store->id, diag);
    if (err == KV_OK)
        store_inner_note(store, "FORMAT was missing and is made anew from the segments. ");
    return err;
}

static enum kv_err make_format(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    enum kv_err err = choose_id(store, diag);
    if (err != KV_OK)
        return err;
    char text[FMT_TEXT_BYTES_MAX];
    int file = -1;
    int error = 0;
    size_t bytes = fmt_text_encode(store->id, text);
    if (error == 0)
        error = door->open(door->context, store->dir, "FORMAT.tmp", IO_WRITE | IO_CREATE, &file);
    if (error == 0)
        error = door->truncate(door->context, file, 0);
    if (error == 0)
        error = door->write(door->context, file, text, bytes, 0);
    if (error == 0)
        error = door->sync(door->context, file);
    if (file >= 0)
        door->close(door->context, file);
    if (error == 0)
        error = door->rename(door->context, store->dir, "FORMAT.tmp", "FORMAT");
    if (error == 0)
        error = door->sync(door->context, store->dir);
    if (error == 0)
        error = sync_above(store);
    return name_error(diag, error, "write", "FORMAT");
}

static enum kv_err read_format(struct store *store, int *there_out, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    char text[FMT_TEXT_BYTES_MAX];
    size_t got = 0;
    int file = -1;
    int error = door->open(door->context, store->dir, "FORMAT", IO_READ, &file);
    *there_out = error != ENOENT;
    if (error == ENOENT)
        return KV_OK;
    if (error == 0)
        error = door->read(door->context, file, text, sizeof text, 0, &got);
    if (file >= 0)
        door->close(door->context, file);
    if (error != 0)
        return name_error(diag, error, "read", "FORMAT");
    return fmt_text_decode(text, got, store->id, diag);
}

static enum kv_err open_seg_dir(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    int error =
        door->open(door->context, store->dir, "seg", IO_READ | IO_DIRECTORY, &store->seg_dir);
    if (error == ENOENT && !store->options.read_only) {
        error = door->make_dir(door->context, store->dir, "seg");
        if (error == 0)
            error = door->open(door->context, store->dir, "seg", IO_READ | IO_DIRECTORY,
                               &store->seg_dir);
    }
    if (error == ENOENT)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the directory seg is missing");
    return name_error(diag, error == ENOTDIR ? ELOOP : error, "open", "seg");
}

/* Before a writer makes anything: what stands here without FORMAT. Another program may make the
 * store meanwhile, and FORMAT before its first segment. */
static enum kv_err without_format(struct store *store, int foreign, int *there_out,
                                  struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    int error =
        door->open(door->context, store->dir, "seg", IO_READ | IO_DIRECTORY, &store->seg_dir);
    if (error == 0) {
        enum kv_err err = refuse_lost_format(store, diag);
        door->close(door->context, store->seg_dir);
        store->seg_dir = -1;
        if (err == KV_ERR_CORRUPT && read_format(store, there_out, NULL) == KV_OK && *there_out)
            return KV_OK;
        /* Under the lock it is made anew. */
        if (err == KV_ERR_CORRUPT && store->options.rebuild_index && !store->options.read_only)
            return KV_OK;
        if (err != KV_OK)
            return err;
    }
    if (foreign)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "FORMAT is missing, and the directory is not empty: not a store; use "
                           "an empty directory");
    if (!may_create(store))
        return no_store(diag);
    return KV_OK;
}

/* FORMAT and directories; a writer makes what is missing in a fresh directory. */
static enum kv_err open_layout(struct store *store, struct kv_diag *diag) {
    int there = 0;
    int foreign = 0;
    enum kv_err err = KV_OK;
    KV_TRY(refuse_links(store, NULL, &foreign, diag));
    KV_TRY(refuse_links(store, "seg", NULL, diag));
    KV_TRY(refuse_links(store, "index", NULL, diag));
    KV_TRY(read_format(store, &there, diag));
    if (!there)
        KV_TRY(without_format(store, foreign, &there, diag));
    if (!store->options.read_only)
        KV_TRY(take_lock(store, diag));
    KV_TRY(open_seg_dir(store, diag));
    /* Somebody may have made the store while we waited for the lock. */
    if (!there)
        KV_TRY(read_format(store, &there, diag));
    if (!there)
        KV_TRY(make_format(store, diag));
done:
    return err;
}

static enum kv_err try_index(struct store *store, const char *dir_path, struct kv_diag *diag) {
    struct index_options options = {.mode = store->options.read_only ? INDEX_READ : INDEX_WRITE,
                                    .door = store->options.door,
                                    .alloc = store->options.alloc,
                                    .dir = store->dir,
                                    .dir_path = dir_path,
                                    .name = "index"};
    enum kv_err err = index_probe(&options, store->options.deadline_ns, diag);
    if (err == KV_OK)
        err = index_open(&options, &store->index, diag);
    if (err == KV_OK)
        err = index_state(store->index, &store->state, diag);
    if (err == KV_OK && memcmp(store->state.store_id, store->id, FMT_ID_BYTES) != 0)
        err = kv_diag_set(diag, KV_ERR_CORRUPT, "the index belongs to another store");
    return err;
}

/* 1 while a writer makes the index anew, or when one was ended in the middle of that. */
static int is_being_made(const struct store *store) {
    const struct io_door *door = store->options.door;
    struct io_file_info info;
    return door->info_at(door->context, store->dir, "index.tmp", &info) == 0;
}

/* A writer that puts a new index in the place of the old one takes that away first: whoever reads
 * waits for it, and looks again at once when it may have been done just now. */
static enum kv_err open_index(struct store *store, const char *dir_path, struct kv_diag *diag) {
    enum kv_err err = try_index(store, dir_path, diag);
#ifndef BREAK_BETWEEN
    for (int tries = 0; store->options.read_only && (err == KV_ERR_NOT_FOUND || err == KV_ERR_IO) &&
                        tries < LOOKS_MAX;
         tries++) {
        if (is_being_made(store))
            /* tidy-allow: wait what another program renames has no event */
            (void)poll(NULL, 0, LOOK_AGAIN_MS);
        else
            tries += LOOKS_MAX / 2;
        index_close(store->index);
        store->index = NULL;
        kv_diag_clear(diag);
        err = try_index(store, dir_path, diag);
    }
#endif
    return err == KV_ERR_NOT_FOUND ? KV_ERR_CORRUPT : err;
}

/* Every entry holds its check, and together they are what the state says. */
static enum kv_err check_index(struct store *store, struct kv_diag *diag) {
    struct index_copy copy = {0};
    uint8_t after[STORE_KEY_BYTES_MAX];
    struct index_range range = {.after = after};
    uint64_t records = 0;
    uint64_t live_bytes = 0;
    enum kv_err err = KV_OK;
    while (err == KV_OK) {
        struct fmt_entry entry;
        err = index_next(store->index, &range, &copy, diag);
        if (err != KV_OK)
            break;
        err = fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry);
        if (err != KV_OK)
            break;
        records++;
        live_bytes += fmt_entry_live_bytes(&entry);
        memcpy(after, copy.bytes, copy.key_bytes);
        range.after_bytes = copy.key_bytes;
    }
    index_copy_release(store->options.alloc, &copy);
    if (err != KV_ERR_NOT_FOUND)
        return err;
    if (records != store->state.record_count || live_bytes != store->state.live_bytes)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "the index has lost entries");
    return KV_OK;
}

/* A reader rebuilds only under the writer's lock, and gives it back. */
static enum kv_err rebuild_for(struct store *store, const char *dir_path, struct kv_diag *diag) {
    index_close(store->index);
    store->index = NULL;
    enum kv_err err = KV_OK;
    int borrowed = store->lock_file < 0;
    if (borrowed)
        err = take_lock(store, diag);
    if (err != KV_OK) {
        kv_diag_prefix(diag, "the index is missing or damaged and cannot be rebuilt now");
        return err;
    }
    memset(&store->state, 0, sizeof store->state);
    err = rebuild_index(store, dir_path, diag);
    if (err == KV_OK)
        err = open_index(store, dir_path, diag);
    if (borrowed)
        drop_lock(store);
    return err;
}

uint64_t store_inner_taken(const struct store *store, const struct io_file_info *info,
                           uint64_t end) {
    return !store->counts_no_blocks && info->stored_bytes < end ? info->stored_bytes : end;
}

static enum kv_err count_segments(struct store *store, struct kv_diag *diag) {
    const struct io_door *door = store->options.door;
    struct fmt_place tail = store->state.tail;
    uint32_t *numbers = NULL;
    size_t count = 0;
    uint64_t size_bytes = 0;
    enum kv_err err = recover_segments(store, &numbers, &count, diag);
    if (err != KV_OK)
        return err;
    store->segment_count = (uint32_t)count;
    for (size_t i = 0; i < count && numbers[i] <= tail.segment && err == KV_OK; i++) {
        char name[SEGMENT_NAME_BYTES];
        struct io_file_info info = {0};
        segment_name(numbers[i], name);
        int error = door->info_at(door->context, store->seg_dir, name, &info);
        uint64_t end = numbers[i] == tail.segment ? tail.off : info.size_bytes;
        if (error != 0)
            err = segment_error(diag, error, "look at", numbers[i]);
        size_bytes += end;
        store->segment_bytes += store_inner_taken(store, &info, end);
    }
    /* The last batch record is never a hole, so this says something about the file system. */
    if (store->segment_bytes == 0 && size_bytes != 0) {
        store->counts_no_blocks = 1;
        store->segment_bytes = size_bytes;
    }
    /* The flag of a real file is the only proof that O_DIRECT is in force. */
    if (err == KV_OK && count != 0 && store->options.read_only) {
        struct segment_open_args args = {door, store->seg_dir, numbers[0],
                                         store->options.direct_wanted};
        int file = -1;
        if (segment_open_read(&args, &file, &store->direct, NULL) == KV_OK)
            door->close(door->context, file);
    }
    kv_alloc_release(store->options.alloc, numbers);
    return err;
}

static enum kv_err open_writer(struct store *store, struct kv_diag *diag) {
    struct segment_writer_options options = {.door = store->options.door,
                                             .alloc = store->options.alloc,
                                             .clock = store->options.clock,
                                             .dir = store->seg_dir,
                                             .direct_wanted = store->options.direct_wanted,
                                             .segment_bytes = store->options.segment_bytes,
                                             .deadline_ns = store->options.deadline_ns,
                                             .tail = store->state.tail};
    enum kv_err err = codec_make(store->options.alloc, &store->codec);
    if (err != KV_OK)
        return kv_diag_set(diag, err, "no memory for the store's codec");
    err = segment_writer_make(&options, &store->writer, diag);
    if (err != KV_OK)
        return err;
    store->door_name = segment_door_name(store->writer);
    snprintf(store->fallback, sizeof store->fallback, "%s", segment_fallback(store->writer));
    return segment_probe(store->writer, &store->direct, diag);
}

static enum kv_err open_all(struct store *store, const char *path, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    KV_TRY(open_dir(store, path, diag));
    KV_TRY(open_layout(store, diag));
    err = open_index(store, path, diag);
    if (err == KV_OK && store->options.rebuild_index)
        err = KV_ERR_CORRUPT;
    if (err == KV_OK && !store->options.read_only)
        err = check_index(store, diag);
    int may_rebuild = !store->options.inspect;
#ifdef BREAK_INSPECT
    may_rebuild = 1;
#endif
    if (err == KV_ERR_CORRUPT && may_rebuild)
        err = rebuild_for(store, path, diag);
    if (err != KV_OK)
        goto done;
    if (!store->options.read_only)
        KV_TRY(recover_forward(store, diag));
    if (!store->options.read_only)
        KV_TRY(open_writer(store, diag));
    if (!store->options.read_only) {
        KV_TRY(store_reserve_open(store, diag));
        store_reserve_take(store);
    }
    KV_TRY(count_segments(store, diag));
    store_written_load(store->index, store->options.alloc, store->written);
    store->state.epoch++; /* reaches the disk with the first batch */
done:
    return err;
}

enum kv_err store_open(const struct store_options *options, struct store **out,
                       struct kv_diag *diag) {
    enum kv_err err = check_options(options, diag);
    if (err != KV_OK)
        return err;
    struct store *store = kv_alloc_zeroed(options->alloc, 1, sizeof *store);
    if (store == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the store");
    store->options = *options;
    store->options.dir = NULL;
    store->dir = -1;
    store->seg_dir = -1;
    store->lock_file = -1;
    store->reserve_file = -1;
    store->door_name = options->door->name;
    pthread_mutex_init(&store->lock, NULL);
    err = open_all(store, options->dir, diag);
    store->options.program = NULL; /* these two are the caller's during the opening alone */
#ifndef BREAK_PROGRESS_STAYS
    store->options.progress = NULL;
#endif
    if (err != KV_OK) {
        kv_diag_prefix(diag, "store %s", options->dir);
        store_close(store);
        return err;
    }
    *out = store;
    return KV_OK;
}

void store_close(struct store *store) {
    if (store == NULL)
        return;
    const struct io_door *door = store->options.door;
    assert(!store->batch.open);
    store_read_release_all(store);
    store_ram_inner_close(store);
    store_reserve_close(store);
    int quiet = segment_writer_drop(store->writer);
    codec_drop(store->codec);
    index_close(store->index);
    kv_alloc_release(store->options.alloc, store->batch.record);
    /* A stalled write may still land: nobody else may write here before this process has ended. */
    if (quiet)
        drop_lock(store);
    if (store->seg_dir >= 0)
        door->close(door->context, store->seg_dir);
    if (store->dir >= 0)
        door->close(door->context, store->dir);
    pthread_mutex_destroy(&store->lock);
    kv_alloc_release(store->options.alloc, store);
}
