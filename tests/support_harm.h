/* tests/support_harm.h - two sessions of a synth model, stored, woken, harmed and looked at.
 *
 * Responsible for: engine, store and two texts with the same keys; what was true when they were
 * saved; which layer of the proof finds a session to be another than that.
 * Not responsible for: changing bytes (support_harm_work.h), which faults there are
 * (support_harm_faults.h).
 *
 * The first session is harmed, the second lends its pages. A question stands five tokens before the
 * end of the text, so the pending token, and with it the fingerprint, reads a graded fact through
 * the window's positions, every layer and every KV head. Spans that can fail as probes, and three
 * facts registered as needles, are there as well.
 *
 * Threads: the main thread. Whatever cannot go on ends the program (support_tally.h).
 * Units: tokens, blocks.
 */
#ifndef TESTS_SUPPORT_HARM_H
#define TESTS_SUPPORT_HARM_H

#include "restore/rest_plan.h"
#include "restore/restore.h"
#include "snapshot/snap_image.h"
#include "snapshot/snapshot.h"
#include "tests/support_synth.h"

enum {
    HARM_FACTS_MAX = 96,
    HARM_BLOCKS_MAX = 32,
    HARM_LAST_TOKENS = 10, /* of the last window page, which is not full */
    HARM_PROBES = 5,
    HARM_NEEDLES = 3,
    HARM_TEXT_BYTES = 320
};

enum harm_layer {
    HARM_RECORDS, /* image, chain and records contradict each other */
    HARM_HASH,
    HARM_GUARD, /* a number that is not finite */
    HARM_FINGERPRINT,
    HARM_PROBE,
    HARM_NEEDLE, /* a registered one, or an answer that is nobody's */
    HARM_GRADED, /* the answer names another tier, or a decoy */
    HARM_NULL,   /* "Nothing" for a fact that was there */
    HARM_THIEF,  /* another session's value */
    HARM_COUNTERS,
    HARM_LAYERS
};
const char *harm_layer_name(enum harm_layer layer);

struct harm_user {
    char name[16];
    uint32_t *ids;
    struct support_synth_fact facts[HARM_FACTS_MAX];
    uint32_t fact_count, graded;
    struct rest_plan truth;   /* as it was saved: image, and digests of every extent */
    struct snap_image stored; /* the same image as snapshot/ reads and writes it */
};

struct harm_settings {
    const char *model, *dir; /* the folder is there, the store is not */
    enum engine_device device;
    uint32_t threads;
    uint32_t blocks; /* of each session, 8 … HARM_BLOCKS_MAX */
    uint64_t pool_bytes;
};

struct harm {
    struct harm_settings settings;
    struct synth synth;
    struct engine *engine;
    struct engine_model model;
    struct store *store;
    struct snapshot *snapshot;
    struct restore_source source;
    struct image_policy policy;
    uint32_t tokens;
    uint32_t next_word;
    struct harm_user users[2];
    /* The harmed block and another one that is read at the same tier; the fact that the fingerprint
     * reads stands in `block`, by its index among the facts. */
    uint32_t block, other, asked;
    char device[96];
    double opened_s, filled_s;
};

/* Makes, saves and puts to sleep both. */
void harm_open(const struct harm_settings *settings, struct harm *harm_out);
void harm_close(struct harm *harm);

/* What a wake that is asked for everything says: the layer that refused it and its sentence, or
 * KV_OK with the session and ""; with COUNTERS and a sentence where its receipt does not prove
 * it. */
enum kv_err harm_wake(struct harm *harm, struct session **session_out, enum harm_layer *layer_out,
                      char text_out[HARM_TEXT_BYTES]);
/* The same way into the device, and no proof: to ask every layer, also behind one that refuses. */
struct session *harm_load(struct harm *harm);

/* A new session of the same name, computed from the same text. */
struct session *harm_prefill(struct harm *harm, uint32_t user);

#endif
