/* tests/support_cli.h - the command line program as a process of its own.
 *
 * Responsible for: a home folder with a tiny model, starting the program that was built beside the
 * test, its exit code, output and error lines.
 * Not responsible for: what they should be.
 *
 * Threads: the main thread.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_CLI_H
#define TESTS_SUPPORT_CLI_H

#include "tests/testing.h"

struct cJSON;

enum { CLI_OUTPUT_BYTES = 1 << 20, CLI_ARGS_MAX = 24, CLI_SECONDS_MAX = 300 };

struct cli {
    char home[TESTING_PATH_BYTES];
    char store[TESTING_PATH_BYTES + 16];
    char model[TESTING_PATH_BYTES + 32];
    const char *input; /* standard input of the next call; NULL: empty; reset by it */
    unsigned closed;   /* bit d: descriptor d is closed in the next call; reset by it */
    int code;          /* exit code of the last call; 128 + signal when it died */
    char out[CLI_OUTPUT_BYTES], err[CLI_OUTPUT_BYTES];
    struct cJSON *json; /* with --json: standard output, parsed; owned */
};

/* cmocka set-up and tear-down: *state is a struct cli. */
int cli_set_up(void **state);
int cli_tear_down(void **state);

/* Writes a tiny model of `seed` and `context_tokens` over the model's file. */
void cli_write_model(struct cli *cli, uint64_t seed, uint32_t context_tokens);

/* Arguments up to NULL. Fails the test when the program dies by a signal. Returns the code. */
int cli_call(struct cli *cli, const char *argument, ...) __attribute__((sentinel));

/* The program `name` that was built beside the test. */
void cli_program(const char *name, char out[TESTING_PATH_BYTES]);

/* Fails the test unless the last call ended with `code` and exactly one line of error that begins
 * with "coldplane: " and holds `said`. */
void cli_refused(const struct cli *cli, int code, const char *said);
/* Fails the test, with the output, unless the last call ended with 0. */
void cli_good(const struct cli *cli);

/* cli_text(cli, "receipt.fingerprint"), cli_number(cli, "woken.tokens_reused"): members of the last
 * JSON; the test fails when one is not there. */
const char *cli_text(const struct cli *cli, const char *path);
double cli_number(const struct cli *cli, const char *path);
const struct cJSON *cli_member(const struct cli *cli, const char *path);

/* For a test that mounts something; it goes with the program. */
void cli_own_mounts_or_skip(void);

#endif
