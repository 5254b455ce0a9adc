/* tools/service_model.c - the model file, read whole, or made where its name is a synth model's.
 *
 * Responsible for: service_read_model: what is no model file is refused by name.
 * Not responsible for: what stands in it (engine/model/gguf.c, engine/model/synth.h).
 *
 * The bytes are read, not mapped: a file that is replaced or cut afterwards changes nothing.
 */
#include "tools/service.h"

#include "engine/model/synth.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MODEL_ALIGN_BYTES = 64, MODEL_BYTES_MIN = 24 };
#define MODEL_BYTES_MAX ((uint64_t)1 << 40)

static enum kv_err make_synth(const char *name, const struct kv_alloc *alloc, uint8_t **bytes_out,
                              uint64_t *size_out, struct kv_diag *diag) {
    struct synth synth;
    enum kv_err err = synth_parse(name, &synth, diag);
    return err == KV_OK ? synth_make(&synth, alloc, bytes_out, size_out, diag) : err;
}

static enum kv_err read_all(int file, uint8_t *bytes, uint64_t size, const char *path,
                            struct kv_diag *diag) {
    uint64_t done = 0;
    while (done < size) {
        uint64_t left = size - done;
        ssize_t got = read(file, bytes + done, left < (1 << 30) ? left : 1 << 30);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kv_diag_errno(diag, KV_ERR_IO, errno, "model file %s", path);
        if (got == 0)
            return kv_diag_set(diag, KV_ERR_CORRUPT,
                               "model file %s became shorter while it was read; fetch it again",
                               path);
        done += (uint64_t)got;
    }
    return KV_OK;
}

enum kv_err service_read_model(const char *path, const struct kv_alloc *alloc, uint8_t **bytes_out,
                               uint64_t *size_out, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    uint8_t *bytes = NULL;
    struct stat info;
    if (synth_is_name(path))
        return make_synth(path, alloc, bytes_out, size_out, diag);
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        if (errno == ENOENT || errno == ENOTDIR)
            return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                               "model file %s: there is none; `make setup` fetches the default "
                               "model, --model FILE names another",
                               path);
        return kv_diag_errno(diag, KV_ERR_IO, errno, "model file %s", path);
    }
    if (fstat(file, &info) != 0)
        KV_TRY(kv_diag_errno(diag, KV_ERR_IO, errno, "model file %s", path));
    if (!S_ISREG(info.st_mode))
        KV_TRY(kv_diag_set(diag, KV_ERR_INVALID,
                           "model file %s: not a file; --model names a GGUF file", path));
    if (info.st_size < MODEL_BYTES_MIN)
        KV_TRY(kv_diag_set(diag, KV_ERR_CORRUPT,
                           "model file %s: %" PRIu64
                           " bytes are too short to be a GGUF file; fetch it again",
                           path, (uint64_t)info.st_size));
    if ((uint64_t)info.st_size > MODEL_BYTES_MAX)
        KV_TRY(kv_diag_set(diag, KV_ERR_CORRUPT,
                           "model file %s: %" PRIu64 " bytes cannot be a model; fetch it again",
                           path, (uint64_t)info.st_size));
    bytes = kv_alloc_aligned(alloc, (size_t)info.st_size, MODEL_ALIGN_BYTES);
    if (bytes == NULL)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "model file %s: no memory for %" PRIu64 " bytes",
                           path, (uint64_t)info.st_size));
    KV_TRY(read_all(file, bytes, (uint64_t)info.st_size, path, diag));
    *bytes_out = bytes;
    *size_out = (uint64_t)info.st_size;
    bytes = NULL;
done:
    kv_alloc_release(alloc, bytes);
    close(file);
    return err;
}
