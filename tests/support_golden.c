/* tests/support_golden.c - recipes that break copies of stores.
 *
 * Responsible for: the contract of support_golden.h.
 * Not responsible for: what is said about them.
 */
#include "tests/support_golden.h"

#include "tests/support_store.h"
#include "tests/testing.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void copy_pages(const char *dir, const char *name, long from, long to, long pages) {
    char path[512];
    static unsigned char page[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    for (long i = 0; i < pages; i++) {
        assert_int_equal(fseek(file, from + i * 4096, SEEK_SET), 0);
        assert_int_equal(fread(page, 1, sizeof page, file), sizeof page);
        assert_int_equal(fseek(file, to + i * 4096, SEEK_SET), 0);
        assert_int_equal(fwrite(page, 1, sizeof page, file), sizeof page);
    }
    fclose(file);
}

static void apply(const char *dir, const char *line) {
    char name[64];
    char path[512];
    unsigned long a = 0;
    unsigned long b = 0;
    unsigned long c = 0;
    if (sscanf(line, "flip %63s %lu %lu", name, &a, &b) == 3) {
        support_store_flip(dir, name, a, (unsigned char)b);
    } else if (sscanf(line, "cut %63s %lu", name, &a) == 2) {
        support_store_truncate(dir, name, a);
    } else if (sscanf(line, "copy %63s %lu %lu %lu", name, &a, &b, &c) == 4) {
        copy_pages(dir, name, (long)a, (long)b, (long)c);
    } else if (sscanf(line, "remove %63s", name) == 1) {
        snprintf(path, sizeof path, "%s/%s", dir, name);
        assert_int_equal(unlink(path), 0);
    } else if (strcmp(line, "nothing\n") != 0) {
        fail_msg("what is '%s'?", line);
    }
}

void support_golden_break(const char *file_path, const char *dir,
                          char expected_out[SUPPORT_GOLDEN_TEXT_BYTES]) {
    char line[512];
    int behind = 0;
    FILE *file = fopen(file_path, "r");
    assert_non_null(file);
    expected_out[0] = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        if (strcmp(line, "report\n") == 0)
            behind = 1;
        else if (behind)
            strncat(expected_out, line, SUPPORT_GOLDEN_TEXT_BYTES - strlen(expected_out) - 1);
        else
            apply(dir, line);
    }
    fclose(file);
    assert_true(behind);
}

unsigned support_golden_each(const char *folder, void (*each)(const char *file_path)) {
    unsigned count = 0;
    DIR *list = opendir(folder);
    assert_non_null(list);
    for (struct dirent *entry = readdir(list); entry != NULL; entry = readdir(list)) {
        char path[600];
        if (strstr(entry->d_name, ".txt") == NULL)
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        each(path);
        count++;
    }
    closedir(list);
    return count;
}
