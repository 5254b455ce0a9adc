/* tests/support_tree.h - a life with its tree of names: forks, tags, removals.
 *
 * Responsible for: opening it in a folder of its own, the calls that must work, a check of all of
 * it.
 * Not responsible for: what is compared.
 *
 * Threads: the main thread.
 * Units: none.
 */
#ifndef TESTS_SUPPORT_TREE_H
#define TESTS_SUPPORT_TREE_H

#include "snapshot/snap_tree.h"
#include "tests/support_life.h"

struct tree_life {
    struct life_options options;
    struct life life;
    struct snap_tree tree;
    char dir[TESTING_PATH_BYTES];
};
/* `real_model`: with two threads, or the test is skipped. Ended by life_close. */
void tree_life_open(struct tree_life *f, int real_model);
/* Nothing is missing, nothing is unused, every count is right, every byte reads. */
void tree_life_check(struct tree_life *f);
void tree_life_fork(struct tree_life *f, const char *name, const char *tag, const char *new_name);
void tree_life_remove(struct tree_life *f, const char *name);

#endif
