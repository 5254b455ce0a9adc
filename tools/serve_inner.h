/* tools/serve_inner.h - what the files of the service for many threads share.
 *
 * Responsible for: struct serve and what serve_turn.c needs of serve.c.
 * Not responsible for: the contract (serve.h).
 *
 * Threads: `lock` guards what stands behind it; it is held for no wait.
 * Units: as serve.h.
 */
#ifndef TOOLS_SERVE_INNER_H
#define TOOLS_SERVE_INNER_H

#include "tools/prefix.h"
#include "tools/receipt_keep.h"
#include "tools/serve.h"

#include <pthread.h>

enum { SERVE_WAITING_MAX = 256, SERVE_KEPT = 1024 };
struct serve_receipt;
struct serve {
    struct service *service;
    struct serve_settings settings;
    struct kv_alloc alloc;
    const struct kv_clock *clock;
    struct prefix *prefix; /* the scheduler thread's */

    pthread_mutex_t lock;
    pthread_cond_t gone; /* a request ended */
    uint32_t requests;
    int stopping; /* requests are refused; those under way end … */
    int hurry;    /* … at the next step */
    struct serve_totals totals;
    struct receipt receipts[SERVE_RECEIPTS]; /* a ring */
    uint64_t receipt_ids[SERVE_RECEIPTS];
    uint8_t receipt_owners[SERVE_RECEIPTS][SERVE_OWNER_BYTES];
    uint64_t receipt_next;

    /* Receipts that are not written yet (serve_receipt.c). */
    pthread_t writer;
    pthread_cond_t handed, written;
    int writing; /* the thread takes more */
    struct serve_receipt *first_waiting, **waiting_end;
    uint32_t waiting; /* the one that is being written, too */
    uint64_t come;    /* that ever waited */
    uint64_t receipt_number;
    struct serve_kept { /* by number */
        uint64_t number, id;
        int is_written;
    } kept[SERVE_KEPT];
};

void serve_inner_log(struct serve *serve, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
int serve_inner_hurry(struct serve *serve);

/* NOMEM. */
enum kv_err serve_receipt_open(struct serve *serve, struct kv_diag *diag);
void serve_receipt_close(struct serve *serve); /* all are written down */
/* Not as the scheduler thread: until it is written down. The id that it is kept under, 0: it is
 * not, or so many have come since that nobody knows. */
uint64_t serve_receipt_await(struct serve *serve, uint64_t number);

#endif
