/* tools/daemon_key.c - the keys that HTTP clients show.
 *
 * Responsible for: the contract of daemon_key.h.
 * Not responsible for: replacing keys while the daemon runs.
 */
#include "tools/daemon_key.h"

#include "tools/config.h"
#include "tools/prefix.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RANDOM_BYTES = 32, FILE_BYTES_MAX = DAEMON_KEYS_MAX * (DAEMON_KEY_BYTES_MAX + 1) };

/* So that the name outlives a crash, as the bytes do. */
static int sync_folder_of(const char *path) {
    char folder[CONFIG_PATH_BYTES + 8];
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path + 1), path);
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int good = file >= 0 && fsync(file) == 0;
    if (file >= 0)
        close(file);
    return good;
}

/* Whole or not at all: it is written beside and renamed only where no key stands yet. */
static enum kv_err make_file(const char *path, struct kv_diag *diag) {
    uint8_t random[RANDOM_BYTES];
    char text[3 + 2 * RANDOM_BYTES + 2] = "cp-";
    char beside[CONFIG_PATH_BYTES + 32];
    int error = 0;
    /* tidy-allow: random a key that can be foretold is none */
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "no random numbers for a key");
    for (int i = 0; i < RANDOM_BYTES; i++)
        snprintf(text + 3 + 2 * i, 3, "%02x", random[i]);
    text[3 + 2 * RANDOM_BYTES] = '\n';
    snprintf(beside, sizeof beside, "%s.new", path);
    (void)unlink(beside);
    int file = open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    size_t length = 3 + 2 * RANDOM_BYTES + 1;
    if (file < 0 || write(file, text, length) != (ssize_t)length || fsync(file) != 0 ||
        (link(beside, path) != 0 && errno != EEXIST) || !sync_folder_of(path))
        error = errno;
    if (file >= 0)
        close(file);
    (void)unlink(beside);
    return error == 0 ? KV_OK : kv_diag_errno(diag, KV_ERR_IO, error, "key file %s", path);
}

static enum kv_err open_file(const char *path, int *file_out, struct kv_diag *diag) {
    struct stat info;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0 && errno == ENOENT) {
        enum kv_err err = make_file(path, diag);
        if (err != KV_OK)
            return err;
        file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    }
    if (file < 0 || fstat(file, &info) != 0) {
        enum kv_err err = kv_diag_errno(diag, KV_ERR_IO, errno, "key file %s", path);
        if (file >= 0)
            close(file);
        return err;
    }
    *file_out = file;
    if (S_ISREG(info.st_mode) && (info.st_mode & 077) == 0)
        return KV_OK;
    close(file);
    return kv_diag_set(diag, KV_ERR_INVALID,
                       "key file %s: must be a file that only you can read; run `chmod 600 %s`",
                       path, path);
}

static enum kv_err add_key(struct daemon_keys *keys, const char *line, size_t length,
                           struct kv_diag *diag) {
    int printable = 1;
    for (size_t i = 0; i < length; i++)
        printable &= line[i] > ' ' && line[i] < 0x7f;
    if (length < DAEMON_KEY_BYTES_MIN || length > DAEMON_KEY_BYTES_MAX || !printable)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "key %zu: a key has %d to %d printable characters without spaces",
                           keys->count + 1, DAEMON_KEY_BYTES_MIN, DAEMON_KEY_BYTES_MAX);
    if (keys->count == DAEMON_KEYS_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "more than %d keys", DAEMON_KEYS_MAX);
    struct daemon_key *key = &keys->items[keys->count++];
    memcpy(key->text, line, length);
    prefix_owner(key->text, key->owner);
    return KV_OK;
}

static enum kv_err read_keys(struct daemon_keys *keys, int file, char *text, struct kv_diag *diag) {
    size_t used = 0;
    ssize_t got;
    enum kv_err err = KV_OK;
    while ((got = read(file, text + used, FILE_BYTES_MAX + 1 - used)) > 0)
        used += (size_t)got;
    if (got < 0)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "it cannot be read");
    if (used > FILE_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_LIMIT, "longer than %d bytes", FILE_BYTES_MAX);
    for (size_t at = 0; at < used && err == KV_OK;) {
        size_t length = 0;
        while (at + length < used && text[at + length] != '\n')
            length++;
        if (length > 0)
            err = add_key(keys, text + at, length, diag);
        at += length + 1;
    }
    if (err == KV_OK && keys->count == 0)
        err = kv_diag_set(diag, KV_ERR_INVALID,
                          "there is no key in it; remove it and a new one "
                          "is made");
    return err;
}

enum kv_err daemon_keys_open(const char *home, const struct kv_alloc *alloc,
                             struct daemon_keys *keys_out, struct kv_diag *diag) {
    char path[CONFIG_PATH_BYTES + 8];
    char *text = NULL;
    int file = -1;
    enum kv_err err = KV_OK;
    *keys_out = (struct daemon_keys){.alloc = alloc};
    snprintf(path, sizeof path, "%s/key", home);
    KV_TRY(open_file(path, &file, diag));
    keys_out->items = kv_alloc_zeroed(alloc, DAEMON_KEYS_MAX, sizeof *keys_out->items);
    text = kv_alloc_zeroed(alloc, FILE_BYTES_MAX + 1, 1);
    if (keys_out->items == NULL || text == NULL)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for keys"));
    err = read_keys(keys_out, file, text, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "key file %s", path);
done:
    kv_alloc_release(alloc, text);
    if (file >= 0)
        close(file);
    if (err != KV_OK)
        daemon_keys_close(keys_out);
    return err;
}

void daemon_keys_close(struct daemon_keys *keys) {
    if (keys->alloc == NULL)
        return;
    if (keys->items != NULL)
        explicit_bzero(keys->items, DAEMON_KEYS_MAX * sizeof *keys->items);
    kv_alloc_release(keys->alloc, keys->items);
    *keys = (struct daemon_keys){.items = NULL};
}
