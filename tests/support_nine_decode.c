/* tests/support_nine_decode.c - a thread that decodes everybody who is awake, and its gaps.
 *
 * Responsible for: what support_nine_decode.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine_decode.h"

#include "engine/engine_inner.h"
#include "store/base/clock.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* In millionths of them. */
static double quantile(uint64_t *values, uint32_t count, double share) {
    if (count == 0)
        return 0;
    nine_sort(values, count);
    return (double)values[(size_t)(share * (double)(count - 1))] * 1e-6;
}

double nine_gaps_ms(struct nine_gaps *gaps, double share) {
    return quantile(gaps->ns, gaps->count, share);
}

double nine_gaps_part(struct nine_gaps *gaps, double share) {
    return quantile(gaps->parts, gaps->count, share);
}

static void drop_gaps(struct nine_gaps *gaps) {
    free(gaps->ns);
    free(gaps->parts);
}

static int make_gaps(struct nine_gaps *gaps) {
    gaps->ns = calloc(NINE_GAPS_MAX, sizeof *gaps->ns);
    gaps->parts = calloc(NINE_GAPS_MAX, sizeof *gaps->parts);
    return gaps->ns && gaps->parts;
}

void nine_seen_release(struct nine_seen *seen) {
    drop_gaps(&seen->quiet);
    drop_gaps(&seen->moving);
    free(seen->holds);
    memset(seen, 0, sizeof *seen);
}

/* Whoever moves sessions rests until enough was seen without it. */
static void tell_rested(struct nine_decoder *decoder) {
    const struct nine_gaps *quiet = &decoder->seen->quiet;

    pthread_mutex_lock(&decoder->lock);
    decoder->over = decoder->err != KV_OK;
    if (decoder->rest_until > 0 &&
        ((nine_seconds() >= decoder->rest_until && quiet->count >= decoder->rest_gaps) ||
         decoder->over || quiet->count == NINE_GAPS_MAX)) {
        decoder->rest_until = 0;
        pthread_cond_signal(&decoder->rested);
    }
    pthread_mutex_unlock(&decoder->lock);
}

static uint32_t awake(const struct nine *nine) {
    uint32_t count = 0;

    for (uint32_t i = 0; i < NINE_SESSIONS_MAX; i++)
        count += nine->users[i].session && !nine->users[i].away;
    return count;
}

/* A step of fewer than are awake is no step of all of them. */
static int is_whole(struct nine_seen *seen, uint32_t tokens, uint32_t wanted) {
#ifdef BREAK_NINE_SHORT
    return tokens > 0;
#endif
    seen->short_steps += tokens < wanted;
    return tokens > 0 && tokens == wanted;
}

static uint64_t part_of(uint64_t ns, uint64_t quiet_ns) {
    return quiet_ns ? (uint64_t)(1e6 * (double)ns / (double)quiet_ns) : 0;
}

/* `before` is what went on beside the step before; returns what goes on now. */
static enum nine_beside step(struct nine_decoder *decoder, enum nine_beside before,
                             uint64_t *last_ns) {
    const struct kv_clock *clock = kv_clock_system();
    const uint64_t *wait_ns = &decoder->nine->engine->device->busy_ns[DEVICE_WAIT];
    struct nine_seen *seen = decoder->seen;
    uint32_t tokens = 0, wanted = awake(decoder->nine);
    enum nine_beside beside = (enum nine_beside)atomic_load(&decoder->beside);
    uint64_t begun_ns = kv_clock_now_ns(clock), waited_ns = *wait_ns;

    decoder->err = nine_step(decoder->nine, &tokens, &decoder->diag);
    uint64_t now_ns = kv_clock_now_ns(clock);
    int whole = is_whole(seen, tokens, wanted);
    uint64_t gap_ns = whole && *last_ns ? now_ns - *last_ns : 0;
    const struct nine_stepped stepped = {gap_ns, now_ns - begun_ns, *wait_ns - waited_ns,
                                         beside == NINE_MOVING ? decoder->quiet_ns : 0};
    enum nine_beside seen_beside = before == NINE_MOVING ? before : beside;
    struct nine_gaps *gaps = seen_beside == NINE_MOVING ? &seen->moving : &seen->quiet;

    if (seen_beside != NINE_NOT_LOOKED_AT && tokens)
        nine_holds_stepped(seen->holds, &stepped);
    if (seen_beside != NINE_NOT_LOOKED_AT && gap_ns && gaps->count < NINE_GAPS_MAX) {
        gaps->parts[gaps->count] = part_of(gap_ns, decoder->quiet_ns);
        gaps->ns[gaps->count++] = gap_ns;
    }
    *last_ns = whole ? now_ns : 0;
    return beside;
}

static void set_decoding(struct nine *nine, int decoding) {
    pthread_mutex_lock(&nine->lock);
    nine->decoding = decoding;
    pthread_cond_broadcast(&nine->stepping);
    pthread_mutex_unlock(&nine->lock);
}

static void *decode(void *context) {
    struct nine_decoder *decoder = context;
    enum nine_beside before = NINE_NOT_LOOKED_AT;
    uint64_t last_ns = 0;

    while (!atomic_load(&decoder->stop) && decoder->err == KV_OK) {
        baton_take(&decoder->nine->baton);
        before = step(decoder, before, &last_ns);
        baton_give(&decoder->nine->baton);
        tell_rested(decoder);
        sched_yield();
    }
    set_decoding(decoder->nine, 0);
    return NULL;
}

enum kv_err nine_decoder_begin(struct nine *nine, struct nine_seen *seen,
                               struct nine_decoder *decoder, struct kv_diag *diag) {
    memset(decoder, 0, sizeof *decoder);
    seen->holds = calloc(1, sizeof *seen->holds);
    if (!make_gaps(&seen->quiet) || !make_gaps(&seen->moving) || !seen->holds)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for gaps");
    decoder->nine = nine;
    decoder->seen = seen;
    atomic_store(&decoder->beside, NINE_NOT_LOOKED_AT);
    pthread_mutex_init(&decoder->lock, NULL);
    pthread_cond_init(&decoder->rested, NULL);
    nine->holds = seen->holds;
    nine->shared = 1;
    set_decoding(nine, 1);
    if (pthread_create(&decoder->thread, NULL, decode, decoder) == 0)
        return KV_OK;
    pthread_cond_destroy(&decoder->rested);
    pthread_mutex_destroy(&decoder->lock);
    set_decoding(nine, 0);
    nine->holds = NULL;
    nine->shared = 0;
    decoder->nine = NULL;
    return kv_diag_set(diag, KV_ERR_NOMEM, "no thread to decode with");
}

enum kv_err nine_decoder_end(struct nine_decoder *decoder, enum kv_err err, struct kv_diag *diag) {
    if (!decoder->nine)
        return err;
    atomic_store(&decoder->stop, 1);
    pthread_join(decoder->thread, NULL);
    pthread_cond_destroy(&decoder->rested);
    pthread_mutex_destroy(&decoder->lock);
    decoder->nine->shared = 0;
    decoder->nine->holds = NULL;
    decoder->nine = NULL;
    if (err != KV_OK || decoder->err == KV_OK)
        return err;
    *diag = decoder->diag;
    return decoder->err;
}

/* Gaps of the rest that is over, in parts of their own median. */
static void look_back(struct nine_decoder *decoder, uint32_t first) {
    struct nine_gaps *quiet = &decoder->seen->quiet;
    uint32_t count = quiet->count - first;

    if (count == 0)
        return;
    nine_sort(quiet->ns + first, count);
    decoder->quiet_ns = quiet->ns[first + count / 2];
    for (uint32_t i = first; i < quiet->count; i++)
        quiet->parts[i] = part_of(quiet->ns[i], decoder->quiet_ns);
}

void nine_decoder_rest(struct nine_decoder *decoder, double seconds, uint32_t least) {
    struct nine *nine = decoder->nine;
    uint32_t first = decoder->seen->quiet.count;

    atomic_store(&decoder->beside, NINE_QUIET);
    baton_give(&nine->baton);
    pthread_mutex_lock(&decoder->lock);
    decoder->rest_gaps = least;
    decoder->rest_until = nine_seconds() + seconds;
    while (decoder->rest_until > 0 && !decoder->over)
        pthread_cond_wait(&decoder->rested, &decoder->lock);
    decoder->rest_until = 0;
    pthread_mutex_unlock(&decoder->lock);
    baton_take(&nine->baton);
    look_back(decoder, first);
    atomic_store(&decoder->beside, NINE_MOVING);
}
