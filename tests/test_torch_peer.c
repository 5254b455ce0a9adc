/* tests/test_torch_peer.c - figures of another program, whatever that program says.
 *
 * Responsible for: lines with and without a figure, a python3 that speaks, says nothing or is not
 * there.
 * Not responsible for: torch itself (make gpu-bench).
 */
#include "tools/torch_peer.h"

#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static void lines_are_figures_or_notes(void **state) {
    static struct torch_peer torch;

    (void)state;
    assert_int_equal(torch_peer_line(&torch, "peer flash 1 131072 156.70 160.00\n"), 1);
    assert_int_equal(torch_peer_line(&torch, "peer cudnn 256 8192 0 0\n"), 0);
    assert_int_equal(torch_peer_line(&torch, "peer cudnn 256\n"), 0);
    assert_int_equal(torch_peer_line(&torch, "torch 2.11.0\n"), 0);
    assert_int_equal(torch.count, 1);
    assert_string_equal(torch.peers[0].name, "flash");
    assert_int_equal(torch.peers[0].rows, 1);
    assert_int_equal(torch.peers[0].tokens, 131072);
    assert_true(torch.peers[0].median_us > 156.6 && torch.peers[0].median_us < 156.8);
    assert_string_equal(torch.note, "torch 2.11.0");
    for (uint32_t i = 0; i < 2 * TORCH_PEER_MAX; i++)
        assert_int_equal(torch_peer_line(&torch, "peer another_name_that_is_far_too_long 1 1 1 1"),
                         0);
    for (uint32_t i = 0; i < 2 * TORCH_PEER_MAX; i++)
        assert_int_equal(torch_peer_line(&torch, "peer x 1 1 1.5 2.5"), 1);
    assert_int_equal(torch.count, TORCH_PEER_MAX);
}

/* A python3 of our own in front of the PATH; NULL: none at all. */
static void run_with(const char *script, struct torch_peer *torch) {
    char dir[TESTING_PATH_BYTES], path[TESTING_PATH_BYTES + 16];
    char *before = strdup(getenv("PATH"));

    testing_temp_dir(dir);
    snprintf(path, sizeof path, "%s/python3", dir);
    if (script) {
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        fprintf(file, "#!/bin/sh\n%s\n", script);
        fclose(file);
        assert_int_equal(chmod(path, 0755), 0);
    }
    assert_int_equal(setenv("PATH", dir, 1), 0);
    torch_peer_run(torch);
    assert_int_equal(setenv("PATH", before, 1), 0);
    free(before);
}

static void what_python_says_is_taken(void **state) {
    static struct torch_peer torch;

    (void)state;
    run_with("[ \"$1\" = -c ] || exit 1\ncase \"$2\" in\n*scaled_dot_product_attention*)\n"
             "echo 'peer cudnn 1 131072 133.1 140'; echo 'peer flash 256 8192 129.8 130';;\nesac\n"
             "echo noise >&2; echo 'torch 9.9'",
             &torch);
    assert_int_equal(torch.count, 2);
    assert_string_equal(torch.peers[1].name, "flash");
    assert_string_equal(torch.note, "torch 9.9");
    run_with("exit 3", &torch);
    assert_int_equal(torch.count, 0);
    assert_non_null(strstr(torch.note, "said nothing"));
    run_with(NULL, &torch);
    assert_int_equal(torch.count, 0);
    assert_non_null(strstr(torch.note, "python3 does not start"));
}

TESTING_MAIN(cmocka_unit_test(lines_are_figures_or_notes),
             cmocka_unit_test(what_python_says_is_taken))
