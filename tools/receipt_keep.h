/* tools/receipt_keep.h - receipts in a folder, the newest 512 of them.
 *
 * Responsible for: files of one receipt each (0600, in a folder 0700), named by the time at which
 * they were written; finding, listing, renaming and forgetting them.
 * Not responsible for: what stands in a receipt (receipt_print.h) or when there is one (service.h).
 *
 * Keeping is a courtesy: what cannot be kept does not make a save or a wake fail.
 *
 * Threads: one; two programs may write into one folder.
 * Units: the id is nanoseconds of wall time when the receipt was written, made unique.
 */
#ifndef TOOLS_RECEIPT_KEEP_H
#define TOOLS_RECEIPT_KEEP_H

#include "engine/receipt.h"
#include "store/base/clock.h"

struct cJSON;

enum { RECEIPT_KEEP_MAX = 512, RECEIPT_KEEP_BYTES_MAX = 1 << 16 };

struct receipt_keep {
    const char *dir; /* borrowed */
    const struct kv_clock *clock;
    const struct kv_alloc *alloc;
};
/* Writes one, and removes the oldest beyond the maximum. Returns its id, 0 when it was not kept. */
uint64_t receipt_keep_add(const struct receipt_keep *keep, const struct receipt *receipt);
/* Ids, newest first, into ids_out[RECEIPT_KEEP_MAX]; IO. A folder that is not there is empty. */
enum kv_err receipt_keep_list(const struct receipt_keep *keep, uint64_t *ids_out,
                              uint32_t *count_out, struct kv_diag *diag);
/* The document, owned by the caller. NOT_FOUND, CORRUPT, IO, NOMEM. */
enum kv_err receipt_keep_read(const struct receipt_keep *keep, uint64_t id,
                              struct cJSON **document_out, struct kv_diag *diag);
/* Those of session `from` say `to`, and as former_name what they said first. */
void receipt_keep_rename(const struct receipt_keep *keep, const char *from, const char *to);
/* Those that name the session go; for `rm --purge`. */
void receipt_keep_forget(const struct receipt_keep *keep, const char *name);

#endif
