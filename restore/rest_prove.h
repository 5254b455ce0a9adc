/* restore/rest_prove.h - a loaded session shows that it is the one that was saved.
 *
 * Responsible for: the fingerprint at the snapshot's tier map, the probes and the kept needles.
 * Not responsible for: digests of bytes (rest_load.h), or dropping a session that fails.
 *
 * Threads: the scheduler thread.
 * Units: logits, nats.
 */
#ifndef RESTORE_REST_PROVE_H
#define RESTORE_REST_PROVE_H

#include "engine/receipt.h"
#include "engine/session.h"

/* Between two programs of different numerics id. Measured: plain C against AVX2 move the best
 * logits by 3.6e-6 (tiny model) and by 4.8e-5 (832 tokens), 4.4e-4 and 5.1e-3 (170 tokens, begun by
 * one and continued by the other) on the default model; one plane of one block exchanged for
 * another session's moves them by 0.25 to 0.34 (tiny model, tests/test_blind.c). */
#define REST_PROVE_DIFF_MAX 0.1f
enum { REST_PROVE_OVERLAP_MIN = 8 }; /* of IMAGE_TOP ids */

struct rest_prove_args {
    struct session *session;
    const struct image *image;
    const struct image_model *here;
    int skip_needles;
    /* Blocks are read at another tier than when it was saved: the floor's fingerprint is compared,
     * and needles are told but refuse nothing. */
    int at_floor;
    uint32_t probes_max;
    const struct kv_clock *clock;
    struct receipt *receipt;
};
/* PROOF naming what differs; DEVICE, NOMEM. Fills fingerprint and needle fields of the receipt. */
enum kv_err rest_prove(const struct rest_prove_args *args, struct kv_diag *diag);

#endif
