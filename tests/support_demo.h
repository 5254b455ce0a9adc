/* tests/support_demo.h - the cast of the demo: twelve chats about pasted documents, room for nine.
 *
 * Responsible for: names, documents, needles, the slot budget, turns whose every logit is digested,
 * and the reference answers that one process writes and another reads.
 * Not responsible for: the acts (demo.c) or damaging the store (support_sabotage.c).
 *
 * Threads: one.
 * Units: tokens, slots, bytes.
 */
#ifndef TESTS_SUPPORT_DEMO_H
#define TESTS_SUPPORT_DEMO_H

#include "tools/licences.h"
#include "tools/service.h"
#include "tools/turn.h"

enum {
    DEMO_SESSIONS = 12,
    DEMO_RESIDENT = 9,
    DEMO_VICTIM = DEMO_SESSIONS - 1, /* its save is killed */
    DEMO_REPLY_TOKENS = 16,
    DEMO_GREEDY_TOKENS = 32,
    DEMO_GROWTH_TOKENS = 192, /* two more turns, rounded up */
    DEMO_RSS_MARGIN_MIB = 256,
    /* Below the first, nine sessions may still grow by what a tenth needs; the second is near the
     * model's context. */
    DEMO_TOKENS_MIN = 1536,
    DEMO_TOKENS_MAX = 7500
};
#define DEMO_KEY "red lamp"

struct demo {
    const char *model_path;
    const char *dir; /* holds the stores and the reference file */
    uint64_t tokens; /* of a session, about */
    uint32_t threads;
};
/* From argv[2…]: dir, model, tokens, threads; how demo.c calls itself and the sabotage programs. */
int demo_from_args(int argc, char **argv, struct demo *demo_out);

struct demo_budget {
    uint32_t session_slots; /* at its longest need in the demo */
    uint32_t reserve_slots; /* one shadow and one fork */
    uint32_t slots;         /* nine sessions and the reserve */
    uint64_t slot_bytes, meta_frame_bytes;
    uint64_t bytes;
};
/* Opens an engine that holds nothing else, to read geometry and plan. */
enum kv_err demo_plan(const struct demo *demo, struct demo_budget *budget_out,
                      struct kv_diag *diag);

enum demo_room { DEMO_ROOM_NINE, DEMO_ROOM_ALL };
/* `door` NULL: the machine's best. `store` is the name of a folder in demo->dir. */
struct demo_opening {
    enum demo_room room;
    const char *store;
    const struct io_door *door;
};
enum kv_err demo_open(const struct demo *demo, const struct demo_opening *opening,
                      struct service **service_out, struct kv_diag *diag);

void demo_name(uint32_t index, char name_out[16]);
void demo_value(uint32_t index, char value_out[8]); /* seven digits, no two sessions alike */

/* Creates the session, pastes its document with its needle in it, lets the model answer, registers
 * the needle. */
enum kv_err demo_first_turn(const struct demo *demo, struct service *service, uint32_t index,
                            struct session **session_out, struct kv_diag *diag);

/* What must be equal, bit for bit, between a woken session and one that was never evicted. */
struct demo_answer {
    uint64_t n_kv; /* before the turn */
    struct kv_digest fingerprint;
    struct kv_digest logits; /* of every row of the turn */
    uint32_t ids[DEMO_GREEDY_TOKENS];
    uint32_t id_count;
};
/* Records the fingerprint, asks question number `turn` (1, 2) and decodes greedily. */
enum kv_err demo_answer_turn(struct service *service, struct session *session, uint32_t turn,
                             struct demo_answer *answer_out, struct kv_diag *diag);
int demo_answer_equal(const struct demo_answer *a, const struct demo_answer *b);

struct demo_reference {
    struct demo_answer answers[DEMO_SESSIONS];
    struct demo_answer victim_later; /* the victim after the turn whose save is killed */
    uint64_t save_writes;            /* writes of that save when nothing fails */
};
int demo_write_file(const struct demo *demo, const char *name, const void *bytes, size_t size);
int demo_read_file(const struct demo *demo, const char *name, void *bytes, size_t size);

/* 1 when the peak resident set keeps the promise; prints the sum either way. */
int demo_check_rss(struct service *service, const char *who);

#endif
