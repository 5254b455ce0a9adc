/* tools/serve_receipt.c - receipts on their way to the disk.
 *
 * Responsible for: a thread that writes receipts down in the order in which they came and makes
 * what was saved be found by its text, so that nobody's step waits for the disk; waiting for it.
 * Not responsible for: files (receipt_keep.c), the table of beginnings (prefix.c).
 *
 * Where none can wait in the queue, for want of memory or since it is full, and once the thread has
 * ended, a receipt is written down where it comes.
 */
#include "store/base/bytes.h"
#include "tools/serve_inner.h"

#include <string.h>
#include <time.h>

struct serve_receipt {
    struct serve_receipt *next;
    struct receipt receipt;
    uint8_t owner[SERVE_OWNER_BYTES];
    uint64_t number;
};

static void count_receipt(struct serve_totals *totals, const struct receipt *receipt) {
    uint64_t bytes = receipt->door_bytes;
    int woken = receipt->operation == RECEIPT_RESTORE;
    if (receipt->err != KV_OK) {
        *(woken ? &totals->wakes_refused : &totals->saves_failed) += 1;
    } else if (woken) {
        totals->wakes++;
        totals->restore_bytes += bytes;
        totals->restore_ns += receipt->wall_ns;
    } else {
        *(receipt->operation == RECEIPT_SLEEP ? &totals->sleeps : &totals->saves) += 1;
        totals->spill_bytes += bytes;
        totals->spill_ns += receipt->wall_ns;
    }
    totals->fingerprints_equal +=
        receipt->fingerprint == RECEIPT_BITS_EQUAL || receipt->fingerprint == RECEIPT_TOP_EQUAL;
    totals->fingerprints_different += receipt->fingerprint == RECEIPT_DIFFERENT;
    totals->probes_asked += receipt->probes_asked;
    totals->probes_passed += receipt->probes_passed;
    totals->needles_asked += receipt->needles_asked;
    totals->needles_passed += receipt->needles_passed;
}

/* What is not known of a session is only not found again: it says so where somebody looks. */
static void note_save(struct serve *serve, const struct receipt *receipt) {
    struct kv_diag diag = {""};
    if (receipt->err != KV_OK ||
        (receipt->operation != RECEIPT_SAVE && receipt->operation != RECEIPT_SLEEP))
        return;
    if (prefix_note(serve->prefix, receipt->name, &diag) != KV_OK)
        serve_inner_log(serve, "session=%s is not found by its text: %s", receipt->name, diag.text);
}

static void write_down(struct serve *serve, const struct serve_receipt *item, int is_scheduler) {
    const struct receipt *receipt = &item->receipt;
    uint64_t id =
        serve->settings.keep != NULL ? receipt_keep_add(serve->settings.keep, receipt) : 0;
    if (!is_scheduler)
        service_enter(serve->service);
    note_save(serve, receipt);
    if (!is_scheduler)
        service_leave(serve->service);
    serve_inner_log(serve, "%s session=%s tokens=%llu ms=%llu receipt=%016llx%s%s",
                    receipt_operation_name(receipt->operation), receipt->name,
                    (unsigned long long)receipt->tokens,
                    (unsigned long long)(receipt->wall_ns / 1000000), (unsigned long long)id,
                    receipt->err != KV_OK ? " refused: " : "",
                    receipt->err != KV_OK ? receipt->reason : "");
    pthread_mutex_lock(&serve->lock);
    size_t at = serve->receipt_next++ % SERVE_RECEIPTS;
    serve->receipts[at] = *receipt;
    serve->receipt_ids[at] = id;
    memcpy(serve->receipt_owners[at], item->owner, sizeof item->owner);
    serve->kept[item->number % SERVE_KEPT] = (struct serve_kept){item->number, id, 1};
    pthread_cond_broadcast(&serve->written);
    pthread_mutex_unlock(&serve->lock);
}

/* 0 when it cannot wait there. */
static int enqueue(struct serve *serve, const struct serve_receipt *item) {
    struct serve_receipt *copy = kv_alloc_zeroed(&serve->alloc, 1, sizeof *copy);
    int taken = 0;
    if (copy == NULL)
        return 0;
    *copy = *item;
    pthread_mutex_lock(&serve->lock);
    if (serve->writing && serve->waiting < SERVE_WAITING_MAX) {
        *serve->waiting_end = copy;
        serve->waiting_end = &copy->next;
        serve->waiting++;
        serve->come++;
        taken = 1;
        pthread_cond_signal(&serve->handed);
    }
    pthread_mutex_unlock(&serve->lock);
    if (!taken)
        kv_alloc_release(&serve->alloc, copy);
    return taken;
}

/* Hands it over to the thread. */
static uint64_t on_receipt(void *context, const struct receipt *receipt) {
    struct serve *serve = context;
    struct serve_receipt item = {.receipt = *receipt};
    if (snapshot_owner(service_store(serve->service), receipt->name, item.owner, NULL) != KV_OK)
        memset(item.owner, 0xff, sizeof item.owner);
    pthread_mutex_lock(&serve->lock);
    count_receipt(&serve->totals, receipt);
    item.number = ++serve->receipt_number;
    serve->kept[item.number % SERVE_KEPT] = (struct serve_kept){item.number, 0, 0};
    pthread_mutex_unlock(&serve->lock);
#ifdef BREAK_RECEIPT_QUEUE
    write_down(serve, &item, 1);
#else
    if (!enqueue(serve, &item))
        write_down(serve, &item, 1);
#endif
    return item.number;
}

uint64_t serve_receipt_await(struct serve *serve, uint64_t number) {
    struct serve_kept *kept = &serve->kept[number % SERVE_KEPT];
    pthread_mutex_lock(&serve->lock);
    while (number != 0 && kept->number == number && !kept->is_written)
        pthread_cond_wait(&serve->written, &serve->lock);
    uint64_t id = number != 0 && kept->number == number ? kept->id : 0;
    pthread_mutex_unlock(&serve->lock);
    return id;
}

int serve_settle(struct serve *serve, uint64_t wait_ns) {
    static const uint64_t second_ns = 1000000000;
    uint64_t until_ns = 0;
    if (!kv_add_u64(kv_clock_now_ns(kv_clock_system()), wait_ns, &until_ns))
        until_ns = INT64_MAX;
    const struct timespec until = {(time_t)(until_ns / second_ns), (long)(until_ns % second_ns)};
    int late = 0;
    pthread_mutex_lock(&serve->lock);
    uint64_t come = serve->come;
    while (serve->come - serve->waiting < come && !late)
        late = pthread_cond_clockwait(&serve->written, &serve->lock, CLOCK_MONOTONIC, &until) != 0;
    int settled = serve->come - serve->waiting >= come;
    pthread_mutex_unlock(&serve->lock);
    return settled;
}

static void *write_main(void *context) {
    struct serve *serve = context;
    pthread_mutex_lock(&serve->lock);
    for (;;) {
        struct serve_receipt *item = serve->first_waiting;
        if (item == NULL && !serve->writing)
            break;
        if (item == NULL) {
            pthread_cond_wait(&serve->handed, &serve->lock);
            continue;
        }
        serve->first_waiting = item->next;
        if (item->next == NULL)
            serve->waiting_end = &serve->first_waiting;
        pthread_mutex_unlock(&serve->lock);
        write_down(serve, item, 0);
        kv_alloc_release(&serve->alloc, item);
        pthread_mutex_lock(&serve->lock);
        serve->waiting--;
        pthread_cond_broadcast(&serve->written);
    }
    pthread_mutex_unlock(&serve->lock);
    return NULL;
}

enum kv_err serve_receipt_open(struct serve *serve, struct kv_diag *diag) {
    service_on_receipt(serve->service, on_receipt, serve);
    serve->waiting_end = &serve->first_waiting;
    serve->writing = 1;
    int error = pthread_create(&serve->writer, NULL, write_main, serve);
    if (error == 0)
        return KV_OK;
    serve->writing = 0;
    return kv_diag_errno(diag, KV_ERR_NOMEM, error, "cannot start the thread that writes receipts");
}

void serve_receipt_close(struct serve *serve) {
    pthread_mutex_lock(&serve->lock);
    int writing = serve->writing;
    serve->writing = 0;
    pthread_cond_signal(&serve->handed);
    pthread_mutex_unlock(&serve->lock);
    if (writing)
        pthread_join(serve->writer, NULL);
}
