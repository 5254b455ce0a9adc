/* tests/test_staging.c - what a wake needs beside the slots does not grow with it (CASE-20).
 *
 * Responsible for: the peak of resident memory while a short and a long session wake, each in a
 * process of its own whose slots have all been touched before.
 * Not responsible for: what wakes (test_life.c), the RAM tier.
 * Broken twin: BREAK_PACKED_ROOM.
 *
 * Units: bytes, KiB where the kernel counts in them.
 */
#include "tests/support_life.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LAYERS = 32, HEADS = 2, SHORT_TOKENS = 600, LONG_TOKENS = 6000, BLOCK_BYTES = 4 << 20 };
/* Read buffers are 8 MiB, compressed extents at most 24, two codecs have room for an extent before
 * and one after shuffling; the rest is what the proof's forward touches first. */
enum { STAGING_BYTES = (8 << 20) + (24 << 20) + 4 * BLOCK_BYTES + (6 << 20) };

static struct life_options options_of(const char *dir) {
    struct life_options options = life_default(dir);
    options.model_layers = LAYERS;
    options.model_heads = HEADS;
    options.engine.slots = 860;
    return options;
}

static uint64_t status_kib(const char *field) {
    char line[200];
    unsigned long long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    assert_non_null(status);
    while (kib == 0 && fgets(line, sizeof line, status) != NULL)
        if (strncmp(line, field, strlen(field)) == 0)
            sscanf(line + strlen(field), ": %llu", &kib);
    fclose(status);
    return kib;
}

struct woken {
    uint64_t grown_kib; /* peak while waking, over what stood there before */
    uint64_t read_bytes, tokens;
};

/* In a child, so that memory that an earlier life has freed counts for nothing. */
static struct woken wake_alone(const char *dir, const char *name) {
    struct woken woken = {0};
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct life_options options = options_of(dir);
        struct life life;
        struct receipt receipt;
        life_open(&options, &life);
        FILE *reset = fopen("/proc/self/clear_refs", "w"); /* 5: the peak begins again here */
        if (reset == NULL || fputs("5", reset) < 0 || fclose(reset) != 0)
            _exit(2);
        uint64_t before = status_kib("VmRSS");
        life_wake(&life, name, &receipt);
        woken.grown_kib = status_kib("VmHWM") - before;
        for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
            woken.read_bytes += receipt.raw_bytes[stream];
        woken.tokens = receipt.tokens_reused;
        int sound = receipt.fingerprint == RECEIPT_BITS_EQUAL && receipt.tokens_prefilled == 0;
        ssize_t sent = write(ends[1], &woken, sizeof woken);
        _exit(sound && sent == (ssize_t)sizeof woken ? 0 : 1);
    }
    int status = 0;
    close(ends[1]);
    assert_int_equal(read(ends[0], &woken, sizeof woken), sizeof woken);
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2)
        testing_skip("the peak of memory cannot be reset here");
    assert_int_equal(status, 0);
    return woken;
}

static void waking_needs_staging_whatever_the_length(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES];
    struct life life;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    testing_skip("a sanitizer keeps what was freed");
#endif
    testing_temp_dir(dir);
    support_wall_set(0);
    struct life_options options = options_of(dir);
    life_open(&options, &life);
    struct session *session = life_session(&life, "short", IMAGE_RECIPE_BF16);
    life_say(session, 1, SHORT_TOKENS, 2, NULL);
    life_sleep(&life, session);
    session = life_session(&life, "long", IMAGE_RECIPE_BF16);
    life_say(session, 2, LONG_TOKENS, 2, NULL);
    life_sleep(&life, session);
    life_close(&life);
    struct woken brief = wake_alone(dir, "short"), lengthy = wake_alone(dir, "long");
    printf("%llu tokens: %llu KiB read, memory grew by %llu KiB; %llu tokens: %llu and %llu\n",
           (unsigned long long)brief.tokens, (unsigned long long)brief.read_bytes >> 10,
           (unsigned long long)brief.grown_kib, (unsigned long long)lengthy.tokens,
           (unsigned long long)lengthy.read_bytes >> 10, (unsigned long long)lengthy.grown_kib);
    assert_true(lengthy.read_bytes >
                (uint64_t)STAGING_BYTES + (16 << 20)); /* or nothing is shown */
    assert_true(lengthy.grown_kib << 10 <= (uint64_t)STAGING_BYTES);
}

TESTING_MAIN(cmocka_unit_test(waking_needs_staging_whatever_the_length))
