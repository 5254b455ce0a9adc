/* tests/support_disk_build.h - what the recording half and the replaying half of the disk share.
 *
 * Responsible for: the entries of the log.
 * Not responsible for: anything that a test calls (support_disk.h).
 *
 * Threads: the disk's lock.
 * Units: bytes. A node is a file or directory, numbered as they appear.
 */
#ifndef TESTS_SUPPORT_DISK_BUILD_H
#define TESTS_SUPPORT_DISK_BUILD_H

#include <stddef.h>
#include <stdint.h>

enum { DISK_NAME_BYTES = 40, DISK_NODE_ABOVE = 0, DISK_NODE_ROOT = 1 };

enum disk_kind {
    DISK_WRITE,
    DISK_TRUNCATE, /* off: the new size */
    DISK_ALLOCATE, /* grows to off */
    DISK_PUNCH,    /* count bytes at off become zeros */
    DISK_SYNC,
    DISK_CREATE, /* node under dir */
    DISK_RENAME, /* node = dir */
    DISK_REMOVE, /* node = dir */
    DISK_INDEX   /* node is the directory of an index; bytes are its whole file, durable */
};

struct disk_entry {
    enum disk_kind kind;
    uint32_t node, dir;
    int is_dir;
    char name[DISK_NAME_BYTES], to[DISK_NAME_BYTES];
    uint64_t off;
    uint8_t *bytes;
    size_t count;
};

struct disk_log {
    struct disk_entry *entries;
    size_t count, capacity;
    uint32_t node_count;
};

struct disk;
const struct disk_log *disk_log_of(const struct disk *disk);
void *disk_need(void *memory);
/* The whole file, to be freed; NULL when it cannot be read. */
uint8_t *disk_read_file(const char *path, size_t *count_out);

#endif
