/* tools/cmd.h - what the commands share, and the table of them.
 *
 * Responsible for: struct cmd, opening a store or service as configured, the exit code of an error
 * (the only mapping), signals as something to look at between steps.
 * Not responsible for: the commands themselves (cmd_*.c), parsing (config.h).
 *
 * A command returns an error and leaves printing it to main. With --json it fills `result` and main
 * prints it, with {"error": {code, text}} added when the command failed; without, it prints its own
 * text. A command that writes to the store may run in the daemon: it uses only the streams of
 * struct cmd, never those of the process.
 *
 * In the daemon a command runs on a thread of its own with the daemon's store and service: between
 * opening and closing them it is the scheduler thread (service.h), or holds the writer.
 *
 * Threads: one for each command.
 * Units: none.
 */
#ifndef TOOLS_CMD_H
#define TOOLS_CMD_H

#include "snapshot/snap_retain.h"
#include "tools/config.h"
#include "tools/service.h"

#include <stdatomic.h>
#include <sys/types.h>

struct cJSON;
struct control;
struct progress;
struct relay;
struct serve;

/* Of the daemon, for the commands that it runs for others. */
struct cmd_host {
    struct service *service;
    struct serve *serve;
    const struct config *config;
    /* As the scheduler thread: what is stored under `name`, or anywhere when it is NULL, may be
     * another than before. */
    void (*changed)(void *context, const char *name);
    void *context;
    struct control *const *control; /* behind it NULL: not open yet */
    /* A gc or a scrub is at work: each lets others write between pieces, but none of its own kind,
     * which would take the same segments, or move the same mark. */
    atomic_flag *collecting, *scrubbing;
};

struct cmd {
    const struct config *config;
    const char *program;         /* as it stands in the store's LOCK */
    const struct cmd_host *host; /* NULL: the command opens what it needs itself */
    const char *home;            /* with host: COLDPLANE_HOME of whoever asked */
    pid_t asker;                 /* with host: its process */
    int spare;                   /* with host: came in beyond those that may work */
    int inside, writes;          /* with host: is the scheduler thread; holds the writer */
    int was_unsaved;             /* with host: the session was, with `was_n` tokens, at the lease */
    uint64_t was_n;
    uint64_t built_ns; /* wall time: a daemon was asked then for the session that `bench restore`
                          measures, and has it; 0: none was */
    int whole;         /* the last turn is complete, only its save failed */
    struct service_lease leases[2];
    const struct kv_alloc *alloc;
    const struct kv_clock *clock;
    const char *session_name;
    uint64_t snapshot;    /* of it, for cmd_open_session; 0: its head */
    FILE *in, *out, *err; /* of the caller: its standard streams, or those of a client */
    struct relay *relay;  /* with host: behind `out` and `err`, whose writes then never wait */
    FILE *direct[2];      /* with relay: the client's own, for who may wait for a person */
    int folder;           /* of the caller: where paths of arguments begin, or AT_FDCWD */
    struct cJSON *result; /* with --json: an object to fill in; else NULL */
    int signals;          /* after cmd_take_signals: a signalfd for INT, TERM and HUP; else -1. With
                             host: the socket of whoever asked */
    int interrupts;       /* INTs seen by cmd_interrupted since it was last set to 0 */
    int leave;            /* TERM or HUP came: end as soon as nothing can be lost */
};

/* Exit codes, DESIGN section 11. */
enum {
    CMD_EXIT_OK = 0,
    CMD_EXIT_USAGE = 1,
    CMD_EXIT_NOT_FOUND = 2,
    CMD_EXIT_REFUSED = 3,
    CMD_EXIT_CORRUPT = 4,
    CMD_EXIT_IO = 5,
    CMD_EXIT_DEVICE = 6,
    CMD_EXIT_PROOF = 7
};
int cmd_exit_code(enum kv_err err);

struct cmd_entry {
    const char *name, *arguments, *summary, *help, *examples;
    uint32_t words_least, words_most; /* arguments behind the command */
    unsigned groups;                  /* enum config_group */
    enum kv_err (*run)(struct cmd *cmd, struct kv_diag *diag);
};
/* INVALID, listing the commands, when none is named so. */
enum kv_err cmd_lookup(const char *name, const struct cmd_entry **entry_out, struct kv_diag *diag);
/* Of one command, or the list of all when `entry` is NULL; with --json into the result. */
void cmd_give_help(struct cmd *cmd, const struct cmd_entry *entry);

/* All of a program's run: arguments and flags, the command, its result and the one line of an
 * error. Returns the exit code. */
int cmd_main(struct cmd *cmd, int argc, char **argv);

/* Argument `index` behind the command, NULL when there are fewer. */
const char *cmd_word(const struct cmd *cmd, uint32_t index);

/* Reading is beside a writer. NOT_FOUND when there is no store, but with CMD_CREATE, which makes it
 * (and a service only once its model is had). The caller closes it. */
enum cmd_access { CMD_READ, CMD_WRITE, CMD_CREATE };
enum kv_err cmd_open_store(struct cmd *cmd, enum cmd_access access, struct store **store_out,
                           struct kv_diag *diag);
/* 1 when the disk of the store has less than 1 GiB and less than 5 % left. */
int cmd_disk_low(const struct config *config, uint64_t *free_out);
/* Who holds the store's lock, as it says itself; "" when nobody writes. */
enum { CMD_HOLDER_BYTES = 128 };
void cmd_holder(const struct config *config, char out[CMD_HOLDER_BYTES]);
/* Says so on standard error, for a command that wrote and went well; one that failed has said more.
 */
void cmd_warn_low(const struct cmd *cmd);
/* As configured; the caller changes what it wants otherwise, and opens. */
struct store_options cmd_store_options(const struct cmd *cmd);
/* The stored session cmd->session_name; NOT_FOUND. */
enum kv_err cmd_find(struct cmd *cmd, struct store *store, struct snapshot_entry *entry_out,
                     struct kv_diag *diag);
/* What is said of a stored session in JSON; owned by the caller. */
struct cJSON *cmd_entry_json(const struct snapshot_entry *entry);
struct receipt_keep;
/* COLDPLANE_HOME/receipts; `dir` is the memory behind it. */
struct receipt_keep cmd_receipts(const struct cmd *cmd, char dir[CONFIG_PATH_BYTES + 16]);
/* `look` (service.h; may be NULL) tells from the store what is wrong with the arguments before a
 * model is loaded; in a daemon as the scheduler thread. */
enum kv_err cmd_open_service(struct cmd *cmd, enum cmd_access access, service_look look,
                             void *context, struct service **service_out, struct kv_diag *diag);
/* A service_look whose context is a struct cmd: NOT_FOUND when its session is not stored; what else
 * is wrong with it the wake says. In a daemon it may be awake and not stored yet. */
enum kv_err cmd_look_stored(void *context, struct store *store, struct kv_diag *diag);
/* Around what this thread itself writes to the store of a service that it opened. */
void cmd_write_begin(struct cmd *cmd, struct service *service);
void cmd_write_end(struct cmd *cmd, struct service *service);
/* What may go when such a write finds no room. In the daemon nothing: whoever holds the writer
 * cannot ask which sessions are resident. `service` NULL: none is. */
struct snap_retain_leave cmd_leave(struct cmd *cmd, struct service *service);
/* Around waiting for a person: others may use the session, so look it up again by name. */
void cmd_pause(struct cmd *cmd);
enum kv_err cmd_resume(struct cmd *cmd, struct kv_diag *diag);
/* With host, as the scheduler thread: nobody else uses `name`, under which something is made, until
 * cmd_made. */
enum kv_err cmd_make(struct cmd *cmd, const char *name, struct kv_diag *diag);
void cmd_made(struct cmd *cmd, const char *name);
/* progress_begin on the caller's standard error. */
void cmd_progress(const struct cmd *cmd, struct progress *progress, const char *what,
                  const char *unit);
/* What cmd_open_store and cmd_open_service gave; NULL is allowed. */
void cmd_close_store(struct cmd *cmd, struct store *store);
void cmd_close_service(struct cmd *cmd, struct service *service);
/* service_session of cmd->session_name with a progress line; `opened_out` is always written. */
enum kv_err cmd_open_session(struct cmd *cmd, struct service *service, int create,
                             struct session **session_out, struct service_opened *opened_out,
                             struct kv_diag *diag);

/* A session for throwaway questions: as it is awake, else woken without asking it its own. In a
 * daemon under its lease. `asked` is for cmd_ask_end, which leaves it as it was found. */
struct cmd_asked {
    struct session *session;
    int woken;
};
enum kv_err cmd_ask_begin(struct cmd *cmd, struct service *service, const char *name,
                          struct cmd_asked *asked_out, struct kv_diag *diag);
void cmd_ask_end(struct cmd *cmd, struct service *service, struct cmd_asked *asked);

/* From here on INT, TERM and HUP wait to be seen by cmd_interrupted, but while cmd_open_store or
 * cmd_open_service is at work they have their usual effect. Before any thread is made. */
void cmd_take_signals(struct cmd *cmd);
/* Takes signals that wait; 1 when generation should stop. Context is a struct cmd. */
int cmd_interrupted(void *context);

/* What this machine's rates (`bench rates`) say of a stored session. */
struct cmd_estimate {
    uint64_t stored_bytes; /* these two are given by the caller */
    uint32_t probes;
    uint64_t wake_ns, prefill_ns;
    uint64_t measured_ns; /* wall clock */
    int same_model;       /* 0: measured with another model, so that prefill says little */
};
struct image;
/* NOT_FOUND when nothing was measured. */
enum kv_err cmd_rates_estimate(struct store *store, const struct image *image,
                               struct cmd_estimate *estimate_out, struct kv_diag *diag);
void cmd_rates_show(const struct cmd_estimate *estimate, struct cJSON *to);

struct template;
struct tokenizer;
/* Of the model that is set; `template_out`, unless it is NULL, is NULL for one without a template
 * that is known. The caller drops both, the template first. */
enum kv_err cmd_open_tokenizer(struct cmd *cmd, struct tokenizer **tokenizer_out,
                               struct template **template_out, struct kv_diag *diag);
/* What was said in a stored session; with `turns` (a JSON array, one object a turn) as their text.
 * MISMATCH when the model that is set has another vocabulary. */
enum kv_err cmd_tell_text(struct cmd *cmd, const struct image *image, struct cJSON *turns,
                          struct kv_diag *diag);
const char *cmd_role_name(enum image_role role);

enum kv_err cmd_chat(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_run(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_ls(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_show(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_snapshot(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_restore(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_needle(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_export(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_import(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_audit(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_verify(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_rm(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_expire(struct cmd *cmd, struct kv_diag *diag);
/* What the byte budget made go: of session `name`, or of all and with totals when it is NULL. With
 * `to` as JSON, else as text; nothing when there was nothing. */
void cmd_tell_retained(struct cmd *cmd, struct store *store, const char *name, struct cJSON *to);
enum kv_err cmd_fork(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_rename(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_pin(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_rollback(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_stats(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_receipt(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_top(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_ps(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_gc(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_fsck(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_scrub(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_tokenize(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_bench(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_version(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_help(struct cmd *cmd, struct kv_diag *diag);

#endif
