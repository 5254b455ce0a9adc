/* tests/test_rates.c - rates kept with a store, what they say, and the choice that stands on them.
 *
 * Responsible for: snapshot/snap_rates.c, `bench rates`, the estimates of `show`, --wake.
 * Not responsible for: how fast anything is.
 * Broken twins: BREAK_RATES_PROOF.
 */
#include "snapshot/snap_rates.h"

#include "store/store_batch.h"
#include "tests/support_cli.h"
#include "tests/support_store.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const struct snap_rates example = {.measured_ns = 1700000000000000000u,
                                          .threads = 2,
                                          .read = 1e9f,
                                          .unzip = 5e8f,
                                          .digest = 8e9f,
                                          .copy = 5e9f,
                                          .prefill_ns = 1e6f,
                                          .prefill_deeper_ns = 200.0f,
                                          .step_ns = 4e6f,
                                          .step_deeper_ns = 500.0f};

static void rates_stay_with_the_store(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 8];
    struct kv_diag diag = {""};
    struct snap_rates found = {0};
    testing_temp_dir(dir);
    snprintf(path, sizeof path, "%s/s", dir);
    struct store_options options = support_store_options(path);
    struct store *store = support_store_open(&options);
    assert_int_equal(snap_rates_get(store, &found, &diag), KV_ERR_NOT_FOUND);
    assert_non_null(strstr(diag.text, "bench rates"));
    assert_int_equal(snap_rates_put(store, &example, &diag), KV_OK);
    store_close(store);
    store = support_store_open(&options);
    assert_int_equal(snap_rates_get(store, &found, &diag), KV_OK);
    assert_memory_equal(&found, &example, sizeof found);
    float *const numbers[] = {&found.read, &found.copy, &found.prefill_ns, &found.step_ns};
    const float wrong[] = {0, -1, NAN, INFINITY};
    for (size_t i = 0; i < 4; i++)
        for (size_t k = 0; k < 4; k++) {
            found = example;
            *numbers[i] = wrong[k];
            assert_int_equal(snap_rates_put(store, &found, &diag), KV_ERR_INVALID);
        }
    /* A value of another form is as none. */
    struct store_batch *batch = NULL;
    const struct store_put put = {.key = "m", .key_bytes = 1, .value = "\2new", .value_bytes = 4};
    assert_int_equal(store_batch_begin(store, 4096, &batch, &diag), KV_OK);
    assert_int_equal(store_batch_put(batch, &put, &diag), KV_OK);
    assert_int_equal(store_batch_commit(batch, NULL, &diag), KV_OK);
    assert_int_equal(snap_rates_get(store, &found, &diag), KV_ERR_NOT_FOUND);
    store_close(store);
}

/* The slowest stage and the proof behind it; a prefill grows with the square of the length.
 * Fails with BREAK_RATES_PROOF. */
static void estimates_follow_the_rates(void **state) {
    (void)state;
    struct snap_rates rates = example;
    struct snap_rates_load load = {
        .stored_bytes = 100000000, .raw_bytes = 120000000, .n_kv = 8000, .probe_rows = 0};
    assert_int_equal(snap_rates_wake_ns(&rates, &load) / 1000000, 240 + 8);
    load.probe_rows = 10;
    assert_int_equal(snap_rates_wake_ns(&rates, &load) / 1000000, 240 + 8 + 26);
    rates.read = 1e8f;
    assert_int_equal((snap_rates_wake_ns(&rates, &load) + 500000) / 1000000, 1000 + 8 + 26);
    assert_int_equal((snap_rates_prefill_ns(&rates, 8000) + 500000) / 1000000, 8000 + 6400);
    assert_int_equal(snap_rates_prefill_ns(&rates, 0), 0);
}

/* --- the commands */

static void say(struct cli *cli, const char *wake) {
    cli_call(cli, "run", "a", "--prompt", "some more words to talk about", "--max-tokens", "3",
             "--wake", wake, "--json", NULL);
    cli_good(cli);
}

static void the_choice_is_the_operators_and_said(void **state) {
    struct cli *cli = *state;
    say(cli, "restore");
    double tokens = cli_number(cli, "receipt.tokens");
    /* Nothing is known yet: the stored memory is read, and that is said. */
    say(cli, "faster");
    assert_non_null(strstr(cli->err, "reading the stored memory: this machine was not measured"));
    assert_true(cli_number(cli, "woken.tokens_reused") == tokens - 1);
    cli_call(cli, "show", "a", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->out, "coldplane bench rates"));
    cli_call(cli, "bench", "rates", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "read_bytes_per_s") > 0 && cli_number(cli, "prefill_ns") > 0);
    cli_call(cli, "ls", "--json", NULL);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), 1);
    cli_call(cli, "show", "a", "--json", NULL);
    cli_good(cli);
    double wake = cli_number(cli, "session.estimate.wake_ns");
    double prefill = cli_number(cli, "session.estimate.prefill_ns");
    assert_true(wake > 0 && prefill > 0);
    tokens = cli_number(cli, "session.tokens");
    say(cli, "faster");
    assert_non_null(strstr(cli->err, "a wake is estimated at"));
    int again = cli_number(cli, "woken.tokens_prefilled") > 0;
    assert_int_equal(again, prefill < wake);
    assert_int_equal(again, strstr(cli->err, "prefilling the session again") != NULL);
}

static void recomputing_keeps_what_was_stored(void **state) {
    struct cli *cli = *state;
    say(cli, "restore");
    say(cli, "restore");
    assert_string_equal(cli->err, "");
    double tokens = cli_number(cli, "receipt.tokens");
    say(cli, "recompute");
    assert_non_null(strstr(cli->err, "prefilling the session again: --wake recompute"));
    assert_true(cli_number(cli, "woken.tokens_prefilled") == tokens);
    assert_true(cli_number(cli, "woken.tokens_reused") == 0);
    assert_string_equal(cli_text(cli, "woken.fingerprint"), "not-asked");
    double after = cli_number(cli, "receipt.tokens");
    assert_true(after > tokens);
    /* `restore` never prefills, whatever the setting. */
    cli_call(cli, "restore", "a", "--wake", "recompute", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.tokens") == after);
    assert_true(cli_number(cli, "receipt.tokens_prefilled") == 0);
    cli_call(cli, "restore", "a@before-restore-1", "--json", NULL);
    cli_good(cli);
    assert_true(cli_number(cli, "receipt.tokens") == tokens);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
    cli_call(cli, "run", "a", "--prompt", "x", "--wake", "sometimes", NULL);
    cli_refused(cli, 1, "none of restore|faster|recompute");
}

static void flip_byte(const struct cli *cli, long off) {
    char path[TESTING_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/seg/00000001.seg", cli->store);
    FILE *file = fopen(path, "r+e");
    assert_non_null(file);
    assert_int_equal(fseek(file, off, SEEK_SET), 0);
    int byte = fgetc(file);
    assert_int_equal(fseek(file, off, SEEK_SET), 0);
    fputc(byte ^ 0x10, file);
    assert_int_equal(fclose(file), 0);
}

static long segment_bytes(const struct cli *cli) {
    char path[TESTING_PATH_BYTES + 32];
    struct stat info;
    snprintf(path, sizeof path, "%s/seg/00000001.seg", cli->store);
    assert_int_equal(stat(path, &info), 0);
    return (long)info.st_size;
}

/* What a damaged session says is what to do: of one whose memory is damaged, that its tokens are
 * not, and what is said there works; of one whose tokens are, who knows older snapshots. */
static void damage_names_its_remedy(void **state) {
    struct cli *cli = *state;
    say(cli, "restore");
    flip_byte(cli, 100);
    cli_call(cli, "run", "a", "--prompt", "x", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli->err, "`coldplane run a --prompt TEXT --wake recompute`"));
    cli_call(cli, "restore", "a", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli->err, "`coldplane run a --prompt TEXT --wake recompute`"));
    say(cli, "recompute");
    flip_byte(cli, 100);
    cli_call(cli, "restore", "a", NULL);
    cli_good(cli);
    int told = 0;
    for (long off = segment_bytes(cli) - 100; off > 0 && !told; off -= 2048) {
        flip_byte(cli, off);
        cli_call(cli, "restore", "a", NULL);
        told = strstr(cli->err, "its tokens cannot be read either: `coldplane scrub`") != NULL;
        flip_byte(cli, off);
    }
    assert_true(told);
}

TESTING_MAIN(cmocka_unit_test(rates_stay_with_the_store),
             cmocka_unit_test(estimates_follow_the_rates),
             cmocka_unit_test_setup_teardown(the_choice_is_the_operators_and_said, cli_set_up,
                                             cli_tear_down),
             cmocka_unit_test_setup_teardown(recomputing_keeps_what_was_stored, cli_set_up,
                                             cli_tear_down),
             cmocka_unit_test_setup_teardown(damage_names_its_remedy, cli_set_up, cli_tear_down))
