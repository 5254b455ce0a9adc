/* restore/rest_layers.h - a wake from the RAM tier, whose planes are followed by its proof.
 *
 * Responsible for: a session that lies in the RAM tier as a whole: first what every layer needs,
 * then, while it is published, the planes in groups of layers, and the proof is asked for those
 * that have arrived; digests and numbers of all of it.
 * Not responsible for: anything that is read from a disk (rest_load.h), or that a question waits
 * for its layers (transfer.h).
 *
 * The session is WAKING and held still until rest_layers_end, and what was proven meanwhile counts
 * only when that says KV_OK.
 *
 * Threads: the scheduler thread, and others may step in each of the calls; two more live from
 * begin to end.
 * A second wake out of memory waits in begin until the first has its bytes, and is not cancelled
 * meanwhile.
 * Units: bytes, layers, nanoseconds.
 */
#ifndef RESTORE_REST_LAYERS_H
#define RESTORE_REST_LAYERS_H

#include "restore/rest_load.h"

/* Starts to bring what is listed, lists the rest, and waits for window and sinks: digests of what
 * goes with publishing are right. *layers_out NULL with KV_OK: some of it is not in memory, or has
 * no layers that could come by themselves; nothing is under way. The list is taken with
 * *layers_out, else it stays the caller's, with the rest in it or not; and the end is due before
 * the load is abandoned. CORRUPT, DEVICE, NOMEM. */
struct rest_layers;
enum kv_err rest_layers_begin(const struct rest_load_args *args, struct rest_fetch *fetch,
                              struct rest_layers **layers_out, struct kv_diag *diag);
/* The load of the same arguments is published as `session`. Returns as soon as the first layers
 * have arrived, or when none will: that a device has failed is said by questions and by the end.
 * CANCELLED: the rest will not come, and the end is due. */
enum kv_err rest_layers_follow(struct rest_layers *layers, struct session *session,
                               struct kv_diag *diag);
/* Waits for the last byte, adds to the receipt and releases; one that nobody has followed stops.
 * NULL is allowed. KV_OK: everything is as it was saved, or nobody has followed. CANCELLED,
 * CORRUPT, DEVICE; IO (not everything was digested). */
enum kv_err rest_layers_end(struct rest_layers *layers, struct kv_diag *diag);

#endif
