/* tools/licences.h - real text that every Debian has.
 *
 * Responsible for: the licence texts of /usr/share/common-licenses as one text, in a fixed order.
 * Not responsible for: what is measured with it.
 *
 * Threads: any.
 * Units: bytes.
 */
#ifndef TOOLS_LICENCES_H
#define TOOLS_LICENCES_H

#include "store/base/alloc.h"
#include "store/base/diag.h"

#include <stddef.h>

/* NOT_FOUND when there are none, IO, NOMEM. The caller releases the text. */
enum kv_err licences_read(const struct kv_alloc *alloc, char **text_out, size_t *bytes_out,
                          struct kv_diag *diag);

#endif
