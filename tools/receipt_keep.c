/* tools/receipt_keep.c - receipts in a folder, the newest 512 of them.
 *
 * Responsible for: what receipt_keep.h promises.
 * Not responsible for: printing.
 */
#include "tools/receipt_keep.h"

#include "tools/json_text.h"
#include "tools/receipt_print.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_BYTES = 32, TRIES = 64, SLACK = 64 };

static void file_name(char out[NAME_BYTES], uint64_t id) {
    snprintf(out, NAME_BYTES, "%016" PRIx64 ".json", id);
}

static int open_dir(const struct receipt_keep *keep) {
    return open(keep->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

/* 0 for a file that is none of ours. */
static uint64_t id_of(const char *name) {
    char *end = NULL;
    if (strlen(name) != 21)
        return 0;
    uint64_t id = strtoull(name, &end, 16);
    return end == name + 16 && strcmp(end, ".json") == 0 ? id : 0;
}

static int newest_first(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x > y ? -1 : x < y;
}

/* All ids, sorted; up to `room`. -1 on an error with errno set. */
static int list_all(int folder, uint64_t *ids, uint32_t room) {
    uint32_t count = 0;
    int copy = dup(folder);
    DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    if (dir == NULL) {
        if (copy >= 0)
            close(copy);
        return -1;
    }
    rewinddir(dir);
    struct dirent *entry;
    while (count < room && (entry = readdir(dir)) != NULL)
        if (id_of(entry->d_name) != 0)
            ids[count++] = id_of(entry->d_name);
    closedir(dir);
    if (count != 0)
        qsort(ids, count, sizeof *ids, newest_first);
    return (int)count;
}

static void forget_oldest(const struct receipt_keep *keep, int folder) {
    uint64_t *ids = kv_alloc_zeroed(keep->alloc, RECEIPT_KEEP_MAX + SLACK, sizeof *ids);
    int count = ids == NULL ? 0 : list_all(folder, ids, RECEIPT_KEEP_MAX + SLACK);
    for (int i = RECEIPT_KEEP_MAX; i < count; i++) {
        char name[NAME_BYTES];
        file_name(name, ids[i]);
        (void)unlinkat(folder, name, 0);
    }
    kv_alloc_release(keep->alloc, ids);
}

static int write_all(int file, const char *text) {
    size_t left = strlen(text);
    while (left > 0) {
        ssize_t wrote = write(file, text, left);
        if (wrote <= 0)
            return 0;
        text += wrote;
        left -= (size_t)wrote;
    }
    return 1;
}

static uint64_t write_new(const struct receipt_keep *keep, int folder, const char *text) {
    uint64_t id = kv_clock_wall_ns(keep->clock);
    char name[NAME_BYTES];
    int file = -1;
    for (int i = 0; i < TRIES && file < 0; i++) {
        file_name(name, ++id);
        file = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (file < 0 && errno != EEXIST)
            return 0;
    }
    if (file < 0)
        return 0;
    int whole = write_all(file, text);
    whole = close(file) == 0 && whole;
    if (!whole)
        (void)unlinkat(folder, name, 0);
    return whole ? id : 0;
}

uint64_t receipt_keep_add(const struct receipt_keep *keep, const struct receipt *receipt) {
    uint64_t id = 0;
    cJSON *document = receipt_print_json(receipt);
    if (document != NULL)
        cJSON_AddNumberToObject(document, "kept_unix",
                                (double)(kv_clock_wall_ns(keep->clock) / 1000000000U));
    char *text = document != NULL ? cJSON_PrintUnformatted(document) : NULL;
    (void)mkdir(keep->dir, 0700);
    int folder = open_dir(keep);
    if (text != NULL && folder >= 0)
        id = write_new(keep, folder, text);
    if (id != 0)
        forget_oldest(keep, folder);
    if (folder >= 0)
        close(folder);
    cJSON_free(text);
    cJSON_Delete(document);
    return id;
}

enum kv_err receipt_keep_list(const struct receipt_keep *keep, uint64_t *ids_out,
                              uint32_t *count_out, struct kv_diag *diag) {
    int folder = open_dir(keep);
    *count_out = 0;
    if (folder < 0)
        return errno == ENOENT ? KV_OK
                               : kv_diag_errno(diag, KV_ERR_IO, errno, "folder %s", keep->dir);
    int count = list_all(folder, ids_out, RECEIPT_KEEP_MAX);
    int error = errno;
    close(folder);
    if (count < 0)
        return kv_diag_errno(diag, KV_ERR_IO, error, "folder %s", keep->dir);
    *count_out = (uint32_t)count;
    return KV_OK;
}

enum kv_err receipt_keep_read(const struct receipt_keep *keep, uint64_t id,
                              struct cJSON **document_out, struct kv_diag *diag) {
    char name[NAME_BYTES];
    file_name(name, id);
    int folder = open_dir(keep);
    int file = folder < 0 ? -1 : openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (folder >= 0)
        close(folder);
    if (file < 0)
        return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                           "receipt %016" PRIx64 ": none is kept; `coldplane receipt` lists them",
                           id);
    char *text = kv_alloc_zeroed(keep->alloc, 1, RECEIPT_KEEP_BYTES_MAX + 1);
    ssize_t bytes = text == NULL ? 0 : read(file, text, RECEIPT_KEEP_BYTES_MAX);
    close(file);
    *document_out = bytes > 0 ? cJSON_Parse(text) : NULL;
    kv_alloc_release(keep->alloc, text);
    if (text == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a receipt");
    if (*document_out == NULL)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "receipt %016" PRIx64 " is no JSON document", id);
    return KV_OK;
}

/* Every kept receipt of a session, with its file's name. */
typedef void (*each_of)(int folder, const char *file, cJSON *document, const char *argument);

static void each_of_session(const struct receipt_keep *keep, const char *name, each_of each,
                            const char *argument) {
    uint64_t *ids = kv_alloc_zeroed(keep->alloc, RECEIPT_KEEP_MAX, sizeof *ids);
    uint32_t count = 0;
    int folder = open_dir(keep);
    if (ids != NULL && folder >= 0 && receipt_keep_list(keep, ids, &count, NULL) != KV_OK)
        count = 0;
    for (uint32_t i = 0; i < count; i++) {
        char file[NAME_BYTES];
        cJSON *document = NULL;
        file_name(file, ids[i]);
        if (receipt_keep_read(keep, ids[i], &document, NULL) != KV_OK)
            continue;
        const cJSON *of = cJSON_GetObjectItem(document, "name");
        if (cJSON_IsString(of) && strcmp(of->valuestring, name) == 0)
            each(folder, file, document, argument);
        cJSON_Delete(document);
    }
    if (folder >= 0)
        close(folder);
    kv_alloc_release(keep->alloc, ids);
}

/* Beside the old one first, so that a receipt is there whole at any time. */
static void rename_one(int folder, const char *file, cJSON *document, const char *to) {
    static const char beside[] = "renamed";
    const char *from = cJSON_GetObjectItem(document, "name")->valuestring;
    if (!cJSON_HasObjectItem(document, "former_name"))
        json_text(document, "former_name", from);
    cJSON_DeleteItemFromObject(document, "name");
    json_text(document, "name", to);
    char *text = cJSON_PrintUnformatted(document);
    int out = text == NULL ? -1
                           : openat(folder, beside,
                                    O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    int whole = out >= 0 && write_all(out, text);
    whole = (out < 0 || close(out) == 0) && whole;
    if (!whole || renameat(folder, beside, folder, file) != 0)
        (void)unlinkat(folder, beside, 0);
    cJSON_free(text);
}

void receipt_keep_rename(const struct receipt_keep *keep, const char *from, const char *to) {
    each_of_session(keep, from, rename_one, to);
}

static void forget_one(int folder, const char *file, cJSON *document, const char *argument) {
    (void)document;
    (void)argument;
    (void)unlinkat(folder, file, 0);
}

void receipt_keep_forget(const struct receipt_keep *keep, const char *name) {
    each_of_session(keep, name, forget_one, NULL);
}
