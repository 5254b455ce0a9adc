/* tools/cmd_ps.c - ps: who is awake, at work or asleep, for whom, and what waits.
 *
 * Responsible for: one account of all sessions, as text and as JSON; warnings that should be seen.
 * Not responsible for: tiers and rates (cmd_top.c), what is stored of a session (cmd_session.c).
 *
 * In a daemon, which runs this for whoever asks, device and queues are known; elsewhere nobody but
 * a writer could have a session awake, and it is named.
 */
#include "tools/cmd.h"
#include "tools/control.h"
#include "tools/json_text.h"
#include "tools/serve.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct line {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    char by[SERVICE_WHO_BYTES];
    enum session_state state; /* SESSION_SLEEPING: it is stored only */
    int working, unsaved, pinned;
    uint32_t waiting, slots;
    uint64_t tokens, since_ns; /* how long */
};

struct ps {
    struct cmd *cmd;
    void *lines; /* struct line [count] */
    size_t count, capacity;
    size_t working, awake, unsaved; /* counts of lines; awake: without those at work */
    struct engine_slots slots;      /* these of a daemon */
    uint32_t requests, requests_max, commands, spill_queue;
    char note[512];
    char holder[CMD_HOLDER_BYTES];
    int refuses_writes, disk_low;
    uint64_t disk_free;
    int no_memory;
};

static struct line *line_at(const struct ps *ps, size_t index) {
    return (struct line *)ps->lines + index;
}

static struct line *find_line(const struct ps *ps, const char *name) {
    for (size_t i = 0; i < ps->count; i++)
        if (strcmp(line_at(ps, i)->name, name) == 0)
            return line_at(ps, i);
    return NULL;
}

/* NULL: no memory. */
static struct line *add_line(struct ps *ps, const char *name) {
    if (!kv_alloc_grow(ps->cmd->alloc, &ps->lines, &ps->capacity, ps->count + 1,
                       sizeof(struct line))) {
        ps->no_memory = 1;
        return NULL;
    }
    struct line *line = line_at(ps, ps->count++);
    memset(line, 0, sizeof *line);
    memcpy(line->name, name, strnlen(name, IMAGE_NAME_BYTES_MAX));
    return line;
}

/* Keys are told apart, not told. */
static void name_owner(const uint8_t owner[IMAGE_OWNER_BYTES], char out[SERVICE_WHO_BYTES]) {
    static const uint8_t operator_self[IMAGE_OWNER_BYTES];
    if (memcmp(owner, operator_self, IMAGE_OWNER_BYTES) == 0)
        memcpy(out, "operator", sizeof "operator");
    else
        snprintf(out, SERVICE_WHO_BYTES, "key %02x%02x%02x%02x", owner[0], owner[1], owner[2],
                 owner[3]);
}

/* --- the daemon */

static void look_at_session(struct ps *ps, struct session *session, uint64_t now_ns) {
    struct session_info info;
    session_info(session, &info);
    struct line *line = add_line(ps, info.name);
    if (line == NULL)
        return;
    line->state = info.state;
    line->tokens = info.n;
    line->slots = info.slots;
    line->since_ns = now_ns > info.last_used_ns ? now_ns - info.last_used_ns : 0;
    line->unsaved = !service_is_saved(session);
    line->pinned = transfer_durable(session)->pinned;
    name_owner(transfer_durable(session)->owner, line->by);
}

/* Whoever has the lease of a session that is not here yet makes or wakes it. */
static void look_at_lease(struct ps *ps, const struct service_lease *lease, uint64_t now_ns) {
    struct line *line = find_line(ps, lease->name);
    if (line == NULL && (line = add_line(ps, lease->name)) != NULL)
        line->state = SESSION_WAKING;
    if (line == NULL)
        return;
    if (line->working) {
        line->waiting++;
        return;
    }
    line->working = 1;
    line->since_ns = now_ns > lease->since_ns ? now_ns - lease->since_ns : 0;
    memcpy(line->by, lease->who, sizeof line->by);
}

static enum kv_err look_at_daemon(struct ps *ps, struct kv_diag *diag) {
    const struct cmd_host *host = ps->cmd->host;
    struct service *service = host->service;
    const struct service_lease *lease;
    struct serve_picture picture;
    struct session *session;
    uint64_t wait_ns;
    enum kv_err err = serve_picture(host->serve, &picture, diag);
    if (err != KV_OK)
        return err;
    ps->requests = picture.requests_now;
    ps->requests_max = picture.requests_max;
    memcpy(ps->note, picture.note, sizeof ps->note);
    serve_picture_release(host->serve, &picture);
    ps->commands = control_clients(*host->control);
    /* Sessions and who has them as one picture, for microseconds. */
    service_enter(service);
    uint64_t now_ns = kv_clock_now_ns(ps->cmd->clock);
    engine_slots(service_engine(service), &ps->slots);
    snapshot_backlog(service_snapshot(service), &ps->spill_queue, &wait_ns);
    for (uint32_t i = 0; (session = session_at(service_engine(service), i)) != NULL; i++)
        look_at_session(ps, session, now_ns);
    for (uint32_t i = 0; (lease = service_lease_at(service, i)) != NULL; i++)
        look_at_lease(ps, lease, now_ns);
    service_leave(service);
    return KV_OK;
}

/* --- the store */

static int on_stored(void *context, const struct snapshot_entry *entry) {
    struct ps *ps = context;
    struct line *line = find_line(ps, entry->head.name);
    /* One that is being woken has nothing on the device to tell yet. */
    if (line != NULL) {
        if (line->tokens == 0)
            line->tokens = entry->head.n;
        return 1;
    }
    uint64_t now_ns = kv_clock_wall_ns(ps->cmd->clock);
    line = add_line(ps, entry->head.name);
    if (line == NULL)
        return 0;
    line->state = SESSION_SLEEPING;
    line->tokens = entry->head.n;
    line->since_ns = now_ns > entry->used_ns ? now_ns - entry->used_ns : 0;
    line->pinned = entry->pinned;
    name_owner(entry->owner, line->by);
    return 1;
}

static int in_order(const void *a, const void *b) {
    const struct line *x = a, *y = b;
    int sleeps_x = x->state == SESSION_SLEEPING, sleeps_y = y->state == SESSION_SLEEPING;
    if (x->working != y->working)
        return y->working - x->working;
    if (sleeps_x != sleeps_y)
        return sleeps_x - sleeps_y;
    if (x->since_ns != y->since_ns)
        return x->since_ns < y->since_ns ? -1 : 1;
    return strcmp(x->name, y->name);
}

static enum kv_err look(struct ps *ps, struct kv_diag *diag) {
    struct cmd *cmd = ps->cmd;
    struct store_stats stats;
    struct store *store = NULL;
    enum kv_err err = KV_OK;
    if (cmd->host != NULL) {
        store = service_store(cmd->host->service);
        KV_TRY(look_at_daemon(ps, diag));
    } else {
        KV_TRY(cmd_open_store(cmd, CMD_READ, &store, diag));
    }
    store_stats_get(store, &stats);
    ps->refuses_writes = stats.refuses_writes;
    ps->disk_low = cmd_disk_low(cmd->config, &ps->disk_free);
    cmd_holder(cmd->config, ps->holder);
    err = snapshot_list(store, cmd->alloc, on_stored, ps, diag);
    if (ps->no_memory)
        KV_TRY(kv_diag_set(diag, KV_ERR_NOMEM, "no memory for %zu sessions", ps->count));
    KV_TRY(err);
    if (ps->count != 0)
        qsort(ps->lines, ps->count, sizeof(struct line), in_order);
    for (size_t i = 0; i < ps->count; i++) {
        const struct line *line = line_at(ps, i);
        ps->working += line->working != 0;
        ps->awake += !line->working && line->state != SESSION_SLEEPING;
        ps->unsaved += line->unsaved && !line->working;
    }
done:
    if (cmd->host == NULL)
        cmd_close_store(cmd, store);
    return err;
}

/* --- what is told */

static const char *state_of(const struct line *line) {
    if (line->state == SESSION_SLEEPING)
        return line->working ? "waking" : "asleep";
    if (line->working && (line->state == SESSION_IDLE || line->state == SESSION_ACTIVE))
        return "working";
    return session_state_name(line->state);
}

static void tell_json(const struct ps *ps, cJSON *to) {
    cJSON *list = cJSON_AddArrayToObject(to, "sessions");
    for (size_t i = 0; i < ps->count; i++) {
        const struct line *line = line_at(ps, i);
        cJSON *item = cJSON_CreateObject();
        json_text(item, "name", line->name);
        json_text(item, "state", state_of(line));
        cJSON_AddBoolToObject(item, "working", line->working);
        cJSON_AddNumberToObject(item, "tokens", (double)line->tokens);
        cJSON_AddNumberToObject(item, "slots", line->slots);
        cJSON_AddNumberToObject(item, "since_seconds", (double)line->since_ns / 1e9);
        json_text(item, "by", line->by);
        cJSON_AddNumberToObject(item, "waiting", line->waiting);
        cJSON_AddBoolToObject(item, "saved", !line->unsaved);
        cJSON_AddBoolToObject(item, "pinned", line->pinned);
        cJSON_AddItemToArray(list, item);
    }
    json_text(to, "writer", ps->holder);
    cJSON_AddBoolToObject(to, "daemon", ps->cmd->host != NULL);
    if (ps->cmd->host != NULL) {
        cJSON_AddNumberToObject(to, "slots", ps->slots.total);
        cJSON_AddNumberToObject(to, "slots_used", ps->slots.used);
        cJSON_AddNumberToObject(to, "requests", ps->requests);
        cJSON_AddNumberToObject(to, "requests_max", ps->requests_max);
        cJSON_AddNumberToObject(to, "commands", ps->commands);
        cJSON_AddNumberToObject(to, "commands_max", CONTROL_CLIENTS_MAX);
        cJSON_AddNumberToObject(to, "spill_queue", ps->spill_queue);
        json_text(to, "note", ps->note);
    }
    cJSON_AddBoolToObject(to, "refuses_writes", ps->refuses_writes);
    cJSON_AddNumberToObject(to, "disk_free_bytes", (double)ps->disk_free);
    cJSON_AddBoolToObject(to, "disk_low", ps->disk_low);
}

static void warn(const struct ps *ps) {
    FILE *out = ps->cmd->out;
    char text[TEXT_SHORT_BYTES];
    if (ps->disk_low)
        fprintf(out, "WARNING the disk has only %s left: remove sessions, then `coldplane gc`\n",
                text_size(ps->disk_free, text));
    if (ps->refuses_writes)
        fprintf(out, "WARNING a write failed and nothing more is written: mend the disk, then "
                     "restart coldplaned\n");
    if (ps->unsaved != 0)
        fprintf(out,
                "WARNING %s in memory only, its save failed: make room, then `coldplane "
                "snapshot` it\n",
                text_count(ps->unsaved, "session", text));
    if (ps->note[0] != 0) {
        fprintf(out, "WARNING ");
        text_print_clean(out, ps->note, strlen(ps->note));
        fprintf(out, "\n");
    }
}

static void tell_line(FILE *out, const struct line *line) {
    char age[TEXT_SHORT_BYTES], slots[TEXT_SHORT_BYTES] = "-";
    if (line->slots != 0)
        snprintf(slots, sizeof slots, "%" PRIu32, line->slots);
    fprintf(out, "%-8s %8" PRIu64 " %6s %8s  ", state_of(line), line->tokens, slots,
            text_age(line->since_ns, age));
    text_print_clean(out, line->by, strlen(line->by));
    fprintf(out, "%*s  ", (int)(strlen(line->by) < 20 ? 20 - strlen(line->by) : 0), "");
    text_print_clean(out, line->name, strlen(line->name));
    if (line->waiting != 0)
        fprintf(out, "  (%" PRIu32 " wait)", line->waiting);
    /* Whoever works on it saves it at the end. */
    if (line->unsaved && !line->working)
        fprintf(out, "  (not saved)");
    if (line->pinned)
        fprintf(out, "  (pinned)");
    fprintf(out, "\n");
}

static void tell_text(const struct ps *ps) {
    FILE *out = ps->cmd->out;
    char sessions[TEXT_SHORT_BYTES];
    fprintf(out, "%s: %zu working, %zu awake, %zu asleep; writer ",
            text_count(ps->count, "session", sessions), ps->working, ps->awake,
            ps->count - ps->working - ps->awake);
    text_print_clean(out, ps->holder[0] != 0 ? ps->holder : "none",
                     strlen(ps->holder[0] != 0 ? ps->holder : "none"));
    fprintf(out, "\n");
    if (ps->cmd->host != NULL)
        fprintf(out,
                "slots %" PRIu32 " of %" PRIu32 ", requests %" PRIu32 " of %" PRIu32
                ", commands %" PRIu32 " of %d, writes waiting %" PRIu32 "\n",
                ps->slots.used, ps->slots.total, ps->requests, ps->requests_max, ps->commands,
                CONTROL_CLIENTS_MAX, ps->spill_queue);
    else if (ps->holder[0] != 0)
        fprintf(out, "whom that program has awake, only it knows\n");
    warn(ps);
    if (ps->count != 0)
        fprintf(out, "%-8s %8s %6s %8s  %-20s  %s\n", "state", "tokens", "slots", "since", "by",
                "name");
    for (size_t i = 0; i < ps->count; i++)
        tell_line(out, line_at(ps, i));
}

enum kv_err cmd_ps(struct cmd *cmd, struct kv_diag *diag) {
    struct ps *ps = kv_alloc_zeroed(cmd->alloc, 1, sizeof *ps);
    if (ps == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to begin with");
    ps->cmd = cmd;
    enum kv_err err = look(ps, diag);
    if (err == KV_OK && cmd->result != NULL)
        tell_json(ps, cmd->result);
    else if (err == KV_OK)
        tell_text(ps);
    kv_alloc_release(cmd->alloc, ps->lines);
    kv_alloc_release(cmd->alloc, ps);
    return err;
}
