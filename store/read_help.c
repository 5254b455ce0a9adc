/* store/read_help.c - threads that unzip and digest behind the reading one.
 *
 * Responsible for: the ring, its lock, who takes which item.
 * Not responsible for: the work itself (store_read.c).
 *
 * todo, what helpers have in hand and done together never exceed the ring, so memory that waits
 * for its turn is bounded.
 */
#include "store/read_help.h"

#include "store/base/polite.h"

#include <assert.h>
#include <string.h>

static size_t pop(size_t *items, uint32_t *first, uint32_t *count) {
    size_t index = items[*first % READ_HELP_ITEMS_MAX];
    (*first)++;
    (*count)--;
    return index;
}

static void push(size_t *items, uint32_t first, uint32_t *count, size_t index) {
    assert(*count < READ_HELP_ITEMS_MAX);
    items[(first + *count) % READ_HELP_ITEMS_MAX] = index;
    (*count)++;
}

static uint32_t held(const struct read_help *help) {
    return help->todo_count + help->busy + help->done_count;
}

static void *help_main(void *argument) {
    struct read_help *help = argument;
    kv_polite();
    pthread_mutex_lock(&help->lock);
    int thread = (int)++help->seated;
    for (;;) {
        while (help->todo_count == 0 && !help->closed)
            pthread_cond_wait(&help->given, &help->lock);
        if (help->todo_count == 0)
            break;
        size_t index = pop(help->todo, &help->todo_first, &help->todo_count);
        help->busy++;
        pthread_mutex_unlock(&help->lock);
#ifdef BREAK_HELP_SEAT
        thread = 1;
#endif
        help->work(help->context, index, thread);
        pthread_mutex_lock(&help->lock);
        help->busy--;
        push(help->done, help->done_first, &help->done_count, index);
        pthread_cond_signal(&help->over);
    }
    pthread_mutex_unlock(&help->lock);
    return NULL;
}

static void release(struct read_help *help) {
    pthread_cond_destroy(&help->given);
    pthread_cond_destroy(&help->over);
    pthread_mutex_destroy(&help->lock);
}

uint32_t read_help_start(struct read_help *help, uint32_t threads, read_help_work work,
                         void *context) {
    assert(threads >= 1 && threads <= READ_HELP_THREADS_MAX);
    memset(help, 0, sizeof *help);
    help->work = work;
    help->context = context;
    pthread_mutex_init(&help->lock, NULL);
    pthread_cond_init(&help->given, NULL);
    pthread_cond_init(&help->over, NULL);
    while (help->running < threads &&
           pthread_create(&help->threads[help->running], NULL, help_main, help) == 0)
        help->running++;
    if (help->running == 0)
        release(help);
    return help->running;
}

void read_help_stop(struct read_help *help) {
    if (help->running == 0)
        return;
    pthread_mutex_lock(&help->lock);
    assert(held(help) == 0);
    help->closed = 1;
    pthread_cond_broadcast(&help->given);
    pthread_mutex_unlock(&help->lock);
    while (help->running != 0)
        pthread_join(help->threads[--help->running], NULL);
    release(help);
}

int read_help_give(struct read_help *help, size_t index) {
    pthread_mutex_lock(&help->lock);
    int taken = held(help) < READ_HELP_ITEMS_MAX;
    if (taken) {
        push(help->todo, help->todo_first, &help->todo_count, index);
        pthread_cond_signal(&help->given);
    }
    pthread_mutex_unlock(&help->lock);
    return taken;
}

int read_help_take(struct read_help *help, int wait, size_t *index_out) {
    int found = 0;
    int mine = 0;
    pthread_mutex_lock(&help->lock);
    int hard = wait || held(help) == READ_HELP_ITEMS_MAX;
    int works = hard && help->running == 1;
    while (hard && help->done_count == 0 && held(help) != 0 && !(works && help->todo_count != 0))
        pthread_cond_wait(&help->over, &help->lock);
    if (help->done_count != 0) {
        *index_out = pop(help->done, &help->done_first, &help->done_count);
        found = 1;
    } else if (works && help->todo_count != 0) {
        *index_out = pop(help->todo, &help->todo_first, &help->todo_count);
        mine = 1;
    }
    pthread_mutex_unlock(&help->lock);
    if (mine)
        help->work(help->context, *index_out, 0);
    return found || mine;
}
