/* tests/support_harm_work.c - bytes and numbers of a session changed where it lies.
 *
 * Responsible for: what support_harm_work.h says.
 * Not responsible for: waking and looking.
 */
#include "tests/support_harm_work.h"

#include "engine/engine_inner.h"
#include "store/store_batch.h"
#include "store/store_read.h"
#include "tests/support_tally.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PARTS_MAX = RECORD_BLOCK_EXTENTS_MAX };

static const char *const place_names[HARM_PLACES] = {"disk", "recorded", "published"};

const char *harm_place_name(enum harm_place place) {
    return place_names[place];
}

/* --- the store */

static uint8_t *read_extent(struct harm *harm, const struct store_extent *extent) {
    const struct store_read_whole whole = {
        .extent = extent, .alloc = kv_alloc_system(), .label = "an extent to be harmed"};
    uint8_t *bytes = NULL;
    struct kv_diag diag = {""};

    tally_need(store_read_whole(harm->store, &whole, &bytes, &diag), &diag, "store_read_whole");
    return bytes;
}

/* What is put into a record in the place of what is there; by kind. */
struct instead {
    const uint8_t *bytes;
    uint64_t size;
};

static void put_record(struct harm *harm, struct store_batch *batch, const struct record_key *key,
                       const struct instead instead[LAYOUT_STREAM_COUNT],
                       const struct record_page *page) {
    struct store_record record;
    struct store_part parts[PARTS_MAX];
    struct iovec pieces[PARTS_MAX];
    uint8_t *own[PARTS_MAX] = {NULL}, value[RECORD_OUT_BYTES];
    struct kv_diag diag = {""};

    tally_need(store_get(harm->store, key->bytes, key->size, &record, &diag), &diag, "store_get");
    for (uint32_t i = 0; i < record.extent_count; i++) {
        const struct store_extent *extent = &record.extents[i];
        int other = extent->kind < LAYOUT_STREAM_COUNT && instead[extent->kind].bytes != NULL;
        own[i] = other ? NULL : read_extent(harm, extent);
        pieces[i] =
            other ? (struct iovec){(void *)instead[extent->kind].bytes, instead[extent->kind].size}
                  : (struct iovec){own[i], extent->raw_bytes};
        parts[i] = (struct store_part){extent->kind, STORE_RAW, &pieces[i], 1, 0};
    }
    memcpy(value, record.value, record.value_bytes);
    const struct store_put put = {.key = key->bytes,
                                  .key_bytes = key->size,
                                  .value = value,
                                  .value_bytes =
                                      page ? record_put_page(page, value) : record.value_bytes,
                                  .parts = parts,
                                  .part_count = record.extent_count};
    tally_need(store_batch_put(batch, &put, &diag), &diag, "store_batch_put");
    for (uint32_t i = 0; i < record.extent_count; i++)
        kv_alloc_release(kv_alloc_system(), own[i]);
    store_record_release(harm->store, &record);
}

static struct store_batch *begin_batch(struct harm *harm) {
    struct store_batch *batch = NULL;
    struct kv_diag diag = {""};

    snapshot_drain(harm->snapshot);
    tally_need(store_batch_begin(harm->store, 0, &batch, &diag), &diag, "store_batch_begin");
    return batch;
}

static void commit(struct store_batch *batch) {
    struct kv_diag diag = {""};

    tally_need(store_batch_commit(batch, NULL, &diag), &diag, "store_batch_commit");
}

/* Extents have moved. */
static void read_truth(struct harm *harm) {
    struct harm_user *user = &harm->users[0];
    struct kv_diag diag = {""};

    rest_plan_release(&user->truth);
    user->truth.ram = 0;
    tally_need(rest_plan_image(harm->store, kv_alloc_system(), user->name, 0, &user->truth, &diag),
               &diag, "plan");
    tally_need(rest_plan_records(harm->store, &user->truth, &diag), &diag, "plan");
}

void harm_store_raw(struct harm *harm) {
    static const struct instead nothing[LAYOUT_STREAM_COUNT];
    const struct rest_plan *plan = &harm->users[0].truth;
    struct store_batch *batch = begin_batch(harm);

    for (uint32_t block = 0; block < plan->image.block_count; block++) {
        const struct record_key key = record_key_block(plan->image.lineage, block);
        put_record(harm, batch, &key, nothing, NULL);
    }
    for (uint32_t page = 0; page < plan->image.page_count; page++) {
        const struct record_key key = record_key_page(plan->image.pages[page].page_id);
        put_record(harm, batch, &key, nothing, NULL);
    }
    commit(batch);
    read_truth(harm);
}

/* The chain over the block records as they are now. */
static struct kv_digest chain_of(struct harm *harm, uint64_t lineage, uint32_t count) {
    struct kv_digest chain = {{0}};
    struct kv_diag diag = {""};

    for (uint32_t block = 0; block < count; block++) {
        const struct record_key key = record_key_block(lineage, block);
        struct store_record record;
        struct record_block value;
        uint8_t kinds[PARTS_MAX];
        struct kv_digest digests[PARTS_MAX];
        tally_need(store_get(harm->store, key.bytes, key.size, &record, &diag), &diag, "store_get");
        tally_need(record_get_block(record.value, record.value_bytes, &value, &diag), &diag,
                   "record_get_block");
        for (uint32_t i = 0; i < record.extent_count; i++) {
            kinds[i] = record.extents[i].kind;
            digests[i] = record.extents[i].digest;
        }
        chain = record_chain_block(&chain, &key, &value, kinds, digests, record.extent_count);
        store_record_release(harm->store, &record);
    }
    return chain;
}

/* --- the device */

static void settle(struct harm *harm) {
    struct kv_diag diag = {"a lane failed"};

    tally_need(device_wait(harm->engine->device, DEVICE_STEP), &diag, "device_wait");
    tally_need(device_wait(harm->engine->device, DEVICE_IN), &diag, "device_wait");
}

static int part_of(const struct harm_work *work, uint32_t block, enum layout_stream stream,
                   struct transfer_part *part_out) {
    struct transfer_part parts[LAYOUT_STREAM_COUNT];
    uint32_t count = transfer_block_parts(transfer_session_block(work->session, block), parts);

    for (uint32_t i = 0; i < count; i++)
        if (parts[i].stream == stream)
            return *part_out = parts[i], 1;
    return 0;
}

/* All eight slots of a window page out, or in. */
static void copy_page(const struct harm_work *work, uint32_t page, uint8_t *whole, int in) {
    struct device_copy copies[LAYOUT_PAGE_SLOTS];
    const struct slots *slots = &work->harm->engine->slots;
    struct kv_diag diag = {"a copy failed"};

    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++) {
        uint8_t *at = slots_at(slots, work->session->window.pages[page].slot[i]);
        uint8_t *here = whole + i * slots->slot_bytes;
        copies[i] = in ? (struct device_copy){at, here, slots->slot_bytes}
                       : (struct device_copy){here, at, slots->slot_bytes};
    }
    tally_need(
        in ? device_copy_in(work->harm->engine->device, DEVICE_STEP, copies, LAYOUT_PAGE_SLOTS)
           : device_copy_out(work->harm->engine->device, DEVICE_STEP, copies, LAYOUT_PAGE_SLOTS),
        &diag, "window page");
}

static void move_page(const struct harm_work *work, uint32_t page, uint8_t *dense, int in) {
    const struct slots *slots = &work->harm->engine->slots;
    uint32_t tokens = work->harm->users[0].truth.image.pages[page].tokens;
    uint8_t *whole = malloc(LAYOUT_PAGE_SLOTS * slots->slot_bytes), *at[LAYOUT_PAGE_SLOTS];

    for (uint32_t i = 0; i < LAYOUT_PAGE_SLOTS; i++)
        at[i] = whole + i * slots->slot_bytes;
    copy_page(work, page, whole, 0);
    if (in) {
        layout_unpack(&slots->pool.geometry, dense, tokens, at);
        copy_page(work, page, whole, 1);
    } else {
        layout_pack(&slots->pool.geometry, (const uint8_t *const *)at, tokens, dense);
    }
    free(whole);
}

/* --- reading */

static void keep(struct harm_bytes *bytes, uint64_t size) {
    bytes->size = size;
    bytes->was = malloc(size);
    bytes->now = malloc(size);
}

static void from_store(struct harm *harm, const struct store_extent *extent,
                       struct harm_bytes *bytes) {
    uint8_t *read = read_extent(harm, extent);

    keep(bytes, extent->raw_bytes);
    memcpy(bytes->was, read, bytes->size);
    kv_alloc_release(kv_alloc_system(), read);
}

void harm_begin(struct harm *harm, enum harm_place place, struct session *session,
                struct harm_work *work_out) {
    struct kv_diag diag = {""};

    *work_out = (struct harm_work){.harm = harm, .place = place, .session = session};
    if (place == HARM_RECORDED)
        tally_need(snap_image_read(harm->store, kv_alloc_system(), harm->users[0].truth.snapshot,
                                   &work_out->image, &diag),
                   &diag, "image");
    if (place != HARM_PUBLISHED)
        return;
    work_out->before = malloc(sizeof *work_out->before);
    *work_out->before = *session;
    work_out->views = malloc(session->block_count * sizeof *work_out->views);
    memcpy(work_out->views, session->views, session->block_count * sizeof *work_out->views);
}

uint8_t *harm_stream(struct harm_work *work, uint32_t block, enum layout_stream stream) {
    struct harm_bytes *bytes = &work->streams[block][stream];
    const struct store_extent *extent =
        rest_plan_extent(&work->harm->users[0].truth.blocks[block], stream);
    struct transfer_part part;
    struct kv_diag diag = {"a copy failed"};

    if (bytes->now)
        return bytes->now;
    if (work->place == HARM_PUBLISHED) {
        if (!part_of(work, block, stream, &part))
            return NULL;
        keep(bytes, part.size);
        settle(work->harm);
        tally_need(transfer_part_read(work->harm->engine, &part, bytes->was), &diag, "a stream");
    } else {
        if (!extent)
            return NULL;
        from_store(work->harm, extent, bytes);
    }
    memcpy(bytes->now, bytes->was, bytes->size);
    return bytes->now;
}

uint8_t *harm_page(struct harm_work *work, uint32_t page) {
    const struct rest_plan *truth = &work->harm->users[0].truth;
    struct harm_bytes *bytes = &work->pages[page];

    if (bytes->now)
        return bytes->now;
    if (work->place == HARM_PUBLISHED) {
        keep(bytes,
             layout_dense_bytes(&truth->image.model.geometry, truth->image.pages[page].tokens));
        move_page(work, page, bytes->was, 0);
    } else {
        from_store(work->harm, &truth->pages[page], bytes);
    }
    memcpy(bytes->now, bytes->was, bytes->size);
    return bytes->now;
}

const uint8_t *harm_thief(struct harm_work *work, uint32_t block, enum layout_stream stream) {
    const struct store_extent *extent =
        rest_plan_extent(&work->harm->users[1].truth.blocks[block], stream);
    struct harm_bytes *bytes = &work->foreign[stream];

    if (extent && !bytes->was)
        from_store(work->harm, extent, bytes);
    return bytes->was;
}

/* --- writing */

static void write_disk(const struct harm *harm, const struct store_extent *extent,
                       const uint8_t *bytes) {
    struct kv_diag diag = {"a segment cannot be written"};
    char path[512];

    snprintf(path, sizeof path, "%s/seg/%08u.seg", harm->settings.dir, extent->segment);
    int file = open(path, O_RDWR | O_CLOEXEC);
    int good =
        file >= 0 && extent->stored_bytes == extent->raw_bytes &&
        pwrite(file, bytes, extent->raw_bytes, (off_t)extent->off) == (ssize_t)extent->raw_bytes &&
        fsync(file) == 0;
    if (file >= 0)
        close(file);
    tally_need(good ? KV_OK : KV_ERR_IO, &diag, path);
}

static void write_record(struct harm_work *work, int back) {
    struct harm *harm = work->harm;
    const struct rest_plan *truth = &harm->users[0].truth;
    struct snap_image *image = back ? &harm->users[0].stored : &work->image;
    struct store_batch *batch = begin_batch(harm);
    struct kv_diag diag = {""};

    for (uint32_t block = 0; block < truth->image.block_count; block++) {
        const struct record_key key = record_key_block(truth->image.lineage, block);
        struct instead instead[LAYOUT_STREAM_COUNT] = {{0}};
        uint32_t count = 0;
        for (uint32_t stream = 0; stream <= LAYOUT_META; stream++) {
            const struct harm_bytes *bytes = &work->streams[block][stream];
            instead[stream] = (struct instead){back ? bytes->was : bytes->now, bytes->size};
            count += bytes->now != NULL;
        }
        if (count)
            put_record(harm, batch, &key, instead, NULL);
    }
    for (uint32_t page = 0; page < truth->image.page_count; page++) {
        const struct harm_bytes *bytes = &work->pages[page];
        const struct image_page *was = &truth->image.pages[page];
        const struct record_key key = record_key_page(was->page_id);
        uint32_t tokens = work->page_tokens[page] && !back ? work->page_tokens[page] : was->tokens;
        const struct record_page value = {truth->image.lineage, was->first, tokens, 1};
        struct instead instead[LAYOUT_STREAM_COUNT] = {{0}};
        if (!bytes->now)
            continue;
        instead[LAYOUT_PAGE] =
            (struct instead){back ? bytes->was : bytes->now,
                             layout_dense_bytes(&truth->image.model.geometry, tokens)};
        put_record(harm, batch, &key, instead, &value);
        image->image.pages[page].tokens = tokens;
        image->image.pages[page].digest =
            kv_digest_of(instead[LAYOUT_PAGE].bytes, instead[LAYOUT_PAGE].size);
    }
    commit(batch);
    if (!work->keep_chain)
        image->image.block_chain = chain_of(harm, truth->image.lineage, image->image.block_count);
    image->record.n = image->image.n;
    image->record.n_kv = image->image.n_kv;
    image->record.page_count = image->image.page_count;
    tally_need(snap_image_encode(image, kv_alloc_system(), &diag), &diag, "image");
    batch = begin_batch(harm);
    tally_need(snap_image_put(batch, truth->snapshot, image, &diag), &diag, "image");
    commit(batch);
}

static void write_device(struct harm_work *work, int back) {
    struct kv_diag diag = {"a copy failed"};
    struct transfer_part part;

    settle(work->harm);
    for (uint32_t block = 0; block < work->harm->settings.blocks; block++)
        for (uint32_t stream = 0; stream <= LAYOUT_META; stream++) {
            const struct harm_bytes *bytes = &work->streams[block][stream];
            if (bytes->now && part_of(work, block, stream, &part))
                tally_need(
                    transfer_part_write(work->harm->engine, &part, back ? bytes->was : bytes->now),
                    &diag, "a stream");
        }
    for (uint32_t page = 0; page < IMAGE_PAGES_MAX; page++)
        if (work->pages[page].now)
            move_page(work, page, back ? work->pages[page].was : work->pages[page].now, 1);
    settle(work->harm);
}

static void write_all_disk(struct harm_work *work, int back) {
    const struct rest_plan *truth = &work->harm->users[0].truth;

    for (uint32_t block = 0; block < work->harm->settings.blocks; block++)
        for (uint32_t stream = 0; stream <= LAYOUT_META; stream++) {
            const struct harm_bytes *bytes = &work->streams[block][stream];
            if (bytes->now && memcmp(bytes->was, bytes->now, bytes->size) != 0)
                write_disk(work->harm, rest_plan_extent(&truth->blocks[block], stream),
                           back ? bytes->was : bytes->now);
        }
    for (uint32_t page = 0; page < IMAGE_PAGES_MAX; page++)
        if (work->pages[page].now)
            write_disk(work->harm, &truth->pages[page],
                       back ? work->pages[page].was : work->pages[page].now);
}

static void put_all(struct harm_work *work, int back) {
#ifdef BREAK_HARM_INJECT
    return;
#endif
    if (work->place == HARM_DISK)
        write_all_disk(work, back);
    else if (work->place == HARM_RECORDED)
        write_record(work, back);
    else
        write_device(work, back);
}

static void count_changed(struct harm_work *work, const struct harm_bytes *bytes) {
    for (uint64_t i = 0; bytes->now && i < bytes->size; i++)
        work->changed_bytes += bytes->was[i] != bytes->now[i];
}

int harm_apply(struct harm_work *work) {
    work->changed_bytes = 0;
    for (uint32_t block = 0; block < HARM_BLOCKS_MAX; block++)
        for (uint32_t stream = 0; stream <= LAYOUT_META; stream++)
            count_changed(work, &work->streams[block][stream]);
    for (uint32_t page = 0; page < IMAGE_PAGES_MAX; page++)
        count_changed(work, &work->pages[page]);
    put_all(work, 0);
    return work->changed_bytes > 0 || work->changed;
}

static void forget(struct harm_bytes *bytes) {
    free(bytes->was);
    free(bytes->now);
    *bytes = (struct harm_bytes){0};
}

void harm_undo(struct harm_work *work) {
    const struct image *image = &work->harm->users[0].truth.image;
    struct session *session = work->session;

    if (work->place == HARM_PUBLISHED) {
        session->n = image->n;
        session->n_kv = image->n_kv;
        session->block_count = work->before->block_count;
        session->window = work->before->window;
        memcpy(session->ids, image->ids, image->n * sizeof *image->ids);
        memcpy(session->views, work->views, session->block_count * sizeof *work->views);
    }
    put_all(work, 1);
    for (uint32_t block = 0; block < HARM_BLOCKS_MAX; block++)
        for (uint32_t stream = 0; stream <= LAYOUT_META; stream++)
            forget(&work->streams[block][stream]);
    for (uint32_t page = 0; page < IMAGE_PAGES_MAX; page++)
        forget(&work->pages[page]);
    for (uint32_t stream = 0; stream <= LAYOUT_META; stream++)
        forget(&work->foreign[stream]);
    free(work->before);
    free(work->views);
    if (work->place == HARM_RECORDED) {
        snap_image_release(&work->image, kv_alloc_system());
        read_truth(work->harm);
    }
}
