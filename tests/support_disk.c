/* tests/support_disk.c - the log of a disk and what a power cut makes of it.
 *
 * Responsible for: the contract of support_disk.h, its door half.
 * Not responsible for: replaying the log (support_disk_build.c).
 */
#include "tests/support_disk.h"

#include "tests/support_disk_build.h"
#include "tests/support_faulty_index.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILES_MAX = 8192, NODE_NONE = UINT32_MAX };

struct live { /* a name that exists now */
    uint32_t dir, node;
    char name[DISK_NAME_BYTES];
};

struct disk {
    struct io_door door;
    const struct io_door *under;
    char root[512];
    pthread_mutex_t lock; /* guards everything below */
    struct disk_log log;
    struct live *live;
    size_t live_count, live_capacity;
    uint32_t node_of[FILES_MAX]; /* by descriptor */
    uint64_t die_at, fail_at, changes;
    int fail_error, failed;
    uint64_t fill_at, filling;     /* of what takes room */
    uint64_t misdirect_at, writes; /* of submitted writes */
    int64_t misdirect_by;
};

static void *need(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "disk: no memory\n");
        abort();
    }
    return memory;
}

void *disk_need(void *memory) {
    return need(memory);
}

static struct disk *self(void *context) {
    return context;
}

const struct disk_log *disk_log_of(const struct disk *disk) {
    return &disk->log;
}

/* --- the log; the lock is held */

static struct disk_entry *append(struct disk *disk, enum disk_kind kind, uint32_t node) {
    struct disk_log *log = &disk->log;
    if (log->count == log->capacity) {
        log->capacity = log->capacity == 0 ? 256 : 2 * log->capacity;
        log->entries = need(realloc(log->entries, log->capacity * sizeof *log->entries));
    }
    struct disk_entry *entry = &log->entries[log->count++];
    *entry = (struct disk_entry){.kind = kind, .node = node};
    return entry;
}

static void take_bytes(struct disk_entry *entry, const void *bytes, size_t count) {
    entry->bytes = need(malloc(count + 1));
    memcpy(entry->bytes, bytes, count);
    entry->count = count;
}

static uint32_t find(const struct disk *disk, uint32_t dir, const char *name) {
    for (size_t i = 0; i < disk->live_count; i++)
        if (disk->live[i].dir == dir && strcmp(disk->live[i].name, name) == 0)
            return (uint32_t)i;
    return NODE_NONE;
}

static uint32_t create(struct disk *disk, uint32_t dir, const char *name, int is_dir) {
    uint32_t node = disk->log.node_count++;
    struct disk_entry *entry = append(disk, DISK_CREATE, node);
    entry->dir = dir;
    entry->is_dir = is_dir;
    snprintf(entry->name, sizeof entry->name, "%s", name);
    if (disk->live_count == disk->live_capacity) {
        disk->live_capacity = disk->live_capacity == 0 ? 64 : 2 * disk->live_capacity;
        disk->live = need(realloc(disk->live, disk->live_capacity * sizeof *disk->live));
    }
    struct live *live = &disk->live[disk->live_count++];
    *live = (struct live){.dir = dir, .node = node};
    snprintf(live->name, sizeof live->name, "%s", name);
    return node;
}

/* --- dying and failing */

static int is_dead(const struct disk *disk) {
    return disk->die_at != 0 && disk->log.count >= disk->die_at;
}

static int is_full(struct disk *disk, int takes_room) {
    disk->filling += takes_room != 0;
    if (!takes_room || disk->fill_at == 0 || disk->filling < disk->fill_at)
        return 0;
    disk->failed = 1;
    return 1;
}

/* 0 when a change may pass, else the errno it gets. Takes the lock and leaves it held. */
static int begin_change(struct disk *disk, int takes_room) {
    pthread_mutex_lock(&disk->lock);
    if (is_dead(disk))
        return EIO;
    if (is_full(disk, takes_room))
        return ENOSPC;
    if (++disk->changes != disk->fail_at)
        return 0;
    disk->failed = 1;
    return disk->fail_error;
}

static int end_change(struct disk *disk, int error) {
    pthread_mutex_unlock(&disk->lock);
    return error;
}

static int dead_now(struct disk *disk) {
    pthread_mutex_lock(&disk->lock);
    int dead = is_dead(disk);
    pthread_mutex_unlock(&disk->lock);
    return dead;
}

static uint32_t node_of(const struct disk *disk, int file) {
    return file >= 0 && file < FILES_MAX ? disk->node_of[file] : NODE_NONE;
}

/* --- the door */

static int disk_open(void *context, int dir, const char *name, int flags, int *file_out) {
    struct disk *disk = self(context);
    pthread_mutex_lock(&disk->lock);
    uint32_t parent = dir == AT_FDCWD ? DISK_NODE_ABOVE : node_of(disk, dir);
    const char *last = dir == AT_FDCWD && strcmp(name, disk->root) == 0 ? "root" : name;
    uint32_t at = parent == NODE_NONE ? NODE_NONE : find(disk, parent, last);
    int fresh = at == NODE_NONE && parent != NODE_NONE && (flags & IO_CREATE) != 0;
    int error = is_dead(disk) ? EIO : (is_full(disk, fresh) ? ENOSPC : 0);
    if (error == 0 && fresh && ++disk->changes == disk->fail_at) {
        disk->failed = 1;
        error = disk->fail_error;
    }
    if (error == 0)
        error = disk->under->open(disk->under->context, dir, name, flags, file_out);
    if (error == 0 && *file_out < FILES_MAX) {
        uint32_t node = at != NODE_NONE ? disk->live[at].node : NODE_NONE;
        if (fresh)
            node = create(disk, parent, last, 0);
        else if (parent == DISK_NODE_ROOT && strcmp(name, "..") == 0)
            node = DISK_NODE_ABOVE;
        disk->node_of[*file_out] = node;
    }
    return end_change(disk, error);
}

static int disk_close(void *context, int file) {
    struct disk *disk = self(context);
    pthread_mutex_lock(&disk->lock);
    if (file >= 0 && file < FILES_MAX)
        disk->node_of[file] = NODE_NONE;
    int error = disk->under->close(disk->under->context, file);
    return end_change(disk, error);
}

static int disk_make_dir(void *context, int dir, const char *name) {
    struct disk *disk = self(context);
    int error = begin_change(disk, 1);
    if (error == 0)
        error = disk->under->make_dir(disk->under->context, dir, name);
    if (error == 0 && dir == AT_FDCWD)
        (void)create(disk, DISK_NODE_ABOVE, "root", 1);
    else if (error == 0 && node_of(disk, dir) != NODE_NONE)
        (void)create(disk, node_of(disk, dir), name, 1);
    return end_change(disk, error);
}

static void forget_name(struct disk *disk, uint32_t dir, const char *name) {
    uint32_t at = find(disk, dir, name);
    if (at != NODE_NONE)
        disk->live[at] = disk->live[--disk->live_count];
}

static int disk_rename(void *context, int dir, const char *from, const char *to) {
    struct disk *disk = self(context);
    uint32_t parent = node_of(disk, dir);
    int error = begin_change(disk, 0);
    if (error == 0)
        error = disk->under->rename(disk->under->context, dir, from, to);
    if (error == 0 && parent != NODE_NONE) {
        forget_name(disk, parent, to);
        uint32_t at = find(disk, parent, from);
        if (at != NODE_NONE)
            snprintf(disk->live[at].name, sizeof disk->live[at].name, "%s", to);
        struct disk_entry *entry = append(disk, DISK_RENAME, parent);
        entry->dir = parent;
        snprintf(entry->name, sizeof entry->name, "%s", from);
        snprintf(entry->to, sizeof entry->to, "%s", to);
    }
    return end_change(disk, error);
}

static int disk_remove(void *context, int dir, const char *name) {
    struct disk *disk = self(context);
    uint32_t parent = node_of(disk, dir);
    int error = begin_change(disk, 0);
    if (error == 0)
        error = disk->under->remove(disk->under->context, dir, name);
    if (error == 0 && parent != NODE_NONE) {
        forget_name(disk, parent, name);
        struct disk_entry *entry = append(disk, DISK_REMOVE, parent);
        entry->dir = parent;
        snprintf(entry->name, sizeof entry->name, "%s", name);
    }
    return end_change(disk, error);
}

static int disk_info(void *context, int file, struct io_file_info *out) {
    struct disk *disk = self(context);
    return disk->under->info(disk->under->context, file, out);
}

static int disk_info_at(void *context, int dir, const char *name, struct io_file_info *out) {
    struct disk *disk = self(context);
    return disk->under->info_at(disk->under->context, dir, name, out);
}

static int disk_list(void *context, int dir, int (*each)(void *argument, const char *name),
                     void *argument) {
    struct disk *disk = self(context);
    return disk->under->list(disk->under->context, dir, each, argument);
}

static int resize(struct disk *disk, int file, uint64_t size_bytes, enum disk_kind kind) {
    int error = begin_change(disk, kind == DISK_ALLOCATE);
    if (error == 0)
        error = kind == DISK_ALLOCATE
                    ? disk->under->allocate(disk->under->context, file, size_bytes)
                    : disk->under->truncate(disk->under->context, file, size_bytes);
    if (error == 0 && node_of(disk, file) != NODE_NONE)
        append(disk, kind, node_of(disk, file))->off = size_bytes;
    return end_change(disk, error);
}

static int disk_allocate(void *context, int file, uint64_t size_bytes) {
    return resize(self(context), file, size_bytes, DISK_ALLOCATE);
}

static int disk_truncate(void *context, int file, uint64_t size_bytes) {
    return resize(self(context), file, size_bytes, DISK_TRUNCATE);
}

static int disk_punch(void *context, int file, uint64_t off, uint64_t bytes) {
    struct disk *disk = self(context);
    int error = begin_change(disk, 0);
    if (error == 0)
        error = disk->under->punch(disk->under->context, file, off, bytes);
    if (error == 0 && node_of(disk, file) != NODE_NONE) {
        struct disk_entry *entry = append(disk, DISK_PUNCH, node_of(disk, file));
        entry->off = off;
        entry->count = (size_t)bytes;
    }
    return end_change(disk, error);
}

static int disk_free_space(void *context, int file, uint64_t *bytes_out) {
    struct disk *disk = self(context);
    return disk->under->free_space(disk->under->context, file, bytes_out);
}

static int disk_read(void *context, int file, void *bytes, size_t count, uint64_t off,
                     size_t *done_out) {
    struct disk *disk = self(context);
    if (dead_now(disk))
        return EIO;
    return disk->under->read(disk->under->context, file, bytes, count, off, done_out);
}

static void log_write(struct disk *disk, int file, const void *bytes, size_t count, uint64_t off) {
    if (node_of(disk, file) == NODE_NONE)
        return;
    struct disk_entry *entry = append(disk, DISK_WRITE, node_of(disk, file));
    entry->off = off;
    take_bytes(entry, bytes, count);
}

static int disk_write(void *context, int file, const void *bytes, size_t count, uint64_t off) {
    struct disk *disk = self(context);
    int error = begin_change(disk, 1);
    if (error == 0)
        error = disk->under->write(disk->under->context, file, bytes, count, off);
    if (error == 0)
        log_write(disk, file, bytes, count, off);
    return end_change(disk, error);
}

static int disk_sync(void *context, int file) {
    struct disk *disk = self(context);
    int error = begin_change(disk, 0);
    if (error == 0)
        error = disk->under->sync(disk->under->context, file);
    if (error == 0 && node_of(disk, file) != NODE_NONE)
        (void)append(disk, DISK_SYNC, node_of(disk, file));
    return end_change(disk, error);
}

static int disk_lock(void *context, int file) {
    struct disk *disk = self(context);
    return disk->under->lock(disk->under->context, file);
}

/* The same id for every store, so that a run can be repeated. */
static int disk_random(void *context, void *bytes, size_t count) {
    (void)context;
    memset(bytes, 0x5d, count);
    return 0;
}

static int disk_queue_open(void *context, const struct io_queue_options *options,
                           struct io_queue **out) {
    struct disk *disk = self(context);
    return disk->under->queue_open(disk->under->context, options, out);
}

static int disk_queue_close(void *context, struct io_queue *queue, uint64_t timeout_ns) {
    struct disk *disk = self(context);
    return disk->under->queue_close(disk->under->context, queue, timeout_ns);
}

static const char *disk_queue_name(void *context, const struct io_queue *queue) {
    struct disk *disk = self(context);
    return disk->under->queue_name(disk->under->context, queue);
}

static const char *disk_queue_fallback(void *context, const struct io_queue *queue) {
    struct disk *disk = self(context);
    return disk->under->queue_fallback(disk->under->context, queue);
}

static int disk_submit(void *context, struct io_queue *queue, const struct io_request *request) {
    struct disk *disk = self(context);
    if (!request->write)
        return dead_now(disk) ? EIO : disk->under->submit(disk->under->context, queue, request);
    int error = begin_change(disk, 1);
    struct io_request moved = *request;
    if (error == 0 && ++disk->writes == disk->misdirect_at) {
        disk->failed = 1;
        moved.off = (uint64_t)((int64_t)moved.off + disk->misdirect_by);
    }
    if (error == 0)
        error = disk->under->submit(disk->under->context, queue, &moved);
    if (error == 0)
        log_write(disk, moved.file, moved.bytes, moved.count, moved.off);
    return end_change(disk, error);
}

static int disk_wait(void *context, struct io_queue *queue, uint64_t timeout_ns,
                     struct io_completion *done, uint32_t room, uint32_t *taken_out) {
    struct disk *disk = self(context);
    return disk->under->wait(disk->under->context, queue, timeout_ns, done, room, taken_out);
}

/* --- the index */

static int index_is_dead(void *context) {
    return disk_is_dead(context);
}

uint8_t *disk_read_file(const char *path, size_t *count_out) {
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    uint8_t *bytes = need(malloc((size_t)size + 1));
    *count_out = fread(bytes, 1, (size_t)size, file);
    fclose(file);
    return bytes;
}

static void load_index(struct disk *disk, uint32_t dir, const char *path) {
    size_t count = 0;
    uint8_t *bytes = disk_read_file(path, &count);
    if (bytes == NULL)
        return;
    struct disk_entry *entry = append(disk, DISK_INDEX, dir);
    take_bytes(entry, bytes, count);
    free(bytes);
}

static void index_committed(void *context, const char *dir_path, const char *name) {
    struct disk *disk = context;
    char path[600];
    if (strcmp(dir_path, disk->root) != 0)
        return;
    snprintf(path, sizeof path, "%s/%s/data.mdb", dir_path, name);
    pthread_mutex_lock(&disk->lock);
    uint32_t at = find(disk, DISK_NODE_ROOT, name);
    if (at != NODE_NONE)
        load_index(disk, disk->live[at].node, path);
    pthread_mutex_unlock(&disk->lock);
}

/* --- making */

/* What is there before counts as safe. */
static void load(struct disk *disk, uint32_t parent, const char *path) {
    DIR *dir = opendir(path);
    struct dirent *item;
    while (dir != NULL && (item = readdir(dir)) != NULL) {
        char below[800];
        struct stat info;
        if (item->d_name[0] == '.' || strcmp(item->d_name, "lock.mdb") == 0)
            continue;
        snprintf(below, sizeof below, "%s/%s", path, item->d_name);
        if (lstat(below, &info) != 0)
            continue;
        if (strcmp(item->d_name, "data.mdb") == 0) {
            load_index(disk, parent, below);
            continue;
        }
        uint32_t node = create(disk, parent, item->d_name, S_ISDIR(info.st_mode));
        if (S_ISDIR(info.st_mode)) {
            load(disk, node, below);
        } else {
            size_t count = 0;
            uint8_t *bytes = disk_read_file(below, &count);
            take_bytes(append(disk, DISK_WRITE, node), bytes, count);
            free(bytes);
        }
        (void)append(disk, DISK_SYNC, node);
    }
    if (dir != NULL)
        closedir(dir);
    (void)append(disk, DISK_SYNC, parent);
}

static struct io_door door_of(struct disk *disk) {
    return (struct io_door){.name = disk->under->name,
                            .context = disk,
                            .open = disk_open,
                            .close = disk_close,
                            .make_dir = disk_make_dir,
                            .rename = disk_rename,
                            .remove = disk_remove,
                            .info = disk_info,
                            .info_at = disk_info_at,
                            .list = disk_list,
                            .allocate = disk_allocate,
                            .truncate = disk_truncate,
                            .punch = disk_punch,
                            .free_space = disk_free_space,
                            .read = disk_read,
                            .write = disk_write,
                            .sync = disk_sync,
                            .lock = disk_lock,
                            .random = disk_random,
                            .queue_open = disk_queue_open,
                            .queue_close = disk_queue_close,
                            .queue_name = disk_queue_name,
                            .queue_fallback = disk_queue_fallback,
                            .submit = disk_submit,
                            .wait = disk_wait};
}

struct disk *disk_make(const struct io_door *under, const char *root) {
    struct disk *disk = need(calloc(1, sizeof *disk));
    struct stat info;
    disk->under = under;
    pthread_mutex_init(&disk->lock, NULL);
    snprintf(disk->root, sizeof disk->root, "%s", root);
    for (int i = 0; i < FILES_MAX; i++)
        disk->node_of[i] = NODE_NONE;
    disk->log.node_count = 1; /* the directory above */
    disk->door = door_of(disk);
    if (lstat(root, &info) == 0) {
        (void)create(disk, DISK_NODE_ABOVE, "root", 1);
        (void)append(disk, DISK_SYNC, DISK_NODE_ABOVE);
        load(disk, DISK_NODE_ROOT, root);
    }
    const struct faulty_index_watch watch = {index_is_dead, index_committed, disk};
    faulty_index_attach(&watch);
    return disk;
}

void disk_drop(struct disk *disk) {
    if (disk == NULL)
        return;
    faulty_index_attach(NULL);
    for (size_t i = 0; i < disk->log.count; i++)
        free(disk->log.entries[i].bytes);
    free(disk->log.entries);
    free(disk->live);
    pthread_mutex_destroy(&disk->lock);
    free(disk);
}

const struct io_door *disk_door(struct disk *disk) {
    return &disk->door;
}

uint64_t disk_entries(struct disk *disk) {
    pthread_mutex_lock(&disk->lock);
    uint64_t count = disk->log.count;
    pthread_mutex_unlock(&disk->lock);
    return count;
}

void disk_die_at(struct disk *disk, uint64_t entries) {
    pthread_mutex_lock(&disk->lock);
    disk->die_at = entries;
    pthread_mutex_unlock(&disk->lock);
}

int disk_is_dead(struct disk *disk) {
    return dead_now(disk);
}

void disk_fail_at(struct disk *disk, uint64_t at, int error) {
    pthread_mutex_lock(&disk->lock);
    disk->changes = 0;
    disk->fail_at = at;
    disk->fail_error = error;
    disk->failed = 0;
    pthread_mutex_unlock(&disk->lock);
}

void disk_fill_at(struct disk *disk, uint64_t at) {
    pthread_mutex_lock(&disk->lock);
    disk->fill_at = at;
    disk->filling = 0;
    disk->failed = 0;
    pthread_mutex_unlock(&disk->lock);
}

void disk_misdirect_at(struct disk *disk, uint64_t at, int64_t by) {
    pthread_mutex_lock(&disk->lock);
    disk->misdirect_at = at;
    disk->misdirect_by = by;
    disk->writes = 0;
    disk->failed = 0;
    pthread_mutex_unlock(&disk->lock);
}

uint64_t disk_changes(struct disk *disk) {
    pthread_mutex_lock(&disk->lock);
    uint64_t count = disk->changes;
    pthread_mutex_unlock(&disk->lock);
    return count;
}

int disk_has_failed(struct disk *disk) {
    pthread_mutex_lock(&disk->lock);
    int failed = disk->failed;
    pthread_mutex_unlock(&disk->lock);
    return failed;
}
