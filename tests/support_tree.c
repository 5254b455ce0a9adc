/* tests/support_tree.c - a life with its tree of names: forks, tags, removals.
 *
 * Responsible for: the contract of support_tree.h.
 * Not responsible for: what is compared.
 */
#include "tests/support_tree.h"

#include "snapshot/snap_care.h"
#include "tests/testing.h"

void tree_life_open(struct tree_life *f, int real_model) {
    testing_temp_dir(f->dir);
    f->options = life_default(f->dir);
    f->options.real_model = real_model;
    if (real_model)
        f->options.engine.threads = 2;
    life_open(&f->options, &f->life);
    f->tree = (struct snap_tree){f->life.store, kv_alloc_system(), kv_clock_system(), NULL};
}

static void on_finding(void *context, const struct snap_care_finding *finding) {
    (void)context;
    fail_msg("fsck: %s|%s|%s", finding->kind, finding->session, finding->text);
}

void tree_life_check(struct tree_life *f) {
    const struct snap_care_check_args args = {
        .store = f->life.store, .alloc = kv_alloc_system(), .each = on_finding};
    struct snap_care_report report;
    struct kv_diag diag = {""};
    snapshot_drain(f->life.snapshot);
    if (snap_care_check(&args, &report, &diag) != KV_OK)
        fail_msg("snap_care_check: %s", diag.text);
}

void tree_life_fork(struct tree_life *f, const char *name, const char *tag, const char *new_name) {
    const struct snap_tree_place place = {name, tag};
    struct kv_diag diag = {""};
    if (snap_tree_fork(&f->tree, &place, new_name, &diag) != KV_OK)
        fail_msg("snap_tree_fork: %s", diag.text);
}

void tree_life_remove(struct tree_life *f, const char *name) {
    struct kv_diag diag = {""};
    if (snapshot_remove(f->life.store, kv_alloc_system(), name, &diag) != KV_OK)
        fail_msg("snapshot_remove: %s", diag.text);
}
