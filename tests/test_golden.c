/* tests/test_golden.c - sessions that an earlier build has stored.
 *
 * Responsible for: every later build opens them, wakes them with proof, goes on with them, keeps
 * deleted ones deleted through a rebuild, and says of broken stores the expected report, word for
 * word, with the session; what is newer is refused by name. `test_golden make DIR` made the store;
 * once it is in the tree it is never made again.
 * Not responsible for: records without sessions (test_store_open.c, test_store_fsck.c).
 */
#include "restore/restore.h"
#include "snapshot/snap_care.h"
#include "store/base/bytes.h"
#include "store/fmt.h"
#include "store/store_fsck.h"
#include "tests/support_golden.h"
#include "tests/support_life.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char golden[] = "tests/golden/v1/sessions";

/* One layer and one head, so that the files stay small. */
static struct life_options golden_options(const char *dir) {
    struct life_options options = life_default(dir);
    options.model_layers = 1;
    options.model_heads = 1;
    return options;
}

static struct session *wake(struct life *life, const char *name, uint64_t tokens) {
    struct receipt receipt;
    struct session *session = life_wake(life, name, &receipt);
    printf("%s: %llu tokens, %s\n", name, (unsigned long long)receipt.tokens,
           receipt_proof_name(receipt.fingerprint));
    assert_int_equal(receipt.tokens, tokens);
    assert_int_equal(receipt.tokens_prefilled, 0);
    assert_true(receipt.fingerprint == RECEIPT_BITS_EQUAL ||
                receipt.fingerprint == RECEIPT_TOP_EQUAL);
    return session;
}

/* Opens, wakes with proof, goes on, sleeps, wakes again; with and without the index. */
static void sessions_wake_and_go_on(void **state) {
    (void)state;
    for (int without_index = 0; without_index < 2; without_index++) {
        char dir[TESTING_PATH_BYTES];
        struct life life;
        struct kv_diag diag = {""};
        struct snapshot_entry entry;
        testing_temp_dir(dir);
        support_store_copy(golden, dir);
        if (without_index)
            support_store_remove_index(dir);
        struct life_options options = golden_options(dir);
        life_open(&options, &life);
        struct session *planes = wake(&life, "planes", 607);
        struct session *pages = wake(&life, "pages", 92);
        life_say(planes, 31, 280, 3, NULL);
        life_say(pages, 32, 20, 3, NULL);
        life_sleep(&life, planes);
        life_sleep(&life, pages);
        session_drop(wake(&life, "planes", 890));
        session_drop(wake(&life, "pages", 115));
        assert_int_equal(snapshot_find(life.store, kv_alloc_system(), "gone", &entry, &diag),
                         KV_ERR_NOT_FOUND);
        life_close(&life);
    }
}

/* --- broken copies */

struct told {
    char text[SUPPORT_GOLDEN_TEXT_BYTES];
    struct snap_care_owners *owners;
    char sessions[128];
    struct store *store;
};

static void tell(struct told *told, const char *kind, const char *sessions, const char *text) {
    size_t used = strlen(told->text);
    snprintf(told->text + used, sizeof told->text - used, "%s [%s] %s\n", kind, sessions, text);
}

static void on_owner(void *context, const char *session) {
    struct told *told = context;
    size_t used = strlen(told->sessions);
    snprintf(told->sessions + used, sizeof told->sessions - used, "%s%s", used != 0 ? " " : "",
             session);
}

static void on_store_finding(void *context, const struct store_fsck_finding *finding) {
    struct told *told = context;
    told->sessions[0] = 0;
    if (finding->key != NULL && finding->key[0] == 'n')
        snprintf(told->sessions, sizeof told->sessions, "%.*s", (int)finding->key_bytes - 1,
                 (const char *)finding->key + 1);
    else if (finding->key != NULL)
        snap_care_owners_of(told->owners, finding->key, finding->key_bytes, on_owner, told);
    tell(told, store_fsck_name(finding->kind), told->sessions, finding->text);
}

static void on_session_finding(void *context, const struct snap_care_finding *finding) {
    tell(context, finding->kind, finding->session, finding->text);
}

static int on_session(void *context, const struct snapshot_entry *entry) {
    struct told *told = context;
    struct restore_check check;
    struct kv_diag diag = {""};
    if (restore_verify(told->store, kv_alloc_system(), entry->head.name, &check, &diag) != KV_OK)
        tell(told, "verify", entry->head.name, diag.text);
    return 1;
}

static void look(const char *dir, struct told *told) {
    struct store_options options = support_store_options(dir);
    struct store_fsck_report report;
    struct snap_care_report records;
    struct kv_diag diag = {""};
    options.read_only = options.inspect = 1;
    memset(told, 0, sizeof *told);
    enum kv_err err = store_open(&options, &told->store, &diag);
    if (err != KV_OK) {
        const char *text = strstr(diag.text, ": ");
        tell(told, kv_err_name(err), "", text != NULL ? text + 2 : diag.text);
        return;
    }
    assert_int_equal(snap_care_owners_make(told->store, kv_alloc_system(), &told->owners, NULL),
                     KV_OK);
    const struct store_fsck_args args = {
        .store = told->store, .read_data = 1, .each = on_store_finding, .context = told};
    const struct snap_care_check_args care = {.store = told->store,
                                              .alloc = kv_alloc_system(),
                                              .each = on_session_finding,
                                              .context = told};
    assert_int_equal(store_fsck(&args, &report, NULL), KV_OK);
    assert_int_equal(snap_care_check(&care, &records, NULL), KV_OK);
    (void)snapshot_list(told->store, kv_alloc_system(), on_session, told, NULL);
    snap_care_owners_drop(told->owners);
    store_close(told->store);
}

static void one_report(const char *file_path) {
    char dir[TESTING_PATH_BYTES];
    char expected[SUPPORT_GOLDEN_TEXT_BYTES];
    static struct told told;
    testing_temp_dir(dir);
    support_store_copy(golden, dir);
    support_golden_break(file_path, dir, expected);
    look(dir, &told);
    if (strcmp(expected, told.text) != 0) {
        printf("%s: expected\n%sgot\n%send\n", file_path, expected, told.text);
        fail();
    }
}

static void broken_stores_name_the_session(void **state) {
    (void)state;
    unsigned count = support_golden_each("tests/golden/v1/sessions_fsck", one_report);
    printf("%u golden reports\n", count);
    assert_true(count >= 8);
}

/* --- what is newer (CASE-11) */

static void refused_as_newer(const char *dir, const char *what) {
    struct store_options options = support_store_options(dir);
    struct store *store = NULL;
    struct kv_diag diag = {""};
    enum kv_err err = store_open(&options, &store, &diag);
    printf("%s: %s\n", what, diag.text);
    assert_int_equal(err, KV_ERR_VERSION);
    assert_non_null(strstr(diag.text, "version 2"));
}

static void put_at(const char *dir, const char *name, uint64_t off, const void *bytes,
                   size_t count) {
    char path[TESTING_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    assert_int_equal(pwrite(file, bytes, count, (off_t)off), (ssize_t)count);
    close(file);
}

static void a_newer_store_is_refused_by_name(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32], text[256] = "";
    testing_temp_dir(dir);
    support_store_copy(golden, dir);
    snprintf(path, sizeof path, "%s/FORMAT", dir);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    char *digit = strstr(text, "version 1");
    assert_non_null(digit);
    digit[8] = '2';
    put_at(dir, "FORMAT", 0, text, size);
    refused_as_newer(dir, "FORMAT");
}

/* The first batch record says version 2; its checks are right. */
static void a_newer_batch_is_refused_by_name(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 32];
    uint8_t head[FMT_BATCH_HEAD_BYTES];
    uint64_t off = 0;
    testing_temp_dir(dir);
    support_store_copy(golden, dir);
    support_store_remove_index(dir);
    snprintf(path, sizeof path, "%s/seg/00000001.seg", dir);
    int file = open(path, O_RDONLY);
    assert_true(file >= 0);
    for (;; off += STORE_PAGE_BYTES) {
        assert_int_equal(pread(file, head, sizeof head, (off_t)off), (ssize_t)sizeof head);
        if (memcmp(head, "CPBATCH1", 8) == 0)
            break;
    }
    close(file);
    kv_put_u32(head + 8, 2);
    kv_put_u64(head + 120, kv_digest_short(head, 120));
    put_at(dir, "seg/00000001.seg", off, head, sizeof head);
    refused_as_newer(dir, "batch record");
}

/* --- made once */

static int make_golden(const char *dir) {
    struct life life;
    struct life_options options = golden_options(dir);
    struct kv_diag diag = {""};
    life_open(&options, &life);
    struct session *planes = life_session(&life, "planes", IMAGE_RECIPE_V3);
    struct session *pages = life_session(&life, "pages", IMAGE_RECIPE_BF16);
    struct session *gone = life_session(&life, "gone", IMAGE_RECIPE_BF16);
    life_say(planes, 1, 590, 4, NULL);
    life_save(&life, planes, 1);
    life_say(gone, 2, 30, 2, NULL);
    life_sleep(&life, gone);
    life_say(pages, 3, 90, 2, NULL);
    life_sleep(&life, pages);
    life_say(planes, 4, 10, 3, NULL);
    life_sleep(&life, planes);
    if (snapshot_remove(life.store, kv_alloc_system(), "gone", &diag) != KV_OK)
        abort();
    life_close(&life);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(sessions_wake_and_go_on),
                                       cmocka_unit_test(broken_stores_name_the_session),
                                       cmocka_unit_test(a_newer_store_is_refused_by_name),
                                       cmocka_unit_test(a_newer_batch_is_refused_by_name)};
    if (argc == 3 && strcmp(argv[1], "make") == 0)
        return make_golden(argv[2]);
    return testing_run(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
