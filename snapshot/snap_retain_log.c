/* snapshot/snap_retain_log.c - the log of what the byte budget made go.
 *
 * Responsible for: one record: totals and the newest actions.
 * Not responsible for: the actions (snap_retain.c).
 */
#include "snapshot/snap_retain_inner.h"

#include "store/base/bytes.h"

#include <assert.h>
#include <string.h>

enum { VERSION = 1, VALUE_BYTES = 8192 };
static const char log_key[] = "r";

const char *snap_retain_name(enum snap_retain_kind kind) {
    switch (kind) {
    case SNAP_RETAIN_PLANES:
        return "planes";
    case SNAP_RETAIN_SNAPSHOT:
        return "snapshot";
    case SNAP_RETAIN_SESSION:
        return "session";
    case SNAP_RETAIN_KINDS:
        break;
    }
    return "unknown";
}

static void put_action(struct kv_writer *writer, const struct snap_retain_action *action) {
    size_t length = strnlen(action->name, IMAGE_NAME_BYTES_MAX);
    kv_write_u8(writer, (uint8_t)action->kind);
    kv_write_u8(writer, action->stream);
    kv_write_u64(writer, action->at_ns);
    kv_write_u64(writer, action->bytes);
    kv_write_u64(writer, action->tokens);
    kv_write_u32(writer, action->blocks);
    kv_write_u8(writer, (uint8_t)length);
    kv_write_bytes(writer, action->name, length);
}

static int get_action(struct kv_reader *reader, struct snap_retain_action *action) {
    uint8_t kind = kv_read_u8(reader);
    action->kind = (enum snap_retain_kind)kind;
    action->stream = kv_read_u8(reader);
    action->at_ns = kv_read_u64(reader);
    action->bytes = kv_read_u64(reader);
    action->tokens = kv_read_u64(reader);
    action->blocks = kv_read_u32(reader);
    uint8_t length = kv_read_u8(reader);
    const uint8_t *name = length <= IMAGE_NAME_BYTES_MAX ? kv_read_bytes(reader, length) : NULL;
    if (reader->failed || kind == 0 || kind >= SNAP_RETAIN_KINDS || (name == NULL && length != 0) ||
        action->stream >= LAYOUT_STREAM_COUNT)
        return 0;
    if (length != 0)
        memcpy(action->name, name, length);
    action->name[length] = 0;
    return 1;
}

static int decode(const void *value, size_t size, struct snap_retain_log *log) {
    struct kv_reader reader;
    kv_reader_init(&reader, value, size);
    int sound = kv_read_u8(&reader) == VERSION;
    for (int i = 1; i < SNAP_RETAIN_KINDS; i++) {
        log->actions[i] = kv_read_u64(&reader);
        log->bytes[i] = kv_read_u64(&reader);
    }
    uint8_t count = kv_read_u8(&reader);
    sound = sound && !reader.failed && count <= SNAP_RETAIN_LOG_MAX;
    for (uint32_t i = 0; sound && i < count; i++, log->count++)
        sound = get_action(&reader, &log->newest[i]);
    return sound && kv_reader_left(&reader) == 0;
}

/* A log that cannot be read stops nobody: it is begun anew. */
enum kv_err snap_retain_read(struct store *store, struct snap_retain_log *log_out,
                             struct kv_diag *diag) {
    struct store_record record;
    memset(log_out, 0, sizeof *log_out);
    enum kv_err err = store_get(store, log_key, 1, &record, diag);
    if (err == KV_ERR_NOT_FOUND || err == KV_ERR_CORRUPT)
        return KV_OK;
    if (err != KV_OK)
        return err;
    if (!decode(record.value, record.value_bytes, log_out))
        memset(log_out, 0, sizeof *log_out);
    store_record_release(store, &record);
    return KV_OK;
}

static enum kv_err put(struct store_batch *batch, const struct snap_retain_log *log,
                       struct kv_diag *diag) {
    uint8_t value[VALUE_BYTES];
    struct kv_writer writer;
    kv_writer_init(&writer, value, sizeof value);
    kv_write_u8(&writer, VERSION);
    for (int i = 1; i < SNAP_RETAIN_KINDS; i++) {
        kv_write_u64(&writer, log->actions[i]);
        kv_write_u64(&writer, log->bytes[i]);
    }
    kv_write_u8(&writer, (uint8_t)log->count);
    for (uint32_t i = 0; i < log->count; i++)
        put_action(&writer, &log->newest[i]);
    assert(!writer.failed);
    const struct store_put record = {
        .key = log_key, .key_bytes = 1, .value = value, .value_bytes = writer.off};
    return store_batch_put(batch, &record, diag);
}

enum kv_err snap_retain_add(struct store *store, struct store_batch *batch,
                            const struct snap_retain_action *action, struct kv_diag *diag) {
    struct snap_retain_log log;
    enum kv_err err = snap_retain_read(store, &log, diag);
    if (err != KV_OK)
        return err;
    log.actions[action->kind]++;
    log.bytes[action->kind] += action->bytes;
    memmove(log.newest + 1, log.newest, (SNAP_RETAIN_LOG_MAX - 1) * sizeof *log.newest);
    log.newest[0] = *action;
    log.count += log.count < SNAP_RETAIN_LOG_MAX;
    return put(batch, &log, diag);
}

enum kv_err snap_retain_forget(struct store *store, struct store_batch *batch, const char *name,
                               struct kv_diag *diag) {
    struct snap_retain_log log;
    uint32_t kept = 0;
    enum kv_err err = snap_retain_read(store, &log, diag);
    if (err != KV_OK)
        return err;
    for (uint32_t i = 0; i < log.count; i++)
        if (strcmp(log.newest[i].name, name) != 0)
            log.newest[kept++] = log.newest[i];
    if (kept == log.count)
        return KV_OK;
    log.count = kept;
    return put(batch, &log, diag);
}
