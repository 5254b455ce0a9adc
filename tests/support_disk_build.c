/* tests/support_disk_build.c - the directory that a power cut leaves.
 *
 * Responsible for: replaying a log up to an entry, choosing what of the unsynced changes is there,
 * and writing the result out as files.
 * Not responsible for: recording (support_disk.c).
 */
#include "tests/support_disk_build.h"
#include "tests/support_disk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct name {
    char text[DISK_NAME_BYTES];
    uint32_t node;
};

struct node {
    int is_dir;
    uint8_t *bytes; /* of a file: what is safe */
    size_t count, capacity;
    struct name *names; /* of a directory: what is safe */
    size_t name_count, name_capacity;
    const struct disk_entry **pending; /* since its last sync */
    size_t pending_count, pending_capacity;
    const struct disk_entry *index; /* the last index in this directory */
};

static void resize(struct node *node, size_t count) {
    if (count > node->capacity) {
        node->capacity = count < 4096 ? 4096 : count + count / 2;
        node->bytes = disk_need(realloc(node->bytes, node->capacity));
    }
    if (count > node->count)
        memset(node->bytes + node->count, 0, count - node->count);
    node->count = count;
}

static void write_piece(struct node *node, const struct disk_entry *entry, size_t from,
                        size_t end) {
    if (entry->off + end > node->count)
        resize(node, (size_t)entry->off + end);
    if (end > from)
        memcpy(node->bytes + entry->off + from, entry->bytes + from, end - from);
}

static void drop_name(struct node *node, const char *text) {
    for (size_t i = 0; i < node->name_count; i++)
        if (strcmp(node->names[i].text, text) == 0) {
            node->names[i] = node->names[--node->name_count];
            return;
        }
}

static void add_name(struct node *node, const char *text, uint32_t child) {
    drop_name(node, text);
    if (node->name_count == node->name_capacity) {
        node->name_capacity = node->name_capacity == 0 ? 16 : 2 * node->name_capacity;
        node->names = disk_need(realloc(node->names, node->name_capacity * sizeof *node->names));
    }
    struct name *name = &node->names[node->name_count++];
    snprintf(name->text, sizeof name->text, "%s", text);
    name->node = child;
}

static void rename_name(struct node *node, const char *from, const char *to) {
    for (size_t i = 0; i < node->name_count; i++)
        if (strcmp(node->names[i].text, from) == 0) {
            uint32_t child = node->names[i].node;
            drop_name(node, from);
            add_name(node, to, child);
            return;
        }
}

static void apply_whole(struct node *node, const struct disk_entry *entry) {
    switch (entry->kind) {
    case DISK_WRITE:
        write_piece(node, entry, 0, entry->count);
        break;
    case DISK_TRUNCATE:
        resize(node, (size_t)entry->off);
        break;
    case DISK_ALLOCATE:
        if (entry->off > node->count)
            resize(node, (size_t)entry->off);
        break;
    case DISK_PUNCH:
        for (size_t at = (size_t)entry->off; at < entry->off + entry->count && at < node->count;
             at++)
            node->bytes[at] = 0;
        break;
    case DISK_CREATE:
        add_name(node, entry->name, entry->node);
        break;
    case DISK_REMOVE:
        drop_name(node, entry->name);
        break;
    case DISK_RENAME:
        rename_name(node, entry->name, entry->to);
        break;
    case DISK_SYNC:
    case DISK_INDEX:
        break;
    }
}

static void settle(struct node *node) {
    for (size_t i = 0; i < node->pending_count; i++)
        apply_whole(node, node->pending[i]);
    node->pending_count = 0;
}

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = *state ^ *state >> 32;
    return (x * 0xd6e8feb86659fd93u) >> 32;
}

/* Each change is there or not by itself: what came later may be there without what came before. */
static void settle_partly(struct node *node, const struct disk_policy *policy, uint64_t *random) {
    /* Often all or nothing of a file survives, so that both are met beside the mixtures. */
    uint64_t mood = next_random(random) % 4;
    for (size_t i = 0; i < node->pending_count; i++) {
        const struct disk_entry *entry = node->pending[i];
        if (mood == 0 || (mood == 1 && i + 1 == node->pending_count))
            continue;
        if (entry->kind != DISK_WRITE) {
            if (mood == 1 || next_random(random) % 2 == 0)
                apply_whole(node, entry);
            continue;
        }
        for (size_t from = 0; from < entry->count; from += policy->grain_bytes) {
            size_t end = from + policy->grain_bytes;
            if (mood == 1 || next_random(random) % 2 == 0)
                write_piece(node, entry, from, end < entry->count ? end : entry->count);
        }
    }
    node->pending_count = 0;
}

static void record(struct node *nodes, const struct disk_entry *entry) {
    struct node *node = &nodes[entry->node];
    if (entry->kind == DISK_INDEX) {
        node->index = entry;
        return;
    }
    if (entry->kind == DISK_SYNC) {
        settle(node);
        return;
    }
    if (entry->kind == DISK_CREATE) {
        nodes[entry->node].is_dir = entry->is_dir;
        node = &nodes[entry->dir];
    }
    if (node->pending_count == node->pending_capacity) {
        node->pending_capacity = node->pending_capacity == 0 ? 64 : 2 * node->pending_capacity;
        node->pending =
            disk_need(realloc(node->pending, node->pending_capacity * sizeof *node->pending));
    }
    node->pending[node->pending_count++] = entry;
}

static void put_file(const char *path, const uint8_t *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    size_t end = count;
    if (file == NULL) {
        fprintf(stderr, "disk: cannot make %s\n", path);
        abort();
    }
    while (end > 0 && bytes[end - 1] == 0)
        end--;
    if ((end > 0 && fwrite(bytes, 1, end, file) != end) || fflush(file) != 0 ||
        ftruncate(fileno(file), (off_t)count) != 0) {
        fprintf(stderr, "disk: cannot write %s\n", path);
        abort();
    }
    fclose(file);
}

static void put_dir(const struct node *nodes, const struct node *node, const char *path) {
    char below[800];
    (void)mkdir(path, 0700);
    if (node->index != NULL) {
        snprintf(below, sizeof below, "%s/data.mdb", path);
        put_file(below, node->index->bytes, node->index->count);
    }
    for (size_t i = 0; i < node->name_count; i++) {
        const struct node *child = &nodes[node->names[i].node];
        snprintf(below, sizeof below, "%s/%s", path, node->names[i].text);
        if (child->is_dir)
            put_dir(nodes, child, below);
        else
            put_file(below, child->bytes, child->count);
    }
}

void disk_build(struct disk *disk, uint64_t entries, const struct disk_policy *policy,
                const char *to) {
    const struct disk_log *log = disk_log_of(disk);
    struct node *nodes = disk_need(calloc(log->node_count + 1, sizeof *nodes));
    uint64_t random = policy->seed * 2862933555777941757u + entries * 3037000493u + 1;
    for (uint64_t i = 0; i < entries && i < log->count; i++)
        record(nodes, &log->entries[i]);
    for (uint32_t i = 0; i < log->node_count; i++) {
        if (policy->unsynced == DISK_KEPT)
            settle(&nodes[i]);
        else if (policy->unsynced == DISK_RANDOM)
            settle_partly(&nodes[i], policy, &random);
    }
    for (size_t i = 0; i < nodes[DISK_NODE_ABOVE].name_count; i++)
        put_dir(nodes, &nodes[nodes[DISK_NODE_ABOVE].names[i].node], to);
    for (uint32_t i = 0; i < log->node_count; i++) {
        free(nodes[i].bytes);
        free(nodes[i].names);
        free(nodes[i].pending);
    }
    free(nodes);
}
