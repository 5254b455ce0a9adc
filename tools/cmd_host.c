/* tools/cmd_host.c - a command in the daemon: its store, its sessions, its limits.
 *
 * Responsible for: the contract of cmd_host.h; pausing, writing beside the background writer.
 * Not responsible for: the socket (control.c).
 *
 * A command that works on the store alone finds its session off the device: what is resident would
 * not know what became of it. One that is saved is dropped, another is saved first.
 */
#include "tools/cmd_host.h"

#include "snapshot/snap_tree.h"
#include "tools/control.h"
#include "tools/relay.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>

static const uint64_t second_ns = 1000000000;

static int is_command(const struct cmd *cmd, const char *name) {
    return strcmp(cmd->config->words[0], name) == 0;
}

enum kv_err cmd_host_check(const struct cmd *cmd, const struct cmd_entry *entry,
                           struct kv_diag *diag) {
    const struct config *config = cmd->config;
    if (cmd->spare && strcmp(entry->name, "ps") != 0 && strcmp(entry->name, "top") != 0)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "the daemon that holds the store is at work for %d commands, which is "
                           "all it takes; `coldplane ps` tells who works, run this again later",
                           CONTROL_CLIENTS_MAX);
    const char *flag = config_differs(
        config, cmd->host->config, (CONFIG_ENGINE | CONFIG_WAKING | CONFIG_WRITE) & ~CONFIG_TOKENS);
    if (flag != NULL)
        return kv_diag_set(diag, KV_ERR_BUSY,
                           "--%s: the daemon that holds the store was started with another value; "
                           "leave it out, or stop coldplaned first",
                           flag);
    return KV_OK;
}

static void enter(struct cmd *cmd) {
    service_enter(cmd->host->service);
    cmd->inside = 1;
}

static void leave(struct cmd *cmd) {
    cmd->inside = 0;
    service_leave(cmd->host->service);
}

/* A save that failed before this command came is not this command's to undo. */
static void note_unsaved(struct cmd *cmd, const char *name) {
    struct session *session = session_find(service_engine(cmd->host->service), name);
    struct session_info info = {0};
    if (session != NULL)
        session_info(session, &info);
    cmd->was_unsaved = session != NULL && !service_is_saved(session);
    cmd->was_n = info.n;
    cmd->whole = 0;
}

static enum kv_err take(struct cmd *cmd, const char *name, int index, struct kv_diag *diag) {
    char who[SERVICE_WHO_BYTES];
    const struct service_patience patience = {kv_clock_now_ns(cmd->clock) +
                                                  cmd->host->config->wait_seconds * second_ns,
                                              cmd_interrupted, cmd, who};
    snprintf(who, sizeof who, "%.32s, pid %ld", cmd->config->words[0], (long)cmd->asker);
    if (cmd->leases[index].name[0] != 0)
        return KV_OK;
    enum kv_err err = service_lease(cmd->host->service, name, &patience, &cmd->leases[index], diag);
    if (err == KV_OK && index == 0)
        note_unsaved(cmd, name);
    return err;
}

/* Off the device, with everything it has in the store. */
static enum kv_err let_go(struct cmd *cmd, const char *name, struct kv_diag *diag) {
    struct service *service = cmd->host->service;
    struct receipt receipt;
    service_settle(service, name);
    struct session *session = session_find(service_engine(service), name);
    if (session == NULL)
        return KV_OK;
    if (!service_is_saved(session))
        return service_sleep(service, session, &receipt, diag);
    snapshot_drain(service_snapshot(service));
    service_drop(service, session_find(service_engine(service), name));
    return KV_OK;
}

enum kv_err cmd_host_take_session(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = take(cmd, cmd->session_name, 0, diag);
    /* An older snapshot is woken under the same name. */
    return err == KV_OK && cmd->snapshot != 0 ? let_go(cmd, cmd->session_name, diag) : err;
}

static int goes_on(void *context, uint64_t done, uint64_t all) {
    (void)done, (void)all;
    return !cmd_interrupted(context);
}

enum kv_err cmd_host_prove(struct cmd *cmd, struct receipt *receipt_out, struct kv_diag *diag) {
    struct service *service = cmd->host->service;
    struct session *session = NULL;
    char name[32];
    snprintf(name, sizeof name, "proof-%016" PRIx64, kv_clock_now_ns(cmd->clock));
    const struct restore_options beside = {.probes_max = cmd->host->config->probes,
                                           .as = name,
                                           .progress = goes_on,
                                           .progress_context = cmd};
    snapshot_drain(service_snapshot(service));
    enum kv_err err = take(cmd, name, 1, diag);
    if (err == KV_OK)
        err = service_wake(service, cmd->session_name, &beside, &session, receipt_out, diag);
    /* It never wrote anything, and what it shares with the session is not its own to give back. */
    if (err == KV_OK)
        session_drop(session);
    service_lease_end(service, &cmd->leases[1]);
    return err;
}

enum kv_err cmd_ask_begin(struct cmd *cmd, struct service *service, const char *name,
                          struct cmd_asked *asked_out, struct kv_diag *diag) {
    const struct service_lookup lookup = {.skip_needles = 1};
    struct service_opened opened;
    enum kv_err err = cmd->host != NULL ? take(cmd, name, 0, diag) : KV_OK;
    *asked_out = (struct cmd_asked){NULL, 0};
    if (err == KV_OK)
        err = service_session(service, name, &lookup, &asked_out->session, &opened, diag);
    if (err == KV_OK)
        asked_out->woken = opened.found == SERVICE_WOKEN;
    else if (cmd->host != NULL)
        service_lease_end(service, &cmd->leases[0]);
    return err;
}

/* One that was woken without its own questions must not be the next turn's. */
void cmd_ask_end(struct cmd *cmd, struct service *service, struct cmd_asked *asked) {
#ifndef BREAK_ASKED_STAYS
    if (asked->session != NULL && asked->woken)
#endif
        service_drop(service, asked->session);
    asked->session = NULL;
    if (cmd->host != NULL)
        service_lease_end(service, &cmd->leases[0]);
}

/* The sessions that the command names, as it will find them in the store. */
static enum kv_err take_named(struct cmd *cmd, struct kv_diag *diag) {
    struct service *service = cmd->host->service;
    const char *new_name =
        is_command(cmd, "fork") || is_command(cmd, "rename") ? cmd_word(cmd, 1) : NULL;
    struct snap_tree_room room;
    struct snap_tree_place place = {cmd->session_name, NULL};
    enum kv_err err = KV_OK;
    if (cmd->session_name == NULL || is_command(cmd, "import") || is_command(cmd, "scrub"))
        return KV_OK;
    if (is_command(cmd, "fork") || is_command(cmd, "rm"))
        KV_TRY(snap_tree_parse(service_store(service), cmd->session_name, &room, &place, diag));
    KV_TRY(take(cmd, place.name, 0, diag));
    if (new_name != NULL)
        KV_TRY(take(cmd, new_name, 1, diag));
    /* Turns that were saved last and blocks under way must be there. */
    snapshot_drain(service_snapshot(service));
    if (!is_command(cmd, "fork"))
        err = let_go(cmd, place.name, diag);
done:
    return err;
}

enum kv_err cmd_host_open_store(struct cmd *cmd, struct store **store_out, struct kv_diag *diag) {
    enter(cmd);
    enum kv_err err = take_named(cmd, diag);
    if (err != KV_OK) {
        cmd_host_close(cmd);
        return err;
    }
    *store_out = service_store(cmd->host->service);
    cmd_write_begin(cmd, cmd->host->service);
    return KV_OK;
}

enum kv_err cmd_host_open_service(struct cmd *cmd, struct service **service_out,
                                  struct kv_diag *diag) {
    (void)diag;
    enter(cmd);
    *service_out = cmd->host->service;
    return KV_OK;
}

void cmd_write_begin(struct cmd *cmd, struct service *service) {
    if (cmd->host == NULL)
        return;
    leave(cmd);
    /* What is told of sessions so far is told under their names of now. */
    if (cmd->host->serve != NULL)
        (void)serve_settle(cmd->host->serve, UINT64_MAX);
    snapshot_writer_take(service_snapshot(service));
    cmd->writes = 1;
}

void cmd_write_end(struct cmd *cmd, struct service *service) {
    if (cmd->host == NULL)
        return;
    cmd->writes = 0;
    snapshot_writer_give(service_snapshot(service));
    enter(cmd);
}

/* A command that failed in the middle leaves what a program that ends would leave; what was there
 * unsaved before it and is whole stays. */
static void drop_unsaved(struct cmd *cmd) {
    struct service *service = cmd->host->service;
    struct session_info info;
    if (cmd->leases[0].name[0] == 0)
        return;
    struct session *session = session_find(service_engine(service), cmd->leases[0].name);
    if (session == NULL || service_is_saved(session))
        return;
    session_info(session, &info);
    if (!cmd->was_unsaved || (info.n != cmd->was_n && !cmd->whole))
        service_drop(service, session);
}

enum kv_err cmd_make(struct cmd *cmd, const char *name, struct kv_diag *diag) {
    /* Its own name is held already; whoever makes it says that it exists. */
    if (cmd->host == NULL || strcmp(cmd->leases[0].name, name) == 0)
        return KV_OK;
    return take(cmd, name, 1, diag);
}

void cmd_made(struct cmd *cmd, const char *name) {
    if (cmd->host == NULL || cmd->leases[1].name[0] == 0)
        return;
    cmd->host->changed(cmd->host->context, name);
    service_lease_end(cmd->host->service, &cmd->leases[1]);
}

void cmd_host_close(struct cmd *cmd) {
    struct service *service = cmd->host->service;
    if (cmd->writes)
        cmd_write_end(cmd, service);
    if (!cmd->inside)
        return;
    drop_unsaved(cmd);
    for (int i = 0; i < 2; i++) {
        if (cmd->leases[i].name[0] != 0)
            cmd->host->changed(cmd->host->context, cmd->leases[i].name);
        service_lease_end(service, &cmd->leases[i]);
    }
    if (is_command(cmd, "import"))
        cmd->host->changed(cmd->host->context, NULL);
    leave(cmd);
}

void cmd_pause(struct cmd *cmd) {
    if (cmd->host == NULL)
        return;
    for (int i = 0; i < 2; i++)
        service_lease_end(cmd->host->service, &cmd->leases[i]);
    leave(cmd);
    /* Nobody waits for this thread now, so it may wait for the person's terminal. */
    (void)relay_settle(cmd->relay);
}

enum kv_err cmd_resume(struct cmd *cmd, struct kv_diag *diag) {
    if (cmd->host == NULL)
        return KV_OK;
    enter(cmd);
    return take(cmd, cmd->session_name, 0, diag);
}

void cmd_host_listen(struct cmd *cmd) {
    char said[16];
    ssize_t got;
    while ((got = recv(cmd->signals, said, sizeof said, MSG_DONTWAIT)) > 0)
        for (ssize_t i = 0; i < got; i++) {
            cmd->interrupts += said[i] == 'I';
            cmd->leave |= said[i] != 'I';
        }
    /* Whoever asked has gone. */
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        cmd->leave = 1;
}
