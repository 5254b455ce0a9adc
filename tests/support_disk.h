/* tests/support_disk.h - a disk that remembers every change and can lose its power at any of them.
 *
 * Responsible for: standing in front of a real door, writing a log of all changes and syncs (of the
 * index too, when attached), and building the directory that a power cut behind any entry of the
 * log leaves, with unsynced changes lost, kept, or torn and reordered at a chosen grain; failing
 * one operation; going dead at one.
 * Not responsible for: LMDB's own pages: its file changes whole, at its commit.
 *
 * What is strict: a file's bytes and size are safe only after a sync of the file, its name only
 * after a sync of its directory.
 *
 * Threads: calls pass from any thread under one lock; build when nothing else runs.
 * Units: bytes, entries of the log.
 */
#ifndef TESTS_SUPPORT_DISK_H
#define TESTS_SUPPORT_DISK_H

#include "store/io.h"

struct disk; /* opaque */

/* `root` is the store's directory, there or not; what is in it counts as safe. Watches the index
 * (support_faulty_index.h) until disk_drop. Ends the program when there is no memory. */
struct disk *disk_make(const struct io_door *under, const char *root);
void disk_drop(struct disk *disk);
const struct io_door *disk_door(struct disk *disk);

uint64_t disk_entries(struct disk *disk);
/* Behind `entries` entries of the log nothing reaches the disk any more: every call fails. */
void disk_die_at(struct disk *disk, uint64_t entries);
int disk_is_dead(struct disk *disk);
/* The change or sync number `at` from now, from 1, gets `error` instead; 0 is none. */
void disk_fail_at(struct disk *disk, uint64_t at, int error);
/* From write, allocation or new name number `at` on there is no room for any; 0: there is. */
void disk_fill_at(struct disk *disk, uint64_t at);
/* Write number `at` from now, from 1, lands `by` bytes from where it belongs and says that all is
 * well; 0: none. */
void disk_misdirect_at(struct disk *disk, uint64_t at, int64_t by);
/* How many changes and syncs there were since disk_fail_at. */
uint64_t disk_changes(struct disk *disk);
int disk_has_failed(struct disk *disk);

enum disk_unsynced { DISK_LOST, DISK_KEPT, DISK_RANDOM };
struct disk_policy {
    enum disk_unsynced unsynced;
    uint64_t seed;        /* of DISK_RANDOM */
    uint32_t grain_bytes; /* of the same: 512 or 4096; each piece of a write is there or not */
};
/* Makes `to` (which must not be there, but its parent) as the disk is when the power fails behind
 * `entries` entries. */
void disk_build(struct disk *disk, uint64_t entries, const struct disk_policy *policy,
                const char *to);

#endif
