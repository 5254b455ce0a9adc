/* store/segment.c - segment files and their names.
 *
 * Responsible for: names, opening for reading, one translation of errno for all files of the store.
 * Not responsible for: writing (segment_writer.c).
 */
#include "store/segment.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void segment_name(uint32_t number, char name_out[SEGMENT_NAME_BYTES]) {
    snprintf(name_out, SEGMENT_NAME_BYTES, "%08u.seg",
             number <= SEGMENT_NUMBER_MAX ? number : SEGMENT_NUMBER_MAX);
}

uint32_t segment_number(const char *name) {
    uint32_t number = 0;
    if (strlen(name) != 12 || strcmp(name + 8, ".seg") != 0)
        return 0;
    for (int i = 0; i < 8; i++) {
        if (name[i] < '0' || name[i] > '9')
            return 0;
        number = number * 10 + (uint32_t)(name[i] - '0');
    }
    return number;
}

enum kv_err segment_error(struct kv_diag *diag, int error, const char *what, uint32_t number) {
    char name[SEGMENT_NAME_BYTES];
    segment_name(number, name);
    switch (error) {
    case 0:
        return KV_OK;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return kv_diag_errno(diag, KV_ERR_NO_SPACE, error, "cannot %s seg/%s", what, name);
    case ENOMEM:
        return kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot %s seg/%s", what, name);
    case ELOOP:
        return kv_diag_set(diag, KV_ERR_CORRUPT, "seg/%s is a symbolic link: refused", name);
    case EISDIR:
        return kv_diag_set(diag, KV_ERR_CORRUPT, "seg/%s is not a file: move it away", name);
    case ENOENT:
        return kv_diag_set(diag, KV_ERR_CORRUPT, "seg/%s is missing", name);
    case ETIMEDOUT:
        return kv_diag_set(diag, KV_ERR_IO, "cannot %s seg/%s: timed out", what, name);
    default:
        return kv_diag_errno(diag, KV_ERR_IO, error, "cannot %s seg/%s", what, name);
    }
}

enum kv_err segment_open_read(const struct segment_open_args *args, int *file_out, int *direct_out,
                              struct kv_diag *diag) {
    const struct io_door *door = args->door;
    char name[SEGMENT_NAME_BYTES];
    segment_name(args->number, name);
    int file = -1;
    int error = EINVAL;
    if (args->direct_wanted)
        error = door->open(door->context, args->dir, name, IO_READ | IO_DIRECT, &file);
    if (error == EINVAL)
        error = door->open(door->context, args->dir, name, IO_READ, &file);
    if (error != 0)
        return segment_error(diag, error, "open", args->number);
    struct io_file_info info;
    error = door->info(door->context, file, &info);
    if (error == 0 && !info.is_regular)
        error = EISDIR;
    if (error != 0) {
        door->close(door->context, file);
        return segment_error(diag, error, "look at", args->number);
    }
    *file_out = file;
    *direct_out = info.is_direct;
    return KV_OK;
}
