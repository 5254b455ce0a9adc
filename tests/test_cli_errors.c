/* tests/test_cli_errors.c - mistakes, damage and limits as a user of the command line meets them.
 *
 * Responsible for: one clear line, the right exit code, nothing lost and nothing outside changed,
 * for every kind of bad input.
 * Not responsible for: the commands when all is well (test_cli.c).
 */
#include "store/base/bytes.h"
#include "store/store.h"
#include "tests/support_cli.h"
#include "tests/support_tiny_model.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t read_file(const char *path, uint8_t **bytes_out) {
    struct stat info;
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &info), 0);
    *bytes_out = malloc((size_t)info.st_size + 1);
    size_t bytes = fread(*bytes_out, 1, (size_t)info.st_size, file);
    fclose(file);
    return bytes;
}

static void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

static void say_hello(struct cli *cli, const char *name) {
    cli_call(cli, "run", name, "-p", "hello there, how are you today", NULL);
    cli_good(cli);
}

static void assert_still_there(struct cli *cli, const char *name) {
    cli_call(cli, "restore", name, "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli_text(cli, "receipt.fingerprint"), "bits-equal");
}

/* --- words and flags */

static void usage_mistakes_end_with_1(void **state) {
    struct cli *cli = *state;
    cli_call(cli, "frobnicate", NULL);
    cli_refused(cli, 1, "no such command; `coldplane help`");
    cli_call(cli, "--json", NULL);
    cli_refused(cli, 1, "which command?");
    cli_call(cli, "run", NULL);
    cli_refused(cli, 1, "usage: coldplane run NAME --prompt TEXT");
    cli_call(cli, "show", "a", "b", NULL);
    cli_refused(cli, 1, "too many arguments");
    cli_call(cli, "run", "a", NULL);
    cli_refused(cli, 1, "add --prompt TEXT");
    cli_call(cli, "run", "a", "--prompt", "", NULL);
    cli_refused(cli, 1, "the prompt is empty");
    cli_call(cli, "ls", "--temperature", "1", NULL);
    cli_refused(cli, 1, "--temperature means nothing to `ls`");
    cli_call(cli, "needle", "frob", "a", NULL);
    cli_refused(cli, 1, "take add, plant, check, ls or rm");
    cli_call(cli, "needle", "plant", "a", NULL);
    cli_refused(cli, 1, "--key and --value are needed");
    cli_call(cli, "bench", "frob", NULL);
    cli_refused(cli, 1, "no such benchmark");
    cli_call(cli, "bench", "attention", "--tokens", "700", NULL);
    cli_refused(cli, 1, "--tokens 700");
    if (access("/dev/nvidiactl", F_OK) != 0) {
        cli_call(cli, "bench", "attention", NULL);
        cli_refused(cli, 6, "it needs a GPU");
    }
    cli_call(cli, "help", "frob", NULL);
    cli_refused(cli, 1, "no such command");
    assert_int_not_equal(access(cli->store, F_OK), 0);
    cli_call(cli, "run", "a", "-p", "x", "--top-p", "0", "--json", NULL);
    cli_refused(cli, 1, "top-p is 0");
}

static void what_is_not_there_ends_with_2(void **state) {
    struct cli *cli = *state;
    static const char *const commands[] = {"show", "verify", "rm", "restore", "snapshot"};
    cli_call(cli, "ls", "--json", NULL);
    cli_refused(cli, 2, "there is none; `coldplane chat` makes it");
    say_hello(cli, "a");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        cli_call(cli, commands[i], "zz", "--json", NULL);
        cli_refused(cli, 2, "session zz: not in this store; `coldplane ls`");
        assert_string_equal(cli_text(cli, "error.code"), "not-found");
    }
    cli_call(cli, "needle", "check", "a", "--key", "k", NULL);
    cli_refused(cli, 2, "needle k: not in this session");
    cli_call(cli, "needle", "ls", "zz", NULL);
    cli_refused(cli, 2, "not in this store");
    cli_call(cli, "run", "tiny", "-p", "x", "-n", "1", NULL);
    cli_call(cli, "needle", "plant", "tiny", "--key", "k", "--value", "v", NULL);
    cli_refused(cli, 3, "talk a little before planting one");
    assert_still_there(cli, "a");
}

/* --- CASE-31 and CASE-32: names */

static uint32_t entries_of(const char *path) {
    DIR *folder = opendir(path);
    uint32_t count = 0;
    assert_non_null(folder);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

static void bad_names_are_refused_before_anything_is_opened(void **state) {
    struct cli *cli = *state;
    char long_name[400], name_200[201];
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    memset(name_200, 'y', 200);
    name_200[200] = 0;
    const char *const names[] = {"",      "../x",     "/etc/x",   "a/b",     "..",
                                 ".",     "trail.",   "a\nb",     "\x1b[2J", "a\x7f",
                                 "a\xff", "\xc0\xaf", "\xc2\x9b", long_name, name_200};
    static const char *const commands[] = {"run", "show", "restore", "snapshot", "verify", "rm"};
    cli_call(cli, "version", NULL);
    uint32_t before = entries_of(cli->home);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        for (size_t c = 0; c < sizeof commands / sizeof commands[0]; c++) {
            if (c == 0)
                cli_call(cli, "run", names[i], "-p", "x", NULL);
            else
                cli_call(cli, commands[c], names[i], NULL);
            cli_refused(cli, 1, "session name");
        }
    }
    cli_call(cli, "chat", "--session", "../x", NULL);
    cli_refused(cli, 1, "session name");
    assert_int_equal(entries_of(cli->home), before);
}

static void names_in_any_script_come_back_byte_for_byte(void **state) {
    struct cli *cli = *state;
    static const char *const names[] = {
        "\xf0\x9f\x98\x80",                   /* emoji */
        "\xd0\xb4\xd0\xb5\xd0\xbd\xd1\x8c 1", /* Cyrillic */
        "\xe6\x97\xa5\xe6\x9c\xac",           /* Japanese */
        "\xd8\xb3\xd9\x84\xd8\xa7\xd9\x85",   /* Arabic */
        "caf\xc3\xa9",
        "cafe\xcc\x81",
        "--odd \"name\" \\ 'x'", /* composed, decomposed */
    };
    size_t count = sizeof names / sizeof names[0];
    char store[TESTING_PATH_BYTES + 64];
    snprintf(store, sizeof store, "%s/\xd1\x81\xd0\xba\xd0\xbb\xd0\xb0\xd0\xb4 \xf0\x9f\xa7\x8a",
             cli->home);
    for (size_t i = 0; i < count; i++) {
        cli_call(cli, "run", "-p", "hi", "--store", store, "--", names[i], NULL);
        cli_good(cli);
    }
    cli_call(cli, "ls", "--store", store, "--json", NULL);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), count);
    for (size_t i = 0; i < count; i++) {
        cli_call(cli, "restore", "--store", store, "--json", "--", names[i], NULL);
        cli_good(cli);
        assert_string_equal(cli_text(cli, "receipt.name"), names[i]);
        cli_call(cli, "rm", "--store", store, "--json", "--", names[i], NULL);
        cli_good(cli);
        assert_string_equal(cli_text(cli, "removed.name"), names[i]);
    }
    cli_call(cli, "ls", "--store", store, "--json", NULL);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), 0);
}

static void a_planted_link_is_not_followed(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 64], outside[TESTING_PATH_BYTES];
    testing_temp_dir(outside);
    say_hello(cli, "a");
    snprintf(path, sizeof path, "%s/seg", cli->store);
    char moved[TESTING_PATH_BYTES + 64];
    snprintf(moved, sizeof moved, "%s/seg", outside);
    assert_int_equal(rename(path, moved), 0);
    assert_int_equal(symlink(moved, path), 0);
    cli_call(cli, "run", "b", "-p", "x", "--json", NULL);
    assert_true(cli->code == 4 || cli->code == 5);
    cli_refused(cli, cli->code, "seg");
    assert_int_equal(entries_of(moved), 3);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(moved, path), 0);
    assert_still_there(cli, "a");
}

/* A pipe in the place of a file must not be waited for. */
static void a_planted_pipe_is_refused(void **state) {
    struct cli *cli = *state;
    static const char *const names[] = {"FORMAT", "LOCK", "seg/00000001.seg"};
    say_hello(cli, "a");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[TESTING_PATH_BYTES + 64], kept[TESTING_PATH_BYTES + 64];
        snprintf(path, sizeof path, "%s/%s", cli->store, names[i]);
        snprintf(kept, sizeof kept, "%s/kept", cli->home);
        assert_int_equal(rename(path, kept), 0);
        assert_int_equal(mkfifo(path, 0600), 0);
        cli_call(cli, "run", "b", "-p", "x", "--json", NULL);
        assert_true(cli->code == 4 || cli->code == 5);
        cli_refused(cli, cli->code, names[i]);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(rename(kept, path), 0);
        assert_still_there(cli, "a");
    }
}

static void a_folder_in_the_place_of_a_segment_is_no_file(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 64], kept[TESTING_PATH_BYTES + 64];
    say_hello(cli, "a");
    snprintf(path, sizeof path, "%s/seg/00000001.seg", cli->store);
    snprintf(kept, sizeof kept, "%s/kept", cli->home);
    assert_int_equal(rename(path, kept), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    cli_call(cli, "verify", "a", "--json", NULL);
    cli_refused(cli, 4, "seg/00000001.seg is not a file");
    cli_call(cli, "run", "a", "-p", "x", "--json", NULL);
    cli_refused(cli, 4, "seg/00000001.seg is not a file");
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(rename(kept, path), 0);
    assert_still_there(cli, "a");
}

static void assert_same_file(const char *a, const char *b) {
    char text[2][256] = {{0}};
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen(i == 0 ? a : b, "r");
        assert_non_null(file);
        assert_true(fread(text[i], 1, sizeof text[i] - 1, file) > 0);
        fclose(file);
    }
    assert_string_equal(text[0], text[1]);
}

static void a_lost_format_is_told_to_readers_and_writers(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 64], kept[TESTING_PATH_BYTES + 64];
    say_hello(cli, "a");
    snprintf(path, sizeof path, "%s/FORMAT", cli->store);
    snprintf(kept, sizeof kept, "%s/kept", cli->home);
    assert_int_equal(rename(path, kept), 0);
    cli_call(cli, "ls", "--json", NULL);
    cli_refused(cli, 4, "FORMAT is missing but segments are there: put FORMAT back");
    cli_call(cli, "run", "a", "-p", "x", "--json", NULL);
    cli_refused(cli, 4, "FORMAT is missing but segments are there: put FORMAT back");
    assert_non_null(strstr(cli->err, "--rebuild-index"));
    /* Asked for, it is made anew from what the segments say: byte for byte. */
    cli_call(cli, "fsck", "--rebuild-index", "--json", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli_text(cli, "opened"), "FORMAT was missing"));
    assert_same_file(path, kept);
    assert_still_there(cli, "a");
    write_file(path, "coldplane store\nversion 1\nid 0\n", 31);
    cli_call(cli, "ls", "--json", NULL);
    cli_refused(cli, 4, "put it back from a copy");
    assert_int_equal(rename(kept, path), 0);
    assert_still_there(cli, "a");
}

/* --- models */

static void assert_model_refused(struct cli *cli, int code, const char *said) {
    cli_call(cli, "run", "a", "-p", "x", "--json", NULL);
    cli_refused(cli, code, said);
    cli_call(cli, "tokenize", "--json", NULL);
    assert_int_not_equal(cli->code, 126);
}

static void bad_model_files_are_named(void **state) {
    struct cli *cli = *state;
    uint8_t *bytes = NULL;
    size_t size = read_file(cli->model, &bytes);
    cli_call(cli, "run", "a", "-p", "x", "-m", "/nonexistent/model.gguf", "--json", NULL);
    cli_refused(cli, 2, "model file /nonexistent/model.gguf: there is none; `make setup`");
    cli_call(cli, "run", "a", "-p", "x", "-m", cli->home, NULL);
    cli_refused(cli, 1, "not a file");
    for (size_t few = 0; few < 24; few += few == 3 ? 1 : 3) {
        write_file(cli->model, bytes, few);
        assert_model_refused(cli, 4, "bytes are too short to be a GGUF file");
    }
    write_file(cli->model, bytes, 23);
    assert_model_refused(cli, 4, ": 23 bytes are too short to be a GGUF file");
    write_file(cli->model, "#!/bin/sh\necho this is not a model at all\n", 42);
    assert_model_refused(cli, 1, "not a GGUF");
    for (size_t part = 1; part < 8; part++) {
        write_file(cli->model, bytes, size * part / 8);
        assert_model_refused(cli, 4, "cut short");
    }
    write_file(cli->model, bytes, size - 1);
    assert_model_refused(cli, 4, "cut short");
    bytes[4] = 99; /* the GGUF version */
    write_file(cli->model, bytes, size);
    assert_model_refused(cli, 3, "version");
    free(bytes);
}

static void write_odd_model(struct cli *cli, const char *architecture, const char *pre,
                            const char *template) {
    struct tiny_model_options options = tiny_model_default();
    options.architecture = architecture;
    options.pre = pre;
    options.template = template;
    tiny_model_write(&options, cli->model);
}

static void unsupported_models_are_refused_by_name(void **state) {
    struct cli *cli = *state;
    const struct tiny_model_options usual = tiny_model_default();
    write_odd_model(cli, "mamba", usual.pre, usual.template);
    assert_model_refused(cli, 3, "mamba");
    write_odd_model(cli, usual.architecture, "klingon", usual.template);
    assert_model_refused(cli, 3, "klingon");
    write_odd_model(cli, usual.architecture, usual.pre, "{{ messages }} in a form of its own");
    assert_model_refused(cli, 3, "template");
    write_odd_model(cli, usual.architecture, usual.pre, NULL);
    assert_model_refused(cli, 3, "template");
}

/* A LoRA file as converters write it: no tokenizer, tensors named after those that they change. */
static size_t make_adapter(uint8_t *bytes, size_t room, const char *type, float alpha) {
    struct kv_writer writer;
    static const char tensor[] = "blk.0.attn_q.weight.lora_a";
    const char *texts[][2] = {
        {"general.architecture", "llama"}, {"adapter.type", "lora"}, {"general.type", type}};
    uint32_t count = type != NULL ? 3 : 2;
    kv_writer_init(&writer, bytes, room);
    kv_write_bytes(&writer, "GGUF", 4);
    kv_write_u32(&writer, 3);
    kv_write_u64(&writer, 1);
    kv_write_u64(&writer, count + 1);
    for (uint32_t i = 0; i < count; i++)
        for (int k = 0; k < 2; k++) {
            if (k == 1)
                kv_write_u32(&writer, GGUF_KIND_STRING);
            kv_write_u64(&writer, strlen(texts[i][k]));
            kv_write_bytes(&writer, texts[i][k], strlen(texts[i][k]));
        }
    kv_write_u64(&writer, strlen("adapter.lora.alpha"));
    kv_write_bytes(&writer, "adapter.lora.alpha", strlen("adapter.lora.alpha"));
    kv_write_u32(&writer, GGUF_KIND_F32);
    kv_write_f32(&writer, alpha);
    kv_write_u64(&writer, strlen(tensor));
    kv_write_bytes(&writer, tensor, strlen(tensor));
    kv_write_u32(&writer, 2);
    kv_write_u64(&writer, 8);
    kv_write_u64(&writer, 4);
    kv_write_u32(&writer, GGUF_TYPE_F32);
    kv_write_u64(&writer, 0);
    memset(bytes + writer.off, 0, 32 + 128);
    return kv_round_up(writer.off, 32) + 128;
}

/* CASE-15: adapters are not supported, so no session is ever made or woken with one: refused by
 * name, whichever it is, and the session of the bare model stays. Another revision is other
 * weights: the next test. */
static void adapters_are_refused_by_name(void **state) {
    struct cli *cli = *state;
    uint8_t bytes[1024];
    static const char *const types[] = {"adapter", NULL};
    say_hello(cli, "a");
    for (int i = 0; i < 4; i++) {
        size_t size = make_adapter(bytes, sizeof bytes, types[i % 2], i < 2 ? 16.0f : 32.0f);
        write_file(cli->model, bytes, size);
        assert_model_refused(cli, 3, "adapter");
        cli_call(cli, "restore", "a", NULL);
        cli_refused(cli, 3, "merge it into its base model");
        cli_call(cli, "run", "fresh", "-p", "x", NULL);
        cli_refused(cli, 3, "adapter");
    }
    cli_write_model(cli, 1, 8192);
    assert_still_there(cli, "a");
    cli_call(cli, "show", "fresh", NULL);
    assert_int_equal(cli->code, 2);
}

/* CASE-14: other weights of the same shape, also under the same path, size and time. */
static void another_models_session_is_refused_and_kept(void **state) {
    struct cli *cli = *state;
    struct stat info;
    say_hello(cli, "a");
    assert_int_equal(stat(cli->model, &info), 0);
    cli_write_model(cli, 2, 8192);
    const struct timespec times[2] = {info.st_atim, info.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, cli->model, times, 0), 0);
    cli_call(cli, "restore", "a", "--json", NULL);
    cli_refused(cli, 3, "weights");
    assert_string_equal(cli_text(cli, "receipt.result"), "mismatch");
    assert_true(cli_number(cli, "receipt.tokens_reused") == 0);
    cli_call(cli, "run", "a", "-p", "x", NULL);
    cli_refused(cli, 3, "weights");
    cli_write_model(cli, 1, 4096);
    cli_call(cli, "restore", "a", NULL);
    cli_refused(cli, 3, "context");
    cli_write_model(cli, 1, 8192);
    assert_still_there(cli, "a");
}

static void what_does_not_fit_changes_nothing(void **state) {
    struct cli *cli = *state;
    char text[6000];
    for (size_t i = 0; i + 1 < sizeof text; i++)
        text[i] = (char)('a' + i % 26);
    text[sizeof text - 1] = 0;
    cli_write_model(cli, 1, 1024);
    say_hello(cli, "a");
    cli_call(cli, "ls", "--json", NULL);
    double tokens = cli_number(cli, "sessions.0.tokens");
    cli_call(cli, "run", "a", "-p", text, "--json", NULL);
    cli_refused(cli, 3, "do not fit the model's context of 1024");
    cli_call(cli, "ls", "--json", NULL);
    assert_true(cli_number(cli, "sessions.0.tokens") == tokens);
    assert_still_there(cli, "a");
    cli_call(cli, "restore", "a", "--slots-memory", "1MiB", "--reserve-slots", "250", NULL);
    cli_refused(cli, 3, "slots");
    cli_call(cli, "restore", "a", "--slots-memory", "9999TiB", NULL);
    cli_refused(cli, 1, "--slots-memory: '9999TiB' is not between");
    cli_call(cli, "restore", "a", "--slots-memory", "999GiB", NULL);
    if (cli->code != 0)
        cli_refused(cli, 6, "give less with --slots-memory");
    /* No machine has so many, and a program built without CUDA says that. */
    cli_call(cli, "run", "a", "--prompt", "x", "--device", "cuda:255", NULL);
    cli_refused(cli, 6, "CUDA");
}

/* --- stores */

static void flip_byte(const char *path, long off) {
    FILE *file = fopen(path, "r+e");
    assert_non_null(file);
    assert_int_equal(fseek(file, off, SEEK_SET), 0);
    int byte = getc(file);
    assert_true(byte != EOF);
    assert_int_equal(fseek(file, off, SEEK_SET), 0);
    putc(byte ^ 0x40, file);
    assert_int_equal(fclose(file), 0);
}

/* A flipped byte either lies in nobody's bytes or is found, by verify and by restore alike. */
static void a_flipped_byte_is_found_and_hurts_one_session(void **state) {
    struct cli *cli = *state;
    char segment[TESTING_PATH_BYTES + 64];
    struct stat info;
    uint32_t found = 0;
    say_hello(cli, "a");
    say_hello(cli, "b");
    snprintf(segment, sizeof segment, "%s/seg/00000001.seg", cli->store);
    assert_int_equal(stat(segment, &info), 0);
    long step = (long)info.st_size / 12;
    for (long off = 17; off < (long)info.st_size; off += step) {
        flip_byte(segment, off);
        cli_call(cli, "verify", "--json", NULL);
        int verified = cli->code;
        assert_true(verified == 0 || verified == 4);
        cli_call(cli, "restore", "a", NULL);
        int a = cli->code;
        assert_true(a == 0 || strstr(cli->err, "its tokens") != NULL ||
                    strstr(cli->err, "`coldplane scrub`") != NULL);
        cli_call(cli, "restore", "b", NULL);
        int b = cli->code;
        assert_true((a == 0 || a == 4) && (b == 0 || b == 4));
        assert_true(a == 0 || b == 0);
        assert_int_equal(verified == 4, a == 4 || b == 4);
        found += verified == 4;
        flip_byte(segment, off);
    }
    assert_true(found >= 3);
    assert_still_there(cli, "a");
    assert_still_there(cli, "b");
}

static void a_segment_that_was_cut_is_named(void **state) {
    struct cli *cli = *state;
    char segment[TESTING_PATH_BYTES + 64];
    say_hello(cli, "a");
    snprintf(segment, sizeof segment, "%s/seg/00000001.seg", cli->store);
    assert_int_equal(truncate(segment, 4096), 0);
    cli_call(cli, "verify", NULL);
    assert_int_equal(cli->code, 4);
    assert_non_null(strstr(cli->err, "00000001.seg"));
    cli_call(cli, "restore", "a", "--json", NULL);
    cli_refused(cli, 4, "00000001.seg");
    cli_call(cli, "run", "a", "-p", "x", "--json", NULL);
    assert_int_equal(cli->code, 4);
}

static void remove_index(const struct cli *cli) {
    static const char *const names[] = {"index/data.mdb", "index/lock.mdb", "index"};
    char path[TESTING_PATH_BYTES + 64];
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", cli->store, names[i]);
        assert_int_equal(remove(path), 0);
    }
}

/* CASE-07's half that belongs here: never an empty list. */
static void a_lost_index_is_rebuilt(void **state) {
    struct cli *cli = *state;
    static char before[CLI_OUTPUT_BYTES];
    say_hello(cli, "a");
    say_hello(cli, "b");
    say_hello(cli, "c");
    cli_call(cli, "rm", "b", NULL);
    cli_call(cli, "ls", "--json", NULL);
    cli_good(cli);
    memcpy(before, cli->out, sizeof before);
    remove_index(cli);
    cli_call(cli, "ls", "--json", NULL);
    cli_good(cli);
    assert_string_equal(cli->out, before);
    remove_index(cli);
    say_hello(cli, "a");
    assert_still_there(cli, "c");
}

/* Index lost and the last batch damaged: what is gone is said by whoever opens the store, also by
 * the writer that rebuilds it, since nobody is told afterwards. */
static void a_rebuild_that_lost_something_says_so(void **state) {
    struct cli *cli = *state;
    static const char said[] = "The last batch (3) was not whole and was dropped";
    char segment[TESTING_PATH_BYTES + 64];
    uint8_t *bytes = NULL;
    say_hello(cli, "a");
    say_hello(cli, "b");
    say_hello(cli, "b");
    snprintf(segment, sizeof segment, "%s/seg/00000001.seg", cli->store);
    size_t size = read_file(segment, &bytes), last = 0;
    for (size_t at = 0; at + 4096 <= size; at += 4096)
        if (memcmp(bytes + at, "CPBATCH1", 8) == 0)
            last = at;
    free(bytes);
    assert_true(last > 0);
    flip_byte(segment, (long)last + 130);
    remove_index(cli);
    cli_call(cli, "ls", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->err, said));
    remove_index(cli);
    cli_call(cli, "run", "b", "-p", "hi", "--model", "/nonexistent/model.gguf", "--json", NULL);
    assert_int_equal(cli->code, 2);
    assert_non_null(strstr(cli_text(cli, "error.text"), said));
    remove_index(cli);
    cli_call(cli, "run", "a", "-p", "hi", NULL);
    cli_good(cli);
    assert_non_null(strstr(cli->err, said));
    cli_call(cli, "ls", NULL);
    cli_good(cli);
    assert_string_equal(cli->err, "");
}

static void a_newer_store_is_refused(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 64];
    uint8_t *bytes = NULL;
    say_hello(cli, "a");
    snprintf(path, sizeof path, "%s/FORMAT", cli->store);
    size_t size = read_file(path, &bytes);
    bytes[size] = 0;
    char *version = strstr((char *)bytes, "version 1");
    assert_non_null(version);
    version[8] = '7';
    write_file(path, bytes, size);
    cli_call(cli, "ls", "--json", NULL);
    cli_refused(cli, 3, "needs version 7");
    cli_call(cli, "run", "a", "-p", "x", NULL);
    cli_refused(cli, 3, "needs version 7");
    version[8] = '1';
    write_file(path, bytes, size);
    free(bytes);
    assert_still_there(cli, "a");
}

/* CASE-25: the second writer is told who holds it; readers go on. */
static void a_held_store_refuses_writers_only(void **state) {
    struct cli *cli = *state;
    struct store *store = NULL;
    say_hello(cli, "a");
    struct store_options options = store_options_usual(cli->store, "somebody else");
    assert_int_equal(store_open(&options, &store, NULL), KV_OK);
    cli_call(cli, "run", "a", "-p", "x", "--json", NULL);
    cli_refused(cli, 3, "somebody else");
    assert_string_equal(cli_text(cli, "error.code"), "busy");
    cli_call(cli, "rm", "a", NULL);
    cli_refused(cli, 3, "somebody else");
    cli_call(cli, "ls", NULL);
    cli_good(cli);
    cli_call(cli, "show", "a", NULL);
    cli_good(cli);
    cli_call(cli, "verify", NULL);
    cli_good(cli);
    cli_call(cli, "stats", NULL);
    cli_good(cli);
    assert_still_there(cli, "a");
    store_close(store);
    say_hello(cli, "a");
}

/* CASE-19: nothing could be written, so nothing is called saved. */
static void a_save_that_cannot_be_written_says_so(void **state) {
    struct cli *cli = *state;
    say_hello(cli, "a");
    for (int i = 0; i < 40 && cli->code == 0; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        cli_call(cli, "run", name, "-p", "more of the same", "--store-max", "1MiB", "--json", NULL);
    }
    cli_refused(cli, 3, "was not saved");
    assert_true(cJSON_IsFalse(cli_member(cli, "saved")));
    assert_true(strlen(cli_text(cli, "text")) > 0);
    assert_true(cli_number(cli, "receipt.door_bytes") == 0);
    assert_string_equal(cli_text(cli, "receipt.result"), "limit");
    assert_still_there(cli, "a");
    cli_call(cli, "run", "a", "-p", "x", "--store", "/proc/store", "--json", NULL);
    cli_refused(cli, 5, "/proc/store");
    write_file(cli->model, "", 0);
    cli_call(cli, "run", "a", "-p", "x", "--store", cli->model, "--json", NULL);
    cli_refused(cli, 1, "it is no store but a file");
}

static void mount_or_skip(const char *path, const char *options, unsigned long flags) {
    if (mount("tmpfs", path, "tmpfs", flags, options) != 0)
        testing_skip("this account may not mount a small tmpfs");
}

static void a_full_disk_keeps_what_was_saved(void **state) {
    struct cli *cli = *state;
    char store[TESTING_PATH_BYTES + 64];
    cli_own_mounts_or_skip();
    snprintf(store, sizeof store, "%s/full", cli->home);
    assert_int_equal(mkdir(store, 0700), 0);
    mount_or_skip(store, "size=1m", 0);
    snprintf(store, sizeof store, "%s/full/store", cli->home);
    int code = 0;
    uint32_t saved = 0;
    for (int i = 0; i < 40 && code == 0; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        code = cli_call(cli, "run", name, "-p", "fill the disk with this", "--store", store, NULL);
        saved += code == 0;
    }
    cli_refused(cli, 5, "coldplane: ");
    cli_call(cli, "ls", "--store", store, "--json", NULL);
    cli_good(cli);
    assert_int_equal(cJSON_GetArraySize(cli_member(cli, "sessions")), saved);
    cli_call(cli, "verify", "--store", store, NULL);
    cli_good(cli);
    assert_true(saved > 0);
    snprintf(store, sizeof store, "%s/full", cli->home);
    umount(store);
}

static void a_read_only_disk_can_still_be_read(void **state) {
    struct cli *cli = *state;
    char folder[TESTING_PATH_BYTES + 64], store[TESTING_PATH_BYTES + 64];
    cli_own_mounts_or_skip();
    snprintf(folder, sizeof folder, "%s/disk", cli->home);
    assert_int_equal(mkdir(folder, 0700), 0);
    mount_or_skip(folder, "size=8m", 0);
    snprintf(store, sizeof store, "%s/store", folder);
    cli_call(cli, "run", "a", "-p", "hi", "--store", store, NULL);
    cli_good(cli);
    mount_or_skip(folder, NULL, MS_REMOUNT | MS_RDONLY);
    cli_call(cli, "run", "a", "-p", "more", "--store", store, "--json", NULL);
    cli_refused(cli, 5, "Read-only file system");
    cli_call(cli, "ls", "--store", store, NULL);
    cli_good(cli);
    cli_call(cli, "verify", "--store", store, NULL);
    cli_good(cli);
    cli_call(cli, "restore", "a", "--store", store, NULL);
    cli_good(cli);
    umount(folder);
}

/* In a pipe nobody reads on: a chat whose save or turn fails ends with its code, said once. */
static void a_failure_in_a_pipe_ends_the_chat(void **state) {
    struct cli *cli = *state;
    static const char *const commands[] = {"/save\nhello\n", "/save red\nhello\n"};
    for (size_t i = 0; i < 2; i++) {
        cli->input = commands[i];
        cli_call(cli, "chat", "-s", "a", NULL);
        assert_in_range(cli->code, 1, 7);
        const char *said = strstr(cli->err, "coldplane: ");
        assert_non_null(said);
        assert_non_null(strstr(said, "nothing to save"));
        assert_null(strstr(said + 1, "coldplane: "));
    }
    char *words = calloc(1, 9000 * 5 + 2);
    for (size_t i = 0; i < 9000; i++)
        memcpy(words + 5 * i, "word ", 5);
    cli->input = words;
    cli_call(cli, "chat", "-s", "a", NULL);
    free(words);
    assert_int_equal(cli->code, 3);
    const char *said = strstr(cli->err, "coldplane: ");
    assert_non_null(said);
    assert_non_null(strstr(said, "do not fit"));
    assert_null(strstr(said + 1, "coldplane: "));
}

/* A closed descriptor must not become one of the store's files. */
static void closed_standard_descriptors_reach_no_file(void **state) {
    struct cli *cli = *state;
    char path[TESTING_PATH_BYTES + 32], lock[256] = "";
    cli_call(cli, "run", "a", "-p", "hi", NULL);
    cli_good(cli);
    cli->closed = 1U << 0;
    cli_call(cli, "chat", "-s", "a", NULL);
    cli_good(cli);
    cli->closed = 1U << 1;
    cli_call(cli, "run", "a", "-p", "more", NULL);
    cli_refused(cli, 5, "standard output: Bad file descriptor");
    cli->closed = 1U << 0 | 1U << 1;
    cli_call(cli, "rm", "a", NULL);
    cli_refused(cli, 5, "standard output: Bad file descriptor");
    snprintf(path, sizeof path, "%s/LOCK", cli->store);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_true(fread(lock, 1, sizeof lock - 1, file) < sizeof lock - 1);
    fclose(file);
    assert_null(strstr(lock, "removed"));
    cli->closed = 7;
    assert_int_equal(cli_call(cli, "ls", NULL), 5);
}

/* As a full disk: the process is not ended by it, and nothing is lost. */
static void a_limit_of_file_sizes_is_named(void **state) {
    struct cli *cli = *state;
    struct rlimit before;
    struct stat segment;
    char path[TESTING_PATH_BYTES + 32];
    say_hello(cli, "a");
    snprintf(path, sizeof path, "%s/seg/00000001.seg", cli->store);
    assert_int_equal(stat(path, &segment), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    const struct rlimit cut = {(rlim_t)segment.st_size, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &cut), 0);
    cli_call(cli, "run", "a", "-p", "and more", NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    cli_refused(cli, 5, "seg/00000001.seg: File too large (raise the limit, see ulimit -f)");
    assert_still_there(cli, "a");
    say_hello(cli, "a");
    cli_call(cli, "fsck", "--read-data", NULL);
    cli_good(cli);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, cli_set_up, cli_tear_down)

TESTING_MAIN(TEST(usage_mistakes_end_with_1), TEST(what_is_not_there_ends_with_2),
             TEST(bad_names_are_refused_before_anything_is_opened),
             TEST(names_in_any_script_come_back_byte_for_byte),
             TEST(a_planted_link_is_not_followed), TEST(a_planted_pipe_is_refused),
             TEST(a_folder_in_the_place_of_a_segment_is_no_file),
             TEST(a_lost_format_is_told_to_readers_and_writers), TEST(bad_model_files_are_named),
             TEST(unsupported_models_are_refused_by_name), TEST(adapters_are_refused_by_name),
             TEST(another_models_session_is_refused_and_kept),
             TEST(what_does_not_fit_changes_nothing),
             TEST(a_flipped_byte_is_found_and_hurts_one_session),
             TEST(a_segment_that_was_cut_is_named), TEST(a_lost_index_is_rebuilt),
             TEST(a_rebuild_that_lost_something_says_so), TEST(a_newer_store_is_refused),
             TEST(a_held_store_refuses_writers_only), TEST(a_save_that_cannot_be_written_says_so),
             TEST(a_full_disk_keeps_what_was_saved), TEST(a_read_only_disk_can_still_be_read),
             TEST(a_failure_in_a_pipe_ends_the_chat), TEST(a_limit_of_file_sizes_is_named),
             TEST(closed_standard_descriptors_reach_no_file))
