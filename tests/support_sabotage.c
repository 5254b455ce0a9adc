/* tests/support_sabotage.c - overwrite, wake, restore.
 *
 * Responsible for: doing damage behind the store's back, with plain pwrite, and judging what the
 * product says about it.
 * Not responsible for: which check catches it.
 */
#include "tests/support_sabotage.h"

#include "engine/record.h"
#include "tests/support_demo.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { DAMAGED = 2, DONOR = 7 };

struct plane {
    struct store_extent extent;
    uint32_t block;
    enum layout_tier tier;
};

/* The oldest block of the session's head snapshot that is read with VR1, at K6V3 or finer. */
static enum kv_err find_plane(struct service *service, uint32_t index, struct plane *plane_out,
                              struct kv_diag *diag) {
    char name[16];
    struct snapshot_entry entry;
    struct image image;
    demo_name(index, name);
    image_init(&image);
    const struct kv_alloc *alloc = service_alloc(service);
    enum kv_err err = snapshot_find(service_store(service), alloc, name, &entry, diag);
    if (err == KV_OK)
        err = restore_image(service_store(service), alloc, name, &image, diag);
    if (err != KV_OK)
        return err;
    const struct image_policy *policy = &image.policies[image.policy_count - 1].policy;
    struct plane plane = {0};
    while (plane.block < image.block_count) {
        plane.tier = image_tier(policy, plane.block, image.n_kv);
        if ((layout_tier_streams(plane.tier) & 1u << LAYOUT_VR1) != 0)
            break;
        plane.block++;
    }
    struct record_key key = record_key_block(entry.head.lineage, plane.block);
    image_release(&image, alloc);
    struct store_record record;
    err = store_get(service_store(service), key.bytes, key.size, &record, diag);
    if (err != KV_OK)
        return err;
    err = kv_diag_set(diag, KV_ERR_NOT_FOUND, "%s has no block with a raw VR1 plane", name);
    for (uint32_t i = 0; i < record.extent_count; i++) {
        plane.extent = record.extents[i];
        if (plane.extent.kind == LAYOUT_VR1 &&
            plane.extent.raw_bytes == plane.extent.stored_bytes) {
            *plane_out = plane;
            err = KV_OK;
            break;
        }
    }
    store_record_release(service_store(service), &record);
    return err;
}

static int move_bytes(const struct demo *demo, const struct store_extent *extent, uint8_t *bytes,
                      int write) {
    char path[512];
    snprintf(path, sizeof path, "%s/store/seg/%08u.seg", demo->dir, extent->segment);
    int file = open(path, write ? O_WRONLY : O_RDONLY);
    if (file < 0)
        return 0;
    ssize_t moved = write ? pwrite(file, bytes, extent->raw_bytes, (off_t)extent->off)
                          : pread(file, bytes, extent->raw_bytes, (off_t)extent->off);
    int synced = !write || fdatasync(file) == 0;
    close(file);
    return synced && moved == (ssize_t)extent->raw_bytes;
}

/* Wakes all twelve, dropping each at once; the damaged one must be refused as expected. */
static int wake_all(struct service *service, enum kv_err expected, struct receipt *refused_out) {
    int good = 0, refused = 0;
    for (uint32_t i = 0; i < DEMO_SESSIONS; i++) {
        char name[16];
        struct kv_diag diag = {""};
        struct session *session = NULL;
        struct receipt receipt;
        struct restore_options options = {0};
        demo_name(i, name);
        enum kv_err err = service_wake(service, name, &options, &session, &receipt, &diag);
        if (err == KV_OK)
            session_drop(session);
        if (i == DAMAGED) {
            *refused_out = receipt;
            refused = err == expected;
            printf("  %s: %s: %s\n", name, kv_err_name(err), err == KV_OK ? "woke" : diag.text);
        } else {
            good += err == KV_OK && receipt.fingerprint == RECEIPT_BITS_EQUAL;
            if (err != KV_OK)
                printf("  %s: %s: %s\n", name, kv_err_name(err), diag.text);
        }
    }
    printf("  the other %d woke with equal fingerprints\n", good);
    return refused && good == DEMO_SESSIONS - 1;
}

static int judge(struct service *service, const struct demo *demo, enum kv_err expected,
                 uint8_t *bytes) {
    struct kv_diag diag = {""};
    struct plane mine, theirs;
    if (find_plane(service, DAMAGED, &mine, &diag) != KV_OK ||
        find_plane(service, DONOR, &theirs, &diag) != KV_OK) {
        printf("  %s\n", diag.text);
        return 1;
    }
    uint64_t size = mine.extent.raw_bytes;
    if (theirs.extent.raw_bytes != size || !move_bytes(demo, &mine.extent, bytes, 0) ||
        !move_bytes(demo, &theirs.extent, bytes + size, 0) ||
        !move_bytes(demo, &mine.extent, bytes + size, 1)) {
        printf("  the planes could not be exchanged\n");
        return 1;
    }
    printf("  block %u of chat-%02d is read at %s; its VR1 (%llu bytes, stored raw) is now that of "
           "chat-%02d\n",
           mine.block, DAMAGED + 1, layout_tier_name(mine.tier), (unsigned long long)size,
           DONOR + 1);
    struct receipt refused = {0};
    int ok = wake_all(service, expected, &refused);
    if (ok && expected == KV_ERR_CORRUPT)
        printf("  caught by: the digest (%u checked, %u failed)\n", refused.digests_checked,
               refused.digests_failed);
    if (ok && expected == KV_ERR_PROOF)
        printf("  caught by: %s\n", refused.fingerprint == RECEIPT_DIFFERENT
                                        ? "the fingerprint"
                                        : "a needle that was kept and is gone");
    if (!move_bytes(demo, &mine.extent, bytes, 1))
        return 1;
    return ok ? 0 : 1;
}

int sabotage_run(int argc, char **argv, enum kv_err expected) {
    struct demo demo;
    struct kv_diag diag = {""};
    struct service *service = NULL;
    struct demo_opening opening = {DEMO_ROOM_NINE, "store", NULL};
    if (!demo_from_args(argc, argv, &demo)) {
        fprintf(stderr, "usage: started by demo\n");
        return 1;
    }
    if (demo_open(&demo, &opening, &service, &diag) != KV_OK) {
        fprintf(stderr, "sabotage: %s\n", diag.text);
        return 1;
    }
    uint8_t *bytes = kv_alloc_aligned(service_alloc(service), 64u << 20, 4096);
    int status = bytes == NULL ? 1 : judge(service, &demo, expected, bytes);
    kv_alloc_release(service_alloc(service), bytes);
    service_close(service);
    return status;
}
