/* tests/bench_prefix.c - what it takes to know how 10,000 sessions begin.
 *
 * Responsible for: the time to make the table of beginnings from a store, its memory, the time of
 * one search in the worst case, where every session begins alike; `bench_prefix SESSIONS`.
 * Not responsible for: waking what is found.
 *
 * Half of the sessions have 300 tokens, half 2,100 (6 blocks, of which forks share the records).
 */
#include "snapshot/snap_prefix.h"
#include "snapshot/snap_tree.h"
#include "tests/support_life.h"
#include "tests/testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t ids[4096];

static void must(enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK) {
        fprintf(stderr, "%s: %s\n", kv_err_name(err), diag->text);
        exit(1);
    }
}

static double ms_since(uint64_t begun) {
    return (double)(kv_clock_now_ns(kv_clock_system()) - begun) / 1e6;
}

static void make(struct life *life, const char *name, uint32_t count) {
    struct session *session = life_session(life, name, IMAGE_RECIPE_V3);
    support_engine_feed(session, ids, count);
    life_sleep(life, session);
}

int main(int argc, char **argv) {
    static const uint8_t owner[IMAGE_OWNER_BYTES];
    unsigned long sessions = argc > 1 ? strtoul(argv[1], NULL, 10) : 10000;
    char dir[TESTING_PATH_BYTES];
    struct life life;
    struct kv_diag diag = {""};
    life_begin(dir, &life);
    support_engine_ids(testing_seed("ids", 1), 256, ids, 4096);
    make(&life, "short", 300);
    make(&life, "long", 2100);
    const struct snap_tree tree = {life.store, kv_alloc_system(), kv_clock_system(), NULL};
    for (unsigned long i = 2; i < sessions; i++) {
        const struct snap_tree_place place = {i % 2 == 0 ? "short" : "long", NULL};
        char name[32];
        snprintf(name, sizeof name, "chat %lu", i);
        must(snap_tree_fork(&tree, &place, name, &diag), &diag);
    }
    const struct snap_prefix_settings settings = {
        .store = life.store, .alloc = kv_alloc_system(), .hash_mask = UINT64_MAX};
    struct snap_prefix *prefix = NULL;
    struct snap_prefix_counts counts;
    uint64_t begun = kv_clock_now_ns(kv_clock_system());
    must(snap_prefix_open(&settings, &prefix, &diag), &diag);
    double open_ms = ms_since(begun);
    snap_prefix_counts(prefix, owner, &counts);
    printf("%llu sessions: table made in %.0f ms, %.1f MiB\n", (unsigned long long)counts.entries,
           open_ms, (double)counts.bytes / 1048576);
    static const uint32_t lengths[] = {200, 320, 2000, 2200};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct snap_prefix_found found[SNAP_PREFIX_FOUND_MAX];
        const struct snap_prefix_wish wish = {.owner = owner, .ids = ids, .count = lengths[i]};
        begun = kv_clock_now_ns(kv_clock_system());
        uint32_t count = snap_prefix_find(prefix, &wish, found);
        printf("a wish of %u tokens: %.2f ms, %u found, claim %llu\n", lengths[i], ms_since(begun),
               count, count != 0 ? (unsigned long long)found[0].claim : 0ULL);
    }
    begun = kv_clock_now_ns(kv_clock_system());
    must(snap_prefix_note(prefix, "chat 3", &diag), &diag);
    printf("one of them noted: %.2f ms\n", ms_since(begun));
    begun = kv_clock_now_ns(kv_clock_system());
    must(snap_prefix_refresh(prefix, &diag), &diag);
    printf("all looked through: %.0f ms\n", ms_since(begun));
    snap_prefix_close(prefix);
    life_close(&life);
    return 0;
}
