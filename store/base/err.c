/* store/base/err.c - names of the error codes.
 *
 * Responsible for: one constant word per code, used in messages and JSON.
 * Not responsible for: what to tell the user (diag.h).
 */
#include "store/base/err.h"

static const char *const err_names[KV_ERR_COUNT] = {
    [KV_OK] = "ok",
    [KV_ERR_INVALID] = "invalid",
    [KV_ERR_NOT_FOUND] = "not-found",
    [KV_ERR_EXISTS] = "exists",
    [KV_ERR_BUSY] = "busy",
    [KV_ERR_LIMIT] = "limit",
    [KV_ERR_NO_SLOTS] = "no-slots",
    [KV_ERR_MISMATCH] = "mismatch",
    [KV_ERR_VERSION] = "version",
    [KV_ERR_CORRUPT] = "corrupt",
    [KV_ERR_IO] = "io",
    [KV_ERR_NO_SPACE] = "no-space",
    [KV_ERR_NOMEM] = "no-memory",
    [KV_ERR_DEVICE] = "device",
    [KV_ERR_PROOF] = "proof-failed",
    [KV_ERR_CANCELLED] = "cancelled",
};

const char *kv_err_name(enum kv_err err) {
    unsigned index = (unsigned)err;
    return index < KV_ERR_COUNT ? err_names[index] : "unknown";
}
