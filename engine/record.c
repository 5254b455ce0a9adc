/* engine/record.c - keys and values of the records of a session, and the block chain.
 *
 * Responsible for: what record.h promises; pure functions.
 * Not responsible for: reading or writing the store.
 */
#include "engine/record.h"

#include "engine/session.h"
#include "store/base/bytes.h"

enum { KEEPS_K = 1 }; /* flag of a block, version 3 */

#include <assert.h>
#include <string.h>

enum { OTHERS_VERSION = 2 }; /* of all records but names */

static struct record_key key_of(char kind, const void *rest, size_t size) {
    struct record_key key = {{(uint8_t)kind}, (uint32_t)(1 + size)};
    assert(size < RECORD_KEY_BYTES_MAX);
    memcpy(key.bytes + 1, rest, size);
    return key;
}

static struct record_key key_of_id(char kind, uint64_t id) {
    uint8_t bytes[8];
    kv_put_u64_be(bytes, id);
    return key_of(kind, bytes, sizeof bytes);
}

struct record_key record_key_name(const char *name) {
    return key_of('n', name, strnlen(name, RECORD_KEY_BYTES_MAX - 1));
}

struct record_key record_key_snapshot(uint64_t snapshot) {
    return key_of_id('s', snapshot);
}

struct record_key record_key_block(uint64_t lineage, uint32_t block) {
    uint8_t bytes[12];
    kv_put_u64_be(bytes, lineage);
    for (int i = 0; i < 4; i++)
        bytes[8 + i] = (uint8_t)(block >> (24 - 8 * i));
    return key_of('b', bytes, sizeof bytes);
}

struct record_key record_key_block_prefix(uint64_t lineage) {
    return key_of_id('b', lineage);
}

struct record_key record_key_page(uint64_t page) {
    return key_of_id('p', page);
}

struct record_key record_key_lineage(uint64_t lineage) {
    return key_of_id('l', lineage);
}

/* A reader of version 1 must not take a value for less than it says, so what it does not know is
 * written as version 2 or 3, and nothing else is. */
static struct kv_writer writer_of(uint8_t *out, int version) {
    struct kv_writer writer;
    kv_writer_init(&writer, out, RECORD_OUT_BYTES);
    kv_write_u8(&writer, (uint8_t)version);
    return writer;
}

static uint32_t size_of(const struct kv_writer *writer) {
    assert(!writer->failed);
    return (uint32_t)writer->off;
}

static void put_name_text(struct kv_writer *writer, const char *name) {
    size_t length = strnlen(name, IMAGE_NAME_BYTES_MAX);
    kv_write_u8(writer, (uint8_t)length);
    kv_write_bytes(writer, name, length);
}

uint32_t record_put_name(const struct record_name *record, uint8_t *out) {
    static const uint8_t nobody[IMAGE_OWNER_BYTES];
    uint8_t flags = (uint8_t)((record->may_expire != 0) | (record->pinned != 0) << 1);
    int owned = memcmp(record->owner, nobody, sizeof nobody) != 0;
    struct kv_writer writer = writer_of(out, owned ? 3 : flags != 0 ? 2 : 1);
    kv_write_u64(&writer, record->snapshot);
    kv_write_u64(&writer, record->lineage);
    kv_write_u64(&writer, record->updated_ns);
    if (flags != 0 || owned)
        kv_write_u8(&writer, flags);
    if (owned)
        kv_write_bytes(&writer, record->owner, sizeof nobody);
    return size_of(&writer);
}

uint32_t record_put_snapshot(const struct record_snapshot *record, uint8_t *out) {
    struct kv_writer writer = writer_of(out, record->tag[0] != 0 ? 2 : 1);
    put_name_text(&writer, record->name);
    kv_write_u64(&writer, record->lineage);
    kv_write_u64(&writer, record->parent);
    kv_write_u32(&writer, record->block_count);
    kv_write_u8(&writer, (uint8_t)((record->is_explicit != 0) | (record->asleep != 0) << 1));
    kv_write_u64(&writer, record->n);
    kv_write_u64(&writer, record->n_kv);
    kv_write_u64(&writer, record->created_ns);
    kv_write_bytes(&writer, record->root.bytes, KV_DIGEST_BYTES);
    kv_write_u64(&writer, record->sinks_page);
    kv_write_u8(&writer, (uint8_t)record->page_count);
    assert(record->page_count <= IMAGE_PAGES_MAX);
    for (uint32_t i = 0; i < record->page_count; i++)
        kv_write_u64(&writer, record->page_ids[i]);
    if (record->tag[0] != 0)
        put_name_text(&writer, record->tag);
    return size_of(&writer);
}

uint32_t record_put_block(const struct record_block *record, uint8_t *out) {
    struct kv_writer writer = writer_of(out, record->keeps_k              ? 3
                                             : record->dropped_count != 0 ? 2
                                                                          : 1);
    kv_write_u32(&writer, record->code_id);
    kv_write_u32(&writer, record->layout_id);
    kv_write_u64(&writer, record->first_position);
    if (record->keeps_k)
        kv_write_u8(&writer, KEEPS_K);
    if (record->keeps_k || record->dropped_count != 0)
        kv_write_u8(&writer, (uint8_t)record->dropped_count);
    for (uint32_t i = 0; i < record->dropped_count; i++) {
        kv_write_u8(&writer, record->dropped_kinds[i]);
        kv_write_bytes(&writer, record->dropped[i].bytes, KV_DIGEST_BYTES);
    }
    return size_of(&writer);
}

uint32_t record_put_page(const struct record_page *record, uint8_t *out) {
    struct kv_writer writer = writer_of(out, 1);
    kv_write_u64(&writer, record->lineage);
    kv_write_u64(&writer, record->first);
    kv_write_u32(&writer, record->tokens);
    kv_write_u32(&writer, record->references);
    return size_of(&writer);
}

uint32_t record_put_lineage(const struct record_lineage *record, uint8_t *out) {
    struct kv_writer writer = writer_of(out, record->parent != 0 ? 2 : 1);
    kv_write_u64(&writer, record->parent);
    kv_write_u64(&writer, record->cut);
    kv_write_u32(&writer, record->snapshot_count);
    put_name_text(&writer, record->name);
    return size_of(&writer);
}

/* The reader stands behind the version byte when KV_OK is returned. */
static enum kv_err begin(struct kv_reader *reader, const void *value, size_t size, const char *what,
                         struct kv_diag *diag) {
    int grown = strcmp(what, "name") == 0 || strcmp(what, "block") == 0;
    int newest = grown ? RECORD_VERSION : OTHERS_VERSION;
    kv_reader_init(reader, value, size);
    uint8_t version = kv_read_u8(reader);
    if (reader->failed || version == 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s record: empty or without a version", what);
    if (version > newest)
        return kv_diag_set(diag, KV_ERR_VERSION,
                           "%s record: needs version %u, this program reads up to %d: "
                           "use a newer program",
                           what, version, newest);
    return KV_OK;
}

/* Behind begin. */
static int version_of(const void *value) {
    return ((const uint8_t *)value)[0];
}

static int is_second(const void *value) {
    return version_of(value) == 2;
}

static enum kv_err end(const struct kv_reader *reader, int sound, const char *what,
                       struct kv_diag *diag) {
    if (reader->failed)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s record: %zu bytes are too few", what,
                           reader->size_bytes);
    if (kv_reader_left(reader) != 0)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s record: %zu bytes too many", what,
                           kv_reader_left(reader));
    if (!sound)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "%s record: a value is out of range", what);
    return KV_OK;
}

static void get_text(struct kv_reader *reader, size_t bytes_max, char *name_out) {
    uint8_t length = kv_read_u8(reader);
    name_out[0] = 0;
    if (length == 0 || length > bytes_max) {
        reader->failed = 1;
        return;
    }
    const uint8_t *at = kv_read_bytes(reader, length);
    if (at == NULL)
        return;
    memcpy(name_out, at, length);
    name_out[length] = 0;
    if (strlen(name_out) != length)
        reader->failed = 1;
}

enum kv_err record_get_name(const void *value, size_t size, struct record_name *out,
                            struct kv_diag *diag) {
    struct kv_reader reader;
    struct record_name record = {0};
    enum kv_err err = begin(&reader, value, size, "name", diag);
    if (err != KV_OK)
        return err;
    record.snapshot = kv_read_u64(&reader);
    record.lineage = kv_read_u64(&reader);
    record.updated_ns = kv_read_u64(&reader);
    uint8_t flags = version_of(value) > 1 ? kv_read_u8(&reader) : 0;
    record.may_expire = flags & 1;
    record.pinned = flags >> 1 & 1;
    int sound = record.snapshot != 0 && record.lineage != 0 && flags <= 3 &&
                (flags != 0 || !is_second(value));
    if (version_of(value) > 2) {
        static const uint8_t nobody[IMAGE_OWNER_BYTES];
        const uint8_t *owner = kv_read_bytes(&reader, sizeof record.owner);
        if (owner != NULL)
            memcpy(record.owner, owner, sizeof record.owner);
        sound &= memcmp(record.owner, nobody, sizeof nobody) != 0;
    }
    err = end(&reader, sound, "name", diag);
    if (err == KV_OK)
        *out = record;
    return err;
}

enum kv_err record_get_snapshot(const void *value, size_t size, struct record_snapshot *out,
                                struct kv_diag *diag) {
    struct kv_reader reader;
    struct record_snapshot record = {0};
    enum kv_err err = begin(&reader, value, size, "snapshot", diag);
    if (err != KV_OK)
        return err;
    get_text(&reader, IMAGE_NAME_BYTES_MAX, record.name);
    record.lineage = kv_read_u64(&reader);
    record.parent = kv_read_u64(&reader);
    record.block_count = kv_read_u32(&reader);
    uint8_t flags = kv_read_u8(&reader);
    record.is_explicit = flags & 1;
    record.asleep = flags >> 1 & 1;
    record.n = kv_read_u64(&reader);
    record.n_kv = kv_read_u64(&reader);
    record.created_ns = kv_read_u64(&reader);
    const uint8_t *root = kv_read_bytes(&reader, KV_DIGEST_BYTES);
    if (root != NULL)
        memcpy(record.root.bytes, root, KV_DIGEST_BYTES);
    record.sinks_page = kv_read_u64(&reader);
    record.page_count = kv_read_u8(&reader);
    int sound = flags <= 3 && record.page_count <= IMAGE_PAGES_MAX && record.lineage != 0 &&
                record.n <= IMAGE_TOKENS_MAX && record.n_kv <= record.n &&
                record.n - record.n_kv <= 1 &&
                record.block_count == layout_sealed_blocks(record.n_kv);
    for (uint32_t i = 0; sound && i < record.page_count; i++)
        record.page_ids[i] = kv_read_u64(&reader);
    if (sound && is_second(value)) {
        get_text(&reader, RECORD_TAG_BYTES_MAX, record.tag);
        sound = record.is_explicit;
    }
    err = end(&reader, sound, "snapshot", diag);
    if (err == KV_OK)
        *out = record;
    return err;
}

/* 0 when it is not what record_put_block writes. */
static int get_dropped(struct kv_reader *reader, struct record_block *record) {
    const uint32_t may = 1u << LAYOUT_KL | 1u << LAYOUT_VR1 | 1u << LAYOUT_VR2 | 1u << LAYOUT_VX;
    record->dropped_count = kv_read_u8(reader);
    if ((record->dropped_count == 0 && !record->keeps_k) ||
        record->dropped_count > RECORD_DROPPED_MAX)
        return 0;
    for (uint32_t i = 0; i < record->dropped_count; i++) {
        uint8_t kind = kv_read_u8(reader);
        const uint8_t *digest = kv_read_bytes(reader, KV_DIGEST_BYTES);
        if (digest == NULL || kind >= LAYOUT_META || (may >> kind & 1) == 0 ||
            (i > 0 && kind <= record->dropped_kinds[i - 1]))
            return 0;
        record->dropped_kinds[i] = kind;
        memcpy(record->dropped[i].bytes, digest, KV_DIGEST_BYTES);
    }
    return 1;
}

enum kv_err record_get_block(const void *value, size_t size, struct record_block *out,
                             struct kv_diag *diag) {
    struct kv_reader reader;
    struct record_block record = {0};
    enum kv_err err = begin(&reader, value, size, "block", diag);
    if (err != KV_OK)
        return err;
    record.code_id = kv_read_u32(&reader);
    record.layout_id = kv_read_u32(&reader);
    record.first_position = kv_read_u64(&reader);
    record.keeps_k = version_of(value) == 3;
    int sound = !record.keeps_k || kv_read_u8(&reader) == KEEPS_K;
    if (record.keeps_k || is_second(value))
        sound = sound && get_dropped(&reader, &record);
    sound = sound && !(record.keeps_k && (record_dropped(&record) >> LAYOUT_KL & 1));
    err = end(&reader, sound, "block", diag);
    if (err == KV_OK)
        *out = record;
    return err;
}

enum kv_err record_get_page(const void *value, size_t size, struct record_page *out,
                            struct kv_diag *diag) {
    struct kv_reader reader;
    struct record_page record;
    enum kv_err err = begin(&reader, value, size, "page", diag);
    if (err != KV_OK)
        return err;
    record.lineage = kv_read_u64(&reader);
    record.first = kv_read_u64(&reader);
    record.tokens = kv_read_u32(&reader);
    record.references = kv_read_u32(&reader);
    int sound = !is_second(value) && record.lineage != 0 && record.first <= IMAGE_TOKENS_MAX &&
                record.tokens >= 1 && record.tokens <= LAYOUT_PAGE_TOKENS;
    err = end(&reader, sound, "page", diag);
    if (err == KV_OK)
        *out = record;
    return err;
}

enum kv_err record_get_lineage(const void *value, size_t size, struct record_lineage *out,
                               struct kv_diag *diag) {
    struct kv_reader reader;
    struct record_lineage record;
    enum kv_err err = begin(&reader, value, size, "lineage", diag);
    if (err != KV_OK)
        return err;
    record.parent = kv_read_u64(&reader);
    record.cut = kv_read_u64(&reader);
    record.snapshot_count = kv_read_u32(&reader);
    get_text(&reader, IMAGE_NAME_BYTES_MAX, record.name);
    int sound = record.cut <= layout_sealed_blocks(IMAGE_TOKENS_MAX) &&
                (record.parent != 0) == (record.cut != 0) &&
                (record.parent != 0) == is_second(value);
    err = end(&reader, sound, "lineage", diag);
    if (err == KV_OK)
        *out = record;
    return err;
}

enum kv_err record_path_next(struct record_path *path, record_get get, void *context,
                             struct kv_diag *diag) {
    assert(path->first > 0);
    path->end = path->first;
    do {
        struct record_lineage record;
        enum kv_err err = get(context, path->next, &record, diag);
        if (err != KV_OK)
            return err;
        if (path->cut != 0 && record.cut >= path->cut)
            return kv_diag_set(diag, KV_ERR_CORRUPT,
                               "lineage %016llx is cut at block %llu, behind one cut at %llu",
                               (unsigned long long)path->next, (unsigned long long)record.cut,
                               (unsigned long long)path->cut);
        path->lineage = path->next;
        path->next = record.parent;
        path->cut = record.cut;
    } while (path->cut >= path->end);
    path->first = (uint32_t)path->cut;
    return KV_OK;
}

enum kv_err record_check_tag(const char *tag, struct kv_diag *diag) {
    size_t size = strlen(tag);
    struct kv_diag own = {""};
    if (size == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "the tag is empty: give it 1 to %d bytes",
                           RECORD_TAG_BYTES_MAX);
    if (size > RECORD_TAG_BYTES_MAX)
        return kv_diag_set(diag, KV_ERR_INVALID, "the tag has %zu bytes: use at most %d", size,
                           RECORD_TAG_BYTES_MAX);
    if (strchr(tag, '@') != NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "the tag '%s' has an '@': leave it out", tag);
    enum kv_err err = session_check_name(tag, &own);
    return err == KV_OK ? KV_OK : kv_diag_set(diag, err, "tag '%.64s': %s", tag, own.text);
}

uint32_t record_code_of(uint32_t streams) {
    return streams & 1u << LAYOUT_FP8    ? RECORD_CODE_FP8
           : streams & 1u << LAYOUT_K8I4 ? RECORD_CODE_V1
                                         : RECORD_CODE_PLANES;
}

enum kv_err record_check_code(const struct record_block *record, uint32_t streams,
                              struct kv_diag *diag) {
    uint32_t code = record_code_of(streams);
    if (record->code_id == code && record->layout_id == RECORD_LAYOUT_ID)
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_MISMATCH,
                       "written with code %u and layout %u, this session's recipe has %u and %d: "
                       "use the program that wrote it",
                       record->code_id, record->layout_id, code, RECORD_LAYOUT_ID);
}

struct kv_digest record_chain(const struct kv_digest *before, uint64_t lineage, uint32_t block,
                              const uint8_t *kinds, const struct kv_digest *digests,
                              uint32_t count) {
    struct kv_digest_state state;
    uint8_t head[8 + 4 + 4];
    uint32_t streams = 0;
    for (uint32_t i = 0; i < count; i++)
        streams |= kinds[i] < LAYOUT_STREAM_COUNT ? 1u << kinds[i] : 0;
    kv_put_u64(head, lineage);
    kv_put_u32(head + 8, block);
    kv_put_u32(head + 12, record_code_of(streams));
    kv_digest_init(&state);
    kv_digest_update(&state, before->bytes, KV_DIGEST_BYTES);
    kv_digest_update(&state, head, sizeof head);
    for (uint32_t i = 0; i < count; i++) {
        kv_digest_update(&state, &kinds[i], 1);
        kv_digest_update(&state, digests[i].bytes, KV_DIGEST_BYTES);
    }
    return kv_digest_final(&state);
}

uint32_t record_dropped(const struct record_block *record) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < record->dropped_count; i++)
        mask |= 1u << record->dropped_kinds[i];
    return mask;
}

struct kv_digest record_chain_block(const struct kv_digest *before, const struct record_key *key,
                                    const struct record_block *record, const uint8_t *kinds,
                                    const struct kv_digest *digests, uint32_t count) {
    enum { MOST = RECORD_BLOCK_EXTENTS_MAX + RECORD_DROPPED_MAX };
    uint8_t all_kinds[MOST];
    struct kv_digest all[MOST];
    uint32_t at = 0;
    uint32_t next = 0;
    assert(count <= RECORD_BLOCK_EXTENTS_MAX && key->size == 13);
    for (uint32_t i = 0; i <= count; i++) {
        /* Planes stand by number behind ids and META. */
        while (next < record->dropped_count &&
               (i == count || (kinds[i] < LAYOUT_META && record->dropped_kinds[next] < kinds[i]))) {
            all_kinds[at] = record->dropped_kinds[next];
            all[at++] = record->dropped[next++];
        }
        if (i == count)
            break;
        all_kinds[at] = kinds[i];
        all[at++] = digests[i];
    }
    uint32_t block = (uint32_t)key->bytes[9] << 24 | (uint32_t)key->bytes[10] << 16 |
                     (uint32_t)key->bytes[11] << 8 | key->bytes[12];
    return record_chain(before, kv_get_u64_be(key->bytes + 1), block, all_kinds, all, at);
}
