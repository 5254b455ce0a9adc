/* tests/support_nine_life.c - more sessions than are awake: random sleep and wake beside decoding.
 *
 * Responsible for: what support_nine_life.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine_life.h"

#include "engine/engine_inner.h"
#include "store/base/clock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PLAIN_BYTES = 1 << 20, PLAIN_ALIGN = 4096 };

/* --- gaps */

double nine_gaps_ms(struct nine_gaps *gaps, double share) {
    if (gaps->count == 0)
        return 0;
    nine_sort(gaps->ns, gaps->count);
    return (double)gaps->ns[(size_t)(share * (double)(gaps->count - 1))] * 1e-6;
}

/* --- the thread that decodes */

struct decoder {
    struct nine *nine;
    struct nine_life *life;
    atomic_int stop, moving;
    uint64_t quiet_ns; /* the median of quiet gaps, once sessions move */
    pthread_mutex_t lock;
    pthread_cond_t rested;
    double rest_until; /* 0: nobody rests */
    uint32_t rest_gaps;
    enum kv_err err;
    struct kv_diag diag;
};

/* Whoever moves sessions rests until enough was seen without it. */
static void tell_rested(struct decoder *decoder) {
    const struct nine_gaps *quiet = &decoder->life->quiet;

    pthread_mutex_lock(&decoder->lock);
    if (decoder->rest_until > 0 &&
        ((nine_seconds() >= decoder->rest_until && quiet->count >= decoder->rest_gaps) ||
         decoder->err != KV_OK || quiet->count == NINE_GAPS_MAX)) {
        decoder->rest_until = 0;
        pthread_cond_signal(&decoder->rested);
    }
    pthread_mutex_unlock(&decoder->lock);
}

/* A gap is what a user sees: from the end of one step to the end of the next, whoever had the
 * device meanwhile. */
static void *decode(void *context) {
    struct decoder *decoder = context;
    const struct kv_clock *clock = kv_clock_system();
    const uint64_t *wait_ns = &decoder->nine->engine->device->busy_ns[DEVICE_WAIT];
    uint64_t last_ns = 0;
    int before = 0;

    while (!atomic_load(&decoder->stop) && decoder->err == KV_OK) {
        uint32_t tokens = 0;
        baton_take(&decoder->nine->baton);
        int moving = atomic_load(&decoder->moving);
        uint64_t begun_ns = kv_clock_now_ns(clock), waited_ns = *wait_ns;
        decoder->err = nine_step(decoder->nine, &tokens, &decoder->diag);
        uint64_t now_ns = kv_clock_now_ns(clock);
        const struct nine_stepped stepped = {tokens && last_ns ? now_ns - last_ns : 0,
                                             now_ns - begun_ns, *wait_ns - waited_ns,
                                             moving ? decoder->quiet_ns : 0};
        nine_holds_stepped(decoder->life->holds, &stepped);
        struct nine_gaps *gaps = moving || before ? &decoder->life->moving : &decoder->life->quiet;
        if (tokens && last_ns && gaps->count < NINE_GAPS_MAX)
            gaps->ns[gaps->count++] = now_ns - last_ns;
        baton_give(&decoder->nine->baton);
        last_ns = tokens ? now_ns : 0;
        before = moving;
        tell_rested(decoder);
        sched_yield();
    }
    return NULL;
}

/* --- moves */

int nine_wake_proven(const struct receipt *receipt, char text_out[NINE_TEXT_BYTES]) {
    int proven = receipt->err == KV_OK && receipt->operation == RECEIPT_RESTORE &&
                 receipt->fingerprint == RECEIPT_BITS_EQUAL && receipt->digests_checked > 0 &&
                 receipt->digests_failed == 0 && receipt->tokens_prefilled == 0 &&
                 receipt->needles_kept == NINE_NEEDLES && receipt->needles_asked == NINE_NEEDLES &&
                 receipt->needles_passed == receipt->needles_asked;
#ifdef BREAK_NINE_UNPROVEN
    proven = 1;
#endif
    text_out[0] = 0;
    if (!proven)
        snprintf(text_out, NINE_TEXT_BYTES,
                 "%.40s: error %d, fingerprint %s, %u digests checked and %u failed, %llu tokens "
                 "prefilled, needles %u of %u, %u kept",
                 receipt->name, (int)receipt->err, receipt_proof_name(receipt->fingerprint),
                 receipt->digests_checked, receipt->digests_failed,
                 (unsigned long long)receipt->tokens_prefilled, receipt->needles_passed,
                 receipt->needles_asked, receipt->needles_kept);
    return proven;
}

int nine_sleep_kept(const struct receipt *receipt) {
    return receipt->needles_kept == NINE_NEEDLES && receipt->needles_asked == NINE_NEEDLES &&
           receipt->needles_passed == NINE_NEEDLES;
}

static void count_sleep(struct nine *nine, const struct receipt *receipt) {
    int kept = nine_sleep_kept(receipt);

    nine->sleeps++;
    nine->sleeps_kept += (uint32_t)kept;
    if (!kept && nine->first_unkept[0] == 0)
        snprintf(nine->first_unkept, sizeof nine->first_unkept,
                 "%.40s: needles %u of %u passed, %u kept", receipt->name, receipt->needles_passed,
                 receipt->needles_asked, receipt->needles_kept);
}

enum kv_err nine_sleep(struct nine *nine, uint32_t index, struct receipt *receipt_out,
                       struct kv_diag *diag) {
    struct nine_user *user = &nine->users[index];

    user->away = 1;
    enum kv_err err = snapshot_sleep(nine->snapshot, user->session, receipt_out, diag);
    if (err != KV_OK)
        return err;
    user->session = NULL;
    count_sleep(nine, receipt_out);
    return KV_OK;
}

static enum kv_err wake(struct nine *nine, uint32_t index, struct nine_life *life,
                        struct nine_move *move, struct kv_diag *diag) {
    const struct restore_options options = {.probes_max = 0};
    struct nine_user *user = &nine->users[index];
    char text[NINE_TEXT_BYTES];
    struct receipt receipt;
    uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());
    enum kv_err err =
        restore_wake(&nine->source, user->name, &options, &user->session, &receipt, diag);

    move->wake_ns = kv_clock_now_ns(kv_clock_system()) - begun_ns;
    move->wake_bytes = receipt.door_bytes;
    life->last = receipt;
    life->wakes++;
    if (nine_wake_proven(&receipt, text))
        life->proven++;
    else if (life->first_unproven[0] == 0)
        memcpy(life->first_unproven, text, sizeof text);
    if (err == KV_OK)
        user->away = 0;
    return err;
}

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* One who is awake (or asleep), by lot. */
static uint32_t draw(const struct nine *nine, int awake, uint64_t *state) {
    uint32_t index;

    do
        index = (uint32_t)(next_random(state) % nine->user_count);
    while ((nine->users[index].session != NULL) != awake);
    return index;
}

static void move_on(struct nine *nine, enum nine_move_kind kind) {
    if (nine->holds)
        nine_holds_move(nine->holds, kind);
}

static enum kv_err exchange(struct nine *nine, uint32_t leaves, uint32_t comes,
                            struct nine_life *life, struct nine_move *move, struct kv_diag *diag) {
    struct receipt receipt;
    uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());

    move_on(nine, NINE_SLEEPS);
    enum kv_err err = nine_sleep(nine, leaves, &receipt, diag);
    move->sleep_ns = kv_clock_now_ns(kv_clock_system()) - begun_ns;
    move->sleep_bytes = receipt.door_bytes;
    move_on(nine, NINE_WAKES);
    if (err == KV_OK)
        err = wake(nine, comes, life, move, diag);
    move_on(nine, NINE_NOT_MOVING);
    return err;
}

/* --- the plain reader */

static int read_file(const char *path, uint8_t *memory, uint64_t most, struct nine_plain *plain) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    uint64_t left = most;

    plain->direct = plain->direct && file >= 0;
    if (file < 0)
        file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    for (ssize_t got = PLAIN_BYTES; got == PLAIN_BYTES && left > 0;) {
        got = read(file, memory, PLAIN_BYTES);
        if (got > 0) {
            plain->bytes += (uint64_t)got;
            left -= left < (uint64_t)got ? left : (uint64_t)got;
        }
    }
    close(file);
    return 1;
}

enum kv_err nine_read_plain(const struct nine *nine, uint64_t bytes, struct nine_plain *plain_out,
                            struct kv_diag *diag) {
    struct nine_plain *plain = plain_out;
    uint8_t *memory = kv_alloc_aligned(kv_alloc_system(), PLAIN_BYTES, PLAIN_ALIGN);
    uint64_t begun_ns = kv_clock_now_ns(kv_clock_system());
    char path[512];

    *plain = (struct nine_plain){.direct = 1};
    if (!memory)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the plain reader");
    for (uint32_t segment = 1; plain->bytes < bytes && segment < 1u << 20; segment++) {
        snprintf(path, sizeof path, "%s/seg/%08u.seg", nine->settings.dir, segment);
        if (!read_file(path, memory, bytes - plain->bytes, plain))
            break;
    }
    plain->ns = kv_clock_now_ns(kv_clock_system()) - begun_ns;
    kv_alloc_release(kv_alloc_system(), memory);
    return plain->bytes > 0 ? KV_OK
                            : kv_diag_set(diag, KV_ERR_IO, "%s: no segment could be read", path);
}

/* --- the life */

/* With the baton, which the decoder has meanwhile. Everybody grows, and steps with them: what is
 * quiet is looked at between moves, not before all of them. */
static void rest(struct decoder *decoder, double seconds, uint32_t least) {
    struct nine *nine = decoder->nine;

    atomic_store(&decoder->moving, 0);
    baton_give(&nine->baton);
    pthread_mutex_lock(&decoder->lock);
    decoder->rest_gaps = least;
    decoder->rest_until = nine_seconds() + seconds;
    while (decoder->rest_until > 0 && decoder->err == KV_OK)
        pthread_cond_wait(&decoder->rested, &decoder->lock);
    pthread_mutex_unlock(&decoder->lock);
    baton_take(&nine->baton);
    decoder->quiet_ns = (uint64_t)(nine_gaps_ms(&decoder->life->quiet, 0.5) * 1e6);
    atomic_store(&decoder->moving, 1);
}

/* As many decode in quiet as meanwhile: one is left out. A fifth of the time is quiet. */
static enum kv_err live_shared(struct nine *nine, double seconds, struct decoder *decoder,
                               struct nine_life *life, struct kv_diag *diag) {
    uint64_t state = nine->settings.seed;
    uint32_t out = draw(nine, 1, &state);
    enum kv_err err = KV_OK;
    double begun = nine_seconds();

    nine->users[out].away = 1;
    baton_take(&nine->baton);
    rest(decoder, seconds / 40, 20);
    while (err == KV_OK && decoder->err == KV_OK && life->move_count < NINE_WAKES_MAX &&
           (nine_seconds() < begun + seconds || life->move_count == 0)) {
        uint32_t comes = draw(nine, 0, &state);
        double from = nine_seconds();
        err = exchange(nine, out, comes, life, &life->moves[life->move_count++], diag);
        out = draw(nine, 1, &state);
        nine->users[out].away = 1;
        if (err == KV_OK)
            rest(decoder, (nine_seconds() - from) / 4, 0);
    }
    baton_give(&nine->baton);
    return err;
}

/* Those who sleep come in the place of one who was asked already. */
static enum kv_err ask_everybody(struct nine *nine, struct nine_life *life, struct kv_diag *diag) {
    uint32_t asked[NINE_SESSIONS_MAX], count = 0;
    int slept[NINE_SESSIONS_MAX];
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < nine->user_count && err == KV_OK; i++) {
        slept[i] = nine->users[i].session == NULL;
        if (slept[i])
            continue;
        err = nine_prove(nine, i, &life->score, diag);
        asked[count++] = i;
    }
    for (uint32_t i = 0; i < nine->user_count && err == KV_OK; i++) {
        struct nine_move move;
        if (!slept[i])
            continue;
        err = exchange(nine, asked[--count], i, life, &move, diag);
        if (err == KV_OK)
            err = nine_prove(nine, i, &life->score, diag);
        asked[count++] = i;
    }
    return err;
}

enum kv_err nine_live(struct nine *nine, double seconds, struct nine_life *life,
                      struct kv_diag *diag) {
    struct decoder decoder = {.nine = nine, .life = life};
    pthread_t thread;
    enum kv_err err;

    life->quiet.ns = calloc(NINE_GAPS_MAX, sizeof *life->quiet.ns);
    life->moving.ns = calloc(NINE_GAPS_MAX, sizeof *life->moving.ns);
    nine->holds = life->holds = calloc(1, sizeof *life->holds);
    if (!life->quiet.ns || !life->moving.ns || !life->holds)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for gaps");
    pthread_mutex_init(&decoder.lock, NULL);
    pthread_cond_init(&decoder.rested, NULL);
    nine->shared = 1;
    if (pthread_create(&thread, NULL, decode, &decoder) != 0)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no thread to decode with");
    err = live_shared(nine, seconds, &decoder, life, diag);
    atomic_store(&decoder.stop, 1);
    pthread_join(thread, NULL);
    pthread_cond_destroy(&decoder.rested);
    pthread_mutex_destroy(&decoder.lock);
    nine->shared = 0;
    nine->holds = NULL;
    if (err == KV_OK && decoder.err != KV_OK) {
        err = decoder.err;
        *diag = decoder.diag;
    }
    for (uint32_t i = 0; i < nine->user_count; i++)
        nine->users[i].away = 0;
    if (err == KV_OK)
        err = ask_everybody(nine, life, diag);
    return err;
}

void nine_life_release(struct nine_life *life) {
    free(life->quiet.ns);
    free(life->moving.ns);
    free(life->holds);
}
