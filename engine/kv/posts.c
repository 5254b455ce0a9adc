/* engine/kv/posts.c - the queue by which other threads reach the scheduler thread.
 *
 * Responsible for: the list and its lock.
 * Not responsible for: what the calls do.
 */
#include "engine/kv/posts.h"

#include <stddef.h>

void posts_init(struct posts *posts) {
    *posts = (struct posts){.first = NULL};
    pthread_mutex_init(&posts->lock, NULL);
}

void posts_release(struct posts *posts) {
    pthread_mutex_destroy(&posts->lock);
}

void posts_push(struct posts *posts, struct post *post) {
    post->next = NULL;
    pthread_mutex_lock(&posts->lock);
    if (posts->last)
        posts->last->next = post;
    else
        posts->first = post;
    posts->last = post;
    pthread_mutex_unlock(&posts->lock);
}

static struct post *pop(struct posts *posts) {
    struct post *post;

    pthread_mutex_lock(&posts->lock);
    post = posts->first;
    if (post) {
        posts->first = post->next;
        if (!posts->first)
            posts->last = NULL;
    }
    pthread_mutex_unlock(&posts->lock);
    return post;
}

unsigned posts_apply_one(struct posts *posts) {
    struct post *post = pop(posts);

    if (!post)
        return 0;
    post->call(post->context);
    return 1;
}

unsigned posts_apply(struct posts *posts) {
    unsigned count = 0;

    while (posts_apply_one(posts))
        count++;
    return count;
}
