/* tests/support_nine_save.c - what saves cost, beside a plain writer, while others decode.
 *
 * Responsible for: what support_nine_save.h says.
 * Not responsible for: goals (nine.c).
 */
#include "tests/support_nine_save.h"

#include "engine/engine_inner.h"
#include "store/base/clock.h"
#include "tests/support_nine_tell.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 2 * NINE_SESSIONS_MAX + 1, PLAIN_BYTES = 1 << 20 };
enum { WINDOW_TOKENS = 30, QUIET_STEPS = 100, MORE_QUIET_STEPS = 30 };
static const uint32_t step_tokens[NINE_SAVE_STEPS] = {1, 256, 4096};
static const uint32_t step_turns[NINE_SAVE_STEPS] = {NINE_SAVE_TURNS, 9, 3};

static uint64_t now(void) {
    return kv_clock_now_ns(kv_clock_system());
}

/* --- the plain writer */

static int write_all(int file, const uint8_t *memory, struct nine_plain *plain, uint64_t bytes) {
    for (; plain->bytes < bytes; plain->bytes += PLAIN_BYTES)
        if (pwrite(file, memory, PLAIN_BYTES, (off_t)plain->bytes) != PLAIN_BYTES)
            return 0;
    return fdatasync(file) == 0;
}

/* `bytes` in writes of 1 MiB, one after the other, into space that is taken already; one sync. */
static enum kv_err write_plain(const char *dir, uint64_t bytes, struct nine_plain *plain,
                               struct kv_diag *diag) {
    uint8_t *memory = kv_alloc_large(kv_alloc_system(), KV_ALLOC_LARGE_BYTES); /* as ours are */
    char path[512];

    if (!memory)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the plain writer");
    for (uint32_t i = 0, noise = 1; i < PLAIN_BYTES; i++, noise = noise * 1664525u + 1013904223u)
        memory[i] = (uint8_t)(noise >> 24);
    snprintf(path, sizeof path, "%.480s/plain", dir);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    int file = open(path, flags | O_DIRECT, 0600);
    *plain = (struct nine_plain){.direct = file >= 0};
    if (file < 0)
        file = open(path, flags, 0600);
    uint64_t begun = now();
    int good = file >= 0 && posix_fallocate(file, 0, (off_t)bytes) == 0 &&
               write_all(file, memory, plain, bytes);
    plain->ns = now() - begun;
    int error = errno;
    if (file >= 0)
        close(file);
    unlink(path);
    kv_alloc_release(kv_alloc_system(), memory);
    return good ? KV_OK
                : kv_diag_set(diag, KV_ERR_IO, "%s cannot be written: %s", path, strerror(error));
}

/* --- sessions */

/* Short users, and those of a short context, grow by less. */
static uint32_t step_of(const struct nine *nine, uint32_t number) {
    uint64_t tokens = step_tokens[number], half = nine->settings.tokens / 2;
    uint64_t most = half < nine->synth.context_tokens / 32 ? half : nine->synth.context_tokens / 32;

    return (uint32_t)(tokens > most ? most - most % LAYOUT_BLOCK_TOKENS : tokens);
}

/* A processor takes its time to compute tokens of the small geometry. */
static uint32_t turns_of(const struct nine *nine, uint32_t number) {
    return nine->synth.layers < 32 ? (step_turns[number] + 2) / 3 : step_turns[number];
}

static uint64_t length_of(const struct nine *nine, int is_long) {
    uint64_t tokens = nine->settings.tokens, most = nine->synth.context_tokens - 1024;

    for (uint32_t i = 0; i < NINE_SAVE_STEPS; i++)
        most -= turns_of(nine, i) * step_of(nine, i);

    if (tokens > most)
        tokens = most;
    if (!is_long)
        tokens /= 8;
    if (tokens < NINE_TOKENS_MIN + 2 * LAYOUT_BLOCK_TOKENS)
        tokens = NINE_TOKENS_MIN + 2 * LAYOUT_BLOCK_TOKENS;
    /* Both windows begin and end alike. */
    return layout_sealed_blocks(tokens) * LAYOUT_BLOCK_TOKENS + LAYOUT_SINK_TOKENS + WINDOW_TOKENS;
}

static enum kv_err add(struct nine *nine, uint32_t index, struct kv_diag *diag) {
    const struct nine_settings settings = nine->settings;
    struct nine_user *user = &nine->users[index];

    free(user->ids);
    user->ids = NULL;
    nine->settings.tokens = length_of(nine, index == NINE_SAVE_LONG);
    nine->settings.mixed = 0;
    nine->settings.blank = 1;
    user->away = 1;
    enum kv_err err = nine_add(nine, index, diag);
    nine->settings = settings;
    return err;
}

/* Whoever came last makes room. */
static enum kv_err add_with_room(struct nine *nine, uint32_t index, struct kv_diag *diag) {
    enum kv_err err = add(nine, index, diag);

    for (uint32_t i = NINE_SAVERS; err == KV_ERR_NO_SLOTS && i-- > 1;) {
        if (!nine->users[i].session)
            continue;
        nine_drop(nine, i);
        nine_settle(nine);
        kv_diag_clear(diag);
        err = add(nine, index, diag);
    }
    return err;
}

/* Until everything that was fed is computed; the baton is ours. */
static enum kv_err compute(struct nine *nine, struct session *session, struct kv_diag *diag) {
    struct session_info info;
    enum kv_err err = KV_OK;

    for (session_info(session, &info); err == KV_OK && info.n_kv < info.n;
         session_info(session, &info)) {
        struct engine_event events[EVENTS];
        uint32_t count = 0;
        err = engine_step(nine->engine, events, &count, diag);
        for (uint32_t i = 0; i < count && err == KV_OK; i++)
            if (events[i].kind == ENGINE_FAILED)
                err = events[i].err;
    }
    return err;
}

static enum kv_err feed(struct nine *nine, struct session *session, uint32_t tokens,
                        struct kv_diag *diag) {
    uint32_t *ids = calloc(tokens, sizeof *ids);
    struct session_info info;

    if (!ids)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for more tokens");
    session_info(session, &info);
    support_synth_filler(&nine->synth, info.n, ids, tokens);
    enum kv_err err = session_feed(session, ids, tokens, IMAGE_USER, diag);
    if (err == KV_OK)
        err = compute(nine, session, diag);
    free(ids);
    return err;
}

static enum kv_err save(struct nine *nine, struct session *session, struct receipt *receipt_out,
                        struct kv_diag *diag) {
    const struct snapshot_options options = {0};

    return snapshot_save(nine->snapshot, session, &options, receipt_out, diag);
}

/* --- a few more tokens */

struct window_pages {
    uint64_t n_kv, first;
    uint32_t tokens;
};

static struct window_pages pages_of(uint64_t n_kv) {
    return (struct window_pages){
        n_kv, LAYOUT_SINK_TOKENS + layout_sealed_blocks(n_kv) * LAYOUT_BLOCK_TOKENS,
        layout_window_tokens(n_kv)};
}

/* Pages of `after` that `before` has not at the same place with as many tokens. */
static uint64_t changed_bytes(const struct nine *nine, uint64_t before, uint64_t after) {
    const struct layout_geometry *geometry = &nine->model.geometry;
    const struct window_pages old = pages_of(before), new = pages_of(after);
    uint32_t streams = layout_tier_streams(image_top(&nine->policy));
    uint64_t bytes = 0, blocks = layout_sealed_blocks(after) - layout_sealed_blocks(before);

    for (uint32_t done = 0; done < new.tokens; done += LAYOUT_PAGE_TOKENS) {
        uint32_t tokens =
            new.tokens - done < LAYOUT_PAGE_TOKENS ? new.tokens - done : LAYOUT_PAGE_TOKENS;
        uint64_t first = new.first + done;
        int same = first >= old.first && first + tokens <= old.first + old.tokens &&
                   (tokens == LAYOUT_PAGE_TOKENS || first + tokens == old.first + old.tokens);
        bytes += same ? 0 : layout_dense_bytes(geometry, tokens);
    }
    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (streams & 1u << stream)
            bytes += blocks * layout_stream_bytes(geometry, (enum layout_stream)stream);
    return bytes;
}

static int by_wall(const void *a, const void *b) {
    const struct receipt *x = a, *y = b;

    return (x->wall_ns > y->wall_ns) - (x->wall_ns < y->wall_ns);
}

/* One length's saves of one step. */
struct turns {
    struct receipt receipts[NINE_SAVE_TURNS];
    uint32_t count;
};

/* A processor that waited for the device for longer is colder: before a save both have waited for
 * the same time, which is longer than any of their steps. */
static void rest_alike(const struct nine *nine) {
    const struct timespec rest = {0, 30000000};

    if (nine->synth.layers < 32)
        return;
    /* tidy-allow: wait nothing is waited for, time itself is wanted */
    (void)nanosleep(&rest, NULL);
}

static enum kv_err run_turn(struct nine *nine, uint32_t which, struct nine_save_step *step,
                            struct turns *turns, struct kv_diag *diag) {
    struct session *session = nine->users[NINE_SAVE_SHORT + which].session;
    struct receipt *receipt = &turns->receipts[turns->count];
    struct session_info before, after;

    session_info(session, &before);
    enum kv_err err = feed(nine, session, step->tokens, diag);
    session_info(session, &after);
    rest_alike(nine);
    if (err == KV_OK)
        err = save(nine, session, receipt, diag);
    if (err != KV_OK)
        return err;
    turns->count++;
    step->bytes = receipt->door_bytes;
    step->record_bytes = receipt->record_bytes;
    step->image_bytes = receipt->image_bytes;
    step->allowed_bytes = changed_bytes(nine, before.n_kv, after.n_kv);
    step->allowed_bytes += step->allowed_bytes / 20 + receipt->record_bytes;
    return KV_OK;
}

/* Both lengths in turns, so that the disk's moods are of both: short, long, long, short, … */
static enum kv_err run_step(struct nine *nine, uint32_t number, struct nine_save_length *lengths,
                            struct kv_diag *diag) {
    struct turns turns[NINE_SAVE_USERS] = {0};
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < NINE_SAVE_USERS; i++)
        lengths[i].steps[number].tokens = step_of(nine, number);
    for (uint32_t i = 0; i < NINE_SAVE_USERS * turns_of(nine, number) && err == KV_OK; i++) {
        uint32_t which = (i + 1) / 2 % 2;
        err = run_turn(nine, which, &lengths[which].steps[number], &turns[which], diag);
    }
    for (uint32_t i = 0; i < NINE_SAVE_USERS && err == KV_OK; i++) {
        struct nine_save_step *step = &lengths[i].steps[number];
        uint32_t count = turns[i].count;
        qsort(turns[i].receipts, count, sizeof turns[i].receipts[0], by_wall);
        step->receipt = turns[i].receipts[count / 2];
        step->least_ns = turns[i].receipts[0].wall_ns;
        step->most_ns = turns[i].receipts[count - 1].wall_ns;
    }
    return err;
}

static enum kv_err run_steps(struct nine *nine, struct nine_save_length *lengths,
                             struct kv_diag *diag) {
    struct session_info info;
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < NINE_SAVE_USERS; i++) {
        session_info(nine->users[NINE_SAVE_SHORT + i].session, &info);
        lengths[i].tokens = info.n;
    }
    for (uint32_t i = 0; i < NINE_SAVE_STEPS && err == KV_OK; i++)
        err = run_step(nine, i, lengths, diag);
    return err;
}

/* --- full saves */

double nine_save_over_plain(const struct nine_save_pair *pair) {
    return nine_rate(pair->receipt.door_bytes, pair->receipt.wall_ns) /
           nine_rate(pair->plain.bytes, pair->plain.ns);
}

static int by_rate(const void *a, const void *b) {
    double x = nine_save_over_plain(a), y = nine_save_over_plain(b);

    return (x > y) - (x < y);
}

const struct nine_save_pair *nine_save_full(const struct nine_saves *saves) {
    return &saves->pairs[NINE_SAVE_PAIRS / 2];
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

/* What a pair wrote makes room for the next one: an empty store, and the long session once more,
 * none of which is written. With the baton. */
static enum kv_err begin_again(struct nine *nine, struct kv_diag *diag) {
    nine_drop(nine, NINE_SAVE_LONG);
    nine_settle(nine);
    nine_store_end(nine);
    nftw(nine->settings.dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    enum kv_err err = nine_store(nine, diag);
    if (err == KV_OK)
        err = add_with_room(nine, NINE_SAVE_LONG, diag);
    /* What others waited meanwhile is not a gap of the next rest. */
    (void)engine_breathe(nine->engine, 0);
    return err;
}

/* The long session, and for how long others had to wait for whoever saved it. */
static enum kv_err save_watched(struct nine_decoder *decoder, struct nine_saves *saves,
                                uint32_t turn, struct kv_diag *diag) {
    struct nine_holds *holds = saves->seen.holds;
    struct nine *nine = decoder->nine;
    enum kv_err err = KV_OK;

    baton_take(&nine->baton);
    if (turn > 0)
        err = begin_again(nine, diag);
    if (err == KV_OK && saves->others)
        nine_decoder_rest(decoder, 0, QUIET_STEPS + turn * MORE_QUIET_STEPS);
    nine_holds_move(holds, NINE_SAVES);
    if (err == KV_OK)
        err = save(nine, nine->users[NINE_SAVE_LONG].session, &saves->pairs[turn].receipt, diag);
    nine_holds_move(holds, NINE_NOT_MOVING);
    atomic_store(&decoder->beside, NINE_NOT_LOOKED_AT);
    baton_give(&nine->baton);
    return err;
}

/* What a disk gives differs within seconds, so each save has a writer of its own behind it. */
static enum kv_err run_pairs(struct nine_decoder *decoder, const char *dir,
                             struct nine_saves *saves, struct kv_diag *diag) {
    const struct nine_place *places = saves->seen.holds->places[NINE_SAVES];
    enum kv_err err = KV_OK;

    for (uint32_t i = 0; i < NINE_SAVE_PAIRS && err == KV_OK; i++) {
        struct nine_save_pair *pair = &saves->pairs[i];
        err = save_watched(decoder, saves, i, diag);
        if (err == KV_OK)
            err = write_plain(dir, pair->receipt.door_bytes, &pair->plain, diag);
    }
    for (uint32_t i = 0; i < NINE_PLACES; i++) {
        saves->held_ns += places[i].sum_ns;
        if (places[i].most_ns > saves->held_most_ns)
            saves->held_most_ns = places[i].most_ns;
    }
    qsort(saves->pairs, NINE_SAVE_PAIRS, sizeof saves->pairs[0], by_rate);
    return err;
}

/* --- all of it */

static enum kv_err run(struct nine *nine, const char *dir, struct nine_saves *saves,
                       struct kv_diag *diag) {
    struct nine_decoder decoder = {0};
    struct receipt first;
    enum kv_err err = KV_OK;

    KV_TRY(add_with_room(nine, NINE_SAVE_LONG, diag));
    KV_TRY(add_with_room(nine, NINE_SAVE_SHORT, diag));
    for (uint32_t i = 0; i < NINE_SAVERS; i++)
        saves->others += nine->users[i].session != NULL;
    KV_TRY(nine_decoder_begin(nine, &saves->seen, &decoder, diag));
    err = run_pairs(&decoder, dir, saves, diag);
done:
    err = nine_decoder_end(&decoder, err, diag);
    /* Alone, so that only the saves themselves are in what they take, and with room to grow. */
    for (uint32_t i = 0; i < NINE_SAVERS; i++)
        nine_drop(nine, i);
    nine_settle(nine);
    if (err == KV_OK)
        err = save(nine, nine->users[NINE_SAVE_SHORT].session, &first, diag);
    return err == KV_OK ? run_steps(nine, saves->lengths, diag) : err;
}

enum kv_err nine_save_run(struct nine *nine, const char *dir, struct nine_saves *saves_out,
                          struct kv_diag *diag) {
    const char *usual = nine->settings.dir;
    char own[512];

    *saves_out = (struct nine_saves){0};
    snprintf(own, sizeof own, "%.480s/saves", dir);
    nine->settings.dir = own;
    nine->saves = 1;
    enum kv_err err = nine_store(nine, diag);
    if (err == KV_OK)
        err = run(nine, dir, saves_out, diag);
    nine_drop(nine, NINE_SAVE_SHORT);
    nine_drop(nine, NINE_SAVE_LONG);
    nine_store_end(nine);
    nine->saves = 0;
    nine->settings.dir = usual;
    nftw(own, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return err;
}

/* --- its lines */

static double megabytes(uint64_t bytes) {
    return (double)bytes * 1e-6;
}

static double milliseconds(uint64_t ns) {
    return (double)ns * 1e-6;
}

/* Stages of a large save are beside each other, as are the proof and the zip of any: what is
 * unnamed is so at least. */
static void tell_stages(const struct receipt *receipt) {
    uint64_t named_ns = 0;

    printf("   ");
    for (uint32_t i = 0; i < RECEIPT_STAGE_COUNT; i++) {
        if (receipt->stage_ns[i])
            printf(" %s %.1f", receipt_stage_name((enum receipt_stage)i),
                   milliseconds(receipt->stage_ns[i]));
        named_ns += receipt->stage_ns[i];
    }
    if (named_ns < receipt->wall_ns)
        printf(" unnamed %.1f", milliseconds(receipt->wall_ns - named_ns));
    printf(" ms busy, blocked %.1f, bound by %s\n", milliseconds(receipt->blocked_ns),
           receipt_stage_name(receipt->bound_by));
}

void nine_save_tell(struct nine_saves *saves) {
    const struct nine_plain *plain = &nine_save_full(saves)->plain;
    const struct receipt *full = &nine_save_full(saves)->receipt;

    printf("  full save of %llu tokens, %u others decode: %.1f ms, %.1f MB at %.3f GB/s; plain "
           "writer%s %.3f GB/s; others p50 %.2f ms, p99 %.2f (quiet %.2f, %.2f)\n",
           (unsigned long long)full->tokens, saves->others, milliseconds(full->wall_ns),
           megabytes(full->door_bytes), nine_rate(full->door_bytes, full->wall_ns),
           plain->direct ? "" : " (buffered: O_DIRECT is refused here)",
           nine_rate(plain->bytes, plain->ns), nine_gaps_ms(&saves->seen.moving, 0.5),
           nine_gaps_ms(&saves->seen.moving, 0.99), nine_gaps_ms(&saves->seen.quiet, 0.5),
           nine_gaps_ms(&saves->seen.quiet, 0.99));
    printf("    all %d held the others up for %.1f ms, %.1f at one time\n", NINE_SAVE_PAIRS,
           milliseconds(saves->held_ns), milliseconds(saves->held_most_ns));
    tell_stages(full);
    for (uint32_t i = 0; i < NINE_SAVE_PAIRS; i++)
        printf("    %s%.1f ms, the plain writer %.1f: %.3f", i == 0 ? "all, by rate: " : "",
               milliseconds(saves->pairs[i].receipt.wall_ns),
               milliseconds(saves->pairs[i].plain.ns), nine_save_over_plain(&saves->pairs[i]));
    printf("\n");
    nine_tell_holds(saves->seen.holds);
    for (uint32_t i = 0; i < NINE_SAVE_USERS; i++)
        for (uint32_t k = 0; k < NINE_SAVE_STEPS; k++) {
            const struct nine_save_step *step = &saves->lengths[i].steps[k];
            printf("  %4u more of %6llu tokens: %.3f MB (%.3f allowed; image %.3f, records %.3f), "
                   "%.2f ms (%.2f to %.2f)\n",
                   step->tokens, (unsigned long long)saves->lengths[i].tokens,
                   megabytes(step->bytes), megabytes(step->allowed_bytes),
                   megabytes(step->image_bytes), megabytes(step->record_bytes),
                   milliseconds(step->receipt.wall_ns), milliseconds(step->least_ns),
                   milliseconds(step->most_ns));
            tell_stages(&step->receipt);
        }
    fflush(stdout);
}

void nine_save_release(struct nine_saves *saves) {
    nine_seen_release(&saves->seen);
}
