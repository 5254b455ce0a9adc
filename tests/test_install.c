/* tests/test_install.c - what `make install` puts in place is whole, and goes without a trace.
 *
 * Responsible for: tools/install.sh: into a folder and out of it, a program of twenty lines that
 * is compiled against the library with pkg-config alone, the Debian package unpacked and run, an
 * upgrade over a store that an older version has written and over a daemon that runs, a program
 * that is older than the store.
 * Not responsible for: building; systemd, of which a stand-in notes what it is asked.
 */
#include "tests/support_daemon.h"
#include "tests/support_store.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[TESTING_PATH_BYTES];

/* Runs a command of the shell; fails the test with what it said unless it ends with `expected`. */
static const char *shell(int expected, const char *command) {
    static char said[16384];
    char whole[4096];
    size_t at = 0;
    snprintf(whole, sizeof whole, "{ %s; } 2>&1", command);
    FILE *pipe = popen(whole, "r");
    assert_non_null(pipe);
    while (at + 1 < sizeof said) {
        size_t got = fread(said + at, 1, sizeof said - 1 - at, pipe);
        if (got == 0)
            break;
        at += got;
    }
    said[at] = 0;
    int status = pclose(pipe);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != expected)
        fail_msg("%s\nended with %d: %s", command, WEXITSTATUS(status), said);
    return said;
}

static const char *run(int expected, const char *format, ...) __attribute__((format(printf, 2, 3)));

static const char *run(int expected, const char *format, ...) {
    char command[3072];
    va_list list;
    va_start(list, format);
    vsnprintf(command, sizeof command, format, list);
    va_end(list);
    return shell(expected, command);
}

/* build/release, where this program stands in a folder of its own. */
static const char *build(void) {
    static char path[TESTING_PATH_BYTES];
    ssize_t size = readlink("/proc/self/exe", path, sizeof path - 1);
    assert_true(size > 0);
    path[size] = 0;
    for (int i = 0; i < 2; i++)
        *strrchr(path, '/') = 0;
    return path;
}

static void begin(void) {
    if (strstr(build(), "release") == NULL)
        testing_skip("only the release build is installed");
    testing_temp_dir(root);
}

static const char program[] =
    "#include \"engine/engine.h\"\n"
    "#include \"restore/restore.h\"\n"
    "#include \"snapshot/snapshot.h\"\n"
    "#include \"store/store.h\"\n"
    "#include <stdio.h>\n"
    "static int show(void *context, const struct snapshot_entry *entry) {\n"
    "    (void)context;\n"
    "    return printf(\"%s %llu\\n\", entry->head.name, (unsigned long long)entry->head.n) > 0;\n"
    "}\n"
    "int main(int argc, char **argv) {\n"
    "    struct store_options options = store_options_usual(argv[argc - 1], \"example\");\n"
    "    struct engine_settings settings = {.alloc = kv_alloc_system(), .threads = 1};\n"
    "    struct restore_check check;\n"
    "    struct engine *engine = NULL;\n"
    "    struct store *store = NULL;\n"
    "    struct kv_diag diag = {\"\"};\n"
    "    if (store_open(&options, &store, &diag) != KV_OK)\n"
    "        return puts(diag.text), 1;\n"
    "    snapshot_list(store, kv_alloc_system(), show, NULL, &diag);\n"
    "    enum kv_err err = restore_verify(store, kv_alloc_system(), \"planes\", &check, &diag);\n"
    "    store_close(store);\n"
    "    return err != KV_OK || engine_open(&settings, \"no model\", 8, &engine, &diag) == KV_OK;\n"
    "}\n";

/* Compiled in a folder of its own, where nothing of this tree can be seen. */
static void a_program_can_use_it(const char *store) {
    char path[TESTING_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/example.c", root);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(program, 1, sizeof program - 1, file), sizeof program - 1);
    fclose(file);
    run(0,
        "cd %s && export PKG_CONFIG_PATH=%s/usr/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=%s && "
        "cc -std=c11 -Wall -Wextra -Werror -o example example.c "
        "$(pkg-config --cflags --libs coldplane)",
        root, root, root);
    const char *said = run(0, "%s/example %s", root, store);
    assert_non_null(strstr(said, "planes 607\n"));
}

static void what_is_installed_goes_again(void **state) {
    (void)state;
    char store[TESTING_PATH_BYTES];
    begin();
    testing_temp_dir(store);
    support_store_copy("tests/golden/v1/sessions", store);
    run(0, "DESTDIR=%s PREFIX=/usr tools/install.sh install %s", root, build());
    run(0, "cmp %s/coldplane %s/usr/bin/coldplane", build(), root);
    run(0, "grep -q '^.TH' %s/usr/share/man/man1/coldplane.1", root);
    run(0, "bash -n %s/usr/share/bash-completion/completions/coldplane", root);
    run(0, "%s/usr/bin/coldplaned --help | head -n 1 | grep -q '^usage: coldplaned'", root);
    run(0, "grep -q '^.TH COLDPLANED 8' %s/usr/share/man/man8/coldplaned.8", root);
    run(0, "grep -q '^ExecStart=/usr/bin/coldplaned ' %s/usr/lib/systemd/system/coldplaned.service",
        root);
    a_program_can_use_it(store);
    /* A second one takes the place of the first, and what is not ours stays. */
    run(0, "DESTDIR=%s PREFIX=/usr tools/install.sh install %s", root, build());
    run(0, "echo mine >%s/usr/include/coldplane/mine.h", root);
    run(0, "DESTDIR=%s PREFIX=/usr tools/install.sh uninstall %s", root, build());
    const char *left = run(0, "cd %s/usr && find . ! -type d -o -name 'coldplane*'", root);
    assert_string_equal(left, "./include/coldplane\n./include/coldplane/mine.h\n");
    run(0, "rm -r %s/usr/include/coldplane", root);
    const char *said =
        run(1, "DESTDIR=%s PREFIX=/usr tools/install.sh uninstall %s", root, build());
    assert_non_null(strstr(said, "nothing was installed"));
}

/* A list that somebody has changed removes nothing outside. */
static void a_foreign_list_is_refused(void **state) {
    (void)state;
    begin();
    run(0, "mkdir -p %s/usr/share/coldplane && touch %s/kept", root, root);
    run(0, "echo ../kept >%s/usr/share/coldplane/files", root);
    run(1, "DESTDIR=%s PREFIX=/usr tools/install.sh uninstall %s", root, build());
    run(0, "test -f %s/kept", root);
}

static void the_package_unpacks_and_runs(void **state) {
    (void)state;
    char store[TESTING_PATH_BYTES];
    begin();
    if (system("command -v dpkg-deb >/dev/null") != 0)
        testing_skip("dpkg-deb is not here");
    testing_temp_dir(store);
    support_store_copy("tests/golden/v1/sessions", store);
    char *package = strdup(run(0, "tools/install.sh deb %s | tail -n 1", build()));
    package[strcspn(package, "\n")] = 0;
    const char *needs = run(0, "dpkg-deb -f %s Depends", package);
    assert_non_null(strstr(needs, "libc6 (>= "));
    assert_non_null(strstr(needs, "liblmdb0 (>= "));
    run(0, "dpkg-deb -x %s %s/deb && dpkg-deb -e %s %s/deb/DEBIAN", package, root, package, root);
    /* An upgrade restarts a daemon that runs, and settings that were changed stay. */
    run(0, "grep -q 'try-restart coldplaned' %s/deb/DEBIAN/postinst", root);
    run(0, "grep -qx /etc/default/coldplaned %s/deb/DEBIAN/conffiles", root);
    run(0, "for script in %s/deb/DEBIAN/p*; do [ ! -f \"$script\" ] || sh -n \"$script\"; done",
        root);
    run(0, "test -z \"$(find %s/deb ! -user root ! -user $(id -un))\"", root);
    /* The store is one that the first version has written. */
    const char *listed =
        run(0, "COLDPLANE_HOME=%s %s/deb/usr/bin/coldplane ls --store %s", root, root, store);
    assert_non_null(strstr(listed, "planes"));
    run(0, "rm %s", package);
    free(package);
}

/* --- over a daemon that runs */

/* The package's own script, with a stand-in for systemctl: what that was asked. */
static const char *maintain(const char *script, const char *arguments) {
    return run(0,
               "sed 's,/run/systemd/system,%s/systemd,' %s/deb/DEBIAN/%s >%s/script && "
               ": >%s/asked && PATH=%s/stand-in:$PATH sh %s/script %s && cat %s/asked",
               root, root, script, root, root, root, root, arguments, root);
}

/* Restarted by an upgrade, stopped before a removal, left alone by everything else. */
static void the_package_restarts_what_runs(void **state) {
    (void)state;
    begin();
    if (system("command -v dpkg-deb >/dev/null") != 0)
        testing_skip("dpkg-deb is not here");
    char *package = strdup(run(0, "tools/install.sh deb %s | tail -n 1", build()));
    package[strcspn(package, "\n")] = 0;
    run(0, "mkdir -p %s/deb/DEBIAN %s/systemd %s/stand-in", root, root, root);
    run(0, "dpkg-deb -e %s %s/deb/DEBIAN && rm %s", package, root, package);
    free(package);
    run(0, "printf '#!/bin/sh\\necho \"$@\" >>%s/asked\\n' >%s/stand-in/systemctl", root, root);
    run(0, "chmod 755 %s/stand-in/systemctl", root);
    assert_string_equal(maintain("postinst", "configure"), "daemon-reload\n");
    assert_string_equal(maintain("postinst", "configure 0.0.1"),
                        "daemon-reload\ntry-restart coldplaned.service\n");
    assert_string_equal(maintain("prerm", "remove"), "stop coldplaned.service\n");
    /* Until the new files are there the old program goes on. */
    assert_string_equal(maintain("prerm", "upgrade 9.9"), "");
}

static void talk(const char *prompt, const char *session, const char *proof) {
    const char *said = run(0, "%s/usr/bin/coldplane run a -p '%s' --json", root, prompt);
    if (strstr(said, session) == NULL || (proof != NULL && strstr(said, proof) == NULL))
        fail_msg("neither %s nor %s: %s", session, proof != NULL ? proof : "", said);
}

/* The files change under it; it is restarted as a package does it; they go under it. */
static void an_upgrade_over_a_daemon_that_runs(void **state) {
    struct cli *cli = *state;
    struct daemon_run daemon = {0};
    char installed[TESTING_PATH_BYTES + 32];
    begin();
    snprintf(installed, sizeof installed, "%s/usr/bin/coldplaned", root);
    daemon.program = installed;
    run(0, "DESTDIR=%s PREFIX=/usr tools/install.sh install %s", root, build());
    assert_true(daemon_start(cli, &daemon, NULL, NULL, NULL));
    talk("hello", "\"new\"", NULL);
    run(0, "DESTDIR=%s PREFIX=/usr tools/install.sh install %s", root, build());
    run(0, "grep -q '(deleted)' /proc/%d/maps", (int)daemon.pid);
    talk("the new command asks the old daemon", "\"resident\"", NULL);
    assert_int_equal(daemon_end(&daemon, SIGTERM), 0);
    assert_true(daemon_start(cli, &daemon, NULL, NULL, NULL));
    talk("and on", "\"woken\"", "\"bits-equal\"");
    run(0, "DESTDIR=%s PREFIX=/usr tools/install.sh uninstall %s", root, build());
    assert_int_equal(daemon_end(&daemon, SIGTERM), 0);
    /* The store is no part of the program. */
    run(0, "%s/coldplane restore a && %s/coldplane fsck --read-data", build(), build());
}

/* After a downgrade: told what is needed, and not a byte is changed. */
static void a_newer_store_is_left_alone(void **state) {
    struct cli *cli = *state;
    struct daemon_run daemon = {0};
    char before[TESTING_PATH_BYTES];
    int code = 0;
    begin();
    run(0, "%s/coldplane run a -p hello", build());
    run(0, "sed -i 's/^version 1$/version 2/' %s/FORMAT", cli->store);
    snprintf(before, sizeof before, "%s", run(0, "cat %s/seg/* | sha256sum", cli->store));
    assert_false(daemon_start(cli, &daemon, &code, NULL, NULL));
    assert_int_equal(code, 3);
    assert_true(daemon_said(&daemon, "needs version 2 of the format"));
    assert_true(daemon_said(&daemon, "use a newer coldplane"));
    static const char *const commands[] = {
        "ls", "run a -p x",   "fsck", "fsck --repair", "fsck --rebuild-index",
        "gc", "rm a --purge", "ps"};
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        assert_non_null(
            strstr(run(3, "%s/coldplane %s", build(), commands[i]), "use a newer coldplane"));
    assert_string_equal(run(0, "cat %s/seg/* | sha256sum", cli->store), before);
    run(0, "sed -i 's/^version 2$/version 1/' %s/FORMAT", cli->store);
    run(0, "%s/coldplane restore a", build());
}

#define OVER(test) cmocka_unit_test_setup_teardown(test, cli_set_up, cli_tear_down)

TESTING_MAIN(OVER(an_upgrade_over_a_daemon_that_runs), OVER(a_newer_store_is_left_alone),
             cmocka_unit_test(the_package_restarts_what_runs),
             cmocka_unit_test(what_is_installed_goes_again),
             cmocka_unit_test(a_foreign_list_is_refused),
             cmocka_unit_test(the_package_unpacks_and_runs))
