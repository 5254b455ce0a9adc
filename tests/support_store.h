/* tests/support_store.h - a store filled with records that can be told right from wrong.
 *
 * Responsible for: records made from (index, version) alone, written, expected, dumped and
 * compared.
 * Not responsible for: faults (support_faulty_io.h).
 *
 * A record has key "r<index>", value "v<index>.<version>" and three extents: raw noise over two
 * pieces, zstd text, shuffled BF16-like bytes.
 *
 * Threads: one test thread, but for support_store_matches, which only reads.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_STORE_H
#define TESTS_SUPPORT_STORE_H

#include "store/store_batch.h"
#include "store/store_read.h"

enum { SUPPORT_STORE_EXTENTS = 3 };

/* Usual options for `dir` with small segments (1 MiB), so that tests cross their ends. */
struct store_options support_store_options(const char *dir);

/* Opens or fails the test. */
struct store *support_store_open(const struct store_options *options);

/* Adds the record to a batch. */
enum kv_err support_store_put(struct store_batch *batch, unsigned index, unsigned version,
                              struct kv_diag *diag);
/* One batch with records [first, end) of a version. */
enum kv_err support_store_commit(struct store *store, unsigned first, unsigned end,
                                 unsigned version, struct kv_diag *diag);

/* 1 when the record is there with this version, value and all extent bytes, read into pieces that
 * are pages (`aligned`) or odd ones; 0 when anything differs. */
int support_store_matches(struct store *store, unsigned index, unsigned version, int aligned);
int support_store_absent(struct store *store, unsigned index);

/* Everything that the index says, as text that two stores can be compared by. free() it. */
char *support_store_dump(struct store *store);

void support_store_remove_index(const char *dir);
void support_store_copy(const char *from_dir, const char *to_dir);
/* Size of a segment; 0 when there is none. */
uint64_t support_store_segment_bytes(const char *dir, unsigned number);
/* What all segments take on the disk. */
uint64_t support_store_segments_disk_bytes(const char *dir);
/* Flips bits of one byte in a file below the store. */
void support_store_flip(const char *dir, const char *name, uint64_t off, unsigned char bits);
void support_store_truncate(const char *dir, const char *name, uint64_t bytes);
/* Takes what the file system has left to the last byte, and gives it back. */
void support_store_fill_disk(const char *mount_dir);
void support_store_unfill_disk(const char *mount_dir);
/* All bytes under the directory, as allocated on disk. */
uint64_t support_store_disk_bytes(const char *dir);

#endif
