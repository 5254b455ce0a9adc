/* tools/relay.c - what a command prints, on its way to a reader who may not read.
 *
 * Responsible for: see relay.h.
 * Not responsible for: what is printed (the commands).
 *
 * The descriptors are those of the asker's terminal or pipes and shared with it, so they keep their
 * mode: poll says whether a piece fits, and a piece is small enough for a pipe to take it whole.
 */
#include "tools/relay.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { PIECE_BYTES = 4096, LAST_WAIT_MS = 1000 };

struct relay_piece {
    struct relay_piece *next;
    int error; /* which stream */
    size_t bytes;
    char text[];
};

struct relay {
    const struct kv_alloc *alloc;
    int outputs[2], failed[2]; /* output, error; the errno of a write */
    int asker, stopping;       /* of the thread only */
    FILE *streams[2];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    struct relay_piece *first, *last;
    size_t kept;
    int over;
};

/* --- handing on */

/* 0 when nobody will take anything from it any more. */
static int await_room(struct relay *relay, int output) {
    for (;;) {
        struct pollfd waits[2] = {{.fd = output, .events = POLLOUT},
                                  {.fd = relay->stopping ? -1 : relay->asker, .events = POLLRDHUP}};
        int ready = poll(waits, 2, relay->stopping ? LAST_WAIT_MS : -1);
        if (ready == 0 || (ready > 0 && (waits[1].revents & POLLHUP) != 0))
            return waits[0].revents != 0;
        if (ready > 0 && waits[0].revents != 0)
            return 1;
        relay->stopping |= ready > 0 && waits[1].revents != 0;
    }
}

static int put(struct relay *relay, int output, const char *text, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        size_t part = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES;
        if (!await_room(relay, output))
            return EPIPE;
        ssize_t wrote = write(output, text + done, part);
        if (wrote < 0 && errno != EINTR && errno != EAGAIN)
            return errno;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    return 0;
}

static void *hand_on(void *context) {
    struct relay *relay = context;
    pthread_mutex_lock(&relay->lock);
    for (;;) {
        while (relay->first == NULL && !relay->over)
            pthread_cond_wait(&relay->moved, &relay->lock);
        struct relay_piece *piece = relay->first;
        if (piece == NULL)
            break;
        int failed = relay->failed[piece->error];
        pthread_mutex_unlock(&relay->lock);
        if (failed == 0)
            failed = put(relay, relay->outputs[piece->error], piece->text, piece->bytes);
        pthread_mutex_lock(&relay->lock);
        if (failed != 0)
            relay->failed[piece->error] = failed;
        relay->kept -= piece->bytes;
        relay->first = piece->next;
        if (relay->first == NULL)
            relay->last = NULL;
        kv_alloc_release(relay->alloc, piece);
        pthread_cond_broadcast(&relay->moved);
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

/* --- writing */

static ssize_t keep(struct relay *relay, int error, const char *text, size_t bytes) {
    struct relay_piece *piece = NULL;
    pthread_mutex_lock(&relay->lock);
    int failed = relay->failed[error];
    if (failed == 0 && bytes > RELAY_BYTES_MAX - relay->kept)
        failed = ENOBUFS;
    if (failed == 0)
        piece = kv_alloc_zeroed(relay->alloc, 1, sizeof *piece + bytes);
    if (failed == 0 && piece == NULL)
        failed = ENOMEM;
    if (failed == 0) {
        piece->error = error;
        piece->bytes = bytes;
        memcpy(piece->text, text, bytes);
        if (relay->last != NULL)
            relay->last->next = piece;
        else
            relay->first = piece;
        relay->last = piece;
        relay->kept += bytes;
        pthread_cond_broadcast(&relay->moved);
    }
    relay->failed[error] = failed;
    pthread_mutex_unlock(&relay->lock);
    errno = failed;
    /* Of a stream's write function 0 says that it failed. */
    return failed == 0 ? (ssize_t)bytes : 0;
}

static ssize_t keep_output(void *context, const char *text, size_t bytes) {
    return keep(context, 0, text, bytes);
}

static ssize_t keep_error(void *context, const char *text, size_t bytes) {
    return keep(context, 1, text, bytes);
}

/* --- beginning and end */

struct relay *relay_open(const struct kv_alloc *alloc, int output, int error, int asker) {
    struct relay *relay = kv_alloc_zeroed(alloc, 1, sizeof *relay);
    if (relay == NULL)
        return NULL;
    *relay = (struct relay){.alloc = alloc, .outputs = {output, error}, .asker = asker};
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->moved, NULL);
    relay->streams[0] = fopencookie(relay, "w", (cookie_io_functions_t){.write = keep_output});
    relay->streams[1] = fopencookie(relay, "w", (cookie_io_functions_t){.write = keep_error});
    if (relay->streams[0] != NULL && relay->streams[1] != NULL &&
        pthread_create(&relay->thread, NULL, hand_on, relay) == 0) {
        setvbuf(relay->streams[1], NULL, _IOLBF, BUFSIZ);
        return relay;
    }
    for (int i = 0; i < 2; i++)
        if (relay->streams[i] != NULL)
            fclose(relay->streams[i]);
    pthread_cond_destroy(&relay->moved);
    pthread_mutex_destroy(&relay->lock);
    kv_alloc_release(alloc, relay);
    return NULL;
}

FILE *relay_output(struct relay *relay) {
    return relay->streams[0];
}

FILE *relay_error(struct relay *relay) {
    return relay->streams[1];
}

int relay_settle(struct relay *relay) {
    fflush(relay->streams[0]);
    fflush(relay->streams[1]);
    pthread_mutex_lock(&relay->lock);
    while (relay->first != NULL)
        pthread_cond_wait(&relay->moved, &relay->lock);
    int failed = relay->failed[0];
    pthread_mutex_unlock(&relay->lock);
    return failed;
}

void relay_close(struct relay *relay) {
    if (relay == NULL)
        return;
    (void)relay_settle(relay);
    pthread_mutex_lock(&relay->lock);
    relay->over = 1;
    pthread_cond_broadcast(&relay->moved);
    pthread_mutex_unlock(&relay->lock);
    pthread_join(relay->thread, NULL);
    for (int i = 0; i < 2; i++)
        fclose(relay->streams[i]);
    pthread_cond_destroy(&relay->moved);
    pthread_mutex_destroy(&relay->lock);
    kv_alloc_release(relay->alloc, relay);
}
