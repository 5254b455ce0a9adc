/* engine/device/workers.h - a fixed set of threads that share out the items of one operation.
 *
 * Responsible for: starting the threads once, giving each a part of the items as it asks for more,
 * returning when every item is done.
 * Not responsible for: what an item does; items must not depend on each other.
 *
 * Items are grouped into at most WORKERS_PARTS_MAX parts; a thread takes the next part when it has
 * finished one, so a slow core does less. Nothing is allocated per run.
 *
 * Threads: one owner calls workers_run; the owner works too and counts as a thread.
 * Units: items.
 */
#ifndef ENGINE_DEVICE_WORKERS_H
#define ENGINE_DEVICE_WORKERS_H

#include <stdint.h>

#include "store/base/alloc.h"
#include "store/base/diag.h"

enum { WORKERS_THREADS_MAX = 256, WORKERS_PARTS_MAX = 4096 };

struct workers;

/* Does items [first, end) on thread `thread`, 0 … threads - 1. */
typedef void (*workers_call)(void *context, uint32_t first, uint32_t end, uint32_t thread);

/* `threads` counts the caller. KV_ERR_INVALID, KV_ERR_NOMEM (memory or no thread to be had). */
enum kv_err workers_make(const struct kv_alloc *alloc, uint32_t threads,
                         struct workers **workers_out, struct kv_diag *diag);
void workers_drop(struct workers *workers); /* NULL is allowed */

/* Parts have `grain` items or more. Returns when all are done, with their writes visible. */
void workers_run(struct workers *workers, uint32_t items, uint32_t grain, workers_call call,
                 void *context);

#endif
