/* tests/support_crowd_inner.h - what the files of the crowd share.
 *
 * Responsible for: struct crowd and its chats, giving up with a reason.
 * Not responsible for: the contract (support_crowd.h).
 *
 * Threads: a chat has one owner at a time; what stands behind `lock` is for all.
 * Units: as support_crowd.h.
 */
#ifndef TESTS_SUPPORT_CROWD_INNER_H
#define TESTS_SUPPORT_CROWD_INNER_H

#include "tests/support_crowd.h"

#include <pthread.h>

struct cJSON;

enum { CROWD_VALUE_BYTES = 8, CROWD_ANSWER_BYTES = 1024, CROWD_NAMES_MAX = 16 };
/* The audit's is never asked in the chat: an answer would state it once more. */
enum { CROWD_AUDIT_FACT = CROWD_ROUNDS, CROWD_FACTS };

struct crowd_chat {
    uint32_t index;
    int names_itself; /* sends a `session` */
    const char *key;
    char own_name[32];
    char session[CROWD_NAME_BYTES];                   /* of the newest answer */
    char branches[CROWD_NAMES_MAX][CROWD_NAME_BYTES]; /* those before it */
    uint32_t branch_count;
    char values[CROWD_FACTS][CROWD_VALUE_BYTES]; /* one for each round, and the audit's */
    struct cJSON *messages;                      /* all of it, the last answer included */
    uint64_t tokens;                             /* behind the newest answer */
    char answer[CROWD_ANSWER_BYTES];             /* the newest one for a fact … */
    int was_right;                               /* … and whether it held it */
};

struct crowd_answer {
    char text[CROWD_ANSWER_BYTES], session[CROWD_NAME_BYTES];
    uint64_t tokens_prompt, tokens_completion, tokens_reused, tokens_prefilled;
    enum crowd_found found;
};

struct crowd {
    struct crowd_options options;
    struct served served;
    char keys[2][40], threads_flag[16];
    struct crowd_chat chats[CROWD_CHATS_MAX];
    uint64_t begun_ns;

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t moved;
    char reason[512];
    uint32_t order[CROWD_CHATS_MAX], next, done; /* of a phase */
    uint32_t generation;                         /* of the daemon */
    int ending;                                  /* it was told to end */
    struct crowd_counts counts;
};

/* The first one stays. Returns 0. */
int support_crowd_inner_fail(struct crowd *crowd, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
int support_crowd_inner_failed(struct crowd *crowd);

#endif
