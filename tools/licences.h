/* tools/licences.h - real text that every Debian has, cut into documents.
 *
 * Responsible for: the paragraphs of the licence texts in /usr/share/common-licenses, lines with
 * digits and near twins of a text left out, and a document of a wanted length for each session.
 * Not responsible for: tokens or needles beyond the place where one paragraph is put.
 *
 * Threads: read-only after licences_load.
 * Units: bytes.
 */
#ifndef TOOLS_LICENCES_H
#define TOOLS_LICENCES_H

#include "store/base/alloc.h"
#include "store/base/diag.h"

#include <stdint.h>

struct licences;

/* NOT_FOUND when the folder or a text is missing, NOMEM. */
enum kv_err licences_load(const struct kv_alloc *alloc, struct licences **licences_out,
                          struct kv_diag *diag);
void licences_drop(struct licences *licences);

/* Document `index` of `count`: consecutive paragraphs from its own slice while the slices are long
 * enough for `bytes`, else all paragraphs in an order of its own, repeated to length. `insert`
 * becomes a paragraph at the share `depth` (0 … 1) of the document. The caller frees *text_out. */
struct licences_document {
    uint32_t index, count;
    uint64_t bytes;
    const char *insert;
    double depth;
};
enum kv_err licences_document(const struct licences *licences,
                              const struct licences_document *document, char **text_out,
                              struct kv_diag *diag);

/* The first `bytes` of all paragraphs, repeated if need be: load, one document, drop. */
enum kv_err licences_text(const struct kv_alloc *alloc, uint64_t bytes, char **text_out,
                          struct kv_diag *diag);

#endif
