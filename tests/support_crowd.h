/* tests/support_crowd.h - many chats at one coldplaned that has room for nine of them.
 *
 * Responsible for: the daemon over a slot budget of nine sessions, a document with facts for each
 * chat, rounds of turns by clients at the same time, asking again what was asked before a session
 * slept, ending the daemon in the middle, the audit, and counting what must be so.
 * Not responsible for: the latency of decoding (crowd.c), sizes (the caller's).
 *
 * Half of the chats send plain messages as any client does, half name their session; both have two
 * owners. Every number of a chat is its own, so an answer that holds another's is found by text.
 *
 * Threads: one owner; clients are threads inside.
 * Units: tokens, bytes, nanoseconds.
 */
#ifndef TESTS_SUPPORT_CROWD_H
#define TESTS_SUPPORT_CROWD_H

#include "tests/support_served.h"

#include <stdint.h>

enum { CROWD_CHATS_MAX = 64, CROWD_AWAKE = 9, CROWD_ROUNDS = 3, CROWD_NAME_BYTES = 129 };

struct crowd_options {
    const char *model_path;
    const char *dir; /* made by the caller, who removes it */
    uint32_t chats, clients, threads;
    uint64_t tokens;        /* of a document, about */
    uint64_t growth_tokens; /* that a chat may need beyond it */
    double bytes_per_token; /* of the document, for this model */
    int knows;              /* 1: the model finds facts in its text; 0: its answers are noise */
    uint64_t seed;
    int quiet; /* no lines of progress */
};

enum crowd_found { CROWD_NEW, CROWD_DEVICE, CROWD_RAM, CROWD_DISK, CROWD_FOUND_COUNT };
struct crowd_counts {
    uint64_t requests, retried;               /* retried: not acknowledged when the daemon ended */
    uint64_t asked, right;                    /* questions for a fact, answers that hold it */
    uint64_t repeated_equal;                  /* of asked: said the same at once when repeated */
    uint64_t again, again_equal, again_right; /* the last question once more; right: it had been */
    uint64_t foreign;                         /* answers that hold a value of another chat */
    uint64_t found[CROWD_FOUND_COUNT], again_found[CROWD_FOUND_COUNT];
    uint64_t tokens_prompt, tokens_reused, tokens_prefilled, tokens_completion;
    uint64_t receipts, receipts_restore, receipts_sleep;
    uint64_t audit_questions, audit_foreign, audit_failed, audit_own;
    double margin_least; /* nats, own value ahead of the likeliest foreign one */
    int has_margin;
    uint64_t tokens_most, tokens_least;   /* of a chat at the end */
    double killed_start_s, ended_start_s; /* starting again behind SIGKILL and behind SIGTERM */
    double ended_s;                       /* from SIGTERM to the end of the process */
};

struct crowd;
/* Starts the daemon. The error of any call, one sentence, is crowd_reason: the first stands. */
struct crowd *crowd_open(const struct crowd_options *options);
void crowd_close(struct crowd *crowd);               /* ends the daemon; NULL is allowed */
const char *crowd_reason(const struct crowd *crowd); /* "" while all is well */

/* Two owners with one prompt; then all rounds, with a SIGKILL between the first two and a SIGTERM
 * in the third; then every chat once more, and the audit. 1 when everything was so. */
int crowd_live(struct crowd *crowd);
const struct crowd_counts *crowd_counts(const struct crowd *crowd);

/* For the caller's own questions afterwards. */
struct served *crowd_served(struct crowd *crowd);
const char *crowd_key(const struct crowd *crowd, uint32_t chat);
/* Wakes a chat, which then says one token. Which: every second one, those that name their session.
 * 1, with where it was. One thread at a time. */
int crowd_wake(struct crowd *crowd, uint32_t number, enum crowd_found *found_out,
               uint64_t *tokens_out);
/* The daemon anew, with so many threads. */
int crowd_restart(struct crowd *crowd, uint32_t threads);

#endif
