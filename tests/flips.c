/* tests/flips.c - single bits turned in the store, one at a time.
 *
 * Responsible for: CASE-13: every flip over the segments is found, by a wake (in a batch record: by
 * the rebuild that would read it), by fsck and by scrub, names the session that it touches and
 * leaves the others alone; a flip over the index gives no wrong answer and loses nothing, whether
 * the bytes were in use or not; a write that lands in a wrong place is found like a flip.
 * Not responsible for: the words of a report (test_store_fsck.c).
 *
 * An argument n flips n bits of each (100 without one). Digest checking off in restore or in the
 * store (the twins) must show up as flips that were not found, never as a crash: all flips run
 * before the verdict.
 * Broken twins: BREAK_DIGEST, BREAK_PLANE_DIGEST, BREAK_SCRUB_CHAIN.
 */
#include "engine/record.h"
#include "restore/restore.h"
#include "snapshot/snap_care.h"
#include "store/store_read.h"
#include "store/store_scrub.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/support_world.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SESSIONS = 3, OWNER_NONE = SESSIONS, EXTENTS_MAX = 512 };

static uint64_t flips_wanted = 100;
static struct world world;
static char dir[TESTING_PATH_BYTES + 16];

struct owned {
    uint32_t segment, owner;
    uint64_t off, end, stored_end;
};
static struct owned owned[EXTENTS_MAX];
static uint32_t owned_count;
static struct kv_digest residents[SESSIONS];

static uint32_t session_of(const char *name) {
    uint32_t i = 0;
    while (i < SESSIONS && strcmp(world_name(i), name) != 0)
        i++;
    return i;
}

static uint32_t owner_of_lineage(uint64_t lineage) {
    struct record_key key = record_key_lineage(lineage);
    struct store_record record;
    struct record_lineage value;
    assert_int_equal(store_get(world.store, key.bytes, key.size, &record, NULL), KV_OK);
    assert_int_equal(record_get_lineage(record.value, record.value_bytes, &value, NULL), KV_OK);
    store_record_release(world.store, &record);
    return session_of(value.name);
}

static uint32_t owner_of(const struct store_record *record) {
    struct record_snapshot snapshot;
    struct record_page page;
    uint64_t id = 0;
    for (uint32_t i = 1; i < 9; i++)
        id = id << 8 | record->key[i];
    switch (record->key[0]) {
    case 's':
        assert_int_equal(record_get_snapshot(record->value, record->value_bytes, &snapshot, NULL),
                         KV_OK);
        return session_of(snapshot.name);
    case 'p':
        assert_int_equal(record_get_page(record->value, record->value_bytes, &page, NULL), KV_OK);
        return owner_of_lineage(page.lineage);
    default:
        return owner_of_lineage(id);
    }
}

static void list_extents(void) {
    struct store_walk walk = {0};
    struct store_record record;
    owned_count = 0;
    while (store_next(world.store, &walk, &record, NULL) == KV_OK) {
        for (uint32_t i = 0; i < record.extent_count; i++) {
            const struct store_extent *extent = &record.extents[i];
            assert_true(owned_count < EXTENTS_MAX);
            owned[owned_count++] = (struct owned){
                .segment = extent->segment,
                .owner = owner_of(&record),
                .off = extent->off,
                .stored_end = extent->off + extent->stored_bytes,
                .end = extent->off + ((extent->stored_bytes + 4095) & ~(uint64_t)4095)};
        }
        store_record_release(world.store, &record);
    }
}

/* Three sessions, each saved once: every byte is an extent in use or a batch record. */
static void make_store(void) {
    static const uint32_t feeds[SESSIONS] = {900, 590, 100};
    struct kv_diag diag = {""};
    char base[TESTING_PATH_BYTES];
    testing_temp_dir(base);
    snprintf(dir, sizeof dir, "%s/store", base);
    if (world_open(&world, dir, NULL, &diag) != KV_OK)
        fail_msg("%s", diag.text);
    for (uint32_t i = 0; i < SESSIONS; i++)
        if (world_say(&world, i, feeds[i], i + 1, &diag) != KV_OK ||
            world_save(&world, i, 0, &diag) != KV_OK)
            fail_msg("%s", diag.text);
    for (uint32_t i = 0; i < SESSIONS; i++)
        residents[i] = world.facts[i].resident;
    world_close(&world);
    assert_int_equal(world_open(&world, dir, NULL, &diag), KV_OK);
    list_extents();
    world_close(&world);
}

/* --- segments */

struct tally {
    uint64_t data, padding, records; /* where flips fell */
    uint64_t found, unnamed, others, undetected;
    uint64_t fsck, scrub; /* found by them */
};

enum seen { SEEN_WHOLE, SEEN_REFUSED, SEEN_UNNAMED, SEEN_WRONG };

/* Every byte is verified; a wake reads what its tiers need, and must not be wrong about that. */
static enum seen try_session(uint32_t session) {
    struct kv_diag diag = {""}, wake_diag = {""};
    const char *name = world_name(session);
    struct restore_check check;
    enum kv_err err = restore_verify(world.store, world.alloc, name, &check, &diag);
    enum kv_err woken = world_wake(&world, session, &wake_diag);
    if (woken == KV_OK) {
        struct kv_digest resident = life_resident(world_find(&world, session));
        session_drop(world_find(&world, session));
        engine_apply(world.engine);
        if (!kv_digest_equal(&resident, &residents[session]))
            return SEEN_WRONG;
    }
    /* The proof is the second line: what reaches it has passed the digests. */
    if (woken == KV_ERR_PROOF)
        return SEEN_WRONG;
    if (err == KV_OK)
        return woken == KV_OK ? SEEN_WHOLE : SEEN_WRONG;
    if (strstr(diag.text, name) == NULL || (woken != KV_OK && strstr(wake_diag.text, name) == NULL))
        return SEEN_UNNAMED;
    return SEEN_REFUSED;
}

static void flip(int file, uint64_t off, unsigned bit) {
    uint8_t byte = 0;
    assert_int_equal(pread(file, &byte, 1, (off_t)off), 1);
    byte ^= (uint8_t)(1u << bit);
    assert_int_equal(pwrite(file, &byte, 1, (off_t)off), 1);
    assert_int_equal(fsync(file), 0);
}

static const struct owned *find_owner(uint32_t segment, uint64_t off) {
    for (uint32_t i = 0; i < owned_count; i++)
        if (owned[i].segment == segment && off >= owned[i].off && off < owned[i].end)
            return &owned[i];
    return NULL;
}

/* --- fsck and scrub, on a copy: scrub writes down how far it has come */

struct care {
    struct snap_care_owners *owners;
    uint32_t named; /* sessions, one bit each */
    uint32_t findings;
    int is_padding; /* behind a batch record: no session's */
};

static void on_owner(void *context, const char *session) {
    struct care *care = context;
    care->named |= 1u << session_of(session);
}

static void on_finding(void *context, const struct store_fsck_finding *finding) {
    struct care *care = context;
    char name[IMAGE_NAME_BYTES_MAX + 1] = "";
    care->findings++;
    care->is_padding |= finding->kind == STORE_FSCK_PADDING;
    if (finding->key == NULL || finding->key_bytes < 2)
        return;
    snprintf(name, sizeof name, "%.*s", (int)finding->key_bytes - 1,
             (const char *)finding->key + 1);
    if (finding->key[0] == 'n')
        on_owner(care, name);
    else
        snap_care_owners_of(care->owners, finding->key, finding->key_bytes, on_owner, care);
}

static void care_for(const char *copy, struct care *fsck, struct care *scrub) {
    struct store_options options = support_store_options(copy);
    struct store *store = support_store_open(&options);
    struct store_fsck_report report;
    struct store_scrub_report scrubbed;
    const struct store_fsck_args args = {
        .store = store, .read_data = 1, .each = on_finding, .context = fsck};
    const struct store_scrub_args scrub_args = {
        .store = store, .restart = 1, .bad = on_finding, .context = scrub};
    memset(fsck, 0, sizeof *fsck);
    memset(scrub, 0, sizeof *scrub);
    assert_int_equal(snap_care_owners_make(store, kv_alloc_system(), &fsck->owners, NULL), KV_OK);
    scrub->owners = fsck->owners;
    assert_int_equal(store_fsck(&args, &report, NULL), KV_OK);
    assert_int_equal(store_scrub(&scrub_args, &scrubbed, NULL), KV_OK);
    snap_care_owners_drop(fsck->owners);
    store_close(store);
}

static void make_copy(char copy[TESTING_PATH_BYTES + 32]) {
    char command[TESTING_PATH_BYTES + 64];
    snprintf(copy, TESTING_PATH_BYTES + 32, "%.*s/copy", (int)(strrchr(dir, '/') - dir), dir);
    snprintf(command, sizeof command, "rm -rf '%s'", copy);
    assert_int_equal(system(command), 0);
    support_store_copy(dir, copy);
}

/* `owner` OWNER_NONE: whose batch record it is must be said, but is not known here. */
static void try_care(uint32_t owner, struct tally *tally) {
    char copy[TESTING_PATH_BYTES + 32];
    struct care cares[2];
    make_copy(copy);
    care_for(copy, &cares[0], &cares[1]);
    for (int i = 0; i < 2; i++) {
        const struct care *care = &cares[i];
        uint32_t right = owner == OWNER_NONE ? care->named : 1u << owner;
        *(i == 0 ? &tally->fsck : &tally->scrub) += care->findings != 0;
        tally->undetected += care->findings == 0;
        tally->unnamed += care->findings != 0 && !care->is_padding && (care->named & right) == 0;
        tally->others += (care->named & ~right) != 0 || (right & (right - 1)) != 0;
        if (care->findings == 0 || (care->named & ~right) != 0 ||
            (!care->is_padding && (care->named & right) == 0))
            printf("%s: %u findings, sessions %x named, %x are right\n", i == 0 ? "fsck" : "scrub",
                   care->findings, care->named, right);
    }
}

static void flip_extent(const struct owned *place, int file, uint64_t off, unsigned bit,
                        struct tally *tally) {
    *(off < place->stored_end ? &tally->data : &tally->padding) += 1;
    flip(file, off, bit);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        enum seen seen = try_session(i);
        if (i != place->owner) {
            tally->others += seen != SEEN_WHOLE;
            continue;
        }
        tally->found += seen == SEEN_REFUSED || seen == SEEN_UNNAMED;
        tally->unnamed += seen == SEEN_UNNAMED;
        tally->undetected += seen == SEEN_WHOLE || seen == SEEN_WRONG;
        if (seen != SEEN_REFUSED)
            printf("flip at %llu of segment %u, session %s: %s\n", (unsigned long long)off,
                   place->segment, world_name(i), seen == SEEN_UNNAMED ? "not named" : "not found");
    }
    try_care(place->owner, tally);
    flip(file, off, bit);
}

/* A batch record is believed only by a rebuild, so the index is taken away: the rebuild must say
 * that something is missing, and sessions of other batches must be there. */
static void flip_record(uint32_t segment, int original, uint64_t off, unsigned bit,
                        struct tally *tally) {
    char copy[TESTING_PATH_BYTES + 32], path[TESTING_PATH_BYTES + 64];
    struct kv_diag diag = {""};
    struct store_stats stats = {0};
    tally->records++;
    world_close(&world);
    flip(original, off, bit);
    try_care(OWNER_NONE, tally);
    flip(original, off, bit);
    make_copy(copy);
    support_store_remove_index(copy);
    snprintf(path, sizeof path, "%s/seg/%08u.seg", copy, segment);
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    flip(file, off, bit);
    close(file);
    enum kv_err err = world_open(&world, copy, NULL, &diag);
    if (err == KV_OK)
        store_stats_get(world.store, &stats);
    int said = err != KV_OK || strstr(stats.opened, "missing") != NULL ||
               strstr(stats.opened, "dropped") != NULL || strstr(stats.opened, "damaged") != NULL;
    uint32_t lost = 0;
    for (uint32_t i = 0; err == KV_OK && i < SESSIONS; i++)
        lost += try_session(i) != SEEN_WHOLE;
    tally->others += lost > 1;
    tally->found += said != 0;
    tally->undetected += !said;
    if (!said)
        printf("flip at %llu of segment %u, in a batch record: the rebuild says '%s', %u lost\n",
               (unsigned long long)off, segment, stats.opened, lost);
    world_close(&world);
    assert_int_equal(world_open(&world, dir, NULL, &diag), KV_OK);
}

/* `aimed`: only at padding and batch records, which are few. */
static void flip_segments(const char *what, uint64_t wanted, int aimed) {
    struct testing_random random;
    struct tally tally = {0};
    struct kv_diag diag = {""};
    int files[8];
    uint64_t sizes[9] = {0};
    uint32_t count = 0;
    testing_random_init(&random, testing_seed(what, 20261129 + (uint64_t)aimed));
    for (; count < 8 && support_store_segment_bytes(dir, count + 1) != 0; count++) {
        char path[TESTING_PATH_BYTES + 64];
        snprintf(path, sizeof path, "%s/seg/%08u.seg", dir, count + 1);
        files[count] = open(path, O_RDWR);
        assert_true(files[count] >= 0);
        sizes[count + 1] = sizes[count] + support_store_segment_bytes(dir, count + 1);
    }
    assert_true(count >= 1);
    assert_int_equal(world_open(&world, dir, NULL, &diag), KV_OK);
    for (uint64_t i = 0; i < wanted;) {
        uint64_t off = testing_random_below(&random, sizes[count]);
        unsigned bit = (unsigned)testing_random_below(&random, 8);
        uint32_t at = 0;
        while (off >= sizes[at + 1])
            at++;
        off -= sizes[at];
        const struct owned *place = find_owner(at + 1, off);
        if (aimed && place != NULL && off < place->stored_end)
            continue;
        i++;
        if (place != NULL)
            flip_extent(place, files[at], off, bit, &tally);
        else
            flip_record(at + 1, files[at], off, bit, &tally);
    }
    for (uint32_t i = 0; i < SESSIONS; i++)
        assert_int_equal(try_session(i), SEEN_WHOLE);
    world_close(&world);
    for (uint32_t i = 0; i < count; i++)
        close(files[i]);
    printf("%s: %llu (%llu data, %llu padding, %llu batch records): %llu found by "
           "wake or rebuild, %llu by fsck, %llu by scrub, %llu misses, %llu without the session's "
           "name, %llu other sessions touched\n",
           what, (unsigned long long)wanted, (unsigned long long)tally.data,
           (unsigned long long)tally.padding, (unsigned long long)tally.records,
           (unsigned long long)tally.found, (unsigned long long)tally.fsck,
           (unsigned long long)tally.scrub, (unsigned long long)tally.undetected,
           (unsigned long long)tally.unnamed, (unsigned long long)tally.others);
    assert_true((aimed || tally.data > 0) && tally.padding > 0 && tally.records > 0);
    assert_int_equal(tally.undetected + tally.unnamed + tally.others, 0);
}

static void segments(void **state) {
    (void)state;
    flip_segments("flips over segments", flips_wanted, 0);
}

static void padding_and_batch_records(void **state) {
    (void)state;
    flip_segments("flips aimed at padding and batch records", 1 + flips_wanted / 5, 1);
}

/* --- the index */

static uint8_t *read_all(const char *path, size_t *size_out) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size_out = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*size_out);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *size_out, file), *size_out);
    fclose(file);
    return bytes;
}

static void write_all(const char *path, const uint8_t *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
}

static void index_file(void **state) {
    (void)state;
    struct testing_random random;
    char path[TESTING_PATH_BYTES + 64], lock_path[TESTING_PATH_BYTES + 64];
    struct store_options options = support_store_options(dir);
    uint64_t unused = 0, rebuilt = 0, wrong = 0, lost = 0;
    size_t size = 0;
    testing_random_init(&random, testing_seed("flips over the index", 11292026));
    snprintf(path, sizeof path, "%s/index/data.mdb", dir);
    snprintf(lock_path, sizeof lock_path, "%s/index/lock.mdb", dir);
    struct store *store = support_store_open(&options);
    char *before = support_store_dump(store);
    store_close(store);
    uint8_t *bytes = read_all(path, &size);
    for (uint64_t i = 0; i < flips_wanted; i++) {
        size_t off = (size_t)testing_random_below(&random, size);
        unsigned bit = (unsigned)testing_random_below(&random, 8);
        struct store_stats stats;
        struct kv_diag diag = {""};
        bytes[off] ^= (uint8_t)(1u << bit);
        write_all(path, bytes, size);
        bytes[off] ^= (uint8_t)(1u << bit);
        if (store_open(&options, &store, &diag) != KV_OK) {
            printf("index byte %zu bit %u: does not open: %s\n", off, bit, diag.text);
            lost++;
        } else {
            char *after = support_store_dump(store);
            store_stats_get(store, &stats);
            *(stats.opened[0] == 0 ? &unused : &rebuilt) += 1;
            if (strcmp(before, after) != 0) {
                printf("index byte %zu bit %u: other answers (%s)\n", off, bit, stats.opened);
                wrong++;
            }
            free(after);
            store_close(store);
        }
        unlink(lock_path);
        write_all(path, bytes, size);
    }
    free(bytes);
    free(before);
    printf("%llu flips over the index: %llu in bytes that nothing uses, %llu found and rebuilt, "
           "%llu wrong answers, %llu stores lost, 0 crashes\n",
           (unsigned long long)flips_wanted, (unsigned long long)unused,
           (unsigned long long)rebuilt, (unsigned long long)wrong, (unsigned long long)lost);
    assert_int_equal(wrong + lost, 0);
    assert_true(rebuilt > 0);
}

/* --- writes that land elsewhere */

enum { RECORDS = 40 };

/* Each record is as it was put or refused; never something else, never silently gone. */
static int misdirect(const struct io_door *door, uint64_t at, int64_t by, uint32_t *refused_out) {
    char base[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 16];
    struct kv_diag diag = {""};
    testing_temp_dir(base);
    snprintf(path, sizeof path, "%s/s", base);
    struct disk *disk = disk_make(door, path);
    struct store_options options = support_store_options(path);
    options.door = disk_door(disk);
    struct store *store = support_store_open(&options);
    disk_misdirect_at(disk, at, by);
    unsigned end = 0;
    while (end < RECORDS && support_store_commit(store, end, end + 4, 1, &diag) == KV_OK)
        end += 4;
    if (end < RECORDS)
        printf("write %llu, %lld bytes off: record %u on: %s\n", (unsigned long long)at,
               (long long)by, end, diag.text);
    int struck = disk_has_failed(disk);
    store_close(store);
    disk_drop(disk);
    options.door = door;
    store = support_store_open(&options);
    for (unsigned i = 0; i < end; i++) {
        char key[16];
        int key_bytes = snprintf(key, sizeof key, "r%05u", i);
        if (support_store_matches(store, i, 1, 1))
            continue;
        enum kv_err err = store_read_check(store, key, (size_t)key_bytes, NULL, &diag);
        if (err != KV_ERR_CORRUPT && err != KV_ERR_IO)
            fail_msg("write %llu landed %lld bytes off: record %s: %s", (unsigned long long)at,
                     (long long)by, key, kv_err_name(err));
        (*refused_out)++;
    }
    store_close(store);
    return struck;
}

static void misdirected_writes(void **state) {
    (void)state;
    static const int64_t by[] = {4096, -4096, 40960, 512 * 1024};
    uint32_t cases = 0, refused = 0;
    for (size_t i = 0; i < 2 * (sizeof by / sizeof by[0]); i++) {
        const struct io_door *door = i % 2 == 0 ? io_posix_door() : io_uring_door();
        /* The first write has nothing in front of it. */
        for (uint64_t at = by[i / 2] < 0 ? 2 : 1; misdirect(door, at, by[i / 2], &refused); at++)
            cases++;
    }
    printf("%u writes landed elsewhere: %u records refused, 0 wrong, 0 missing\n", cases, refused);
    assert_true(cases > 10 && refused > 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(segments), cmocka_unit_test(padding_and_batch_records),
        cmocka_unit_test(index_file), cmocka_unit_test(misdirected_writes)};
    if (argc > 1)
        flips_wanted = strtoull(argv[1], NULL, 10);
    if (access("/dev/shm", W_OK) == 0)
        setenv("TMPDIR", "/dev/shm", 0);
    world_begin(&world);
    make_store();
    int status = testing_run(1, argv, tests, sizeof tests / sizeof tests[0]);
    world_end(&world);
    return status;
}
