/* tools/licences.c - the licence texts as paragraphs and documents.
 *
 * Responsible for: reading and filtering the files, and joining paragraphs.
 * Not responsible for: what is asked about them.
 */
#include "tools/licences.h"

#include "store/base/bytes.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>

#define LICENCES_FOLDER "/usr/share/common-licenses/"
enum { FILE_BYTES_MAX = 1 << 20, PARAGRAPH_BYTES_MIN = 40 };

/* GFDL-1.2, GPL-1, LGPL-2 are near twins of what is here. */
static const char *const file_names[] = {"Apache-2.0", "Artistic", "BSD",    "CC0-1.0",
                                         "GFDL-1.3",   "GPL-2",    "GPL-3",  "LGPL-2.1",
                                         "LGPL-3",     "MPL-1.1",  "MPL-2.0"};
enum { FILE_COUNT = sizeof file_names / sizeof file_names[0] };

struct paragraph {
    const char *bytes;
    size_t size;
};

struct licences {
    const struct kv_alloc *alloc;
    char *texts[FILE_COUNT];
    struct paragraph *paragraphs;
    size_t paragraph_capacity;
    size_t paragraph_count;
    uint64_t bytes;
};

static enum kv_err read_text(struct licences *licences, size_t index, struct kv_diag *diag) {
    char path[128];
    snprintf(path, sizeof path, "%s%s", LICENCES_FOLDER, file_names[index]);
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return kv_diag_errno(diag, KV_ERR_NOT_FOUND, errno,
                             "%s (the Debian package base-files brings it)", path);
    enum kv_err err = KV_OK;
    char *text = kv_alloc_zeroed(licences->alloc, 1, FILE_BYTES_MAX + 1);
    if (text == NULL)
        err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %s", path);
    else if (fread(text, 1, FILE_BYTES_MAX, file) == 0)
        err = kv_diag_set(diag, KV_ERR_NOT_FOUND, "%s is empty", path);
    fclose(file);
    licences->texts[index] = text;
    return err;
}

static int has_digit(const char *line, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (isdigit((unsigned char)line[i]))
            return 1;
    }
    return 0;
}

/* Squeezes one text in place: lines with digits go, runs of blank lines part paragraphs. */
static enum kv_err split_text(struct licences *licences, char *text) {
    char *write = text;
    char *start = text;
    for (char *line = text; *line != 0;) {
        char *end = strchrnul(line, '\n');
        size_t size = (size_t)(end - line);
        size_t blank = strspn(line, " \t\r\f");
        int empty = blank >= size;
        char *next = *end == 0 ? end : end + 1;
        if (!empty && !has_digit(line, size)) {
            memmove(write, line + blank, size - blank);
            write += size - blank;
            *write++ = '\n';
        }
        if ((empty || *next == 0) && (size_t)(write - start) >= PARAGRAPH_BYTES_MIN) {
            if (!kv_alloc_grow(licences->alloc, (void **)&licences->paragraphs,
                               &licences->paragraph_capacity, licences->paragraph_count + 1,
                               sizeof *licences->paragraphs))
                return KV_ERR_NOMEM;
            size_t bytes = (size_t)(write - start);
            licences->paragraphs[licences->paragraph_count++] = (struct paragraph){start, bytes};
            licences->bytes += bytes;
            start = write;
        } else if (empty) {
            write = start;
        }
        line = next;
    }
    return KV_OK;
}

enum kv_err licences_load(const struct kv_alloc *alloc, struct licences **licences_out,
                          struct kv_diag *diag) {
    struct licences *licences = kv_alloc_zeroed(alloc, 1, sizeof *licences);
    if (licences == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the licence texts");
    licences->alloc = alloc;
    enum kv_err err = KV_OK;
    for (size_t i = 0; i < FILE_COUNT && err == KV_OK; i++) {
        err = read_text(licences, i, diag);
        if (err == KV_OK)
            err = split_text(licences, licences->texts[i]);
    }
    if (err != KV_OK) {
        licences_drop(licences);
        return err;
    }
    *licences_out = licences;
    return KV_OK;
}

void licences_drop(struct licences *licences) {
    if (licences == NULL)
        return;
    for (size_t i = 0; i < FILE_COUNT; i++)
        kv_alloc_release(licences->alloc, licences->texts[i]);
    kv_alloc_release(licences->alloc, licences->paragraphs);
    kv_alloc_release(licences->alloc, licences);
}

/* The place of a document's first paragraph, and how many places each step goes on. A slice begins
 * with the first paragraph at or after its byte offset and goes on by one; a document with an order
 * of its own takes a stride that is coprime to the count. */
struct order {
    size_t first, stride;
};

static size_t gcd(size_t a, size_t b) {
    return b == 0 ? a : gcd(b, a % b);
}

static struct order order_of(const struct licences *licences,
                             const struct licences_document *document) {
    struct order order = {0, 1};
    uint64_t slice = licences->bytes / document->count;
    if (document->bytes <= slice) {
        uint64_t passed = 0;
        while (passed < slice * document->index)
            passed += licences->paragraphs[order.first++].size;
        return order;
    }
    order.first = document->index * 17u % licences->paragraph_count;
    order.stride = 2u * document->index + 1;
    while (gcd(order.stride, licences->paragraph_count) != 1)
        order.stride++;
    return order;
}

/* The most bytes up to `limit` that end before a space or line end. */
static size_t whole_words(const char *text, size_t limit) {
    while (limit > 0 && text[limit] != ' ' && text[limit] != '\n')
        limit--;
    return limit;
}

enum kv_err licences_document(const struct licences *licences,
                              const struct licences_document *document, char **text_out,
                              struct kv_diag *diag) {
    size_t insert_bytes = document->insert == NULL ? 0 : strlen(document->insert) + 2;
    size_t capacity = document->bytes + insert_bytes + 2;
    char *text = kv_alloc_zeroed(licences->alloc, 1, capacity);
    if (text == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a document of %zu bytes", capacity);
    struct order order = order_of(licences, document);
    size_t used = 0, filler = 0;
    int inserted = document->insert == NULL;
    for (size_t step = 0; filler < document->bytes; step++) {
        size_t at = (order.first + step * order.stride) % licences->paragraph_count;
        if (!inserted && (double)filler >= document->depth * (double)document->bytes) {
            used += (size_t)snprintf(text + used, capacity - used, "%s\n\n", document->insert);
            inserted = 1;
        }
        size_t size = licences->paragraphs[at].size;
        int last = size + 1 > document->bytes - filler;
        if (last)
            size = whole_words(licences->paragraphs[at].bytes, document->bytes - filler - 1);
        memcpy(text + used, licences->paragraphs[at].bytes, size);
        used += size;
        text[used++] = '\n';
        filler += size + 1;
        if (last)
            break;
    }
    if (!inserted)
        used += (size_t)snprintf(text + used, capacity - used, "%s\n", document->insert);
    text[used] = 0;
    *text_out = text;
    return KV_OK;
}

enum kv_err licences_text(const struct kv_alloc *alloc, uint64_t bytes, char **text_out,
                          struct kv_diag *diag) {
    struct licences *licences = NULL;
    const struct licences_document document = {.index = 0, .count = 1, .bytes = bytes};
    enum kv_err err = licences_load(alloc, &licences, diag);
    if (err != KV_OK)
        return err;
    err = licences_document(licences, &document, text_out, diag);
    licences_drop(licences);
    return err;
}
