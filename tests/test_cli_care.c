/* tests/test_cli_care.c - gc, fsck, scrub and stats of the program on a store of its own.
 *
 * Responsible for: exit codes, JSON and text of these commands, a damaged index in the program.
 * Not responsible for: what gc, fsck and scrub do inside (test_store_gc.c, test_store_fsck.c).
 */
#include "tests/support_cli.h"
#include "tests/support_store.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
             TEST(a_damaged_index_is_rebuilt_on_request))
