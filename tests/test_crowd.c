/* tests/test_crowd.c - the crowd on a tiny model: twelve chats, room for nine.
 *
 * Responsible for: the life of tests/support_crowd.c where the answers are noise, the same noise
 * before a sleep and after it.
 * Not responsible for: facts that a model finds, latency (tests/crowd.c).
 *
 * Its checks can fail: BREAK_CROWD_FOREIGN takes another chat's value for the answer,
 * BREAK_CROWD_OWNER asks with one key for both owners, BREAK_CROWD_LOST removes a chat's session
 * before all are looked for, BREAK_CROWD_RECEIPT damages the store, so that a wake is refused.
 */
#include "tests/support_cli.h"
#include "tests/support_crowd.h"
#include "tests/testing.h"

static void twelve_chats_with_room_for_nine(void **state) {
    struct cli *cli = *state;
    const struct crowd_options options = {.model_path = cli->model,
                                          .dir = cli->home,
                                          .chats = 12,
                                          .clients = 4,
                                          .threads = 1,
                                          .tokens = 700,
                                          .growth_tokens = 1100,
                                          .bytes_per_token = 1,
                                          .seed = testing_seed("crowd", 20261130)};
    struct crowd *crowd = crowd_open(&options);
    assert_non_null(crowd);
    int good = crowd_reason(crowd)[0] == 0 && crowd_live(crowd);
    const struct crowd_counts *counts = crowd_counts(crowd);
    if (!good)
        print_error("%s\n", crowd_reason(crowd));
    assert_true(good);
    assert_int_equal(counts->foreign, 0);
    assert_int_equal(counts->again_equal, counts->again);
    assert_true(counts->receipts_sleep > 0 && counts->receipts_restore > 0);
    crowd_close(crowd);
}

TESTING_MAIN(cmocka_unit_test_setup_teardown(twelve_chats_with_room_for_nine, cli_set_up,
                                             cli_tear_down))
