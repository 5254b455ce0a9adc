/* restore/rest_prove.h - a loaded session shows that it is the one that was saved.
 *
 * Responsible for: the fingerprint at the snapshot's tier map and the kept needles.
 * Not responsible for: digests of bytes (rest_load.h), or dropping a session that fails.
 *
 * Threads: the scheduler thread.
 * Units: logits, nats.
 */
#ifndef RESTORE_REST_PROVE_H
#define RESTORE_REST_PROVE_H

#include "engine/receipt.h"
#include "engine/session.h"

/* Between two programs of different numerics id. Plain C against AVX2 on the same model and text
 * differ by less than 1e-3 in logits; a wrong plane moves them by more than 1. */
#define REST_PROVE_DIFF_MAX 0.25f
enum { REST_PROVE_OVERLAP_MIN = 8 }; /* of IMAGE_TOP ids */

struct rest_prove_args {
    struct session *session;
    const struct image *image;
    const struct image_model *here;
    int skip_needles;
    struct receipt *receipt;
};
/* PROOF naming what differs; DEVICE, NOMEM. Fills fingerprint and needle fields of the receipt. */
enum kv_err rest_prove(const struct rest_prove_args *args, struct kv_diag *diag);

#endif
