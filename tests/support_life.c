/* tests/support_life.c - store, engine, snapshot and restore put together over the tiny model.
 *
 * Responsible for: what support_life.h says.
 * Not responsible for: what is compared.
 */
#include "tests/support_life.h"

#include "engine/engine_inner.h"
#include "store/store_batch.h"
#include "store/store_ram.h"
#include "store/store_read.h"
#include "tests/support_tiny_model.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct life_options life_default(const char *dir) {
    struct life_options options = {.dir = dir,
                                   .engine = support_engine_default(),
                                   .queue_max = 64,
                                   .bytes_max = STORE_BYTES_UNLIMITED,
                                   .deadline_ns = UINT64_C(30000000000),
                                   .model_seed = 1,
                                   .model_layers = 2};
    options.engine.poison = 1;
    options.engine.shuffle_seed = 7;
    return options;
}

/* --- hooks reach the life through a cell that lives as long as the engine */

struct life_hook {
    struct snapshot *snapshot;
    struct restore_source source;
};

static void block_sealed(void *context, struct session *session, struct block *block) {
    struct life_hook *hook = context;
    if (hook->snapshot != NULL)
        snapshot_block_sealed(hook->snapshot, session, block);
    else
        transfer_block_failed(block);
}

static void planes_wanted(void *context, struct session *session, struct block *block) {
    struct life_hook *hook = context;
    restore_planes_wanted(&hook->source, session, block);
}

static void leaving(void *context, struct session *session) {
    const struct life_hook *hook = context;
    restore_keep(&hook->source, session);
}

static int slots_low(void *context, struct session *session, uint32_t slots) {
    struct life_hook *hook = context;
    (void)session;
    if (hook->snapshot == NULL)
        return 0;
    snapshot_drain(hook->snapshot);
    engine_apply(hook->source.engine);
    return engine_relieve(hook->source.engine, slots) > 0;
}

/* Tensors come last in the file; a low bit of a quant keeps every number finite. */
static uint8_t *make_model(const struct life_options *options, struct layout_geometry *geometry_out,
                           size_t *size_out) {
    struct tiny_model_options model = tiny_model_default();
    if (options->real_model) {
        testing_need_model();
        *geometry_out = (struct layout_geometry){30, 3, 64};
        return tiny_model_read_real(size_out);
    }
    model.seed = options->model_seed;
    model.layers = options->model_layers;
    if (options->model_heads != 0)
        model.heads = model.kv_heads = options->model_heads;
    *geometry_out = (struct layout_geometry){model.layers, model.kv_heads, model.head_dim};
    uint8_t *file = tiny_model_make(&model, size_out);
    if (file != NULL)
        file[*size_out - 1] ^= options->change_tensor_byte != 0;
    return file;
}

static const struct kv_alloc *alloc_of(const struct life_options *options) {
    return options->alloc != NULL ? options->alloc : kv_alloc_system();
}

static void open_engine(const struct life_options *options, struct life *life) {
    const struct support_engine_options *engine = &options->engine;
    struct engine_settings settings = {.alloc = alloc_of(options),
                                       .clock = kv_clock_system(),
                                       .hooks = {.context = life->hook,
                                                 .block_sealed = block_sealed,
                                                 .planes_wanted = planes_wanted,
                                                 .slots_low = slots_low},
                                       .simd = engine->simd,
                                       .threads = engine->threads,
                                       .sessions_max = engine->sessions_max,
                                       .slots_low_percent = options->slots_low_percent,
                                       .slots_high_percent = options->slots_high_percent,
                                       .reserve_slots = engine->reserve,
                                       .poison_free_slots = engine->poison,
                                       .shuffle_seed = engine->shuffle_seed};
    struct kv_diag diag = {""};
    struct layout_geometry geometry;
    size_t size;
    uint8_t *file = make_model(options, &geometry, &size);
    assert_non_null(file);
    settings.slot_budget_bytes =
        engine->slots / 8 * (8 * layout_slot_bytes(&geometry) + layout_meta_frame_bytes(&geometry));
    if (engine_open(&settings, file, size, &life->engine, &diag) != KV_OK)
        fail_msg("engine_open: %s", diag.text);
    tiny_model_drop(file);
}

void life_open(const struct life_options *options, struct life *life_out) {
    struct life life = {0};
    struct kv_diag diag = {""};
    struct store_options store = store_options_usual(options->dir, "test");
    store.alloc = alloc_of(options);
    store.bytes_max = options->bytes_max;
    store.segment_bytes = 4 << 20;
    if (options->limited)
        store_options_limit(&store, options->bytes_max);
    store.deadline_ns = options->deadline_ns;
    if (options->door != NULL)
        store.door = options->door;
    if (store_open(&store, &life.store, &diag) != KV_OK)
        fail_msg("store_open: %s", diag.text);
    life.hook = kv_alloc_zeroed(kv_alloc_system(), 1, sizeof *life.hook);
    assert_non_null(life.hook);
    open_engine(options, &life);
    life.source = (struct restore_source){.store = life.store,
                                          .engine = life.engine,
                                          .alloc = alloc_of(options),
                                          .clock = kv_clock_system()};
    assert_int_equal(restore_refine_open(alloc_of(options), &life.source.refine), KV_OK);
    life.hook->source = life.source;
    const struct snapshot_settings settings = {.store = life.store,
                                               .engine = life.engine,
                                               .alloc = alloc_of(options),
                                               .clock = kv_clock_system(),
                                               .queue_max = options->queue_max,
                                               .helpers = options->helpers,
                                               .leaving = leaving,
                                               .leaving_context = life.hook};
    if (store_ram_open(life.store, options->ram_bytes, &diag) != KV_OK)
        fail_msg("store_ram_open: %s", diag.text);
    restore_lie(life.store, life.engine);
    if (snapshot_open(&settings, &life.snapshot, &diag) != KV_OK)
        fail_msg("snapshot_open: %s", diag.text);
    snapshot_write_budget(life.snapshot, options->bytes_per_second, 0);
    life.hook->snapshot = life.snapshot;
    *life_out = life;
}

void life_begin(char dir_out[TESTING_PATH_BYTES], struct life *life_out) {
    testing_temp_dir(dir_out);
    const struct life_options options = life_default(dir_out);
    life_open(&options, life_out);
}

void life_close(struct life *life) {
    life->hook->snapshot = NULL;
    snapshot_close(life->snapshot);
    while (engine_apply(life->engine))
        ;
    store_close(life->store);
    engine_close(life->engine);
    restore_refine_close(life->source.refine);
    kv_alloc_release(kv_alloc_system(), life->hook);
    memset(life, 0, sizeof *life);
}

void life_rig_open(struct life_rig *rig) {
    testing_temp_dir(rig->dir);
    rig->faulty = faulty_io_make(io_best_door());
    rig->options = life_default(rig->dir);
    rig->options.door = faulty_io_door(rig->faulty);
    life_open(&rig->options, &rig->life);
}

void life_rig_close(struct life_rig *rig) {
    life_close(&rig->life);
    faulty_io_drop(rig->faulty);
}

void life_rig_reopen(struct life_rig *rig) {
    life_close(&rig->life);
    life_open(&rig->options, &rig->life);
}

struct session *life_session(struct life *life, const char *name, enum image_recipe recipe) {
    struct session_settings settings = support_engine_greedy(name, recipe);
    struct session *session = NULL;
    struct kv_diag diag = {""};
    if (recipe == IMAGE_RECIPE_V3)
        settings.policy = (struct image_policy){
            .recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};
    if (session_create(life->engine, &settings, &session, &diag) != KV_OK)
        fail_msg("session_create: %s", diag.text);
    return session;
}

/* --- talking */

struct rows {
    struct kv_digest_state state;
    size_t row_bytes;
};

static void take_row(void *context, uint64_t position, const float *logits) {
    struct rows *rows = context;
    kv_digest_update(&rows->state, &position, sizeof position);
    kv_digest_update(&rows->state, logits, rows->row_bytes);
}

void life_say(struct session *session, uint64_t seed, uint32_t count, uint32_t tokens,
              struct life_turn *turn_out) {
    struct engine_model model;
    struct session_info before, after;
    struct rows rows;
    uint32_t *ids = malloc(count * sizeof *ids);
    assert_non_null(ids);
    engine_model(session_engine(session), &model);
    support_engine_ids(seed, 256, ids, count);
    kv_digest_init(&rows.state);
    rows.row_bytes = model.vocab_count * sizeof(float);
    session_observe(session, take_row, &rows);
    if (count != 0)
        support_engine_feed(session, ids, count);
    session_info(session, &before);
    if (tokens != 0)
        support_engine_generate(session, tokens);
    session_observe(session, NULL, NULL);
    session_info(session, &after);
    free(ids);
    if (turn_out == NULL)
        return;
    memset(turn_out, 0, sizeof *turn_out);
    turn_out->rows = kv_digest_final(&rows.state);
    for (uint64_t i = before.n; i < after.n && turn_out->id_count < 64; i++)
        turn_out->ids[turn_out->id_count++] = after.ids[i];
}

void life_same_turn(const struct life_turn *a, const struct life_turn *b) {
    assert_int_equal(a->id_count, b->id_count);
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
    assert_memory_equal(a->rows.bytes, b->rows.bytes, KV_DIGEST_BYTES);
}

static void take_likeliest(void *context, uint64_t row, const float *logits) {
    uint32_t *best = context;
    (void)row;
    best[1] = 0;
    for (uint32_t i = 1; i < best[0]; i++)
        if (logits[i] > logits[best[1]])
            best[1] = i;
}

struct life_twin life_twin(struct session *session) {
    enum { COUNT = sizeof((struct life_twin *)0)->ids / sizeof(uint32_t) };
    struct image_fingerprint print;
    struct engine_model model;
    struct session_info info;
    struct life_twin twin = {0};
    struct kv_diag diag = {""};
    uint32_t asked[COUNT + 1], count = 0;
    engine_model(session_engine(session), &model);
    session_info(session, &info);
    if (session_fingerprint(session, 0, &print, &diag) != KV_OK)
        fail_msg("session_fingerprint: %s", diag.text);
    twin.logits = print.logits;
    if (info.n == info.n_kv)
        asked[count++] = info.ids[info.n - 1];
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t best[2] = {model.vocab_count, 0};
        const struct session_ask ask = {
            .ids = asked, .count = count, .rows_first = count > 0 ? count - 1 : 0};
        if (session_ask(session, &ask, take_likeliest, best, &diag) != KV_OK)
            fail_msg("session_ask: %s", diag.text);
        twin.ids[i] = asked[count++] = best[1];
    }
    return twin;
}

void life_same_twin(const struct life_twin *a, const struct life_twin *b) {
    assert_memory_equal(a->logits.bytes, b->logits.bytes, KV_DIGEST_BYTES);
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
}

struct receipt life_save(struct life *life, struct session *session, int is_explicit) {
    const struct snapshot_options options = {.is_explicit = is_explicit};
    struct receipt receipt;
    struct kv_diag diag = {""};
    if (snapshot_save(life->snapshot, session, &options, &receipt, &diag) != KV_OK)
        fail_msg("snapshot_save: %s", diag.text);
    return receipt;
}

struct receipt life_sleep(struct life *life, struct session *session) {
    struct receipt receipt;
    struct kv_diag diag = {""};
    if (snapshot_sleep(life->snapshot, session, 0, &receipt, &diag) != KV_OK)
        fail_msg("snapshot_sleep: %s", diag.text);
    return receipt;
}

struct session *life_wake(struct life *life, const char *name, struct receipt *receipt_out) {
    const struct restore_options options = {0};
    struct session *session = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    if (restore_wake(&life->source, name, &options, &session, &receipt, &diag) != KV_OK)
        fail_msg("restore_wake: %s", diag.text);
    if (receipt_out != NULL)
        *receipt_out = receipt;
    return session;
}

const char *life_refuse(struct life *life, const char *name, enum kv_err expected,
                        struct kv_diag *diag) {
    const struct restore_options options = {0};
    struct session *session = NULL;
    struct receipt receipt;
    enum kv_err err = restore_wake(&life->source, name, &options, &session, &receipt, diag);
    if (err != expected)
        fail_msg("expected %s, got %s: %s", kv_err_name(expected), kv_err_name(err), diag->text);
    assert_int_equal(receipt.err, expected);
    assert_null(session);
    assert_null(session_find(life->engine, name));
    return diag->text;
}

int life_wake_short(struct life *life, uint64_t k, struct receipt *receipt_out) {
    struct restore_source source = life->source;
    struct testing_alloc failing;
    struct session *session = NULL;
    struct kv_diag diag = {""};
    testing_alloc_init(&failing, k);
    source.alloc = &failing.alloc;
    enum kv_err err =
        restore_wake(&source, "chat", &(struct restore_options){0}, &session, receipt_out, &diag);
    assert_int_equal(failing.live_count, 0);
    if (failing.failed_count == 0) {
        assert_int_equal(err, KV_OK);
        assert_true(k > 8);
        return 1;
    }
    assert_int_equal(err, KV_ERR_NOMEM);
    assert_true(diag.text[0] != 0);
    return 0;
}

static int want_all(void *context, uint64_t first, uint32_t tokens) {
    (void)context;
    (void)first;
    (void)tokens;
    return 1;
}

struct kv_digest life_resident(struct session *session) {
    struct kv_digest_state state;
    kv_digest_init(&state);
    kv_digest_update(&state, session->ids, session->n * sizeof *session->ids);
    for (uint32_t b = 0; b < session->block_count; b++) {
        struct transfer_part parts[LAYOUT_STREAM_COUNT];
        uint32_t read = layout_tier_streams(session->views[b].tier);
        uint32_t count = transfer_block_parts(session->blocks[b], parts);
        for (uint32_t i = 0; i < count; i++) {
            struct kv_digest digest;
            assert_int_equal(transfer_digests(session->engine, &parts[i], 1, &digest), KV_OK);
            if (read & 1u << parts[i].stream)
                kv_digest_update(&state, digest.bytes, KV_DIGEST_BYTES);
        }
    }
    struct transfer_frozen frozen;
    struct kv_diag diag = {""};
    if (transfer_freeze(session, want_all, NULL, &frozen, &diag) != KV_OK)
        fail_msg("transfer_freeze: %s", diag.text);
    kv_digest_update(&state, frozen.sinks.bytes, frozen.sinks.size);
    for (uint32_t p = 0; p < frozen.page_count; p++)
        kv_digest_update(&state, frozen.pages[p].bytes, frozen.pages[p].size);
    transfer_frozen_release(session->engine, &frozen);
    return kv_digest_final(&state);
}

/* --- stored records */

struct record_snapshot life_head(struct life *life, const char *name, uint64_t *snapshot_out) {
    struct snapshot_entry entry;
    struct kv_diag diag = {""};
    if (snapshot_find(life->store, kv_alloc_system(), name, &entry, &diag) != KV_OK)
        fail_msg("snapshot_find: %s", diag.text);
    if (snapshot_out != NULL)
        *snapshot_out = entry.snapshot;
    return entry.head;
}

static struct store_record get(struct life *life, const struct record_key *key) {
    struct store_record record;
    struct kv_diag diag = {""};
    if (store_get(life->store, key->bytes, key->size, &record, &diag) != KV_OK)
        fail_msg("store_get: %s", diag.text);
    return record;
}

static struct store_batch *begin(struct life *life) {
    struct store_batch *batch = NULL;
    snapshot_drain(life->snapshot);
    assert_int_equal(store_batch_begin(life->store, 0, &batch, NULL), KV_OK);
    return batch;
}

static void put_copy(struct life *life, const struct store_record *record, uint32_t keep,
                     const struct record_key *key) {
    struct store_part parts[32];
    struct iovec pieces[32];
    size_t count = 0;
    for (uint32_t i = 0; i < record->extent_count; i++) {
        if (!(keep & 1u << i))
            continue;
        const struct store_extent *extent = &record->extents[i];
        pieces[count] = (struct iovec){kv_alloc_aligned(kv_alloc_system(), extent->raw_bytes, 4096),
                                       extent->raw_bytes};
        struct store_read read = {
            .extent = extent, .pieces = &pieces[count], .piece_count = 1, .verify = 1};
        const struct store_read_args args = {.reads = &read, .count = 1};
        assert_int_equal(store_read(life->store, &args, NULL, NULL), KV_OK);
        parts[count] = (struct store_part){extent->kind, STORE_RAW, &pieces[count], 1, 0};
        count++;
    }
    const struct store_put put = {.key = key->bytes,
                                  .key_bytes = key->size,
                                  .value = record->value,
                                  .value_bytes = record->value_bytes,
                                  .parts = parts,
                                  .part_count = count};
    struct store_batch *batch = begin(life);
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
    for (size_t i = 0; i < count; i++)
        kv_alloc_release(kv_alloc_system(), pieces[i].iov_base);
}

void life_rewrite(struct life *life, const struct record_key *key, life_change change,
                  void *context) {
    struct store_record record = get(life, key);
    put_copy(life, &record, change(context, &record), key);
    store_record_release(life->store, &record);
}

void life_copy(struct life *life, const struct record_key *from, const struct record_key *to) {
    struct store_record record = get(life, from);
    put_copy(life, &record, UINT32_MAX, to);
    store_record_release(life->store, &record);
}

void life_delete(struct life *life, const struct record_key *key) {
    struct store_batch *batch = begin(life);
    assert_int_equal(store_batch_delete(batch, key->bytes, key->size, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

void life_replace_image(struct life *life, uint64_t snapshot, const void *bytes, size_t size,
                        const struct kv_digest *root) {
    struct record_key key = record_key_snapshot(snapshot);
    struct store_record stored = get(life, &key);
    struct record_snapshot record;
    uint8_t value[RECORD_OUT_BYTES];
    assert_int_equal(record_get_snapshot(stored.value, stored.value_bytes, &record, NULL), KV_OK);
    store_record_release(life->store, &stored);
    record.root = *root;
    const struct iovec piece = {(void *)bytes, size};
    const struct store_part part = {RECORD_KIND_IMAGE, STORE_RAW, &piece, 1, 0};
    const struct store_put put = {.key = key.bytes,
                                  .key_bytes = key.size,
                                  .value = value,
                                  .value_bytes = record_put_snapshot(&record, value),
                                  .parts = &part,
                                  .part_count = 1};
    struct store_batch *batch = begin(life);
    assert_int_equal(store_batch_put(batch, &put, NULL), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, NULL), KV_OK);
}

void life_extent(struct life *life, const struct record_key *key, uint8_t kind,
                 struct store_extent *extent_out) {
    struct store_record record = get(life, key);
    int found = 0;
    for (uint32_t i = 0; i < record.extent_count && !found; i++) {
        found = record.extents[i].kind == kind;
        if (found)
            *extent_out = record.extents[i];
    }
    store_record_release(life->store, &record);
    assert_true(found);
}

void life_disk(const char *dir, const struct store_extent *extent, void *bytes, int write) {
    char path[TESTING_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/seg/%08u.seg", dir, extent->segment);
    int file = open(path, write ? O_RDWR : O_RDONLY);
    assert_true(file >= 0);
    ssize_t done = write ? pwrite(file, bytes, extent->stored_bytes, (off_t)extent->off)
                         : pread(file, bytes, extent->stored_bytes, (off_t)extent->off);
    assert_int_equal(done, extent->stored_bytes);
    assert_int_equal(fsync(file), 0);
    close(file);
}
