/* tools/cmd.c - what the commands share.
 *
 * Responsible for: exit codes, opening as configured, signals.
 * Not responsible for: the table of commands and their help (cmd_help.c).
 */
#include "tools/cmd.h"

#include "snapshot/snap_tree.h"
#include "store/io.h"
#include "tools/cmd_host.h"
#include "tools/progress.h"
#include "tools/receipt_keep.h"
#include "tools/recompute.h"
#include "tools/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

int cmd_exit_code(enum kv_err err) {
    switch (err) {
    case KV_OK:
        return CMD_EXIT_OK;
    case KV_ERR_INVALID:
        return CMD_EXIT_USAGE;
    case KV_ERR_NOT_FOUND:
        return CMD_EXIT_NOT_FOUND;
    case KV_ERR_EXISTS:
    case KV_ERR_BUSY:
    case KV_ERR_LIMIT:
    case KV_ERR_NO_SLOTS:
    case KV_ERR_MISMATCH:
    case KV_ERR_VERSION:
    case KV_ERR_CANCELLED:
        return CMD_EXIT_REFUSED;
    case KV_ERR_CORRUPT:
        return CMD_EXIT_CORRUPT;
    case KV_ERR_IO:
    case KV_ERR_NO_SPACE:
        return CMD_EXIT_IO;
    case KV_ERR_NOMEM:
    case KV_ERR_DEVICE:
        return CMD_EXIT_DEVICE;
    case KV_ERR_PROOF:
        return CMD_EXIT_PROOF;
    case KV_ERR_COUNT:
        break;
    }
    return CMD_EXIT_DEVICE;
}

const char *cmd_word(const struct cmd *cmd, uint32_t index) {
    return index + 1 < cmd->config->word_count ? cmd->config->words[index + 1] : NULL;
}

/* A new folder's name is lost with the power until the folder above it is synced. */
static enum kv_err sync_above(const char *home, struct kv_diag *diag) {
    char above[CONFIG_PATH_BYTES + 4];
    snprintf(above, sizeof above, "%s/..", home);
    int folder = open(above, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = folder < 0 || fsync(folder) != 0 ? errno : 0;
    if (folder >= 0)
        close(folder);
    return error == 0 ? KV_OK
                      : kv_diag_errno(diag, KV_ERR_IO, error,
                                      "the folder above %s cannot be synced", home);
}

/* The home folder is made when it is missing; any other parent is the user's business. */
static enum kv_err make_home(const struct config *config, int *made_out, struct kv_diag *diag) {
    *made_out = mkdir(config->home, 0700) == 0;
    if (*made_out)
        return sync_above(config->home, diag);
    if (errno == EEXIST)
        return KV_OK;
    if (strncmp(config->store, config->home, strlen(config->home)) != 0)
        return KV_OK;
    return kv_diag_errno(diag, KV_ERR_IO, errno, "folder %s cannot be made; set COLDPLANE_HOME",
                         config->home);
}

/* With nothing in it, it is as if it had never been made. */
static void drop_home(const struct config *config, int made) {
    if (made)
        (void)rmdir(config->home);
}

static const struct io_door *door_of(const struct config *config) {
    return config->posix_io ? io_posix_door() : io_best_door();
}

/* Opening repairs once: what it found is said now or never. */
static void tell_opened(const struct cmd *cmd, struct store *store) {
    struct store_stats stats;
    store_stats_get(store, &stats);
    if (stats.opened[0] == 0)
        return;
    fprintf(cmd->err, "coldplane: store ");
    text_print_clean(cmd->err, cmd->config->store, strlen(cmd->config->store));
    fprintf(cmd->err, ": %s\n", stats.opened);
}

struct store_options cmd_store_options(const struct cmd *cmd) {
    struct store_options options = store_options_usual(cmd->config->store, cmd->program);
    store_options_limit(&options, cmd->config->store_max_bytes);
    options.door = door_of(cmd->config);
    options.alloc = cmd->alloc;
    options.clock = cmd->clock;
    return options;
}

void cmd_holder(const struct config *config, char out[CMD_HOLDER_BYTES]) {
    char path[CONFIG_PATH_BYTES + 8];
    out[0] = 0;
    snprintf(path, sizeof path, "%s/LOCK", config->store);
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0)
        return;
    if (flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        ssize_t got = read(file, out, CMD_HOLDER_BYTES - 1);
        out[got > 0 ? got : 0] = 0;
        out[strcspn(out, "\n")] = 0;
        if (out[0] == 0)
            memcpy(out, "a writer", sizeof "a writer");
    }
    close(file);
}

int cmd_disk_low(const struct config *config, uint64_t *free_out) {
    struct statvfs disk;
    *free_out = UINT64_MAX;
    if (statvfs(config->store, &disk) != 0)
        return 0;
    *free_out = (uint64_t)disk.f_bavail * disk.f_frsize;
    return *free_out < (uint64_t)1 << 30 && disk.f_bavail < disk.f_blocks / 20;
}

void cmd_warn_low(const struct cmd *cmd) {
    uint64_t left = 0;
    char size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL || !cmd_disk_low(cmd->config, &left))
        return;
    fprintf(cmd->err, "coldplane: the disk of store ");
    text_print_clean(cmd->err, cmd->config->store, strlen(cmd->config->store));
    fprintf(cmd->err, " has only %s left: remove sessions, then `coldplane gc`\n",
            text_size(left, size));
}

/* --- signals */

/* Signals become something to read between steps, so that no handler and no global is needed.
 * Threads made later inherit the mask. */
void cmd_take_signals(struct cmd *cmd) {
    sigset_t set;
    if (cmd->host != NULL)
        return;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &set, NULL) == 0)
        cmd->signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

/* While something is opened nobody looks at the signals, and a disk may let it hang: a thread takes
 * them with their usual effect, which ends the program unless the caller ignores them. */
struct watch {
    pthread_t thread;
    int signals, over; /* `over` is an eventfd */
    int runs;
};

static void take_effect(int number) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
    raise(number);
    pthread_sigmask(SIG_BLOCK, &one, NULL);
}

static void *watch_signals(void *context) {
    struct watch *watch = context;
    struct signalfd_siginfo info;
    struct pollfd waits[2] = {{.fd = watch->over, .events = POLLIN},
                              {.fd = watch->signals, .events = POLLIN}};
    for (;;) {
        if (poll(waits, 2, -1) < 0)
            continue;
        if (waits[0].revents != 0)
            return NULL;
        if (read(watch->signals, &info, sizeof info) == (ssize_t)sizeof info)
            take_effect((int)info.ssi_signo);
    }
}

static void watch_begin(struct watch *watch, int signals) {
    *watch = (struct watch){.signals = signals, .over = -1};
    if (signals >= 0)
        watch->over = eventfd(0, EFD_CLOEXEC);
    watch->runs =
        watch->over >= 0 && pthread_create(&watch->thread, NULL, watch_signals, watch) == 0;
}

static void watch_end(struct watch *watch) {
    const uint64_t one = 1;
    if (watch->runs && write(watch->over, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(watch->thread, NULL);
    if (watch->over >= 0)
        close(watch->over);
}

/* --- opening */

static void on_rebuild(void *context, uint64_t done, uint64_t all) {
    progress_update(context, done, all);
}

enum kv_err cmd_open_store(struct cmd *cmd, enum cmd_access access, struct store **store_out,
                           struct kv_diag *diag) {
    if (cmd->host != NULL)
        return cmd_host_open_store(cmd, store_out, diag);
    struct store_options options = cmd_store_options(cmd);
    int made = 0;
    options.read_only = access == CMD_READ;
    options.create = access == CMD_CREATE;
    enum kv_err err = access == CMD_CREATE ? make_home(cmd->config, &made, diag) : KV_OK;
    if (err != KV_OK)
        return err;
    struct watch watch;
    struct progress progress;
    cmd_progress(cmd, &progress, "rebuilding the index", "segments");
    options.progress = on_rebuild;
    options.progress_context = &progress;
    watch_begin(&watch, cmd->signals);
    err = store_open(&options, store_out, diag);
    watch_end(&watch);
    progress_end(&progress);
    if (err == KV_OK)
        tell_opened(cmd, *store_out);
    else
        drop_home(cmd->config, made);
    return err;
}

/* What was asked for may be a session that is there, with a tag that the command does not take. */
static enum kv_err not_found(const struct cmd *cmd, struct store *store, struct kv_diag *diag) {
    struct snap_tree_room room;
    struct snap_tree_place place = {NULL, NULL};
    struct snapshot_entry entry;
    if (snap_tree_parse(store, cmd->session_name, &room, &place, NULL) == KV_OK &&
        place.tag != NULL && snapshot_find(store, cmd->alloc, place.name, &entry, NULL) == KV_OK)
        return kv_diag_set(
            diag, KV_ERR_NOT_FOUND,
            "session %s: not in this store; only restore, fork, export and rm take a "
            "tag: leave @%s out",
            cmd->session_name, place.tag);
    return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                       "session %s: not in this store; `coldplane ls` lists what is there",
                       cmd->session_name);
}

enum kv_err cmd_find(struct cmd *cmd, struct store *store, struct snapshot_entry *entry_out,
                     struct kv_diag *diag) {
    enum kv_err err = session_check_name(cmd->session_name, diag);
    if (err == KV_OK)
        err = snapshot_find(store, cmd->alloc, cmd->session_name, entry_out, diag);
    return err == KV_ERR_NOT_FOUND ? not_found(cmd, store, diag) : err;
}

enum kv_err cmd_look_stored(void *context, struct store *store, struct kv_diag *diag) {
    struct cmd *cmd = context;
    struct snapshot_entry entry;
    struct kv_diag own = {""};
    if (cmd->host != NULL || cmd_find(cmd, store, &entry, &own) != KV_ERR_NOT_FOUND)
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_NOT_FOUND, "%s", own.text);
}

/* Memory for slots; UINT64_MAX: what a GPU has left. Whoever gives a GPU's memory away means it for
 * sessions, unless slots are counted too. */
static uint64_t slots_bytes(const struct config *config) {
    return config_stated(config, "device-memory") && !config_stated(config, "slots-memory") &&
                   config->device.kind == ENGINE_DEVICE_CUDA
               ? UINT64_MAX
               : config->slots_bytes;
}

static int anyone(void *context, const char *session) {
    (void)context;
    (void)session;
    return 1;
}

struct snap_retain_leave cmd_leave(struct cmd *cmd, struct service *service) {
    if (cmd->host != NULL)
        return (struct snap_retain_leave){.is_busy = anyone};
    return service != NULL ? snapshot_leave(service_snapshot(service))
                           : (struct snap_retain_leave){.may_degrade = cmd->config->may_degrade};
}

struct receipt_keep cmd_receipts(const struct cmd *cmd, char dir[CONFIG_PATH_BYTES + 16]) {
    snprintf(dir, CONFIG_PATH_BYTES + 16, "%s/receipts", cmd->config->home);
    return (struct receipt_keep){dir, cmd->clock, cmd->alloc};
}

static uint64_t keep_receipt(void *context, const struct receipt *receipt) {
    char dir[CONFIG_PATH_BYTES + 16];
    const struct receipt_keep keep = cmd_receipts(context, dir);
    return receipt_keep_add(&keep, receipt);
}

/* In a daemon everything is open already. */
static enum kv_err join_service(struct cmd *cmd, service_look look, void *context,
                                struct service **service_out, struct kv_diag *diag) {
    enum kv_err err = cmd_host_open_service(cmd, service_out, diag);
    return err == KV_OK && look != NULL ? look(context, service_store(*service_out), diag) : err;
}

enum kv_err cmd_open_service(struct cmd *cmd, enum cmd_access access, service_look look,
                             void *context, struct service **service_out, struct kv_diag *diag) {
    const struct config *config = cmd->config;
    struct service_settings settings;
    int made = 0;
    if (cmd->host != NULL)
        return join_service(cmd, look, context, service_out, diag);
    service_settings_usual(&settings);
    settings.look = look;
    settings.look_context = context;
    settings.program = cmd->program;
    settings.model_path = config->model;
    settings.store_dir = config->store;
    settings.read_only = access == CMD_READ;
    settings.create = access == CMD_CREATE;
    settings.door = door_of(config);
    settings.store_bytes_max = config->store_max_bytes;
    settings.may_degrade = config->may_degrade;
    settings.write_second_bytes = config->write_second_bytes;
    settings.write_day_bytes = config->write_day_bytes;
    settings.device = config->device.kind;
    settings.cuda_index = config->device.index;
    settings.device_memory_bytes = config->device_bytes;
    settings.simd = config->simd;
    settings.threads = config->threads;
    settings.sessions_max = config->sessions_max;
    settings.slot_budget_bytes = slots_bytes(config);
    settings.reserve_slots = config->reserve_slots;
    settings.policy = config->policy;
    settings.sampler = config->sampler;
    settings.probes = config->probes;
    settings.eager = config->eager;
    settings.fit = config->fit;
    settings.ram_bytes = config->ram_bytes;
    settings.idle_ns = (uint64_t)config->idle_seconds * 1000000000u;
    settings.slots_low_percent = config->slots_low_percent;
    settings.slots_high_percent = config->slots_high_percent;
    settings.receipt = keep_receipt;
    settings.receipt_context = cmd;
    settings.alloc = cmd->alloc;
    settings.clock = cmd->clock;
    /* Receipts are kept there. */
    enum kv_err err = access != CMD_READ ? make_home(config, &made, diag) : KV_OK;
    if (err != KV_OK)
        return err;
    struct watch watch;
    watch_begin(&watch, cmd->signals);
    err = service_open(&settings, service_out, diag);
    watch_end(&watch);
    if (err == KV_OK)
        tell_opened(cmd, service_store(*service_out));
    else
        drop_home(config, made);
    return err;
}

void cmd_close_store(struct cmd *cmd, struct store *store) {
    if (cmd->host != NULL)
        cmd_host_close(cmd);
    else
        store_close(store);
}

void cmd_close_service(struct cmd *cmd, struct service *service) {
    if (cmd->host != NULL)
        cmd_host_close(cmd);
    else
        service_close(service);
}

struct reading {
    struct cmd *cmd;
    struct progress progress;
};

static int on_reading(void *context, uint64_t done, uint64_t all) {
    struct reading *reading = context;
    progress_update(&reading->progress, done, all);
    return !cmd_interrupted(reading->cmd);
}

/* --wake faster: what the rates of this machine say. Without rates, or with those of another model
 * or program, the stored memory is read. */
static int is_prefill_faster(struct cmd *cmd, struct service *service, char text_out[160]) {
    char wake[TEXT_SHORT_BYTES], prefill[TEXT_SHORT_BYTES];
    struct store *store = service_store(service);
    struct snapshot_entry entry;
    struct image image;
    image_init(&image);
    enum kv_err err = snapshot_find(store, cmd->alloc, cmd->session_name, &entry, NULL);
    if (err == KV_OK)
        err = restore_image(store, cmd->alloc, cmd->session_name, &image, NULL);
    struct cmd_estimate estimate = {.stored_bytes = entry.stored_bytes,
                                    .probes = cmd->config->probes};
    if (err == KV_OK)
        err = cmd_rates_estimate(store, &image, &estimate, NULL);
    image_release(&image, cmd->alloc);
    if (err != KV_OK || !estimate.same_model) {
        snprintf(text_out, 160,
                 "this machine was not measured with this model: `coldplane bench "
                 "rates`");
        return 0;
    }
    snprintf(text_out, 160, "a wake is estimated at %s, prefilling again at %s",
             text_duration(estimate.wake_ns, wake), text_duration(estimate.prefill_ns, prefill));
    return estimate.prefill_ns < estimate.wake_ns;
}

/* 1 when the tokens are to be prefilled again; which it is, is always said. */
static int wants_prefill(struct cmd *cmd, struct service *service) {
    char why[160] = "--wake recompute";
    int again = cmd->config->wake == CONFIG_WAKE_RECOMPUTE;
    if (cmd->config->wake == CONFIG_WAKE_FASTER)
        again = is_prefill_faster(cmd, service, why);
    fprintf(cmd->err, "coldplane: %s: %s\n",
            again ? "prefilling the session again" : "reading the stored memory", why);
    return again;
}

static enum kv_err recompute(struct cmd *cmd, struct service *service, struct session **session_out,
                             struct service_opened *opened_out, struct kv_diag *diag) {
    struct reading reading = {.cmd = cmd};
    const struct recompute_args args = {cmd->session_name, on_reading, &reading};
    memset(opened_out, 0, sizeof *opened_out);
    opened_out->found = SERVICE_WOKEN;
    cmd_progress(cmd, &reading.progress, "prefilling", "tokens");
    enum kv_err err = recompute_session(service, &args, session_out, &opened_out->receipt, diag);
    progress_end(&reading.progress);
    return err;
}

/* Only for a turn: what reads, proves or keeps a session wants the memory that was stored. */
static int may_recompute(struct cmd *cmd, struct service *service, int create) {
    struct snapshot_entry entry;
    return create && cmd->config->wake != CONFIG_WAKE_RESTORE && cmd->snapshot == 0 &&
           service_snapshot(service) != NULL &&
           session_find(service_engine(service), cmd->session_name) == NULL &&
           snapshot_find(service_store(service), cmd->alloc, cmd->session_name, &entry, NULL) ==
               KV_OK;
}

enum kv_err cmd_open_session(struct cmd *cmd, struct service *service, int create,
                             struct session **session_out, struct service_opened *opened_out,
                             struct kv_diag *diag) {
    struct reading reading = {.cmd = cmd};
    enum kv_err err = cmd->host != NULL ? cmd_host_take_session(cmd, diag) : KV_OK;
    memset(opened_out, 0, sizeof *opened_out);
    if (err != KV_OK)
        return err;
    if (may_recompute(cmd, service, create) && wants_prefill(cmd, service))
        return recompute(cmd, service, session_out, opened_out, diag);
    cmd_progress(cmd, &reading.progress, "waking", "bytes");
    /* In a daemon only what was said with the command is not the daemon's own setting. */
    const struct service_wakes wakes = {cmd->config->eager, cmd->config->fit};
    int said = config_given(cmd->config, "restore") || config_given(cmd->config, "tiers");
    const struct service_lookup lookup = {.create = create,
                                          .policy = &cmd->config->policy,
                                          .sampler = &cmd->config->sampler,
                                          .snapshot = cmd->snapshot,
                                          .wakes = said ? &wakes : NULL,
                                          .progress = on_reading,
                                          .progress_context = &reading};
    err = service_session(service, cmd->session_name, &lookup, session_out, opened_out, diag);
    progress_end(&reading.progress);
    return err;
}

void cmd_progress(const struct cmd *cmd, struct progress *progress, const char *what,
                  const char *unit) {
    progress_begin(progress, cmd->relay != NULL ? cmd->direct[1] : cmd->err, cmd->clock, what,
                   unit);
    if (progress->out != NULL)
        progress->out = cmd->err;
}

int cmd_interrupted(void *context) {
    struct cmd *cmd = context;
    struct signalfd_siginfo info;
    if (cmd->host != NULL) {
        cmd_host_listen(cmd);
        return cmd->interrupts > 0 || cmd->leave;
    }
    while (cmd->signals >= 0 && read(cmd->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGINT)
            cmd->interrupts++;
        else
            cmd->leave = 1;
    }
    return cmd->interrupts > 0 || cmd->leave;
}
