/* tools/cmd_top.c - top: the store and its sessions, again and again.
 *
 * Responsible for: one frame of at most the terminal's size, its refresh, the keys.
 * Not responsible for: what another process than a daemon knows (its slots and its queue): it is
 * told that there is a writer.
 *
 * Each frame opens the store for reading and closes it: nothing is held while nobody looks. In a
 * daemon, which runs this for whoever asks, the store is its own, and device and queue are known.
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/relay.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

enum { REFRESH_MS = 2000, BAR = 16, COLUMNS = 80, LINES_USUAL = 24, HEAD_LINES = 8 };
enum { CACHE = 256 };

/* The tier map stands in the image, which a session's head never changes. */
struct tiers {
    uint64_t snapshot;
    uint32_t blocks[16];
    int known;
};

/* A session on the device of a daemon. */
struct awake {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    enum session_state state;
};

struct top {
    struct cmd *cmd;
    FILE *out;
    struct engine_slots slots; /* with host, as the next three */
    uint32_t spill_queue;
    struct awake *awake;
    size_t awake_count, awake_capacity;
    struct snapshot_entry *entries;
    size_t count, capacity;
    struct store_stats stats;
    struct tiers cache[CACHE];
    uint64_t disk_free, written_bytes, written_ns; /* of the frame before; ns 0: none */
    double write_rate;
    char holder[CMD_HOLDER_BYTES]; /* of the store's lock; "" when nobody writes */
    int live;                      /* a terminal that is drawn again and again */
    int no_memory;
};

/* --- what there is */

static int take_entry(void *context, const struct snapshot_entry *entry) {
    struct top *top = context;
    void *entries = top->entries;
    top->no_memory = !kv_alloc_grow(top->cmd->alloc, &entries, &top->capacity, top->count + 1,
                                    sizeof *top->entries);
    top->entries = entries;
    if (!top->no_memory)
        top->entries[top->count++] = *entry;
    return !top->no_memory;
}

static int latest_first(const void *a, const void *b) {
    const struct snapshot_entry *x = a, *y = b;
    if (x->used_ns != y->used_ns)
        return x->used_ns > y->used_ns ? -1 : 1;
    return strcmp(x->head.name, y->head.name);
}

static enum layout_tier tier_of(const struct image *image, uint32_t block) {
    const struct image_policy *policy = &image->policies[image->policy_count - 1].policy;
    return image_tier_without(policy, image_tier(policy, block, image->n_kv),
                              image->absent != NULL ? image->absent[block] : 0);
}

static const struct tiers *tiers_of(struct top *top, struct store *store,
                                    const struct snapshot_entry *entry) {
    struct tiers *tiers = &top->cache[entry->snapshot % CACHE];
    struct image image;
    if (tiers->snapshot == entry->snapshot && tiers->known)
        return tiers;
    *tiers = (struct tiers){.snapshot = entry->snapshot, .known = 1};
    image_init(&image);
    if (restore_image(store, top->cmd->alloc, entry->head.name, &image, NULL) == KV_OK)
        for (uint32_t b = 0; b < image.block_count && image.policy_count > 0; b++)
            tiers->blocks[tier_of(&image, b)]++;
    image_release(&image, top->cmd->alloc);
    return tiers;
}

/* As the scheduler thread, for microseconds. */
static enum kv_err look_at_device(struct top *top, struct kv_diag *diag) {
    struct service *service = top->cmd->host->service;
    struct engine *engine = service_engine(service);
    uint64_t wait_ns;
    enum kv_err err = KV_OK;
    top->awake_count = 0;
    service_enter(service);
    engine_slots(engine, &top->slots);
    snapshot_backlog(service_snapshot(service), &top->spill_queue, &wait_ns);
    for (uint32_t i = 0; session_at(engine, i) != NULL && err == KV_OK; i++) {
        struct session_info info;
        void *awake = top->awake;
        session_info(session_at(engine, i), &info);
        if (!kv_alloc_grow(top->cmd->alloc, &awake, &top->awake_capacity, top->awake_count + 1,
                           sizeof *top->awake))
            err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the sessions on the device");
        top->awake = awake;
        if (err != KV_OK)
            break;
        struct awake *at = &top->awake[top->awake_count++];
        memcpy(at->name, info.name, strlen(info.name) + 1);
        at->state = info.state;
    }
    service_leave(service);
    return err;
}

static enum kv_err open_store(struct top *top, struct store **store_out, struct kv_diag *diag) {
    if (top->cmd->host == NULL)
        return cmd_open_store(top->cmd, CMD_READ, store_out, diag);
    *store_out = service_store(top->cmd->host->service);
    return look_at_device(top, diag);
}

static enum kv_err look(struct top *top, struct store **store_out, struct kv_diag *diag) {
    enum kv_err err = open_store(top, store_out, diag);
    if (err != KV_OK)
        return err;
    top->count = 0;
    store_stats_get(*store_out, &top->stats);
    (void)cmd_disk_low(top->cmd->config, &top->disk_free);
    cmd_holder(top->cmd->config, top->holder);
    err = snapshot_list(*store_out, top->cmd->alloc, take_entry, top, diag);
    if (top->no_memory)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu sessions", top->count);
    if (top->count != 0)
        qsort(top->entries, top->count, sizeof *top->entries, latest_first);
    uint64_t written = 0, now_ns = kv_clock_now_ns(top->cmd->clock);
    for (int i = 0; i < STORE_CAUSES; i++)
        written += top->stats.written[i].device_bytes;
    top->write_rate = 0;
    if (top->written_ns != 0 && now_ns > top->written_ns && written >= top->written_bytes)
        top->write_rate =
            (double)(written - top->written_bytes) * 1e9 / (double)(now_ns - top->written_ns);
    top->written_bytes = written;
    top->written_ns = now_ns;
    return err;
}

/* --- one frame */

/* `parts` of `whole` as characters of one bar; what is there at all gets one. */
static void bar_of(const uint64_t *parts, const char *marks, uint64_t whole, char out[BAR + 1]) {
    int at = 0;
    memset(out, ' ', BAR);
    out[BAR] = 0;
    for (int i = 0; marks[i] != 0 && whole != 0; i++) {
        int length = (int)((double)parts[i] * BAR / (double)whole + 0.5);
        if (length == 0 && parts[i] != 0)
            length = 1;
        for (; length > 0 && at < BAR; length--)
            out[at++] = marks[i];
    }
}

/* 8, 6, 3, 2: the bits that tell K8V4, K6V4, K6V3 and K6V2 apart; X for K8V8, c and b for K8V3 and
 * K8V2 of recipe v2; f and i for FP8 and K8I4 of recipes fp8 and v1; B for BF16; w the window. */
static void tier_bar(const struct snapshot_entry *entry, const struct tiers *tiers,
                     char out[BAR + 1]) {
    static const enum layout_tier order[] = {LAYOUT_K8V8, LAYOUT_K8V4,     LAYOUT_K6V4,
                                             LAYOUT_K8V3, LAYOUT_K6V3,     LAYOUT_K8V2,
                                             LAYOUT_K6V2, LAYOUT_TIER_FP8, LAYOUT_TIER_K8I4};
    enum { ORDERED = sizeof order / sizeof order[0], OTHERS = ORDERED, WINDOW };
    uint64_t parts[WINDOW + 1] = {0}, known = 0;
    for (int i = 0; i < ORDERED; i++)
        known += parts[i] = tiers->blocks[order[i]];
    parts[OTHERS] = entry->head.block_count > known ? entry->head.block_count - known : 0;
    for (int i = 0; i <= OTHERS; i++)
        parts[i] *= LAYOUT_BLOCK_TOKENS;
    parts[WINDOW] = entry->head.n_kv > (uint64_t)entry->head.block_count * LAYOUT_BLOCK_TOKENS
                        ? entry->head.n_kv - (uint64_t)entry->head.block_count * LAYOUT_BLOCK_TOKENS
                        : 0;
    bar_of(parts, "X86c3b2fiBw", entry->head.n_kv, out);
}

static const char *state_of(const struct top *top, const struct snapshot_entry *entry) {
    for (size_t i = 0; i < top->awake_count; i++)
        if (strcmp(top->awake[i].name, entry->head.name) == 0)
            return session_state_name(top->awake[i].state);
    if (entry->pinned)
        return "pinned";
    if (top->cmd->host != NULL)
        return "asleep";
    return entry->head.asleep ? "asleep" : "saved";
}

/* At most `columns` bytes, cut between characters: names may be long and in any script. */
static void print_cut(const struct top *top, const char *text, size_t columns) {
    size_t bytes = strlen(text);
    if (bytes > columns) {
        bytes = columns;
        while (bytes > 0 && ((unsigned char)text[bytes] & 0xc0) == 0x80)
            bytes--;
    }
    text_print_clean(top->out, text, bytes);
}

static void end_line(const struct top *top) {
    fputs(top->live ? "\033[K\n" : "\n", top->out);
}

static void print_slots(const struct top *top) {
    char bar[BAR + 1], bytes[TEXT_SHORT_BYTES];
    const uint64_t used = top->slots.used;
    bar_of(&used, "#", top->slots.total, bar);
    fprintf(top->out,
            "slots  [%s] %" PRIu32 " of %" PRIu32 " used, %s each; %zu awake, %" PRIu32 " to spill",
            bar, top->slots.used, top->slots.total, text_size(top->slots.slot_bytes, bytes),
            top->awake_count, top->spill_queue);
    end_line(top);
}

static void print_head(const struct top *top) {
    const struct store_stats *stats = &top->stats;
    char live[TEXT_SHORT_BYTES], garbage[TEXT_SHORT_BYTES], index[TEXT_SHORT_BYTES],
        rate[TEXT_SHORT_BYTES], all[TEXT_SHORT_BYTES], bar[BAR + 1];
    uint64_t whole = stats->bytes_max != STORE_BYTES_UNLIMITED
                         ? stats->bytes_max
                         : stats->segment_bytes + stats->index_bytes;
    const uint64_t parts[3] = {stats->live_bytes, stats->garbage_bytes, stats->index_bytes};
    fprintf(top->out, "coldplane top  ");
    print_cut(top, top->cmd->config->store, COLUMNS - 16);
    end_line(top);
    bar_of(parts, "#.i", whole, bar);
    fprintf(top->out, "disk   [%s] %s live, %s garbage, %s index", bar,
            text_size(stats->live_bytes, live), text_size(stats->garbage_bytes, garbage),
            text_size(stats->index_bytes, index));
    end_line(top);
    fprintf(top->out, "       %s, %s free on the disk, %s/s written",
            stats->bytes_max == STORE_BYTES_UNLIMITED ? "no budget" : text_size(whole, all),
            text_size(top->disk_free, live), text_size((uint64_t)top->write_rate, rate));
    end_line(top);
    if (top->cmd->host != NULL)
        print_slots(top);
    fprintf(top->out, "writer ");
    print_cut(top, top->holder[0] != 0 ? top->holder : "none", COLUMNS - 8);
    end_line(top);
    fprintf(top->out, "%zu sessions%s", top->count, top->live ? "; q leaves" : "");
    end_line(top);
    fprintf(top->out,
            "8 K8V4 6 K6V4 3 K6V3 2 K6V2 X K8V8 c K8V3 b K8V2 f FP8 i K8I4 B BF16 w window");
    end_line(top);
    fprintf(top->out, "%8s %10s %4s %-7s %7s  %-*s name", "tokens", "stored", "tags", "state",
            "used", BAR, "tiers");
    end_line(top);
}

static void print_row(struct top *top, struct store *store, const struct snapshot_entry *entry,
                      uint64_t now_ns) {
    char size[TEXT_SHORT_BYTES], age[TEXT_SHORT_BYTES], bar[BAR + 1];
    tier_bar(entry, tiers_of(top, store, entry), bar);
    text_age(now_ns > entry->used_ns ? now_ns - entry->used_ns : 0, age);
    fprintf(top->out, "%8" PRIu64 " %10s %4" PRIu32 " %-7s %7s  %s ", entry->head.n,
            text_size(entry->stored_bytes, size), entry->tag_count, state_of(top, entry), age, bar);
    print_cut(top, entry->head.name, COLUMNS - 60);
    end_line(top);
}

/* Descriptors of whoever asked. */
static int screen_of(const struct cmd *cmd) {
    return fileno(cmd->direct[0] != NULL ? cmd->direct[0] : cmd->out);
}

static size_t rows_that_fit(const struct top *top) {
    struct winsize size = {.ws_row = 0};
    if (!top->live)
        return top->count;
    (void)ioctl(screen_of(top->cmd), TIOCGWINSZ, &size);
    size_t head = HEAD_LINES + (top->cmd->host != NULL);
    size_t lines = size.ws_row > head + 1 ? size.ws_row : LINES_USUAL;
    return lines - head;
}

static void print_json(struct top *top, struct store *store) {
    cJSON *list = cJSON_AddArrayToObject(top->cmd->result, "sessions");
    json_text(top->cmd->result, "writer", top->holder);
    cJSON_AddNumberToObject(top->cmd->result, "live_bytes", (double)top->stats.live_bytes);
    cJSON_AddNumberToObject(top->cmd->result, "disk_free_bytes", (double)top->disk_free);
    if (top->cmd->host != NULL) {
        cJSON_AddNumberToObject(top->cmd->result, "slots", top->slots.total);
        cJSON_AddNumberToObject(top->cmd->result, "slots_used", top->slots.used);
        cJSON_AddNumberToObject(top->cmd->result, "slot_bytes", (double)top->slots.slot_bytes);
        cJSON_AddNumberToObject(top->cmd->result, "awake", (double)top->awake_count);
        cJSON_AddNumberToObject(top->cmd->result, "spill_queue", top->spill_queue);
    }
    for (size_t i = 0; i < top->count; i++) {
        char bar[BAR + 1];
        cJSON *item = cmd_entry_json(&top->entries[i]);
        tier_bar(&top->entries[i], tiers_of(top, store, &top->entries[i]), bar);
        json_text(item, "tier_bar", bar);
        json_text(item, "state", state_of(top, &top->entries[i]));
        cJSON_AddItemToArray(list, item);
    }
}

static enum kv_err frame(struct top *top, struct kv_diag *diag) {
    struct store *store = NULL;
    uint64_t now_ns = kv_clock_wall_ns(top->cmd->clock);
    enum kv_err err = look(top, &store, diag);
    if (err == KV_OK && top->cmd->result != NULL) {
        print_json(top, store);
    } else if (err == KV_OK) {
        size_t rows = rows_that_fit(top);
        if (top->live)
            fputs("\033[H", top->out);
        print_head(top);
        for (size_t i = 0; i < top->count && i < rows; i++)
            print_row(top, store, &top->entries[i], now_ns);
        if (top->live)
            fputs("\033[J", top->out);
        fflush(top->out);
    }
    if (top->cmd->host == NULL)
        cmd_close_store(top->cmd, store);
    else if (top->live)
        (void)relay_settle(top->cmd->relay);
    return err;
}

/* --- the terminal */

/* 1 when it is time to leave. */
static int wait_for_key(struct cmd *cmd) {
    int keys = fileno(cmd->in);
    struct pollfd waits[2] = {{.fd = keys, .events = POLLIN},
                              {.fd = cmd->signals, .events = POLLIN}};
    char key = 0;
    if (poll(waits, cmd->signals >= 0 ? 2 : 1, REFRESH_MS) > 0 && waits[0].revents != 0 &&
        read(keys, &key, 1) != 1)
        return 1;
    return key == 'q' || key == 'Q' || cmd_interrupted(cmd);
}

static enum kv_err run_live(struct top *top, struct kv_diag *diag) {
    struct termios before, raw;
    enum kv_err err = KV_OK;
    int over = 0, keys = fileno(top->cmd->in);
    if (tcgetattr(keys, &before) != 0)
        return kv_diag_errno(diag, KV_ERR_IO, errno, "the terminal");
    raw = before;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    (void)tcsetattr(keys, TCSANOW, &raw);
    fputs("\033[?1049h\033[?25l", top->out); /* a screen of its own, without a cursor */
    while (err == KV_OK && !over) {
        err = frame(top, diag);
        over = err != KV_OK || wait_for_key(top->cmd);
    }
    fputs("\033[?25h\033[?1049l", top->out);
    fflush(top->out);
    (void)tcsetattr(keys, TCSANOW, &before);
    return err;
}

enum kv_err cmd_top(struct cmd *cmd, struct kv_diag *diag) {
    struct top *top = kv_alloc_zeroed(cmd->alloc, 1, sizeof *top);
    if (top == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to begin with");
    top->cmd = cmd;
    top->out = cmd->out;
    top->live = !cmd->config->once && cmd->result == NULL && isatty(fileno(cmd->in)) &&
                isatty(screen_of(cmd));
    if (top->live && cmd->host == NULL)
        cmd_take_signals(cmd);
    enum kv_err err = top->live ? run_live(top, diag) : frame(top, diag);
    kv_alloc_release(cmd->alloc, top->awake);
    kv_alloc_release(cmd->alloc, top->entries);
    kv_alloc_release(cmd->alloc, top);
    return err;
}
