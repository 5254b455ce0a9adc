/* tests/test_config.c - flags and the configuration file.
 *
 * Responsible for: defaults, precedence, units, every message that a mistake gives.
 * Not responsible for: what commands do with settings (test_cli.c).
 *
 * Fails with BREAK_AGES_ORDER (distances may fall).
 */
#include "tools/config.h"

#include "store/store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Too large for every stack frame; each test loads it anew. */
struct fixture {
    char home[TESTING_PATH_BYTES];
    struct config config;
    struct kv_diag diag;
};

static int set_up(void **state) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    testing_temp_dir(fixture->home);
    setenv("COLDPLANE_HOME", fixture->home, 1);
    *state = fixture;
    return 0;
}

static int tear_down(void **state) {
    free(*state);
    return 0;
}

/* `line` is cut at single spaces. */
static enum kv_err load(struct fixture *fixture, const char *line) {
    static char copy[1024];
    char *argv[32] = {"coldplane"};
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *at = copy; *at != 0 && argc < 32;) {
        argv[argc++] = at;
        at += strcspn(at, " ");
        if (*at == ' ')
            *at++ = 0;
    }
    kv_diag_clear(&fixture->diag);
    return config_load(argc, argv, &fixture->config, &fixture->diag);
}

static void write_file(const struct fixture *fixture, const char *text, size_t bytes) {
    char path[TESTING_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/config", fixture->home);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void assert_refused(struct fixture *fixture, const char *line, const char *said) {
    assert_int_equal(load(fixture, line), KV_ERR_INVALID);
    if (strstr(fixture->diag.text, said) == NULL)
        fail_msg("`%s` said `%s`, not `%s`", line, fixture->diag.text, said);
}

static void defaults_are_as_documented(void **state) {
    struct fixture *fixture = *state;
    char path[TESTING_PATH_BYTES + 64];
    const struct config *config = &fixture->config;
    assert_int_equal(load(fixture, "ls"), KV_OK);
    snprintf(path, sizeof path, "%s/store", fixture->home);
    assert_string_equal(config->store, path);
    snprintf(path, sizeof path, "%s/models/SmolLM2-135M-Instruct.Q4_1.gguf", fixture->home);
    assert_string_equal(config->model, path);
    assert_int_equal(config->policy.recipe, IMAGE_RECIPE_V3);
    assert_int_equal(config->policy.age_count, 1);
    assert_int_equal(config->policy.ages[0], 32768);
    assert_true(config->threads >= 1);
    assert_true(config->slots_bytes == UINT64_C(1) << 30);
    assert_true(config->store_max_bytes == STORE_BYTES_UNLIMITED);
    assert_int_equal(config->word_count, 1);
    assert_string_equal(config->words[0], "ls");
}

static void home_comes_from_the_environment_only(void **state) {
    struct fixture *fixture = *state;
    unsetenv("COLDPLANE_HOME");
    setenv("HOME", "/home/someone", 1);
    assert_int_equal(load(fixture, "ls"), KV_OK);
    assert_string_equal(fixture->config.home, "/home/someone/.coldplane");
    unsetenv("HOME");
    assert_refused(fixture, "ls", "set COLDPLANE_HOME");
    setenv("COLDPLANE_HOME", "", 1);
    assert_refused(fixture, "ls", "set COLDPLANE_HOME");
}

static void flags_win_over_the_file_over_defaults(void **state) {
    static const char text[] = "# a comment\n\n  threads = 3\nages = 512,1024\r\n"
                               "slots-memory = 64MiB\nsystem = Be brief = short.\njson = yes\n";
    struct fixture *fixture = *state;
    const struct config *config = &fixture->config;
    write_file(fixture, text, sizeof text - 1);
    assert_int_equal(load(fixture, "run a --threads 2 --prompt=x --ages=1,2,3"), KV_OK);
    assert_int_equal(config->threads, 2);
    assert_true(config->slots_bytes == UINT64_C(64) << 20);
    assert_string_equal(config->system, "Be brief = short.");
    assert_int_equal(config->json, 1);
    assert_int_equal(config->policy.age_count, 3);
    assert_int_equal(config->policy.ages[2], 3);
    assert_int_equal(load(fixture, "run a"), KV_OK);
    assert_int_equal(config->threads, 3);
    assert_int_equal(config->policy.age_count, 2);
    assert_true(config_given(config, "threads") == 0);
}

static void words_and_flags_may_mix(void **state) {
    struct fixture *fixture = *state;
    const struct config *config = &fixture->config;
    assert_int_equal(load(fixture, "--json run -m m.gguf name -p hi -- --odd"), KV_OK);
    assert_int_equal(config->word_count, 3);
    assert_string_equal(config->words[1], "name");
    assert_string_equal(config->words[2], "--odd");
    assert_string_equal(config->model, "m.gguf");
    assert_string_equal(config->prompt, "hi");
    assert_true(config_given(config, "model") && config_given(config, "json"));
    assert_int_equal(load(fixture, "run name --prompt -"), KV_OK);
    assert_string_equal(config->prompt, "-");
}

/* Fails with BREAK_AGES_ORDER. */
static void mistakes_name_the_flag_and_what_is_right(void **state) {
    struct fixture *fixture = *state;
    assert_refused(fixture, "ls --colour", "--colour: no such flag");
    assert_refused(fixture, "ls --store", "--store: a value is missing");
    assert_refused(fixture, "run a --threads 0", "from 1 to 256");
    assert_refused(fixture, "run a --threads 2x", "from 1 to 256");
    assert_refused(fixture, "run a --threads -1", "from 1 to 256");
    assert_refused(fixture, "run a --threads 99999999999999999999999", "from 1 to 256");
    assert_refused(fixture, "run a --simd neon", "none of auto, avx2 and c");
    assert_refused(fixture, "run a --recipe v9", "take v3, v2, v1, fp8 or bf16");
    assert_refused(fixture, "run a --device gpu", "none of auto, cpu and cuda:0");
    assert_refused(fixture, "run a --device cuda:", "none of auto, cpu and cuda:0");
    assert_refused(fixture, "run a --device cuda:256", "none of auto, cpu and cuda:0");
    assert_refused(fixture, "run a --device-memory all", "512MiB");
    assert_refused(fixture, "run a --temperature nan", "not a number");
    assert_refused(fixture, "run a --temperature -1", "not a number");
    assert_refused(fixture, "run a --ages 512,256", "must not fall");
    assert_refused(fixture, "run a --ages 1,2,3,4,5", "at most four");
    assert_refused(fixture, "run a --ages 1,2,3,4", "down has 3 steps");
    assert_refused(fixture, "run a --recipe v2 --ages 1,2,3", "K8V4 down has 2 steps");
    assert_refused(fixture, "run a --policy lru", "none of age|pressure");
    assert_refused(fixture, "run a --top bf16", "none of k8v4|k8v8");
    assert_refused(fixture, "run a --policy pressure --ages 5", "knows no ages");
    assert_refused(fixture, "run a --policy pressure --recipe bf16", "one tier only");
    assert_refused(fixture, "run a --top k8v8 --recipe bf16", "one tier only");
    assert_refused(fixture, "run a --top k8v8 --recipe fp8", "recipe fp8 has one tier only");
    assert_refused(fixture, "run a --policy pressure --recipe v1", "recipe v1 has one tier only");
    assert_refused(fixture, "run a --recipe v4", "v3, v2, v1, fp8 or bf16");
    assert_refused(fixture, "run a --ages 512,", "missing");
    assert_refused(fixture, "run a --ages=", "no distances");
    assert_refused(fixture, "run a --ages 1 --recipe bf16", "one tier only");
    assert_refused(fixture, "run a --slots-memory lots", "512MiB");
    assert_refused(fixture, "a b c d e f g h i", "too many arguments");
}

static void devices_are_read_and_shown(void **state) {
    struct fixture *fixture = *state;
    const struct config *config = &fixture->config;
    assert_int_equal(load(fixture, "run a"), KV_OK);
    assert_int_equal(config->device.kind, ENGINE_DEVICE_AUTO);
    assert_true(config->device_bytes == UINT64_MAX);
    assert_int_equal(load(fixture, "run a --device cpu --device-memory 2GiB"), KV_OK);
    assert_int_equal(config->device.kind, ENGINE_DEVICE_CPU);
    assert_true(config->device_bytes == UINT64_C(2) << 30);
    assert_int_equal(load(fixture, "run a --device cuda:3"), KV_OK);
    assert_int_equal(config->device.kind, ENGINE_DEVICE_CUDA);
    assert_int_equal(config->device.index, 3);
}

static void ages_of_a_recipe_without_any_are_told(void **state) {
    struct fixture *fixture = *state;
    static const char text[] = "ages = 512\nrecipe = bf16\n";
    write_file(fixture, text, sizeof text - 1);
    assert_refused(fixture, "run a", "/config: recipe bf16 has one tier only, so `ages` means");
    assert_int_equal(load(fixture, "run a --recipe v3"), KV_OK);
    assert_int_equal(fixture->config.policy.ages[0], 512);
    write_file(fixture, text, strlen("ages = 512\n"));
    assert_int_equal(load(fixture, "run a --recipe bf16"), KV_OK);
    assert_int_equal(fixture->config.policy.age_count, 0);
    assert_int_equal(load(fixture, "run a --recipe fp8"), KV_OK);
    assert_int_equal(fixture->config.policy.recipe, IMAGE_RECIPE_FP8);
    assert_int_equal(fixture->config.policy.age_count, 0);
    assert_int_equal(load(fixture, "run a --recipe v1"), KV_OK);
    assert_int_equal(fixture->config.policy.recipe, IMAGE_RECIPE_V1);
}

static void policies_and_tops_are_read(void **state) {
    struct fixture *fixture = *state;
    const struct config *config = &fixture->config;
    assert_int_equal(load(fixture, "run a --ages 1,2,3,4 --top k8v8"), KV_OK);
    assert_int_equal(config->policy.top_k8v8, 1);
    assert_int_equal(config->policy.age_count, 4);
    assert_int_equal(config->slots_high_percent, 0);
    assert_int_equal(load(fixture, "run a --policy pressure --recipe v2"), KV_OK);
    assert_int_equal(config->policy.recipe, IMAGE_RECIPE_V2);
    assert_int_equal(config->policy.pressure, 1);
    assert_int_equal(config->policy.age_count, 0);
    assert_true(config->slots_low_percent > 0);
    assert_true(config->slots_high_percent > config->slots_low_percent);
    assert_int_equal(load(fixture, "run a --policy pressure --slots-high 7"), KV_OK);
    assert_int_equal(config->slots_low_percent, 0);
    write_file(fixture, "policy = pressure\ntop = k8v8\n", 29);
    assert_int_equal(load(fixture, "run a"), KV_OK);
    assert_int_equal(config->policy.pressure + config->policy.top_k8v8, 2);
    assert_int_equal(load(fixture, "run a --policy age --top k8v4"), KV_OK);
    assert_int_equal(config->policy.pressure + config->policy.top_k8v8, 0);
    write_file(fixture, "policy = pressure\nages = 512\n", 29);
    assert_refused(fixture, "run a", "`ages` means nothing");
}

static void flags_of_other_commands_are_refused(void **state) {
    struct fixture *fixture = *state;
    assert_int_equal(load(fixture, "ls --json --temperature 1"), KV_OK);
    assert_int_equal(config_check_flags(&fixture->config, 0, "ls", &fixture->diag), KV_ERR_INVALID);
    assert_non_null(strstr(fixture->diag.text, "--temperature means nothing to `ls`"));
    assert_int_equal(config_check_flags(&fixture->config, CONFIG_CREATE, "run", &fixture->diag),
                     KV_OK);
    assert_refused(fixture, "--requests 257", "from 1 to 256");
    assert_int_equal(load(fixture, "--requests 256"), KV_OK);
}

static void file_mistakes_name_the_line(void **state) {
    struct fixture *fixture = *state;
    write_file(fixture, "threads = 2\ncolour = red\n", 25);
    assert_refused(fixture, "ls", "config, line 2: 'colour' is not a setting");
    write_file(fixture, "\nthreads 2\n", 11);
    assert_refused(fixture, "ls", "line 2: no '='");
    write_file(fixture, "threads = many", 14);
    assert_refused(fixture, "ls", "line 1: threads: 'many'");
    write_file(fixture, "prompt = x", 10);
    assert_refused(fixture, "ls", "'prompt' is not a setting");
    write_file(fixture, "json = maybe", 12);
    assert_refused(fixture, "ls", "neither yes nor no");
    write_file(fixture, "threads\0= 2", 11);
    assert_int_equal(load(fixture, "ls"), KV_ERR_LIMIT);
}

static void json_is_known_even_after_a_mistake(void **state) {
    struct fixture *fixture = *state;
    assert_int_equal(load(fixture, "ls --colour --json"), KV_ERR_INVALID);
    assert_int_equal(fixture->config.json, 1);
}

static void sizes_have_units(void **state) {
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},
                {"1024", 1024},
                {"512MiB", 536870912},
                {"1kB", 1000},
                {"1.5 KiB", 1536},
                {"2gib", UINT64_C(2) << 30},
                {"3GB", 3000000000},
                {"78.6GiB", 84396107366},
                {"1TiB", UINT64_C(1) << 40}};
    static const char *const bad[] = {"",    "x",   "-1",   "1XB",   "1e999", "nan",
                                      "inf", "MiB", "1 2K", "1MiBs", "0x",    "9999999999TiB"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t bytes = 1;
        assert_int_equal(config_parse_bytes(good[i].text, &bytes, NULL), KV_OK);
        assert_true(bytes == good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t bytes = 7;
        if (config_parse_bytes(bad[i], &bytes, NULL) != KV_ERR_INVALID || bytes != 7)
            fail_msg("'%s' was taken for %llu bytes", bad[i], (unsigned long long)bytes);
    }
}

static void what_is_shown_can_be_read_back(void **state) {
    struct fixture *fixture = *state;
    char *shown = NULL, *again = NULL;
    size_t bytes = 0;
    assert_int_equal(load(fixture, "run a --threads 2 --ages 5,6 --top-p 0.5 --store-max 1GiB "
                                   "--system x --simd c --seed 18446744073709551615"),
                     KV_OK);
    FILE *out = open_memstream(&shown, &bytes);
    config_show(&fixture->config, out);
    fclose(out);
    write_file(fixture, shown, bytes);
    assert_int_equal(load(fixture, "ls"), KV_OK);
    assert_int_equal(fixture->config.policy.ages[1], 6);
    assert_true(fixture->config.sampler.seed == UINT64_MAX);
    assert_int_equal(fixture->config.simd, ENGINE_SIMD_C);
    out = open_memstream(&again, &bytes);
    config_show(&fixture->config, out);
    fclose(out);
    assert_string_equal(shown, again);
    free(shown);
    free(again);
}

/* What explains is wanted most when the file is broken: it goes on, and says what is wrong. */
static void a_broken_file_does_not_stop_what_explains(void **state) {
    struct fixture *fixture = *state;
    static const char text[] = "threads = 3\ncolour = blue\nstore-max = none\nseed = 5\n";
    static const char *const explain[] = {"help",          "help run", "run --help",
                                          "--show-config", "version",  "--version"};
    char *shown = NULL;
    size_t bytes = 0;
    write_file(fixture, text, sizeof text - 1);
    assert_refused(fixture, "ls", "line 2");
    for (size_t i = 0; i < sizeof explain / sizeof explain[0]; i++) {
        assert_int_equal(load(fixture, explain[i]), KV_OK);
        assert_int_equal(fixture->config.file_err, KV_ERR_INVALID);
        assert_non_null(strstr(fixture->config.file_diag.text, "line 2"));
        assert_int_equal(fixture->config.threads, 3);
        assert_true(fixture->config.sampler.seed == 5); /* the lines behind it count */
    }
    assert_int_equal(load(fixture, "--show-config"), KV_OK);
    FILE *out = open_memstream(&shown, &bytes);
    config_show(&fixture->config, out);
    fclose(out);
    assert_non_null(strstr(shown, "line 2"));
    assert_non_null(strstr(shown, "store-max = none"));
    free(shown);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

TESTING_MAIN(TEST(defaults_are_as_documented), TEST(home_comes_from_the_environment_only),
             TEST(flags_win_over_the_file_over_defaults), TEST(words_and_flags_may_mix),
             TEST(mistakes_name_the_flag_and_what_is_right), TEST(devices_are_read_and_shown),
             TEST(ages_of_a_recipe_without_any_are_told), TEST(policies_and_tops_are_read),
             TEST(flags_of_other_commands_are_refused), TEST(file_mistakes_name_the_line),
             TEST(json_is_known_even_after_a_mistake), TEST(sizes_have_units),
             TEST(what_is_shown_can_be_read_back), TEST(a_broken_file_does_not_stop_what_explains))
