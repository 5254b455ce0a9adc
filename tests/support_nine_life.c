/* tests/support_nine_life.c - more sessions than are awake: random sleep and wake beside decoding.
 *
 * Responsible for: what support_nine_life.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine_life.h"

#include "store/base/clock.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PLAIN_BYTES = 1 << 20 };

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
    enum kv_err err = snapshot_sleep(nine->snapshot, user->session, 1, receipt_out, diag);
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
    /* In large pages, as our own buffers are: else the disk would be compared with page sizes. */
    uint8_t *memory = kv_alloc_large(kv_alloc_system(), KV_ALLOC_LARGE_BYTES);
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

/* As many decode in quiet as meanwhile: one is left out. A fifth of the time is quiet, a part
 * between any two moves: everybody grows, and steps with them. */
static enum kv_err live_shared(struct nine *nine, double seconds, struct nine_decoder *decoder,
                               struct nine_life *life, struct kv_diag *diag) {
    uint64_t state = nine->settings.seed;
    uint32_t out = draw(nine, 1, &state);
    enum kv_err err = KV_OK;
    double begun = nine_seconds();

    baton_take(&nine->baton);
    nine->users[out].away = 1;
    nine_decoder_rest(decoder, seconds / 40, 20);
    while (err == KV_OK && decoder->err == KV_OK && life->move_count < NINE_WAKES_MAX &&
           (nine_seconds() < begun + seconds || life->move_count == 0)) {
        uint32_t comes = draw(nine, 0, &state);
        double from = nine_seconds();
        err = exchange(nine, out, comes, life, &life->moves[life->move_count++], diag);
        out = draw(nine, 1, &state);
        nine->users[out].away = 1;
        if (err == KV_OK)
            nine_decoder_rest(decoder, (nine_seconds() - from) / 4, 0);
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
    struct nine_decoder decoder;
    enum kv_err err = nine_decoder_begin(nine, &life->seen, &decoder, diag);

    if (err == KV_OK)
        err = live_shared(nine, seconds, &decoder, life, diag);
    err = nine_decoder_end(&decoder, err, diag);
    for (uint32_t i = 0; i < nine->user_count; i++)
        nine->users[i].away = 0;
    if (err == KV_OK)
        err = ask_everybody(nine, life, diag);
    return err;
}

void nine_life_release(struct nine_life *life) {
    nine_seen_release(&life->seen);
}
