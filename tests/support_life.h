/* tests/support_life.h - store, engine, snapshot and restore put together over the tiny model.
 *
 * Responsible for: opening and ending them in order, talking to sessions, hashing what is resident,
 * changing stored records and bytes behind the product's back.
 * Not responsible for: what is compared.
 *
 * Threads: the main thread.
 * Units: tokens, bytes.
 */
#ifndef TESTS_SUPPORT_LIFE_H
#define TESTS_SUPPORT_LIFE_H

#include "engine/engine.h"
#include "engine/record.h"
#include "engine/transfer.h"
#include "restore/restore.h"
#include "snapshot/snapshot.h"
#include "store/store.h"
#include "tests/support_engine.h"
#include "tests/support_faulty_io.h"
#include "tests/testing.h"

struct life_options {
    const char *dir;
    const struct io_door *door; /* NULL: the best one */
    struct support_engine_options engine;
    uint32_t slots_low_percent, slots_high_percent; /* watermarks of policy pressure */
    uint32_t queue_max;
    uint32_t helpers; /* of the background writer */
    uint64_t bytes_max;
    uint64_t bytes_per_second; /* the write budget, 0: none */
    int limited;               /* 1: reserve and segments as the program sets them for bytes_max */
    uint64_t deadline_ns;      /* of one read or write of the store */
    int real_model;            /* 1: instead of the tiny one; skips the test without it */
    uint64_t ram_bytes;        /* of the RAM tier, 0: none */
    uint64_t model_seed;       /* 1 is the usual tiny model */
    uint32_t model_layers;     /* 2 is usual */
    uint32_t model_heads;      /* of queries and of KV; 0: as usual, 4 and 2 */
    int change_tensor_byte;    /* 1: one byte of one weight is another */
    const struct kv_alloc *alloc; /* of all but the hooks; NULL: the system's */
};

struct life {
    struct store *store;
    struct engine *engine;
    struct snapshot *snapshot;
    struct restore_source source;
    struct life_hook *hook; /* what the hooks of the engine reach */
};

/* Poisoned free slots, shuffled order, queue of 64. */
struct life_options life_default(const char *dir);

/* A life in a folder of its own behind a door that can fail. */
struct life_rig {
    char dir[TESTING_PATH_BYTES];
    struct faulty_io *faulty;
    struct life_options options;
    struct life life;
};
void life_rig_open(struct life_rig *rig);
void life_rig_close(struct life_rig *rig);
void life_rig_reopen(struct life_rig *rig); /* with its options as they are now */
/* Fails the test on an error. */
void life_open(const struct life_options *options, struct life *life_out);
/* The usual one, in a folder of its own. */
void life_begin(char dir_out[TESTING_PATH_BYTES], struct life *life_out);
/* In order: snapshot, store, engine, whose slots a late read may still write. */
void life_close(struct life *life);

/* v3 with ages 512, 1024, 1536, or bf16; greedy. */
struct session *life_session(struct life *life, const char *name, enum image_recipe recipe);

/* One turn: `count` random ids of `seed` fed, then `tokens` generated. */
struct life_turn {
    struct kv_digest rows; /* of every row of logits of the turn */
    uint32_t ids[64];      /* the last ones generated, at most 64 */
    uint32_t id_count;
};
void life_say(struct session *session, uint64_t seed, uint32_t count, uint32_t tokens,
              struct life_turn *turn_out);
void life_same_turn(const struct life_turn *a, const struct life_turn *b);

/* What a throwaway fork says: the logits at its end, and the 32 likeliest tokens one by one. */
struct life_twin {
    struct kv_digest logits;
    uint32_t ids[32];
};
struct life_twin life_twin(struct session *session);
void life_same_twin(const struct life_twin *a, const struct life_twin *b);

/* Save and wake that must work; a table line is printed for failures only. */
struct receipt life_save(struct life *life, struct session *session, int is_explicit);
struct receipt life_sleep(struct life *life, struct session *session);
struct session *life_wake(struct life *life, const char *name, struct receipt *receipt_out);
/* Wake that must fail with `expected`; the sentence is returned. */
const char *life_refuse(struct life *life, const char *name, enum kv_err expected,
                        struct kv_diag *diag);
/* A wake of "chat" whose k-th allocation in restore fails: it must give all back and say why. 1
 * when it needed fewer than k: it is awake then, and must be. */
int life_wake_short(struct life *life, uint64_t k, struct receipt *receipt_out);

/* Over its ids and every byte of blocks, sinks and window that the session reads. */
struct kv_digest life_resident(struct session *session);

/* The head snapshot's record and image. */
struct record_snapshot life_head(struct life *life, const char *name, uint64_t *snapshot_out);

/* Rewrites one stored record: `change` may alter value and drop extents by returning a mask of
 * those to keep; their bytes are read and put again. */
typedef uint32_t (*life_change)(void *context, struct store_record *record);
void life_rewrite(struct life *life, const struct record_key *key, life_change change,
                  void *context);
/* Puts the record under `from` under `to` as well. */
void life_copy(struct life *life, const struct record_key *from, const struct record_key *to);
void life_delete(struct life *life, const struct record_key *key);
/* Puts other bytes into extent 0 of the record (an image). */
void life_replace_image(struct life *life, uint64_t snapshot, const void *bytes, size_t size,
                        const struct kv_digest *root);

/* One extent's place on disk, and its bytes there. */
void life_extent(struct life *life, const struct record_key *key, uint8_t kind,
                 struct store_extent *extent_out);
void life_disk(const char *dir, const struct store_extent *extent, void *bytes, int write);

#endif
