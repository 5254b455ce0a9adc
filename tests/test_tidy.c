/* tests/test_tidy.c - the checker is checked: every rule of tools/tidy.awk catches its violation.
 *
 * Responsible for: one planted violation per rule, and clean files that nothing may complain about.
 * Not responsible for: rules over several files (tools/check.sh).
 */
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char c_head[] = "/* %s - a file.\n *\n * Responsible for: this.\n"
                             " * Not responsible for: that.\n */\n";
static const char h_head[] = "/* %s - a file.\n *\n * Responsible for: this.\n"
                             " * Not responsible for: that.\n *\n * Threads: any.\n"
                             " * Units: none.\n */\n";

static char root[4096];

/* The checker's output for one file with this content, made in a tree of its own. */
static void tidy(const char *path, const char *content, char *out, size_t out_bytes) {
    char dir[TESTING_PATH_BYTES];
    char text[2 * sizeof root];
    static const char *const folders[] = {"store",    "store/base", "kernels", "engine",
                                          "snapshot", "tools",      "tests"};
    testing_temp_dir(dir);
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(text, sizeof text, "%s/%s", dir, folders[i]);
        assert_int_equal(mkdir(text, 0700), 0);
    }
    snprintf(text, sizeof text, "%s/%s", dir, path);
    FILE *file = fopen(text, "w");
    assert_non_null(file);
    fputs(content, file);
    fclose(file);
    snprintf(text, sizeof text,
             "cd %s && cp %s/tools/layers.txt tools/ && LC_ALL=C awk -f %s/tools/tidy.awk %s 2>&1",
             dir, root, root, path);
    FILE *pipe = popen(text, "r");
    assert_non_null(pipe);
    size_t used = fread(out, 1, out_bytes - 1, pipe);
    out[used] = 0;
    int status = pclose(pipe);
    assert_int_equal(status != 0, used != 0);
}

static void check(const char *path, const char *head, const char *body, const char *wanted) {
    char content[65536];
    char out[4096];
    int used = snprintf(content, sizeof content, head, path);
    snprintf(content + used, sizeof content - (size_t)used, "%s", body);
    tidy(path, content, out, sizeof out);
    if (wanted == NULL ? out[0] != 0 : strstr(out, wanted) == NULL)
        fail_msg("%s\n%s\nwanted: %s\ngot: %s", path, body, wanted == NULL ? "nothing" : wanted,
                 out);
}

static void each_rule_catches_its_violation(void **state) {
    (void)state;
    static const struct {
        const char *path, *body, *wanted;
    } cases[] = {
        {"store/x.c", "int f(void) {\n    return g(malloc (3));\n}\n", "kv_alloc"},
        {"store/x.c", "void f(void) {\n    free(p);\n}\n", "kv_alloc"},
        {"store/x.c", "void f(void) {\n    strcpy(a, b);\n}\n", "banned call"},
        {"store/x.c", "void f(void) {\n    exit(1);\n}\n", "exit, abort and print"},
        {"engine/x.c", "void f(void) {\n    fprintf(stderr, \"\");\n}\n", "exit, abort and print"},
        {"tools/x.c", "void f(void) {\n    getenv(\"HOME\");\n}\n", "environment"},
        {"store/x.c", "void f(void) {\n    clock_gettime(0, 0);\n}\n", "time comes from"},
        {"tools/x.c", "void f(void) {\n    time(NULL);\n}\n", "time comes from"},
        {"tests/x.c", "void f(void) {\n    usleep(3);\n}\n", "no sleeps"},
        {"store/x.c", "void f(void) {\n    rand();\n}\n", "randomness"},
        /* tidy-allow: random this is the planted violation */
        {"store/x.c", "void f(void) {\n    open(\"/dev/urandom\", 0);\n}\n", "randomness"},
        {"store/x.c", "void f(void) {\n    goto out;\n}\n", "the only label"},
        {"store/x.c", "void f(void) {\nout:\n    return;\n}\n", "the only label"},
        {"store/x.c", "typedef struct x x_t;\n", "typedef"},
        {"store/x.c", "/* TODO later */\n", "TODO needs an issue"},
        {"store/x.c", "#define NDEBUG 1\n", "assert stays on"},
        {"store/x.c", "#include \"kernels/layout.h\"\n", "layer: store/ may not include"},
        {"kernels/x.c", "#include \"store/base/err.h\"\n", "layer: kernels/ may not include"},
        {"engine/x.c", "#include \"store/store.h\"\n", "layer: engine/ may not include"},
        {"snapshot/x.c", "#include \"restore/restore.h\"\n", "layer: snapshot/ may not include"},
        {"store/x.c", "#include \"x.h\"\n", "layer: store/ may not include"},
        {"engine/x.c", "#include <cuda_runtime.h>\n", "CUDA headers"},
        {"store/x.c", "int x; \n", "white space at the end"},
        {"store/x.c", "/* f(x, y) = 3; */\n", "commented-out"},
        {"store/x.c", "int f(int a, int b, int c, int d, int e, int g, int h);\n", "6 parameters"},
        {"store/x.c", "int f(int a, int b, int c,\n      int d, int e, int g, int h) {\n}\n",
         "6 parameters"},
        {"store/x.c", "int f(void) {\n    {\n}\n", "braces do not balance"},
        {"store/x.c", "/* tidy-allow: wait */\n", "without a reason"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check(cases[i].path, c_head, cases[i].body, cases[i].wanted);
}

static void clean_code_passes(void **state) {
    (void)state;
    check(
        "store/x.c", c_head,
        "#include \"store/base/err.h\"\n"
        "typedef void (*callback)(void);\n"
        "static const char *const words[] = {\"malloc(3)\", \"exit(1)\", \"it's {\", \"}\\\"{\"};\n"
        "/* malloc(3) is not called here; \"neither\" is exit(1), don't worry. */\n"
        "enum kv_err f(int (*get)(int, int, int, int), int b, int c, int d, int e, int g) {\n"
        "    switch (b) {\n    case '{':\n    default:\n        x.free(y);\n    }\n"
        "    z->time(y);\n    own_printf(snprintf(a, 3, \"\"));\n    mytime(3);\n"
        "done:\n    goto done;\n}\n"
        "#ifdef X\nint g(void) {\n#else\nint h(void) {\n#endif\n}\n",
        NULL);
    check("tools/x.c", c_head, "void f(void) {\n    printf(\"\");\n    exit(1);\n}\n", NULL);
    check("store/base/alloc.c", c_head, "void f(void) {\n    free(p);\n}\n", NULL);
    check("tests/x.c", c_head,
          "void f(void) {\n    /* tidy-allow: wait the child has no other way to be seen */\n"
          "    usleep(3);\n}\n",
          NULL);
    check("store/x.h", h_head, "int f(void);\n", NULL);
}

static void header_comments_are_complete(void **state) {
    (void)state;
    check("store/x.h", c_head, "int f(void);\n", "lacks 'Threads:'");
    check("store/x.h", c_head, "int f(void);\n", "lacks 'Units:'");
    check("store/x.c", "/* %s - a.\n * Responsible for: b.\n */\n", "int f;\n", "'Not responsible");
    check("store/x.c", "/* %s - a.\n * Not responsible for: b.\n */\n", "int f;\n",
          "lacks 'Responsible for:'");
    check("store/x.c", "/* store/%s - a.\n */\n", "int f;\n", "must open with");
}

/* A body or file of `count` lines. */
static void repeat(char *out, size_t out_bytes, const char *first, size_t count, const char *last) {
    size_t used = (size_t)snprintf(out, out_bytes, "%s", first);
    for (size_t i = 0; i < count; i++)
        used += (size_t)snprintf(out + used, out_bytes - used, "    x();\n");
    snprintf(out + used, out_bytes - used, "%s", last);
}

static void lengths_are_exact(void **state) {
    (void)state;
    static char body[60000];
    repeat(body, sizeof body, "int f(int a,\n      int b) {\n", 70, "}\n");
    check("store/x.c", c_head, body, NULL);
    repeat(body, sizeof body, "int f(int a,\n      int b) {\n", 71, "}\n");
    check("store/x.c", c_head, body, "function longer than 70 lines (71)");
    repeat(body, sizeof body, "struct x {\n", 200, "};\n");
    check("store/x.c", c_head, body, NULL);
    repeat(body, sizeof body, "", 800 - 5, "");
    check("store/x.c", c_head, body, NULL);
    repeat(body, sizeof body, "", 801 - 5, "");
    check("store/x.c", c_head, body, "file longer than 800");

    memset(body, 'x', 101);
    memcpy(body, "int ", 4);
    memcpy(body + 99, ";\n", 3);
    check("store/x.c", c_head, body, NULL);
    memcpy(body + 100, ";\n", 3);
    body[99] = 'x';
    check("store/x.c", c_head, body, "longer than 100 columns");
    memset(body, 'x', 101);
    memcpy(body, "/* \xc3\x97\xc3\x97", 7);
    memcpy(body + 98, " */\n", 5);
    check("store/x.c", c_head, body, NULL); /* 99 columns, 101 bytes */
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_rule_catches_its_violation), cmocka_unit_test(clean_code_passes),
        cmocka_unit_test(header_comments_are_complete), cmocka_unit_test(lengths_are_exact)};
    if (getcwd(root, sizeof root) == NULL || access("tools/tidy.awk", R_OK) != 0) {
        fprintf(stderr, "run this from the root of the tree\n");
        return 1;
    }
    return testing_run(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
