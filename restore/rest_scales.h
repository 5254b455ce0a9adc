/* restore/rest_scales.h - the scales of a block, checked as numbers.
 *
 * Responsible for: refusing a META stream whose bytes no encoder can have written, even when its
 * digest is right: a writer with a bug is a user too, and one NaN spreads over every later token.
 * Not responsible for: digests (rest_load.h), planes (every bit pattern of a plane is a number).
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef RESTORE_REST_SCALES_H
#define RESTORE_REST_SCALES_H

#include "engine/transfer.h"
#include "store/base/diag.h"

/* Every scale is a positive, finite, normal fp16 number. KV_OK, or CORRUPT naming `what` and the
 * first one that is not. Streams other than META pass. */
enum kv_err rest_scales_check(const char *what, const struct transfer_part *part,
                              struct kv_diag *diag);

#endif
