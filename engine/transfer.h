/* engine/transfer.h - the states of a session that leave the device and come back.
 *
 * Responsible for: giving a writer the bytes of sealed blocks and of a frozen window, and taking a
 * session back in the shadow: reserved slots that nothing can see until they are published, or
 * whose layers only questions wait for behind that.
 * Not responsible for: writing or reading them, or choosing what to save.
 *
 * Threads: the scheduler thread; parts of a held block may be read by writer threads, parts that
 * are expected filled and digested by reader threads, which take turns on the device.
 * Units: bytes and slots.
 * Errors: as engine.h.
 */
#ifndef ENGINE_TRANSFER_H
#define ENGINE_TRANSFER_H

#include "engine/image.h"
#include "engine/session.h"
#include "kernels/layout.h"

/* Where one stream of a block, a page or the sinks lies: the stored extent is the pieces in
 * order. Pieces are 4 KiB aligned when they are slots. They are addresses of the device, which the
 * processor may follow only when transfer_mapped says so or the part is staged. */
struct transfer_piece {
    void *bytes;
    uint64_t size;
};
struct transfer_part {
    enum layout_stream stream;
    uint32_t piece_count;
    uint64_t size; /* of all pieces */
    int staged;    /* 1: memory of the processor, moved to the device when the load is published */
    struct transfer_piece pieces[32]; /* last: most parts have a few, and thousands are copied */
};
enum { TRANSFER_PARTS_MAX = 64 };
int transfer_mapped(const struct engine *engine);
/* The part's bytes in one piece of `part->size`, from and to memory of the processor; DEVICE. */
enum kv_err transfer_part_read(struct engine *engine, const struct transfer_part *part,
                               void *bytes_out);
/* Several, one behind the other in `bytes_out`, which is faster; at most TRANSFER_PARTS_MAX. */
enum kv_err transfer_parts_read(struct engine *engine, const struct transfer_part *parts,
                                uint32_t count, void *bytes_out);
enum kv_err transfer_part_write(struct engine *engine, const struct transfer_part *part,
                                const void *bytes);
/* Several at once, which is faster; at most TRANSFER_PARTS_MAX. */
enum kv_err transfer_parts_write(struct engine *engine, const struct transfer_part *parts,
                                 const void *const *bytes, uint32_t count);
/* The same of memory that stays as it is until send_end has returned: then all that was sent since
 * send_begin is in its place, for questions and digests too. In between others who send wait, so
 * that nobody is told of another's failure; end is called whatever send has said. DEVICE. */
void transfer_send_begin(struct engine *engine);
enum kv_err transfer_parts_send(struct engine *engine, const struct transfer_part *parts,
                                const void *const *bytes, uint32_t count);
enum kv_err transfer_send_end(struct engine *engine);
/* How much was sent so far, and waiting for so much of it: more may be on its way. DEVICE, which
 * the end says again. */
uint64_t transfer_sent(struct engine *engine);
enum kv_err transfer_send_wait(struct engine *engine, uint64_t sent);
/* Digests of the parts' bytes where they lie; DEVICE. Many at once cost less; those of up to
 * TRANSFER_DIGESTS_MAX go to the device together. */
enum { TRANSFER_DIGESTS_MAX = 256 };
enum kv_err transfer_digests(struct engine *engine, const struct transfer_part *parts,
                             uint32_t count, struct kv_digest *digests_out);
/* Memory of the processor that parts are read to and written from fastest, 4 KiB aligned; NULL. */
void *transfer_host_get(struct engine *engine, uint64_t bytes);
/* The same for very many that stay long; NULL: ordinary memory serves as well, or none is left. */
void *transfer_host_keep(struct engine *engine, uint64_t bytes);
void transfer_host_put(struct engine *engine, void *memory); /* NULL is allowed */
/* The same where bytes on their way from a disk land: one place until engine_close. One has it at a
 * time, and for good where a late read may still write there; NULL: it is taken, or smaller, or
 * there is none. Any thread. */
void *transfer_landing_take(struct engine *engine, uint64_t bytes);
void transfer_landing_give(struct engine *engine);

/* Blocks. A block handed to hooks.block_sealed is held until durable or failed is said. */
uint64_t transfer_block_index(const struct block *block);
/* Of a session's blocks, `index` below their count. */
const struct block *transfer_session_block(const struct session *session, uint32_t index);
/* Ids of the block's 256 tokens, u32 little-endian: only of a block that was sealed here, which is
 * every block that is not durable. */
const uint8_t *transfer_block_ids(const struct block *block);
/* Resident streams of the block, META included; at most LAYOUT_STREAM_COUNT. */
uint32_t transfer_block_parts(const struct block *block, struct transfer_part *parts_out);
/* The index commit that names the block has returned: its unread planes may go. Drops the hold. */
void transfer_block_durable(struct block *block);
/* It could not be written: the block stays whole and volatile. Drops the hold. */
void transfer_block_failed(struct block *block);
/* Holds every block of `session` that is not durable and not held by a writer yet, in order, and
 * gives each to `take`. For a save after a failed write. */
void transfer_blocks_volatile(struct session *session,
                              void (*take)(void *context, struct block *block), void *context);

/* After hooks.planes_wanted: the parts that were missing, and the word that they are filled. The
 * engine checks nothing; the caller has compared digests (transfer_digests). `session` may be
 * gone, or NULL; where no session is left that refers to the block nothing is missing. Slots that
 * a late read may still write are said to be lost instead, and never given back. */
uint32_t transfer_block_missing(struct block *block, struct transfer_part *parts_out);
void transfer_planes_arrived(struct session *session, struct block *block, enum kv_err err);
void transfer_planes_lost(struct block *block); /* the scheduler thread */

/* What the durable side knows about a session; kept with it, read and written by snapshot/ and
 * restore/ on the scheduler thread only. */
struct transfer_durable {
    uint64_t lineage;     /* 0: not assigned yet */
    uint64_t parent, cut; /* of a lineage that is not recorded yet: blocks below `cut` are shared */
    uint64_t snapshot;    /* head snapshot id, 0: none */
    uint64_t n_kv;        /* tokens with KV in it */
    int head_explicit;    /* the head was asked for by name and stays */
    int head_kept;        /* the session went back: the next save gives the head a tag */
    int pinned;           /* not to be put to sleep for others */
    uint8_t owner[IMAGE_OWNER_BYTES]; /* of a session that has no head yet, else as stored */
    int trim_pending;     /* first batch after a wake deletes blocks beyond block_count */
    uint32_t block_count; /* blocks of this lineage known durable, in order */
    struct kv_digest block_chain;
    struct kv_digest root; /* of the head snapshot's image */
    struct image_page sinks;
    struct image_page pages[IMAGE_PAGES_MAX];
    uint32_t page_count;
};
struct transfer_durable *transfer_durable(struct session *session);

/* Needles registered with the session (image_needle, owned by the session's image). */
struct image_needle *transfer_needles(struct session *session, uint32_t *count_out);
/* Copies `needle` into the session. LIMIT, EXISTS (same key), BUSY (it is being asked), NOMEM. */
enum kv_err transfer_add_needle(struct session *session, const struct image_needle *needle,
                                struct kv_diag *diag);

/* Takes needle `index` out; it is below the count. BUSY (it is being asked). */
enum kv_err transfer_drop_needle(struct session *session, uint32_t index, struct kv_diag *diag);
/* The session's probes (probe.h), which go into its image; set copies at most IMAGE_PROBES_MAX. */
const struct image_probe *transfer_probes(const struct session *session, uint32_t *count_out);
void transfer_set_probes(struct session *session, const struct image_probe *probes, uint32_t count);

/* Freeze, between steps: fills everything of `image_out` that the engine knows (lineage, block
 * chain, page ids and digests, fingerprints and parent are left for the caller) and copies the
 * bytes of the sinks and of those window pages that `want` asks for. The session may go on. */
struct transfer_frozen_page {
    uint64_t first;
    uint32_t tokens;
    uint8_t *bytes; /* dense; owned by the frozen; NULL when not wanted */
    uint64_t size;
};
struct transfer_frozen {
    struct image image;
    struct transfer_frozen_page sinks;
    struct transfer_frozen_page pages[IMAGE_PAGES_MAX];
    uint32_t page_count;
};
/* Pure: others may step while it is called. */
typedef int (*transfer_want_page)(void *context, uint64_t first, uint32_t tokens);
enum kv_err transfer_freeze(struct session *session, transfer_want_page want, void *context,
                            struct transfer_frozen *frozen_out, struct kv_diag *diag);
/* The same in two halves, bytes first; whoever asks the session in between (session_ask_begin)
 * finds what became of its needles and probes in the image. After an error of the second one
 * `frozen` is as whole as before: to be released. */
enum kv_err transfer_freeze_pages(struct session *session, transfer_want_page want, void *context,
                                  struct transfer_frozen *frozen_out, struct kv_diag *diag);
enum kv_err transfer_freeze_image(struct session *session, struct transfer_frozen *frozen,
                                  struct kv_diag *diag);
void transfer_frozen_release(struct engine *engine, struct transfer_frozen *frozen);

/* Load, the shadow. begin checks the image against this engine (MISMATCH) and reserves every slot
 * (NO_SLOTS with need and have, or when sessions_max are resident). The load owns a copy of what it
 * needs of the image. */
enum transfer_tiers {
    TRANSFER_EXACT, /* the tier map */
    TRANSFER_FLOOR, /* the ladder's lowest tier; the session asks for no more (session_refine) */
    TRANSFER_EAGER  /* the same, with slots for the tier map; session_refine asks for the rest */
};
struct transfer_load;
enum kv_err transfer_load_begin(struct engine *engine, const struct image *image,
                                enum transfer_tiers tiers, struct transfer_load **load_out,
                                struct kv_diag *diag);
/* The session that is to be published: for transfer_layers_ alone until then. */
struct session *transfer_load_session(struct transfer_load *load);
/* Streams of block `index` that are read at first, META first. */
uint32_t transfer_load_block(struct transfer_load *load, uint32_t index,
                             struct transfer_part *parts_out);
/* Ids of `count` tokens from `first` on, u32 little-endian, that the image did not have yet.
 * CORRUPT (one is outside the vocabulary). */
enum kv_err transfer_load_ids(struct transfer_load *load, uint64_t first, const uint8_t *ids,
                              uint32_t count, struct kv_diag *diag);
/* Page `index` of the image (or the sinks): dense bytes, one part. */
void transfer_load_page(struct transfer_load *load, uint32_t index, struct transfer_part *part_out);
void transfer_load_sinks(struct transfer_load *load, struct transfer_part *part_out);
/* One swap: the session exists, WAKING, with nothing prefilled. Owned by the engine from now on.
 * NO_SLOTS (sessions_max are resident by now), EXISTS, DEVICE, NOMEM: nothing changed, the load is
 * still to be abandoned. */
enum kv_err transfer_load_publish(struct transfer_load *load, struct session **session_out,
                                  struct kv_diag *diag);
/* Gives everything back, in pieces as session_drop. NULL is allowed. */
void transfer_load_abandon(struct transfer_load *load);

/* A WAKING session whose layers are still on their way. Questions to it (session_ask, needles,
 * probes, fingerprints) wait in front of each layer until it has arrived, while others may step;
 * nothing else looks at its planes until it is WAKING no more. Whoever loads has ended before
 * session_drop and transfer_load_abandon. Once all have arrived this costs nothing. */
/* The scheduler thread, before the first question, or who loads a session that is not published
 * yet: no layer is there. */
void transfer_layers_expect(struct session *session);
/* Any thread: layers [0, layers) are in their places, on the device. The most ever told counts. */
void transfer_layers_arrived(struct session *session, uint32_t layers);
/* Any thread: the rest will not come. A question that needs more of them returns `err`. */
void transfer_layers_failed(struct session *session, enum kv_err err);
/* The scheduler thread: how long questions have waited since transfer_layers_expect. */
uint64_t transfer_layers_waited_ns(const struct session *session);
/* When the first of them was let through to the last layer, by the engine's clock; 0: none was. */
uint64_t transfer_layers_last_ns(const struct session *session);

#endif
