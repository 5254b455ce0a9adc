/* tests/gpu_harm.c - faults in a restored session on a GPU, and which layer of the proof finds it.
 *
 * Responsible for: the list of faults (support_harm_faults.h) on synth:8b, on the disk, in records
 * and in the device's memory; a table and JSON of what caught what. Ends with `N passed, N failed`.
 * Not responsible for: devices that fail (gpu_faults.c), the same on a processor in CI
 * (test_harm.c).
 *
 * Usage: gpu_harm OUT.json COMMIT [cpu]; `cpu` is synth:small on the processor.
 */
#include "store/base/diag.h"
#include "tests/support_harm_faults.h"
#include "tests/support_tally.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct harm harm;
static struct harm_result results[HARM_RESULTS_MAX];

static void names_of(uint32_t mask, char *text, size_t room) {
    size_t used = 0;

    text[0] = 0;
    for (uint32_t layer = 0; layer < HARM_LAYERS && used < room; layer++)
        if (mask >> layer & 1)
            used += (size_t)snprintf(text + used, room - used, "%s%s", used ? ", " : "",
                                     harm_layer_name((enum harm_layer)layer));
    if (mask == 0)
        snprintf(text, room, "not caught");
}

/* "graded or thief; fingerprint" */
static void expected_of(const struct harm_result *result, char *text, size_t room) {
    size_t used = 0;

    snprintf(text, room, "-");
    for (uint32_t i = 0; i < HARM_EXPECTED_MAX && used < room; i++) {
        char names[128];
        if (result->expected[i] == 0)
            continue;
        names_of(result->expected[i], names, sizeof names);
        used += (size_t)snprintf(text + used, room - used, "%s%s", used ? " + " : "",
                                 result->expected[i] == HARM_ANY_NEEDLE ? "any needle" : names);
    }
}

static void tell(FILE *file, uint32_t index, uint32_t count) {
    const struct harm_result *result = &results[index];
    char caught[192], expected[192], line[640];

    names_of(result->caught, caught, sizeof caught);
    expected_of(result, expected, sizeof expected);
    snprintf(line, sizeof line, "%-39s %-9s expected: %-26s caught: %s%s", result->fault,
             harm_place_name(result->place), expected, caught,
             result->place != HARM_PUBLISHED && result->woken ? " (it woke)" : "");
    (void)tally_check(result->good, line);
    if (!result->good)
        printf("     injected %d, %llu bytes, %u of %u facts wrong: %s\n", result->injected,
               (unsigned long long)result->changed_bytes, result->wrong, result->asked,
               result->text);
    for (char *at = results[index].text; *at; at++)
        *at = *at == '"' || *at == '\\' || (unsigned char)*at < ' ' ? '\'' : *at;
    fprintf(file,
            "  {\"fault\": \"%s\", \"place\": \"%s\", \"expected\": \"%s\", \"caught\": \"%s\", "
            "\"as_expected\": %s,\n   \"bytes_changed\": %llu, \"facts_asked\": %u, "
            "\"facts_wrong\": %u, \"woke\": %s, \"first\": \"%s\"}%s\n",
            result->fault, harm_place_name(result->place), expected, caught,
            result->good ? "true" : "false", (unsigned long long)result->changed_bytes,
            result->asked, result->wrong, result->woken ? "true" : "false", result->text,
            index + 1 < count ? "," : "");
}

static void begin_file(FILE *file, const char *commit, const char *model) {
    time_t now = time(NULL);
    struct tm utc;
    char date[32];

    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    fprintf(file,
            "{\"command\": \"gpu_harm\", \"commit\": \"%s\", \"date\": \"%s\",\n \"device\": "
            "\"%s\", \"model\": \"%s\", \"tokens\": %u, \"blocks\": %u,\n \"faults\": [\n",
            commit, date, harm.device, model, harm.tokens, harm.settings.blocks);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

int main(int argc, char **argv) {
    int cpu = argc > 3 && strcmp(argv[3], "cpu") == 0;
    char dir[64] = "/tmp/gpu_harm_XXXXXX", store[80];

    if (argc < 3)
        return printf("usage: gpu_harm OUT.json COMMIT [cpu]\n"), 2;
    FILE *file = fopen(argv[1], "w");
    if (!file || setvbuf(stdout, NULL, _IOLBF, 0) != 0 || !mkdtemp(dir))
        return 2;
    snprintf(store, sizeof store, "%s/store", dir);
    const struct harm_settings settings = {.model = cpu ? "synth:small" : "synth:8b",
                                           .dir = store,
                                           .device = cpu ? ENGINE_DEVICE_CPU : ENGINE_DEVICE_CUDA,
                                           .threads = cpu ? 2 : 16,
                                           .blocks = cpu ? 8 : 15,
                                           .pool_bytes = (uint64_t)(cpu ? 64 : 4096) << 20};
    double begun = tally_seconds();
    harm_open(&settings, &harm);
    printf("     %s on %s: opened in %.1f s, two sessions of %u tokens made in %.1f s\n",
           settings.model, harm.device, harm.opened_s, harm.tokens, harm.filled_s);
    uint32_t count = harm_run(&harm, results);
    begin_file(file, argv[2], settings.model);
    for (uint32_t i = 0; i < count; i++)
        tell(file, i, count);
    fprintf(file, " ],\n \"seconds\": %.1f, \"passed\": %d, \"failed\": %d}\n",
            tally_seconds() - begun, tally_passed(), tally_failed());
    fclose(file);
    harm_close(&harm);
    nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return tally_end();
}
