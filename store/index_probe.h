/* store/index_probe.h - a child that walks the index before this process trusts it.
 *
 * Responsible for: running a piece of work in a forked child and telling a child that ends from one
 * that dies or hangs; the walk of every entry through LMDB.
 * Not responsible for: pages that LMDB cannot have written (index_pages.h), which plain reads find
 * without a child; mending (rebuild.c).
 *
 * LMDB believes what it maps: damage that no check has thought of ends the process. A child takes
 * that blow. It takes memory from the system's allocator, whose locks survive a fork, and no other
 * lock of the process. Where other threads run, a child that hangs is all the same no sign of
 * damage: it could have inherited a lock, and the walk of the pages has to do.
 *
 * Threads: any one at a time.
 * Units: nanoseconds.
 */
#ifndef STORE_INDEX_PROBE_H
#define STORE_INDEX_PROBE_H

#include "store/index.h"

/* Opens and walks the index in a child. KV_OK also when no child could be had. KV_ERR_CORRUPT: it
 * died, hung or found damage. */
enum kv_err index_probe(const struct index_options *options, uint64_t deadline_ns,
                        struct kv_diag *diag);

/* The child's work; what it returns and says is the result. */
typedef enum kv_err (*index_probe_work)(void *context, struct kv_diag *diag);
/* *ran_out 0: the process cannot fork, and nothing was tried. */
enum kv_err index_probe_run(index_probe_work work, void *context, uint64_t deadline_ns,
                            int *ran_out, struct kv_diag *diag);

#endif
