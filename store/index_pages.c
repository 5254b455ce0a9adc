/* store/index_pages.c - the structure of an LMDB 0.9 file, page by page.
 *
 * Responsible for: meta pages, the free list, the directory of databases and their trees: every
 * page inside the file, of the right kind, used once, with nodes inside it.
 * Not responsible for: the order of keys (index_lmdb.c looks at each step).
 *
 * Layout, 64-bit little-endian. Page: number u64, pad u16, flags u16, then lower u16 and upper
 * u16, or for an overflow run its page count u32; node offsets u16 from byte 16 to `lower`. Node:
 * lo u16, hi u16, flags u16, key size u16, key, data. In a branch lo, hi, flags are the child; in
 * a leaf lo and hi are the data size, and large data is the number of an overflow page. Meta, from
 * byte 16 of pages 0 and 1: magic u32, version u32, address u64, map size u64, two trees of 48
 * bytes (free list, then databases), last page u64, transaction u64.
 */
#include "store/index_pages.h"

#include "store/base/bytes.h"

#include <errno.h>
#include <string.h>

enum {
    HEAD_BYTES = 16,
    NODE_BYTES = 8,
    TREE_BYTES = 48,
    META_BYTES = 24 + 2 * TREE_BYTES + 16,
    PAGE_BYTES_MAX = 65536,
    DEPTH_MAX = 20,
    KEY_BYTES_MAX = 511
};
enum { PAGE_BRANCH = 1, PAGE_LEAF = 2, PAGE_OVERFLOW = 4, PAGE_META = 8 };
enum { NODE_BIG = 1, NODE_TREE = 2 };
enum { TREE_INTEGER_KEY = 8 };
static const uint32_t meta_magic = 0xBEEFC0DE;

enum tree_kind { TREE_FREE, TREE_DATABASES, TREE_RECORDS };

struct meta {
    uint32_t page_bytes;
    uint64_t last_page;
    uint64_t transaction;
    uint8_t trees[2][TREE_BYTES];
};

struct walk {
    const struct io_door *door;
    const struct kv_alloc *alloc;
    int file;
    struct meta meta;
    uint8_t *used;  /* one bit per page */
    uint8_t *pages; /* one page per level */
    uint8_t *ids;   /* one entry of the free list */
    size_t ids_bytes;
    int error; /* errno, or 0 */
    int no_memory;
};

static int read_at(struct walk *walk, void *bytes, size_t count, uint64_t off) {
    size_t got = 0;
    walk->error = walk->door->read(walk->door->context, walk->file, bytes, count, off, &got);
    return walk->error == 0 && got == count;
}

/* The newer of both meta pages, as LMDB picks it; both must be sound. */
static int read_meta(struct walk *walk, struct meta *out) {
    uint8_t page[HEAD_BYTES + META_BYTES];
    struct meta metas[2];
    uint64_t second_off = 4096;
    for (int i = 0; i < 2; i++) {
        if (!read_at(walk, page, sizeof page, i == 0 ? 0 : second_off))
            return 0;
        const uint8_t *at = page + HEAD_BYTES;
        if ((kv_get_u16(page + 10) & PAGE_META) == 0 || kv_get_u32(at) != meta_magic ||
            kv_get_u32(at + 4) != 1)
            return 0;
        memcpy(metas[i].trees, at + 24, 2 * TREE_BYTES);
        metas[i].page_bytes = kv_get_u32(metas[i].trees[0]);
        metas[i].last_page = kv_get_u64(at + 24 + 2 * TREE_BYTES);
        metas[i].transaction = kv_get_u64(at + 32 + 2 * TREE_BYTES);
        second_off = metas[i].page_bytes;
        if (second_off < 512 || second_off > PAGE_BYTES_MAX || (second_off & (second_off - 1)) != 0)
            return 0;
    }
    if (metas[0].page_bytes != metas[1].page_bytes)
        return 0;
    *out = metas[metas[1].transaction > metas[0].transaction];
    return 1;
}

/* Each page has one user. */
static int take_pages(struct walk *walk, uint64_t first, uint64_t count) {
    uint64_t end = 0;
    if (first < 2 || count == 0 || !kv_add_u64(first, count, &end) ||
        end > walk->meta.last_page + 1)
        return 0;
    for (uint64_t page = first; page < end; page++) {
        uint8_t bit = (uint8_t)(1u << (page & 7));
        if ((walk->used[page >> 3] & bit) != 0)
            return 0;
        walk->used[page >> 3] |= bit;
    }
    return 1;
}

/* Pages that the free list gives away must belong to nobody. */
static int check_ids(struct walk *walk, const uint8_t *ids, uint64_t bytes) {
    uint64_t count = bytes < 8 ? UINT64_MAX : kv_get_u64(ids);
    /* LMDB may leave a record with more room than numbers. */
    if (bytes % 8 != 0 || count > bytes / 8 - 1)
        return 0;
#ifdef BREAK_FREE_LIST
    return 1;
#endif
    for (uint64_t i = 1; i <= count; i++) {
        uint64_t page = kv_get_u64(ids + 8 * i);
        if ((i > 1 && page >= kv_get_u64(ids + 8 * (i - 1))) || !take_pages(walk, page, 1))
            return 0;
    }
    return 1;
}

static int check_tree(struct walk *walk, const uint8_t *tree, enum tree_kind kind);

static int check_data(struct walk *walk, const uint8_t *data, uint64_t bytes, unsigned flags,
                      enum tree_kind kind) {
    if (kind == TREE_FREE)
        return check_ids(walk, data, bytes);
    if (kind == TREE_DATABASES)
        return flags == NODE_TREE && bytes == TREE_BYTES && check_tree(walk, data, TREE_RECORDS);
    return 1;
}

static int check_overflow(struct walk *walk, uint64_t page, uint64_t bytes, enum tree_kind kind) {
    uint8_t head[HEAD_BYTES];
    uint64_t page_bytes = walk->meta.page_bytes;
    uint64_t count = (HEAD_BYTES - 1 + bytes) / page_bytes + 1;
    if (!take_pages(walk, page, count) || !read_at(walk, head, sizeof head, page * page_bytes) ||
        kv_get_u64(head) != page || (kv_get_u16(head + 10) & 0xf) != PAGE_OVERFLOW ||
        kv_get_u32(head + 12) < count)
        return 0;
    if (kv_get_u32(head + 12) > count &&
        !take_pages(walk, page + count, kv_get_u32(head + 12) - count))
        return 0;
    if (kind == TREE_RECORDS)
        return 1;
    if (kind != TREE_FREE)
        return 0;
    void *ids = walk->ids;
    if (!kv_alloc_grow(walk->alloc, &ids, &walk->ids_bytes, (size_t)bytes, 1)) {
        walk->no_memory = 1;
        return 0;
    }
    walk->ids = ids;
    return read_at(walk, walk->ids, (size_t)bytes, page * page_bytes + HEAD_BYTES) &&
           check_ids(walk, walk->ids, bytes);
}

static int check_leaf_node(struct walk *walk, const uint8_t *page, uint32_t off,
                           enum tree_kind kind) {
    const uint8_t *node = page + off;
    uint64_t room = walk->meta.page_bytes - off;
    uint64_t bytes = kv_get_u16(node) | (uint64_t)kv_get_u16(node + 2) << 16;
    unsigned flags = kv_get_u16(node + 4);
    uint64_t key_bytes = kv_get_u16(node + 6);
    const uint8_t *data = node + NODE_BYTES + key_bytes;
    if (key_bytes == 0 || key_bytes > KEY_BYTES_MAX || (flags & ~(NODE_BIG | NODE_TREE)) != 0 ||
        (kind == TREE_FREE && key_bytes != 8))
        return 0;
    if ((flags & NODE_BIG) != 0)
        return flags == NODE_BIG && NODE_BYTES + key_bytes + 8 <= room &&
               check_overflow(walk, kv_get_u64(data), bytes, kind);
    if (NODE_BYTES + key_bytes + bytes > room || (kind != TREE_DATABASES && flags != 0))
        return 0;
    return check_data(walk, data, bytes, flags, kind);
}

struct level {
    uint64_t page;
    unsigned depth;      /* of this page, from 1 */
    unsigned leaf_depth; /* where the leaves must be */
    enum tree_kind kind;
    unsigned base; /* levels in use above this tree */
};

static int check_page(struct walk *walk, const struct level *level, uint64_t *entries) {
    uint32_t page_bytes = walk->meta.page_bytes;
    unsigned slot = level->base + level->depth - 1;
    uint8_t *page = walk->pages + (size_t)slot * page_bytes;
    int leaf = level->depth == level->leaf_depth;
    if (slot >= DEPTH_MAX || !take_pages(walk, level->page, 1) ||
        !read_at(walk, page, page_bytes, level->page * page_bytes))
        return 0;
    uint32_t lower = kv_get_u16(page + 12);
    uint32_t upper = kv_get_u16(page + 14);
    if (kv_get_u64(page) != level->page ||
        kv_get_u16(page + 10) != (leaf ? PAGE_LEAF : PAGE_BRANCH) || lower < HEAD_BYTES ||
        lower % 2 != 0 || lower > upper || upper > page_bytes)
        return 0;
    uint32_t count = (lower - HEAD_BYTES) / 2;
    if (count < (leaf ? 1u : 2u))
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t off = kv_get_u16(page + HEAD_BYTES + 2 * i);
        if (off < upper || off % 2 != 0 || off + NODE_BYTES > page_bytes)
            return 0;
        if (leaf) {
            if (!check_leaf_node(walk, page, off, level->kind))
                return 0;
            continue;
        }
        if (off + NODE_BYTES + kv_get_u16(page + off + 6) > page_bytes)
            return 0;
        struct level child = *level;
        child.page = kv_get_u16(page + off) | (uint64_t)kv_get_u16(page + off + 2) << 16 |
                     (uint64_t)kv_get_u16(page + off + 4) << 32;
        child.depth++;
        if (!check_page(walk, &child, entries))
            return 0;
    }
    *entries += leaf ? count : 0;
    return 1;
}

static int check_tree(struct walk *walk, const uint8_t *tree, enum tree_kind kind) {
    uint64_t root = kv_get_u64(tree + 40);
    uint64_t entries = 0;
    struct level level = {.page = root,
                          .depth = 1,
                          .leaf_depth = kv_get_u16(tree + 6),
                          .kind = kind,
                          .base = kind == TREE_RECORDS ? DEPTH_MAX / 2 : 0};
    if (kv_get_u16(tree + 4) != (kind == TREE_FREE ? TREE_INTEGER_KEY : 0))
        return 0;
    if (root == UINT64_MAX)
        return level.leaf_depth == 0 && kv_get_u64(tree + 32) == 0;
    if (level.leaf_depth == 0 || level.leaf_depth > DEPTH_MAX / 2 ||
        !check_page(walk, &level, &entries))
        return 0;
    return entries == kv_get_u64(tree + 32);
}

static int check_file(struct walk *walk, uint64_t size_bytes) {
    uint64_t end = 0;
    if (!read_meta(walk, &walk->meta) || walk->meta.last_page < 1 ||
        !kv_mul_u64(walk->meta.last_page + 1, walk->meta.page_bytes, &end) || end > size_bytes)
        return 0;
    walk->used = kv_alloc_zeroed(walk->alloc, (size_t)(walk->meta.last_page / 8 + 1), 1);
    walk->pages = kv_alloc_zeroed(walk->alloc, DEPTH_MAX, walk->meta.page_bytes);
    if (walk->used == NULL || walk->pages == NULL) {
        walk->no_memory = 1;
        return 0;
    }
    return check_tree(walk, walk->meta.trees[0], TREE_FREE) &&
           check_tree(walk, walk->meta.trees[1], TREE_DATABASES);
}

static int has_moved_on(struct walk *walk) {
    struct meta now;
    return read_meta(walk, &now) && now.transaction != walk->meta.transaction;
}

enum kv_err index_pages_check(const struct io_door *door, int dir, const struct kv_alloc *alloc,
                              struct kv_diag *diag) {
    struct walk walk = {.door = door, .alloc = alloc, .file = -1};
    struct io_file_info info = {0};
    int error = door->open(door->context, dir, "data.mdb", IO_READ, &walk.file);
    if (error == 0)
        error = door->info(door->context, walk.file, &info);
    enum kv_err err = KV_OK;
    if (error != 0)
        err = kv_diag_errno(diag, KV_ERR_IO, error, "index: cannot read data.mdb");
    else if (!check_file(&walk, info.size_bytes)) {
        if (walk.no_memory)
            err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory to check the index");
        else if (walk.error != 0)
            err = kv_diag_errno(diag, KV_ERR_IO, walk.error, "index: cannot read data.mdb");
        else if (!has_moved_on(&walk))
            err = kv_diag_set(diag, KV_ERR_CORRUPT, "index: data.mdb has a damaged page");
    }
    if (walk.file >= 0)
        door->close(door->context, walk.file);
    kv_alloc_release(alloc, walk.used);
    kv_alloc_release(alloc, walk.pages);
    kv_alloc_release(alloc, walk.ids);
    return err;
}
