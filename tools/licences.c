/* tools/licences.c - real text that every Debian has.
 *
 * Responsible for: see licences.h.
 * Not responsible for: what is measured with it.
 */
#include "tools/licences.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define FOLDER "/usr/share/common-licenses/"

enum { FILE_BYTES_MAX = 1 << 20 };

static enum kv_err append_file(const char *name, const struct kv_alloc *alloc, void **text,
                               size_t *capacity, size_t *bytes) {
    char path[128];
    snprintf(path, sizeof path, FOLDER "%s", name);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return errno == ENOENT ? KV_OK : KV_ERR_IO;
    enum kv_err err = KV_ERR_NOMEM;
    if (kv_alloc_grow(alloc, text, capacity, *bytes + FILE_BYTES_MAX + 1, 1)) {
        *bytes += fread((char *)*text + *bytes, 1, FILE_BYTES_MAX, file);
        err = ferror(file) ? KV_ERR_IO : KV_OK;
    }
    fclose(file);
    return err;
}

enum kv_err licences_read(const struct kv_alloc *alloc, char **text_out, size_t *bytes_out,
                          struct kv_diag *diag) {
    static const char *const names[] = {"Apache-2.0", "GPL-3",    "MPL-2.0", "GFDL-1.3",
                                        "LGPL-2.1",   "GPL-2",    "MPL-1.1", "LGPL-2",
                                        "GPL-1",      "GFDL-1.2", "LGPL-3",  "Artistic"};
    void *text = NULL;
    size_t capacity = 0, bytes = 0;
    enum kv_err err = KV_OK;
    for (size_t i = 0; err == KV_OK && i < sizeof names / sizeof names[0]; i++)
        err = append_file(names[i], alloc, &text, &capacity, &bytes);
    if (err == KV_OK && bytes == 0)
        err = KV_ERR_NOT_FOUND;
    if (err != KV_OK) {
        kv_alloc_release(alloc, text);
        return kv_diag_set(diag, err,
                           "the licence texts in " FOLDER " cannot be read; they belong to the "
                           "Debian package base-files");
    }
    ((char *)text)[bytes] = 0;
    *text_out = text;
    *bytes_out = bytes;
    return KV_OK;
}
