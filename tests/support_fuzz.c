/* tests/support_fuzz.c - what is done with bytes from outside.
 *
 * Responsible for: the contract of support_fuzz.h.
 * Not responsible for: choosing bytes.
 */
#include "tests/support_fuzz.h"

#include "engine/export.h"
#include "engine/image.h"
#include "engine/model/gguf.h"
#include "engine/model/tokenizer.h"
#include "engine/record.h"
#include "snapshot/snap_take.h"
#include "store/base/bytes.h"
#include "store/fmt.h"
#include "store/io.h"
#include "store/store.h"
#include "store/store_read.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void *copy_of(const uint8_t *bytes, size_t count) {
    uint8_t *copy = malloc(count + 64);
    if (copy == NULL)
        abort();
    memset(copy + count, 0, 64);
    if (count != 0)
        memcpy(copy, bytes, count);
    return copy;
}

/* --- a model file */

static void use_tokenizer(const struct tokenizer *tokenizer) {
    static const char text[] = "a b<|im_start|>\xe2\x82\xac \xff 12345\n";
    uint32_t ids[64];
    struct tokenizer_ids list = {.items = ids, .capacity = 64};
    struct kv_diag diag = {""};
    if (tokenizer_encode(tokenizer, text, sizeof text - 1, 0, &list, &diag) != KV_OK)
        return;
    for (size_t i = 0; i < list.count; i++) {
        struct gguf_text piece = tokenizer_piece(tokenizer, ids[i]);
        volatile uint8_t last =
            piece.size_bytes != 0 ? (uint8_t)piece.bytes[piece.size_bytes - 1] : 0;
        (void)last;
    }
}

int support_fuzz_gguf(const uint8_t *bytes, size_t count) {
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    struct kv_diag diag = {""};
    uint8_t *copy = kv_alloc_aligned(kv_alloc_system(), count + 1, 64);
    if (copy == NULL)
        abort();
    memcpy(copy, bytes, count);
    enum kv_err err = gguf_parse(copy, count, kv_alloc_system(), &gguf, &diag);
    if (err == KV_OK) {
        struct kv_digest digest = gguf_tensors_digest(gguf);
        (void)digest;
        if (tokenizer_make(gguf, kv_alloc_system(), &tokenizer, &diag) == KV_OK)
            use_tokenizer(tokenizer);
    } else if (diag.text[0] == 0) {
        abort(); /* refused without a word */
    }
    tokenizer_drop(tokenizer);
    gguf_drop(gguf);
    kv_alloc_release(kv_alloc_system(), copy);
    return err == KV_OK;
}

/* --- records of the store */

enum { HEAD_CHECKED_BYTES = 120 };

/* Makes the checks of every put right, as far as the operations can be followed. */
static void mend_ops(uint8_t *ops, size_t count) {
    for (size_t at = 0; at + FMT_OP_HEAD_BYTES <= count;) {
        uint64_t key_bytes = kv_get_u16(ops + at + 2), entry_bytes = kv_get_u32(ops + at + 4);
        uint64_t total = key_bytes + entry_bytes;
        at += FMT_OP_HEAD_BYTES;
        if (total > count - at)
            return;
        if (entry_bytes >= 8)
            kv_put_u64(ops + at + total - 8, kv_digest_short(ops + at, (size_t)total - 8));
        at += (size_t)total;
    }
}

static void mend_batch(uint8_t *record, size_t count) {
    if (count < FMT_BATCH_HEAD_BYTES)
        return;
    uint64_t length = kv_get_u64(record + 64);
    kv_put_u64(record + HEAD_CHECKED_BYTES, kv_digest_short(record, HEAD_CHECKED_BYTES));
    if (length < FMT_BATCH_HEAD_BYTES + KV_DIGEST_BYTES || length > count)
        return;
    size_t body = (size_t)length - KV_DIGEST_BYTES;
    mend_ops(record + FMT_BATCH_HEAD_BYTES, body - FMT_BATCH_HEAD_BYTES);
    struct kv_digest digest = kv_digest_of(record, body);
    memcpy(record + body, digest.bytes, KV_DIGEST_BYTES);
}

int support_fuzz_batch(const uint8_t *bytes, size_t count) {
    uint8_t *record = copy_of(bytes, count);
    struct fmt_batch batch;
    struct kv_digest digest;
    mend_batch(record, count);
    enum kv_err err = fmt_batch_decode(record, count, &batch, &digest);
    if (err == KV_OK) {
        struct kv_reader reader;
        struct fmt_op op;
        kv_reader_init(&reader, record + FMT_BATCH_HEAD_BYTES,
                       (size_t)batch.record_bytes - FMT_BATCH_HEAD_BYTES - KV_DIGEST_BYTES);
        for (uint32_t i = 0; i < batch.op_count; i++)
            if (fmt_op_decode(&reader, &op) != KV_OK)
                abort(); /* taken whole, refused in part */
    }
    struct fmt_state state;
    if (count >= FMT_STATE_BYTES) {
        kv_put_u64(record + HEAD_CHECKED_BYTES, kv_digest_short(record, HEAD_CHECKED_BYTES));
        (void)fmt_state_decode(record, FMT_STATE_BYTES, &state);
    }
    free(record);
    return err == KV_OK;
}

static void decode_value(const struct fmt_entry *entry, uint8_t kind) {
    struct record_name name;
    struct record_snapshot snapshot;
    struct record_block block;
    struct record_page page;
    struct record_lineage lineage;
    struct kv_diag diag = {""};
    switch (kind) {
    case 'n':
        (void)record_get_name(entry->value, entry->value_bytes, &name, &diag);
        break;
    case 's':
        (void)record_get_snapshot(entry->value, entry->value_bytes, &snapshot, &diag);
        break;
    case 'b':
        (void)record_get_block(entry->value, entry->value_bytes, &block, &diag);
        break;
    case 'p':
        (void)record_get_page(entry->value, entry->value_bytes, &page, &diag);
        break;
    default:
        (void)record_get_lineage(entry->value, entry->value_bytes, &lineage, &diag);
        break;
    }
}

/* One byte says how long the key is; key and entry follow. */
int support_fuzz_entry(const uint8_t *bytes, size_t count) {
    if (count < 10)
        return 0;
    size_t key_bytes = bytes[0], total = count - 1;
    uint8_t *copy = copy_of(bytes + 1, total);
    struct fmt_entry entry;
    kv_put_u64(copy + total - 8, kv_digest_short(copy, total - 8));
    enum kv_err err = fmt_entry_decode(copy, key_bytes, total, &entry);
    if (err == KV_OK) {
        decode_value(&entry, copy[0]);
        (void)fmt_entry_live_bytes(&entry);
    }
    free(copy);
    return err == KV_OK;
}

/* --- a session image and FORMAT */

int support_fuzz_image(const uint8_t *bytes, size_t count) {
    struct image image;
    struct kv_diag diag = {""};
    uint8_t *copy = copy_of(bytes, count), *again = NULL;
    size_t size = 0;
    enum kv_err err = image_decode(copy, count, kv_alloc_system(), &image, &diag);
    if (err == KV_OK) {
        if (image_encode(&image, kv_alloc_system(), &again, &size, &diag) == KV_OK)
            kv_alloc_release(kv_alloc_system(), again);
        image_release(&image, kv_alloc_system());
    }
    free(copy);
    return err == KV_OK;
}

int support_fuzz_format(const uint8_t *bytes, size_t count) {
    uint8_t id[FMT_ID_BYTES];
    struct kv_diag diag = {""};
    char *copy = copy_of(bytes, count);
    /* The check is the last line: the digits of what stands before it. */
    if (count > 23 && count < 512) {
        char digits[17];
        snprintf(digits, sizeof digits, "%016llx",
                 (unsigned long long)kv_digest_short(copy, count - 23));
        memcpy(copy + count - 17, digits, 16);
    }
    enum kv_err err = fmt_text_decode(copy, count, id, &diag);
    free(copy);
    return err == KV_OK;
}

/* --- an exported session */

void support_fuzz_mend_export(uint8_t *bytes, size_t count) {
    if (count < EXPORT_START_BYTES)
        return;
    uint64_t check = kv_digest_short(bytes, 16);
    kv_put_u64(bytes + 16, check);
    for (size_t at = EXPORT_START_BYTES; at + EXPORT_FRAME_BYTES <= count;) {
        uint8_t chained[40];
        uint64_t length = kv_get_u64(bytes + at + 8);
        if (length <= count - at - EXPORT_FRAME_BYTES) {
            struct kv_digest digest = kv_digest_of(bytes + at + EXPORT_FRAME_BYTES, (size_t)length);
            memcpy(bytes + at + 16, digest.bytes, KV_DIGEST_BYTES);
        }
        kv_put_u64(chained, check);
        memcpy(chained + 8, bytes + at, 32);
        check = kv_digest_short(chained, sizeof chained);
        kv_put_u64(bytes + at + 32, check);
        at += EXPORT_FRAME_BYTES;
        if (length > count - at)
            return;
        at += (size_t)length;
    }
}

struct bytes_in {
    const uint8_t *bytes;
    size_t count, at;
};

static enum kv_err get_some(void *context, void *bytes, size_t count, size_t *got_out,
                            struct kv_diag *diag) {
    struct bytes_in *in = context;
    (void)diag;
    *got_out = count < in->count - in->at ? count : in->count - in->at;
    if (*got_out != 0)
        memcpy(bytes, in->bytes + in->at, *got_out);
    in->at += *got_out;
    return KV_OK;
}

int support_fuzz_export(const uint8_t *bytes, size_t count) {
    uint8_t *copy = copy_of(bytes, count);
    struct bytes_in in = {copy, count, 0};
    struct kv_diag diag = {""};
    uint64_t taken = 0;
    const struct snap_take_args args = {
        .alloc = kv_alloc_system(), .get = get_some, .get_context = &in, .vocab_count = 1 << 20};
    support_fuzz_mend_export(copy, count);
    enum kv_err err = snap_take(&args, &taken, &diag);
    if (err == KV_OK ? taken != count : diag.text[0] == 0)
        abort(); /* bytes left over, or refused without a word */
    free(copy);
    return err == KV_OK;
}

/* --- a whole segment, read by a rebuild */

static const uint8_t store_id[FMT_ID_BYTES] = {0x5d, 0x5d, 0x5d, 0x5d, 0x5d, 0x5d, 0x5d, 0x5d,
                                               0x5d, 0x5d, 0x5d, 0x5d, 0x5d, 0x5d, 0x5d, 0x5d};

static const char *fuzz_dir(void) {
    static char dir[64];
    if (dir[0] == 0) {
        snprintf(dir, sizeof dir, "%s/fuzz_XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        if (mkdtemp(dir) == NULL)
            abort();
    }
    return dir;
}

static void put_file(const char *name, const void *bytes, size_t count) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", fuzz_dir(), name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, count, file) != count)
        abort();
    fclose(file);
}

static void clear_dir(void) {
    static const char *const names[] = {"index/data.mdb",
                                        "index/lock.mdb",
                                        "index",
                                        "index.tmp/data.mdb",
                                        "index.tmp/lock.mdb",
                                        "index.tmp",
                                        "seg/00000001.seg",
                                        "seg/00000002.seg",
                                        "seg",
                                        "FORMAT",
                                        "LOCK"};
    char path[128];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", fuzz_dir(), names[i]);
        if (unlink(path) != 0)
            (void)rmdir(path);
    }
}

static int read_store(void) {
    struct store_options options = store_options_usual(fuzz_dir(), "fuzz");
    options.door = io_posix_door();
    struct store *store = NULL;
    struct kv_diag diag = {""};
    enum kv_err err = store_open(&options, &store, &diag);
    if (err != KV_OK)
        return 0;
    struct store_walk walk = {0};
    struct store_record record;
    while ((err = store_next(store, &walk, &record, &diag)) == KV_OK || err == KV_ERR_CORRUPT) {
        if (err == KV_ERR_CORRUPT)
            continue;
        if (record.extent_count < 32)
            (void)store_read_check(store, record.key, record.key_bytes, NULL, &diag);
        store_record_release(store, &record);
    }
    store_close(store);
    return 1;
}

int support_fuzz_segment(const uint8_t *bytes, size_t count) {
    char text[FMT_TEXT_BYTES_MAX], path[128];
    uint8_t *copy = copy_of(bytes, count);
    for (size_t at = 0; at + FMT_BATCH_HEAD_BYTES <= count; at += STORE_PAGE_BYTES)
        if (memcmp(copy + at, "CPBATCH1", 8) == 0) {
            memcpy(copy + at + 16, store_id, sizeof store_id);
            kv_put_u32(copy + at + 48, 1);
            kv_put_u64(copy + at + 56, at);
            mend_batch(copy + at, count - at);
        }
    snprintf(path, sizeof path, "%s/seg", fuzz_dir());
    (void)mkdir(path, 0700);
    put_file("FORMAT", text, fmt_text_encode(store_id, text));
    put_file("seg/00000001.seg", copy, count);
    free(copy);
    int taken = read_store();
    clear_dir();
    (void)rmdir(fuzz_dir());
    (void)mkdir(fuzz_dir(), 0700);
    return taken;
}
