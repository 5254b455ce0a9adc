/* tests/support_faulty_index.h - a door to the index that breaks on request.
 *
 * Responsible for: standing in front of every call of store/index.h (the linker sends them here:
 * --wrap, see Makefile), counting them, failing the n-th, and telling a recorder when a change has
 * become durable, so that a power cut takes index and segments at one moment.
 * Not responsible for: LMDB's own pages, which no door can tear (tests/kill_save.c kills for that).
 *
 * Threads: arm and attach from any thread; calls pass from any thread.
 * Units: calls.
 */
#ifndef TESTS_SUPPORT_FAULTY_INDEX_H
#define TESTS_SUPPORT_FAULTY_INDEX_H

#include "store/index.h"

struct faulty_index_plan {
    uint64_t at;      /* the call that fails, from 1; 0: none */
    enum kv_err err;  /* what it returns */
    int only_changes; /* 1: counts index_apply and index_sync alone */
    int after_effect; /* 1: index_apply does its work and then fails: a half-known commit */
};
/* Sets the counts to zero. */
void faulty_index_arm(const struct faulty_index_plan *plan);
uint64_t faulty_index_hits(void);

/* `is_dead` 1: every call fails, as after a power cut. `committed` comes behind each durable
 * change with the directory of the store and the name below it. NULL detaches. */
struct faulty_index_watch {
    int (*is_dead)(void *context);
    void (*committed)(void *context, const char *dir_path, const char *name);
    void *context;
};
void faulty_index_attach(const struct faulty_index_watch *watch);

#endif
