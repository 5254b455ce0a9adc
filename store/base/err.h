/* store/base/err.h - the error codes that every folder returns.
 *
 * Responsible for: the list, its names, and KV_TRY, the only macro that changes control flow.
 * Not responsible for: the sentence a user reads (diag.h carries it) or exit codes (tools/).
 *
 * Three kinds that never mix: our own bug is an assert, never a code; bytes that came from disk,
 * a socket or a user give CORRUPT, VERSION, MISMATCH, LIMIT or INVALID; a world that failed gives
 * IO, NO_SPACE, NOMEM or DEVICE.
 *
 * Threads: pure.
 * Units: none.
 */
#ifndef STORE_BASE_ERR_H
#define STORE_BASE_ERR_H

enum kv_err {
    KV_OK = 0,
    KV_ERR_INVALID,   /* an argument or text from the user that cannot mean anything */
    KV_ERR_NOT_FOUND, /* the named thing does not exist */
    KV_ERR_EXISTS,    /* the name is taken */
    KV_ERR_BUSY,      /* somebody else holds it, or its state does not allow this now */
    KV_ERR_LIMIT,     /* beyond a named maximum (DESIGN section 14) or the context length */
    KV_ERR_NO_SLOTS,  /* the device holds as much as it can; need and have are in the diag */
    KV_ERR_MISMATCH,  /* valid, but of another model, geometry, code or layout */
    KV_ERR_VERSION,   /* written by a newer version; the diag names which one is needed */
    KV_ERR_CORRUPT,   /* bytes that are not what was written: digest, length or structure */
    KV_ERR_IO,        /* the system refused a read, write or sync; errno text in the diag */
    KV_ERR_NO_SPACE,  /* disk, inodes or the store's byte budget are used up */
    KV_ERR_NOMEM,     /* host memory */
    KV_ERR_DEVICE,    /* the accelerator or a numeric step failed (non-finite values) */
    KV_ERR_PROOF,     /* restored, but a fingerprint or needle says it is not the same */
    KV_ERR_CANCELLED, /* stopped at the caller's wish; nothing changed */
    KV_ERR_COUNT
};

/* A constant lower-case name such as "not-found"; never NULL, also for values out of range. */
const char *kv_err_name(enum kv_err err);

/* For functions with a local `enum kv_err err` and the single label `done`. */
#define KV_TRY(call)                                                                               \
    do {                                                                                           \
        err = (call);                                                                              \
        if (err != KV_OK)                                                                          \
            goto done;                                                                             \
    } while (0)

#endif
