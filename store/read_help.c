/* store/read_help.c - a second thread that unzips and digests behind the reading one.
 *
 * Responsible for: the ring, its lock, who takes which item.
 * Not responsible for: the work itself (store_read.c).
 *
 * todo, what the helper has in hand and done together never exceed the ring, so memory that waits
 * for its turn is bounded.
 */
#include "store/read_help.h"

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
    pthread_mutex_lock(&help->lock);
    for (;;) {
        while (help->todo_count == 0 && !help->closed)
            pthread_cond_wait(&help->given, &help->lock);
        if (help->todo_count == 0)
            break;
        size_t index = pop(help->todo, &help->todo_first, &help->todo_count);
        help->busy = 1;
        pthread_mutex_unlock(&help->lock);
        help->work(help->context, index, 1);
        pthread_mutex_lock(&help->lock);
        help->busy = 0;
        push(help->done, help->done_first, &help->done_count, index);
        pthread_cond_signal(&help->over);
    }
    pthread_mutex_unlock(&help->lock);
    return NULL;
}

int read_help_start(struct read_help *help, read_help_work work, void *context) {
    memset(help, 0, sizeof *help);
    help->work = work;
    help->context = context;
    pthread_mutex_init(&help->lock, NULL);
    pthread_cond_init(&help->given, NULL);
    pthread_cond_init(&help->over, NULL);
    if (pthread_create(&help->thread, NULL, help_main, help) == 0) {
        help->running = 1;
        return 1;
    }
    pthread_cond_destroy(&help->given);
    pthread_cond_destroy(&help->over);
    pthread_mutex_destroy(&help->lock);
    return 0;
}

void read_help_stop(struct read_help *help) {
    if (!help->running)
        return;
    pthread_mutex_lock(&help->lock);
    assert(held(help) == 0);
    help->closed = 1;
    pthread_cond_signal(&help->given);
    pthread_mutex_unlock(&help->lock);
    pthread_join(help->thread, NULL);
    pthread_cond_destroy(&help->given);
    pthread_cond_destroy(&help->over);
    pthread_mutex_destroy(&help->lock);
    help->running = 0;
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
    while (hard && help->done_count == 0 && help->todo_count == 0 && help->busy != 0)
        pthread_cond_wait(&help->over, &help->lock);
    if (help->done_count != 0) {
        *index_out = pop(help->done, &help->done_first, &help->done_count);
        found = 1;
    } else if (hard && help->todo_count != 0) {
        *index_out = pop(help->todo, &help->todo_first, &help->todo_count);
        mine = 1;
    }
    pthread_mutex_unlock(&help->lock);
    if (mine)
        help->work(help->context, *index_out, 0);
    return found || mine;
}
