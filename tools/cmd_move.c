/* tools/cmd_move.c - export and import: one session as one file.
 *
 * Responsible for: files and pipes, text and JSON of these commands.
 * Not responsible for: what stands in the file (restore/, snapshot/).
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/text.h"

#include "engine/export.h"
#include "snapshot/snap_import.h"
#include "snapshot/snap_tree.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct moving {
    struct cmd *cmd;
    const char *path; /* as the user named it */
    int file;
    int nameless; /* the file gets its name when it is complete */
    int spooled;  /* the file is ours */
    struct progress progress;
};

static int is_pipe(const struct moving *moving) {
    return strcmp(moving->path, "-") == 0;
}

static int on_progress(void *context, uint64_t done, uint64_t all) {
    struct moving *moving = context;
    progress_update(&moving->progress, done, all);
    return !cmd_interrupted(moving->cmd);
}

/* --- export */

static enum kv_err put_bytes(void *context, const void *bytes, size_t count, struct kv_diag *diag) {
    const struct moving *moving = context;
    for (size_t done = 0; done < count;) {
        ssize_t wrote = write(moving->file, (const char *)bytes + done, count - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return kv_diag_errno(diag, errno == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, errno,
                                 "writing %s", moving->path);
        done += (size_t)wrote;
    }
    return KV_OK;
}

static enum kv_err taken(const struct moving *moving, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_EXISTS, "%s: there is such a file; name another, or remove it",
                       moving->path);
}

/* The folder of the file, for a name that comes when the bytes are there. */
static const char *folder_of(const char *path, char out[CONFIG_PATH_BYTES]) {
    const char *slash = strrchr(path, '/');
    size_t length = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    if (length == 0)
        return ".";
    memcpy(out, path, length);
    out[length] = 0;
    return out;
}

static enum kv_err open_output(struct moving *moving, struct kv_diag *diag) {
    char folder[CONFIG_PATH_BYTES];
    struct stat there;
    if (is_pipe(moving)) {
        if (moving->cmd->result != NULL)
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "export: with - the session goes to standard output, where --json "
                               "cannot; name a file");
        if (isatty(STDOUT_FILENO))
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "export: standard output is a terminal; name a file, or pipe it");
        moving->file = STDOUT_FILENO;
        return KV_OK;
    }
    if (moving->path[0] == 0 || strlen(moving->path) >= CONFIG_PATH_BYTES)
        return kv_diag_set(diag, KV_ERR_INVALID, "export: a path of 1 to %d bytes is needed",
                           CONFIG_PATH_BYTES - 1);
    if (lstat(moving->path, &there) == 0)
        return taken(moving, diag);
    moving->file = open(folder_of(moving->path, folder), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    moving->nameless = moving->file >= 0;
    /* File systems without nameless files get the name at once; import refuses what is cut. */
    if (moving->file < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL))
        moving->file =
            open(moving->path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (moving->file >= 0)
        return KV_OK;
    if (errno == EEXIST)
        return taken(moving, diag);
    return kv_diag_errno(diag, errno == ENOENT ? KV_ERR_NOT_FOUND : KV_ERR_IO, errno,
                         "file %s cannot be made", moving->path);
}

/* Bytes first, then the name, then the folder that holds it. */
static enum kv_err name_output(const struct moving *moving, struct kv_diag *diag) {
    char self[64], folder[CONFIG_PATH_BYTES];
    if (is_pipe(moving))
        return KV_OK;
    if (fsync(moving->file) != 0)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "writing %s", moving->path);
    snprintf(self, sizeof self, "/proc/self/fd/%d", moving->file);
    if (moving->nameless && linkat(AT_FDCWD, self, AT_FDCWD, moving->path, AT_SYMLINK_FOLLOW) != 0)
        return errno == EEXIST ? taken(moving, diag)
                               : kv_diag_errno(diag, KV_ERR_IO, errno, "naming %s", moving->path);
    int above = open(folder_of(moving->path, folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = above < 0 || fsync(above) != 0 ? errno : 0;
    if (above >= 0)
        close(above);
    return error == 0 ? KV_OK
                      : kv_diag_errno(diag, KV_ERR_IO, error, "the folder of %s", moving->path);
}

static void tell_exported(struct moving *moving, const struct restore_exported *exported) {
    struct cmd *cmd = moving->cmd;
    FILE *out = is_pipe(moving) ? cmd->err : cmd->out;
    char size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON *item = cJSON_AddObjectToObject(cmd->result, "exported");
        json_text(item, "name", cmd->session_name);
        json_text(item, "file", moving->path);
        cJSON_AddNumberToObject(item, "tokens", (double)exported->n);
        cJSON_AddNumberToObject(item, "tokens_kv", (double)exported->n_kv);
        cJSON_AddNumberToObject(item, "blocks", exported->blocks);
        cJSON_AddNumberToObject(item, "pages", exported->pages);
        cJSON_AddNumberToObject(item, "bytes", (double)exported->bytes);
        return;
    }
    fprintf(out, "exported ");
    text_print_clean(out, cmd->session_name, strlen(cmd->session_name));
    fprintf(out, ": %" PRIu64 " tokens, %" PRIu32 " blocks, %" PRIu32 " pages, %s\n", exported->n,
            exported->blocks, exported->pages, text_size(exported->bytes, size));
}

enum kv_err cmd_export(struct cmd *cmd, struct kv_diag *diag) {
    struct moving moving = {.cmd = cmd, .path = cmd_word(cmd, 1), .file = -1};
    struct store *store = NULL;
    struct snap_tree_room room;
    struct snap_tree_place place;
    struct restore_exported exported;
    struct snapshot_entry entry;
    const char *said = cmd->session_name;
    uint64_t snapshot = 0;
    enum kv_err err = KV_OK;
    KV_TRY(cmd_open_store(cmd, CMD_READ, &store, diag));
    KV_TRY(snap_tree_parse(store, cmd->session_name, &room, &place, diag));
    cmd->session_name = place.name;
    err = cmd_find(cmd, store, &entry, diag);
    cmd->session_name = said; /* with its tag, where it is told */
    KV_TRY(err);
    KV_TRY(snap_tree_find(store, &place, &snapshot, NULL, diag));
    KV_TRY(open_output(&moving, diag));
    const struct restore_export_args args = {.store = store,
                                             .alloc = cmd->alloc,
                                             .name = place.name,
                                             .snapshot = snapshot,
                                             .put = put_bytes,
                                             .context = &moving,
                                             .progress = on_progress,
                                             .progress_context = &moving};
    cmd_progress(cmd, &moving.progress, "exporting", "bytes");
    err = restore_export(&args, &exported, diag);
    progress_end(&moving.progress);
    if (err == KV_OK)
        err = name_output(&moving, diag);
    if (err == KV_OK)
        tell_exported(&moving, &exported);
    else if (!is_pipe(&moving) && !moving.nameless)
        (void)unlink(moving.path);
done:
    if (moving.file >= 0 && !is_pipe(&moving))
        close(moving.file);
    cmd_close_store(cmd, store);
    return err;
}

/* --- import */

static enum kv_err get_bytes(void *context, void *bytes, size_t count, size_t *got_out,
                             struct kv_diag *diag) {
    const struct moving *moving = context;
    struct pollfd waits[2] = {{.fd = moving->file, .events = POLLIN},
                              {.fd = moving->cmd->signals, .events = POLLIN}};
    *got_out = 0;
    while (*got_out < count) {
        /* A pipe may never give anything: a signal ends the wait. */
        if (poll(waits, 2, -1) > 0 && waits[1].revents != 0 && cmd_interrupted(moving->cmd))
            return kv_diag_set(diag, KV_ERR_CANCELLED, "it was stopped");
        if (waits[0].revents == 0)
            continue;
        ssize_t got = read(moving->file, (char *)bytes + *got_out, count - *got_out);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kv_diag_errno(diag, KV_ERR_IO, errno, "reading %s", moving->path);
        if (got == 0)
            return KV_OK;
        *got_out += (size_t)got;
    }
    return KV_OK;
}

/* Of a file, before a store is opened or made for it; what comes through a pipe is seen later. */
static enum kv_err check_start(const struct moving *moving, struct kv_diag *diag) {
    uint8_t start[EXPORT_START_BYTES] = {0};
    uint64_t check = 0;
    /* What is shorter is no export either. */
    ssize_t got = pread(moving->file, start, sizeof start, 0);
    if (got < 0 && (errno == ESPIPE || errno == EINTR))
        return KV_OK;
    if (got < 0)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "reading %s", moving->path);
    enum kv_err err = export_get_start(start, &check, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "import of %s", moving->path);
    return err;
}

static enum kv_err open_input(struct moving *moving, struct kv_diag *diag) {
    if (is_pipe(moving)) {
        moving->file = fileno(moving->cmd->in);
        return KV_OK;
    }
    struct stat there;
    moving->file = openat(moving->cmd->folder, moving->path, O_RDONLY | O_CLOEXEC);
    if (moving->file >= 0 && fstat(moving->file, &there) == 0 && S_ISDIR(there.st_mode))
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "import of %s: it is a folder; name a file that `coldplane export` made",
                           moving->path);
    if (moving->file < 0)
        return kv_diag_errno(diag, errno == ENOENT ? KV_ERR_NOT_FOUND : KV_ERR_IO, errno,
                             "file %s cannot be read", moving->path);
    return check_start(moving, diag);
}

/* In a daemon: what may never come is waited for here, before others have to wait for this
 * command. The file has no name, on the disk where the session goes anyway. */
static enum kv_err spool(struct moving *moving, struct kv_diag *diag) {
    enum { SPOOL_BYTES = 1 << 16 };
    char path[CONFIG_PATH_BYTES + 16];
    struct stat there;
    size_t got = SPOOL_BYTES;
    if (moving->cmd->host == NULL || (fstat(moving->file, &there) == 0 && S_ISREG(there.st_mode)))
        return KV_OK;
    snprintf(path, sizeof path, "%s/import-XXXXXX", moving->cmd->host->config->store);
    struct moving spooled = *moving;
    spooled.file = mkostemp(path, O_CLOEXEC);
    if (spooled.file < 0)
        return kv_diag_errno(diag, errno == ENOSPC ? KV_ERR_NO_SPACE : KV_ERR_IO, errno,
                             "file %s cannot be made", path);
    (void)unlink(path);
    char *bytes = kv_alloc_zeroed(moving->cmd->alloc, SPOOL_BYTES, 1);
    enum kv_err err =
        bytes != NULL ? KV_OK : kv_diag_set(diag, KV_ERR_NOMEM, "no memory to import");
    while (err == KV_OK && got == SPOOL_BYTES) {
        err = get_bytes(moving, bytes, SPOOL_BYTES, &got, diag);
        if (err == KV_OK)
            err = put_bytes(&spooled, bytes, got, diag);
    }
    kv_alloc_release(moving->cmd->alloc, bytes);
    if (err == KV_OK && lseek(spooled.file, 0, SEEK_SET) != 0)
        err = kv_diag_errno(diag, KV_ERR_IO, errno, "reading %s", moving->path);
    if (err != KV_OK) {
        kv_diag_prefix(diag, "import of %s", is_pipe(moving) ? "standard input" : moving->path);
        close(spooled.file);
        return err;
    }
    if (!is_pipe(moving))
        close(moving->file);
    moving->file = spooled.file;
    moving->spooled = 1;
    return KV_OK;
}

static void tell_imported(struct cmd *cmd, const struct snap_import_result *result) {
    char size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON *item = cJSON_AddObjectToObject(cmd->result, "imported");
        char hex[17];
        json_text(item, "name", result->name);
        snprintf(hex, sizeof hex, "%016" PRIx64, result->snapshot);
        json_text(item, "snapshot", hex);
        cJSON_AddNumberToObject(item, "tokens", (double)result->n);
        cJSON_AddNumberToObject(item, "tokens_kv", (double)result->n_kv);
        cJSON_AddNumberToObject(item, "blocks", result->blocks);
        cJSON_AddNumberToObject(item, "pages", result->pages);
        cJSON_AddNumberToObject(item, "batches", result->batches);
        cJSON_AddNumberToObject(item, "file_bytes", (double)result->file_bytes);
        cJSON_AddNumberToObject(item, "raw_bytes", (double)result->raw_bytes);
        cJSON_AddNumberToObject(item, "stored_bytes", (double)result->stored_bytes);
        return;
    }
    fprintf(cmd->out, "imported ");
    text_print_clean(cmd->out, result->name, strlen(result->name));
    fprintf(cmd->out,
            ": %" PRIu64 " tokens, %" PRIu32 " blocks, %" PRIu32 " pages, %s stored; `coldplane "
            "restore` proves it\n",
            result->n, result->blocks, result->pages, text_size(result->stored_bytes, size));
}

static enum kv_err import_into(struct moving *moving, struct store *store,
                               const struct engine *engine, struct kv_diag *diag) {
    struct cmd *cmd = moving->cmd;
    struct engine_model model;
    struct snap_import_result result;
    const struct snap_retain_leave leave = cmd_leave(cmd, NULL);
    struct snap_import_args args = {.store = store,
                                    .name = cmd->config->as,
                                    .clock = cmd->clock,
                                    .leave = &leave,
                                    .batch_bytes = SNAP_IMPORT_BATCH_BYTES,
                                    .take = {.alloc = cmd->alloc,
                                             .get = get_bytes,
                                             .get_context = moving,
                                             .progress = on_progress,
                                             .progress_context = moving}};
    if (engine != NULL) {
        engine_model(engine, &model);
        args.take.here = &model.identity;
        args.take.vocab_count = model.vocab_count;
    }
    cmd_progress(cmd, &moving->progress, "importing", "bytes");
    enum kv_err err = snap_import(&args, &result, diag);
    progress_end(&moving->progress);
    if (err == KV_OK)
        tell_imported(cmd, &result);
    else
        kv_diag_prefix(diag, "import of %s", is_pipe(moving) ? "standard input" : moving->path);
    return err;
}

enum kv_err cmd_import(struct cmd *cmd, struct kv_diag *diag) {
    struct moving moving = {.cmd = cmd, .path = cmd_word(cmd, 0), .file = -1};
    struct service *service = NULL;
    struct store *store = NULL;
    enum kv_err err = KV_OK;
    if (cmd->config->as != NULL)
        KV_TRY(session_check_new_name(cmd->config->as, diag));
    KV_TRY(open_input(&moving, diag));
    cmd_take_signals(cmd);
    KV_TRY(spool(&moving, diag));
    if (cmd->config->any_model) {
        KV_TRY(cmd_open_store(cmd, CMD_CREATE, &store, diag));
        err = import_into(&moving, store, NULL, diag);
    } else {
        KV_TRY(cmd_open_service(cmd, CMD_CREATE, NULL, NULL, &service, diag));
        cmd_write_begin(cmd, service);
        err = import_into(&moving, service_store(service), service_engine(service), diag);
        cmd_write_end(cmd, service);
    }
done:
    if (moving.file >= 0 && (moving.spooled || !is_pipe(&moving)))
        close(moving.file);
    cmd_close_service(cmd, service);
    cmd_close_store(cmd, store);
    return err;
}
