/* tests/test_cli_care.c - gc, fsck, scrub and stats of the program on a store of its own.
 *
 * Responsible for: exit codes, JSON and text of these commands, a damaged index in the program.
 * Not responsible for: what gc, fsck and scrub do inside (test_store_gc.c, test_store_fsck.c).
 */
#include "engine/record.h"
#include "snapshot/snapshot.h"
#include "store/store.h"
#include "tests/support_cli.h"
#include "tests/support_store.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* Two sessions, one of them removed again, so that most of the store is garbage. */
static void make_sessions(struct cli *cli) {
    char *text = calloc(1, 4001);
    for (size_t i = 0; i < 500; i++)
        snprintf(text + i * 8, 9, "w%06zu ", i * 7919 % 1000000);
    for (unsigned i = 0; i < 3; i++) {
        static const char *const names[3] = {"gone", "travel", "more"};
        cli->input = text;
        cli_call(cli, "run", names[i], "--prompt", "-", "--store-max", "16MiB", NULL);
        cli_good(cli);
    }
    free(text);
    cli_call(cli, "rm", "gone", "--store-max", "16MiB", NULL);
    cli_good(cli);
}

static void gc_frees_and_says_so(void **state) {
    struct cli *cli = *state;
    make_sessions(cli);
    cli_call(cli, "gc", "--dry-run", "--json", NULL);
    cli_good(cli);
    double planned = cli_number(cli, "freed_bytes");
    double before = cli_number(cli, "segment_bytes_before");
    cli_call(cli, "gc", "--store-max", "16MiB", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "freed_bytes") == planned);
    assert_true(cli_number(cli, "segment_bytes_before") == before);
    assert_true(cli_number(cli, "segment_bytes_after") <= before);
    cli_call(cli, "gc", "--rate", "100MiB", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "segments: "));
    cli_call(cli, "verify", "travel", NULL);
    cli_good(cli);
    cli_call(cli, "restore", "travel", "--json", NULL);
    cli_good(cli);
    cli_call(cli, "stats", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "written.saves.device_bytes") > 0);
    assert_true(cli_number(cli, "written.removals.batches") >= 0);
    assert_true(cli_number(cli, "write_amplification") > 0);
    assert_true(cli_number(cli, "disk_free_bytes") > 0);
    cli_call(cli, "stats", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "amplification"));
}

static void fsck_and_scrub_name_the_session(void **state) {
    struct cli *cli = *state;
    make_sessions(cli);
    cli_call(cli, "fsck", "--read-data", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "stored_sessions") == 2);
    assert_true(cli_number(cli, "damage") == 0);
    cli_call(cli, "scrub", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "bad") == 0 && cli_number(cli, "records") > 4);
    double records = cli_number(cli, "records");
    /* Every page of the segments is flipped in turn until a live extent is hit. */
    int hit = 0;
    unsigned number = 1;
    char segment[32] = "seg/00000001.seg";
    for (unsigned off = 4096 * 3 + 7; !hit; off += 4096 * 32) {
        while (off >= support_store_segment_bytes(cli->store, number)) {
            assert_true(++number < 64);
            snprintf(segment, sizeof segment, "seg/%08u.seg", number);
            off = 7;
        }
        support_store_flip(cli->store, segment, off, 1);
        hit = cli_call(cli, "scrub", "--restart", "--json", NULL) == 4;
        if (hit) {
            const char *who = cli_text(cli, "findings.0.sessions");
            assert_true(strcmp(who, "travel") == 0 || strcmp(who, "more") == 0);
            assert_true(cli_number(cli, "records") == records);
            char name[32];
            snprintf(name, sizeof name, "%s", who);
            cli_call(cli, "fsck", "--read-data", NULL);
            assert_int_equal(cli->code, 4);
            assert_non_null(strstr(cli->out, name));
            cli_call(cli, "fsck", NULL); /* without reading, the structure is whole */
            cli_good(cli);
        }
        support_store_flip(cli->store, segment, off, 1);
    }
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
}

/* The place of a stream of the newest block of `name`. */
static struct store_extent plane_of(struct cli *cli, const char *name, uint8_t kind) {
    struct store_options options = store_options_usual(cli->store, "test");
    struct store *store = NULL;
    struct snapshot_entry entry;
    struct store_record record;
    struct store_extent found = {.id = 0};
    options.read_only = 1;
    assert_int_equal(store_open(&options, &store, NULL), KV_OK);
    assert_int_equal(snapshot_find(store, kv_alloc_system(), name, &entry, NULL), KV_OK);
    assert_true(entry.head.block_count > 0);
    struct record_key key = record_key_block(entry.head.lineage, entry.head.block_count - 1);
    assert_int_equal(store_get(store, key.bytes, key.size, &record, NULL), KV_OK);
    for (uint32_t i = 0; i < record.extent_count; i++)
        if (record.extents[i].kind == kind)
            found = record.extents[i];
    store_record_release(store, &record);
    store_close(store);
    assert_true(found.stored_bytes != 0);
    return found;
}

static void flip(struct cli *cli, const struct store_extent *extent) {
    char segment[32];
    snprintf(segment, sizeof segment, "seg/%08u.seg", extent->segment);
    support_store_flip(cli->store, segment, extent->off + extent->stored_bytes / 2, 4);
}

/* A plane that only refines: the wake and scrub name the remedy, the remedy keeps the session. */
static void a_refinement_plane_is_given_up(void **state) {
    struct cli *cli = *state;
    make_sessions(cli);
    struct store_extent extent = plane_of(cli, "travel", LAYOUT_VR2);
    flip(cli, &extent);
    cli_call(cli, "restore", "travel", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli->err, "scrub --keep-lower"));
    cli_call(cli, "scrub", "--restart", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli->out, "session travel"));
    assert_non_null(strstr(cli->out, "--keep-lower keeps the session at K6V3"));
    cli_call(cli, "scrub", "--restart", "--keep-lower", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "kept_lower") == 1);
    cli_call(cli, "scrub", "--restart", NULL);
    cli_good(cli);
    cli_call(cli, "restore", "travel", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.degraded_blocks") == 1);
    assert_true(cJSON_IsTrue(cli_member(cli, "receipt.fingerprint_floor")));
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    assert_true(cli_number(cli, "receipt.mixed_from") > 0);
    cli_call(cli, "restore", "travel", NULL);
    assert_non_null(strstr(cli->out, "degraded"));
    assert_non_null(strstr(cli->out, "at the ladder's floor"));
    cli_call(cli, "run", "travel", "--prompt", "and now?", "-n", "4", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.mixed_from") > 0);
    cli_call(cli, "show", "travel", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "gave up KL VR2"));
    assert_non_null(strstr(cli->out, "mixed history from token"));
    cli_call(cli, "ls", NULL);
    assert_non_null(strstr(cli->out, "gave up KL VR2 of 1 of"));
    /* A plane that the floor needs costs the snapshots that count its block. */
    extent = plane_of(cli, "more", LAYOUT_VB);
    flip(cli, &extent);
    cli_call(cli, "scrub", "--restart", "--keep-lower", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli->out, "lost from that snapshot on, others: none"));
    cli_call(cli, "restore", "more", NULL);
    assert_int_equal(cli->code, 4);
}

/* store-max: refused with 3 while nothing may go; expire and --may-degrade let something go, and
 * it is told. */
static void a_reached_budget_is_refused_or_gives_way(void **state) {
    struct cli *cli = *state;
    char name[16] = "";
    make_sessions(cli);
    cli_call(cli, "stats", "--json", NULL);
    char limit[32];
    snprintf(limit, sizeof limit, "%.0f",
             (cli_number(cli, "segment_bytes") + cli_number(cli, "index_bytes")) * 1.2 + 1e6);
    int count = 0;
    for (cli->code = 0; cli->code == 0 && count < 60; count++) {
        snprintf(name, sizeof name, "n%d", count);
        cli_call(cli, "run", name, "-p", "more of the same", "-n", "8", "--store-max", limit, NULL);
    }
    assert_true(count < 60);
    cli_refused(cli, 3, "--may-degrade");
    cli_call(cli, "stats", "--json", NULL);
    assert_true(cli_number(cli, "given_up.planes.actions") == 0);
    cli_call(cli, "expire", "nobody", NULL);
    assert_int_equal(cli->code, 2);
    cli_call(cli, "expire", "travel", "--json", NULL);
    cli_good(cli);
    assert_true(cJSON_IsTrue(cli_member(cli, "may_expire")));
    cli_call(cli, "ls", NULL);
    assert_non_null(strstr(cli->out, "travel  (may expire)"));
    cli_call(cli, "expire", "travel", "--undo", NULL);
    assert_non_null(strstr(cli->out, "stays"));
    cli_call(cli, "run", name, "-p", "more of the same", "-n", "8", "--store-max", limit,
             "--may-degrade", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.made_room.lowered_sessions") > 0);
    assert_true(cli_number(cli, "receipt.made_room.removed_sessions") == 0);
    cli_call(cli, "stats", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "plane KL of"));
    assert_non_null(strstr(cli->out, "write budget  no limit a second"));
    cli_call(cli, "show", "travel", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "session.lowered_blocks") > 0);
    assert_string_equal(cli_text(cli, "session.given_up.newest.0.session"), "travel");
    cli_call(cli, "verify", NULL);
    cli_good(cli);
    cli_call(cli, "restore", "travel", NULL);
    cli_good(cli);
}

/* What writes and is no save is refused with 3 as well, and nothing has changed. */
static void every_writer_keeps_to_the_budget(void **state) {
    struct cli *cli = *state;
    char file[TESTING_PATH_BYTES + 32];
    snprintf(file, sizeof file, "%s/travel.kv", cli->home);
    make_sessions(cli);
    cli_call(cli, "export", "travel", file, NULL);
    cli_good(cli);
    cli_call(cli, "fork", "travel", "second", "--store-max", "1MiB", NULL);
    cli_refused(cli, 3, "store-max");
    cli_call(cli, "rename", "travel", "second", "--store-max", "1MiB", NULL);
    cli_refused(cli, 3, "--may-degrade");
    cli_call(cli, "import", file, "--as", "second", "--store-max", "1MiB", NULL);
    cli_refused(cli, 3, "store-max");
    cli_call(cli, "snapshot", "travel", "--tag", "red", "--store-max", "1MiB", NULL);
    cli_refused(cli, 3, "store-max");
    cli_call(cli, "show", "second", NULL);
    assert_int_equal(cli->code, 2);
    /* What removes is let in. */
    cli_call(cli, "rm", "more", "--purge", "--store-max", "1MiB", NULL);
    cli_good(cli);
    cli_call(cli, "fork", "travel", "second", NULL);
    cli_good(cli);
}

static int holds(const char *dir, const uint8_t *page) {
    char command[2 * TESTING_PATH_BYTES];
    char hex[64];
    for (int i = 0; i < 24; i++)
        snprintf(hex + 2 * i, 3, "%02x", page[i]);
    snprintf(command, sizeof command, "cat '%s'/seg/* | od -An -v -tx1 | tr -d ' \\n' | grep -q %s",
             dir, hex);
    return system(command) == 0;
}

/* ramfs makes no holes: the segment that is open is written again as well. */
static void a_purge_without_holes_leaves_nothing(void **state) {
    struct cli *cli = *state;
    char store[TESTING_PATH_BYTES + 64], path[TESTING_PATH_BYTES + 96];
    uint8_t page[24];
    cli_own_mounts_or_skip();
    snprintf(store, sizeof store, "%s/ram", cli->home);
    assert_int_equal(mkdir(store, 0700), 0);
    if (mount("ramfs", store, "ramfs", 0, "") != 0)
        testing_skip("this account may not mount a ramfs");
    cli_call(cli, "run", "gone", "-p", "something private", "--store", store, NULL);
    cli_good(cli);
    cli_call(cli, "run", "stays", "-p", "something else", "--store", store, NULL);
    cli_good(cli);
    snprintf(path, sizeof path, "%s/seg/00000001.seg", store);
    int file = open(path, O_RDONLY);
    assert_int_equal(pread(file, page, sizeof page, 0), sizeof page);
    close(file);
    assert_true(holds(store, page));
    cli_call(cli, "rm", "gone", "--purge", "--store", store, NULL);
    cli_good(cli);
    assert_false(holds(store, page));
    cli_call(cli, "verify", "stays", "--store", store, NULL);
    cli_good(cli);
    umount(store);
}

static char *list_of(struct cli *cli) {
    cli_call(cli, "ls", "--json", NULL);
    cli_good(cli);
    return strdup(cli->out);
}

/* CASE-07: ten sessions, each program call a restart: all are found, usage is what the disk says,
 * and an index made anew gives the same list. */
static void ten_sessions_outlive_their_index(void **state) {
    struct cli *cli = *state;
    char name[16];
    for (int i = 0; i < 10; i++) {
        snprintf(name, sizeof name, "s%d", i);
        cli_call(cli, "run", name, "-p", "hello there", "-n", "4", NULL);
        cli_good(cli);
    }
    char *before = list_of(cli);
    cli_call(cli, "stats", "--json", NULL);
    double used = cli_number(cli, "segment_bytes") + cli_number(cli, "index_bytes") +
                  cli_number(cli, "kept_bytes");
    double disk = (double)support_store_disk_bytes(cli->store);
    /* FORMAT, LOCK, the index's lock file and folders beside it. */
    if (disk < used || disk > used + (64 << 10))
        fail_msg("stats say %.0f bytes, the disk %.0f", used, disk);
    support_store_remove_index(cli->store);
    char *after = list_of(cli);
    assert_string_equal(before, after);
    free(before);
    free(after);
    for (int i = 0; i < 10; i++) {
        snprintf(name, sizeof name, "s%d", i);
        cli_call(cli, "restore", name, "--json", NULL);
        cli_good(cli);
        assert_true(cli_number(cli, "receipt.tokens_reused") > 0);
    }
}

/* fsck and stats count the same records; one session is one session. */
static void counts_agree(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "run", "only", "-p", "hello", "-n", "4", NULL);
    cli_good(cli);
    cli_call(cli, "stats", "--json", NULL);
    double records = cli_number(cli, "records");
    cli_call(cli, "fsck", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "records") == records);
    cli_call(cli, "fsck", NULL);
    assert_non_null(strstr(cli->out, "1 session, "));
    cli_call(cli, "verify", NULL);
    assert_non_null(strstr(cli->out, "1 session verified"));
    assert_non_null(strstr(cli->out, "1 snapshot, "));
}

/* Inspection leaves a damaged index alone and says what mends it; then it is mended. */
static void a_damaged_index_is_rebuilt_on_request(void **state) {
    struct cli *cli = *state;
    make_sessions(cli);
    support_store_flip(cli->store, "index/data.mdb", 4096 * 2 + 10, 0xff);
    support_store_flip(cli->store, "index/data.mdb", 4096 * 3 + 10, 0xff);
    support_store_flip(cli->store, "index/data.mdb", 10, 0xff);
    cli_call(cli, "fsck", "--json", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli_text(cli, "error.text"), "--rebuild-index"));
    assert_string_equal(cli_text(cli, "findings.0.kind"), "index");
    cli_call(cli, "fsck", "--rebuild-index", "--json", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli_text(cli, "opened"), "rebuilt"));
    assert_true(cli_number(cli, "stored_sessions") == 2);
    cli_call(cli, "ls", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "travel"));
    assert_null(strstr(cli->out, "gone"));
    cli_call(cli, "fsck", "--repair", NULL);
    cli_good(cli);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

TESTING_MAIN(TEST(gc_frees_and_says_so), TEST(fsck_and_scrub_name_the_session),
             TEST(a_damaged_index_is_rebuilt_on_request), TEST(a_refinement_plane_is_given_up),
             TEST(a_reached_budget_is_refused_or_gives_way), TEST(counts_agree),
             TEST(every_writer_keeps_to_the_budget), TEST(a_purge_without_holes_leaves_nothing),
             TEST(ten_sessions_outlive_their_index))
