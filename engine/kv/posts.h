/* engine/kv/posts.h - the queue by which other threads reach the scheduler thread.
 *
 * Responsible for: calls that run later on the scheduler thread, in the order they were posted.
 * Not responsible for: what they do.
 *
 * A post is embedded in what it is about, so that posting cannot fail; it is posted again only
 * after it has run.
 *
 * Threads: posts_push from any thread; posts_apply from the scheduler thread.
 * Units: none.
 */
#ifndef ENGINE_KV_POSTS_H
#define ENGINE_KV_POSTS_H

#include <pthread.h>

struct post {
    struct post *next;
    void (*call)(void *context);
    void *context;
};

struct posts {
    pthread_mutex_t lock;
    struct post *first, *last;
};

void posts_init(struct posts *posts);
void posts_release(struct posts *posts);
void posts_push(struct posts *posts, struct post *post);
/* Runs what is queued, and what those calls queue; returns how many ran. A call may release the
 * memory of its own post. */
unsigned posts_apply(struct posts *posts);
/* Runs the first one only; 0 when there is none. */
unsigned posts_apply_one(struct posts *posts);

#endif
