/* tests/support_harm_work.h - bytes and numbers of a session changed where it lies.
 *
 * Responsible for: the same bytes on the disk (digests as they were), in records (new digests,
 * chain and root, as if the wrong thing had been saved) and in the device's memory (after
 * publishing); changing them, and changing them back.
 * Not responsible for: what is changed (support_harm_faults.h).
 *
 * Threads: the main thread.
 * Units: bytes as stored: streams of a block whole, window pages dense.
 */
#ifndef TESTS_SUPPORT_HARM_WORK_H
#define TESTS_SUPPORT_HARM_WORK_H

#include "tests/support_harm.h"

enum harm_place { HARM_DISK, HARM_RECORDED, HARM_PUBLISHED, HARM_PLACES };
const char *harm_place_name(enum harm_place place);

struct harm_bytes {
    uint8_t *was, *now; /* NULL: nobody asked for them */
    uint64_t size;
};
struct harm_work {
    struct harm *harm;
    enum harm_place place;
    struct session *session; /* HARM_PUBLISHED; its fields may be changed */
    struct harm_bytes streams[HARM_BLOCKS_MAX][LAYOUT_META + 1];
    struct harm_bytes foreign[LAYOUT_META + 1]; /* of one block of the thief; only read */
    struct harm_bytes pages[IMAGE_PAGES_MAX];
    uint32_t page_tokens[IMAGE_PAGES_MAX]; /* 0: as they were */
    struct snap_image image;               /* HARM_RECORDED; may be changed: then `changed` */
    int changed;                           /* image or session differ from what they were */
    int keep_chain;                        /* the image goes on saying what it said of blocks */
    uint64_t changed_bytes;                /* counted by harm_apply */
    struct session *before;                /* its fields as they were */
    struct kvops_block *views;
};

void harm_begin(struct harm *harm, enum harm_place place, struct session *session,
                struct harm_work *work_out);
/* The bytes to change, or NULL where the stream is not there. */
uint8_t *harm_stream(struct harm_work *work, uint32_t block, enum layout_stream stream);
uint8_t *harm_page(struct harm_work *work, uint32_t page);
/* The same block's stream of the thief, as it is stored. */
const uint8_t *harm_thief(struct harm_work *work, uint32_t block, enum layout_stream stream);
/* Writes what differs. 0 when nothing does: then no fault was injected. */
int harm_apply(struct harm_work *work);
/* Everything as it was before. */
void harm_undo(struct harm_work *work);

/* Every extent of the harmed session is written again as it is, uncompressed, so that bytes on the
 * disk are those of the stream. */
void harm_store_raw(struct harm *harm);

#endif
