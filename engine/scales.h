/* engine/scales.h - stored numbers, checked as numbers.
 *
 * Responsible for: refusing scales and BF16 values that no encoder can have written, even when
 * their digest is right: a writer with a bug is a user too, and one NaN spreads over every later
 * token.
 * Not responsible for: digests (restore/, snapshot/), planes (every bit pattern is a number).
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef ENGINE_SCALES_H
#define ENGINE_SCALES_H

#include "engine/transfer.h"
#include "store/base/diag.h"

/* META: every scale is a positive, finite, normal fp16 number. FP8: no value is NaN. K8I4: every
 * scale and minimum is finite. KV_OK, or CORRUPT naming `what` and the first one that is not. Other
 * streams pass. */
enum kv_err scales_check(const char *what, const struct transfer_part *part, struct kv_diag *diag);
/* Every BF16 value is finite; else CORRUPT as above. */
enum kv_err scales_check_bf16(const char *what, const void *bytes, size_t size,
                              struct kv_diag *diag);

#endif
