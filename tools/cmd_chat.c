/* tools/cmd_chat.c - run and chat: talking to a session.
 *
 * Responsible for: one turn from a flag, the conversation loop, what is shown while tokens arrive.
 * Not responsible for: reading lines on a terminal (line_edit.c) or rendering turns (turn.c).
 *
 * A turn that fails in the middle leaves a session that is not what was saved, so it is dropped and
 * woken again from its last saved turn: what the user sees and what is stored stay the same.
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/line_edit.h"
#include "tools/progress.h"
#include "tools/receipt_print.h"
#include "tools/text.h"
#include "tools/turn.h"

#include "snapshot/snap_tree.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

struct talk {
    struct cmd *cmd;
    struct service *service;
    struct session *session;
    struct progress progress;
    int show;    /* print the answer while it is made */
    cJSON *said; /* with --json: one object for each turn, printed at the end */
    struct service_opened opened;
    int went_back; /* what is resident is not saved before the turn is */
};

static int on_text(void *context, const char *text, size_t bytes) {
    struct talk *talk = context;
    progress_end(&talk->progress);
    if (talk->show) {
        text_print_clean(talk->cmd->out, text, bytes);
        fflush(talk->cmd->out);
    }
    return 1;
}

static int on_cancelled(void *context) {
    struct talk *talk = context;
    return cmd_interrupted(talk->cmd);
}

static void on_prefilled(void *context, uint64_t done, uint64_t all) {
    struct talk *talk = context;
    progress_update(&talk->progress, done, all);
}

/* The system message goes in front of the first turn only. `text` NULL: the answer anew. */
static enum kv_err say(struct talk *talk, const char *text, size_t bytes,
                       struct turn_result *result, struct kv_diag *diag) {
    const struct config *config = talk->cmd->config;
    struct session_info info;
    struct template_message messages[2];
    size_t count = 0;
    session_info(talk->session, &info);
    if (info.n == 0 && config->system != NULL)
        messages[count++] =
            (struct template_message){TEMPLATE_SYSTEM, config->system, strlen(config->system)};
    if (text != NULL)
        messages[count++] = (struct template_message){TEMPLATE_USER, text, bytes};
    /* What is dropped with a message that was not read whole is stored; an answer whose save failed
     * before is not, and stays with what was read. */
    int lossless = talk->went_back || service_is_saved(talk->session);
    const struct turn_options options = {.messages = messages,
                                         .message_count = count,
                                         .resume = text == NULL,
                                         .tokens_max = config->tokens_max,
                                         .save = 1,
                                         .take_back = lossless,
                                         .stream = on_text,
                                         .cancelled = on_cancelled,
                                         .prefilled = on_prefilled,
                                         .context = talk};
    cmd_progress(talk->cmd, &talk->progress, "reading", "tokens");
    enum kv_err err = turn_run(talk->service, talk->session, &options, result, diag);
    talk->cmd->whole = err != KV_OK && result->receipt.operation != 0;
    progress_end(&talk->progress);
    if (err == KV_ERR_CANCELLED && result->tokens_unread > 0) {
        service_drop(talk->service, talk->session);
        talk->session = NULL;
    }
    return err;
}

/* After a turn that was stopped and is saved. */
static void tell_stopped(const struct talk *talk, const struct turn_result *result,
                         struct kv_diag *diag) {
    struct session_info info;
    session_info(talk->session, &info);
    uint64_t read = result->tokens_fed - result->tokens_unread;
    if (result->tokens_unread == 0)
        kv_diag_set(diag, KV_ERR_CANCELLED, "stopped; what was answered so far is saved");
    else
        kv_diag_set(diag, KV_ERR_CANCELLED,
                    "stopped; the message was cut at token %" PRIu64 " of %" PRIu64
                    " and saved so; `coldplane rollback %s --to %" PRIu64 "` takes it out",
                    read, result->tokens_fed, info.name, info.n - read);
}

static const char *done_name(const struct turn_result *result) {
    if (result->cancelled)
        return "cancelled";
    switch (result->done) {
    case ENGINE_DONE_STOP:
        return "stop";
    case ENGINE_DONE_LENGTH:
        return "length";
    case ENGINE_DONE_CONTEXT:
        return "context";
    case ENGINE_DONE_CANCELLED:
        return "cancelled";
    case ENGINE_DONE_FED:
        break;
    }
    return "fed";
}

/* --- run */

static void run_json(cJSON *to, const struct turn_result *result,
                     const struct service_opened *opened) {
    static const char *const found[] = {"resident", "woken", "new"};
    json_text(to, "session", found[opened->found]);
    json_text(to, "text", result->text != NULL ? result->text : "");
    cJSON_AddNumberToObject(to, "tokens_fed", (double)result->tokens_fed);
    cJSON_AddNumberToObject(to, "tokens_generated", (double)result->tokens_generated);
    json_text(to, "done", done_name(result));
    cJSON_AddNumberToObject(to, "prefill_ns", (double)result->prefill_ns);
    cJSON_AddNumberToObject(to, "decode_ns", (double)result->decode_ns);
    cJSON_AddBoolToObject(to, "saved", result->saved);
    if (opened->receipt.operation != 0)
        cJSON_AddItemToObject(to, "woken", receipt_print_json(&opened->receipt));
    if (result->receipt.operation != 0)
        cJSON_AddItemToObject(to, "receipt", receipt_print_json(&result->receipt));
}

/* Flags of a session's birth mean nothing later; saying so beats ignoring them silently. */
static void warn_birth_flags(const struct cmd *cmd, enum service_found found) {
    static const char *const birth[] = {"recipe", "ages", "temperature", "top-p",
                                        "top-k",  "seed", "system"};
    for (size_t i = 0; found != SERVICE_NEW && i < sizeof birth / sizeof birth[0]; i++)
        if (config_given(cmd->config, birth[i]))
            fprintf(cmd->err,
                    "coldplane: --%s: the session keeps what it was made with; begin a new one to "
                    "change it\n",
                    birth[i]);
}

static enum kv_err take_prompt(struct cmd *cmd, char **owned_out, const char **text_out,
                               size_t *bytes_out, struct kv_diag *diag) {
    const char *prompt = cmd->config->prompt;
    enum kv_err err = KV_OK;
    if (prompt == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "run: nothing to say; add --prompt TEXT, or --prompt - for standard "
                           "input");
    *bytes_out = strlen(prompt);
    *text_out = prompt;
    if (strcmp(prompt, "-") == 0) {
        err = text_read_all(cmd->in, cmd->alloc, owned_out, bytes_out, diag);
        *text_out = *owned_out;
    }
    if (err == KV_OK && *bytes_out == 0)
        err = kv_diag_set(diag, KV_ERR_INVALID, "run: the prompt is empty; say something");
    return err;
}

/* A session that is not stored begins, and its name is a new one. */
static enum kv_err look_talker(void *context, struct store *store, struct kv_diag *diag) {
    struct cmd *cmd = context;
    struct snapshot_entry entry;
    if (cmd->host != NULL)
        return KV_OK;
    enum kv_err err = store != NULL
                          ? snapshot_find(store, cmd->alloc, cmd->session_name, &entry, diag)
                          : KV_ERR_NOT_FOUND;
    if (err != KV_ERR_NOT_FOUND)
        return KV_OK; /* what is wrong with a stored one its wake says */
    kv_diag_clear(diag);
    return session_check_new_name(cmd->session_name, diag);
}

enum kv_err cmd_run(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct talk talk = {.cmd = cmd, .show = cmd->result == NULL};
    struct service_opened opened;
    struct turn_result result;
    const char *text = NULL;
    char *owned = NULL;
    size_t bytes = 0;
    memset(&opened, 0, sizeof opened);
    memset(&result, 0, sizeof result);
    KV_TRY(session_check_name(cmd->session_name, diag));
    KV_TRY(take_prompt(cmd, &owned, &text, &bytes, diag));
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_service(cmd, CMD_CREATE, look_talker, cmd, &talk.service, diag));
    KV_TRY(cmd_open_session(cmd, talk.service, 1, &talk.session, &opened, diag));
    warn_birth_flags(cmd, opened.found);
    err = say(&talk, text, bytes, &result, diag);
    if (talk.show && result.text_bytes > 0)
        fprintf(cmd->out, "\n");
    if (err == KV_OK && result.cancelled) {
        struct kv_diag why;
        tell_stopped(&talk, &result, &why);
        err = kv_diag_set(diag, KV_ERR_CANCELLED, "run: %s", why.text);
    }
done:
    if (cmd->result != NULL)
        run_json(cmd->result, &result, &opened);
    if (talk.service != NULL) {
        turn_result_release(talk.service, &result);
        if (service_note(talk.service)[0] != 0)
            fprintf(cmd->err, "coldplane: %s\n", service_note(talk.service));
    }
    cmd_close_service(cmd, talk.service);
    kv_alloc_release(cmd->alloc, owned);
    return err;
}

/* --- chat */

static const char chat_help[] =
    "/retry       another answer to the last message (the same one at temperature 0)\n"
    "/edit TEXT   TEXT instead of the last message\n"
    "/fork NAME   a second session from here on; this one goes on\n"
    "/save [TAG]  keep a snapshot that later turns do not replace; with TAG it is NAME@TAG\n"
    "/sleep       ask the needles, write everything, and leave\n"
    "/quit        leave; every turn is saved already\n"
    "/help        this list; a line that begins with a space is never a command\n"
    "After /retry and /edit the conversation before stays as tag before-restore-N.\n"
    "Ctrl-C stops an answer; at the prompt, twice leaves.\n";

static void greet(const struct talk *talk, const struct service_opened *opened) {
    struct session_info info;
    struct engine_model model;
    session_info(talk->session, &info);
    engine_model(service_engine(talk->service), &model);
    if (model.device_note[0] != 0)
        fprintf(talk->cmd->err, "(%s)\n", model.device_note);
    if (opened->found == SERVICE_WOKEN)
        receipt_print_line(&opened->receipt, talk->cmd->err);
    fprintf(talk->cmd->err,
            "session %s, %s%" PRIu64 " tokens, on %s; /help lists what else there is\n", info.name,
            opened->found == SERVICE_NEW ? "new, " : "", info.n, model.device_name);
}

static enum kv_err open_talk(struct talk *talk, struct service_opened *opened,
                             struct kv_diag *diag) {
    return cmd_open_session(talk->cmd, talk->service, 1, &talk->session, opened, diag);
}

/* After a turn that failed: back to what is stored. */
static enum kv_err recover(struct talk *talk, const struct turn_result *result,
                           struct kv_diag *diag) {
    struct service_opened opened;
    /* The answer is complete and only its save failed: the session is whole and stays. */
    if (result->receipt.operation != 0 || (result->tokens_fed == 0 && !talk->went_back))
        return KV_OK;
    if (talk->session != NULL)
        service_drop(talk->service, talk->session);
    talk->session = NULL;
    /* The ctrl-C that stopped the turn is not meant for what comes back now. */
    talk->cmd->interrupts = 0;
    return open_talk(talk, &opened, diag);
}

static void tell_error(const struct cmd *cmd, const struct kv_diag *diag) {
    fprintf(cmd->err, "coldplane: ");
    text_print_clean(cmd->err, diag->text, strlen(diag->text));
    fprintf(cmd->err, "\n");
}

/* Not on a terminal nobody can react: the first failure ends the run, and main says it. */
static enum kv_err tell_or_end(const struct cmd *cmd, enum kv_err err, const struct kv_diag *diag) {
    if (err == KV_OK || !isatty(fileno(cmd->in)))
        return err;
    tell_error(cmd, diag);
    return KV_OK;
}

/* How the session was found belongs to the first turn only. */
static void note_turn(struct talk *talk, const struct turn_result *result) {
    cJSON *turn = cJSON_CreateObject();
    run_json(turn, result, &talk->opened);
    cJSON_AddItemToArray(talk->said, turn);
    memset(&talk->opened, 0, sizeof talk->opened);
    talk->opened.found = SERVICE_RESIDENT;
}

static enum kv_err chat_turn(struct talk *talk, const char *line, size_t bytes,
                             struct kv_diag *diag) {
    struct turn_result result;
    struct kv_diag why = {""};
    talk->cmd->interrupts = 0;
    enum kv_err err = say(talk, line, bytes, &result, &why);
    if (talk->show)
        fprintf(talk->cmd->out, "\n");
    fflush(talk->cmd->out);
    if (err == KV_OK && talk->said != NULL)
        note_turn(talk, &result);
    if (err == KV_OK && result.cancelled && result.tokens_unread == 0) {
        fprintf(talk->cmd->err, "(stopped; saved so far)\n");
    } else if (err == KV_OK && result.cancelled) {
        tell_stopped(talk, &result, &why);
        tell_error(talk->cmd, &why);
    } else if (err == KV_OK && result.done == ENGINE_DONE_LENGTH)
        fprintf(talk->cmd->err, "(cut at --max-tokens %" PRIu32 ")\n",
                talk->cmd->config->tokens_max);
    else if (err == KV_OK && result.done == ENGINE_DONE_CONTEXT)
        fprintf(talk->cmd->err, "(the model's context is full; begin a new session)\n");
    if (err != KV_OK) {
        enum kv_err lost = recover(talk, &result, diag);
        if (lost != KV_OK) {
            tell_error(talk->cmd, &why);
            err = lost;
        } else {
            *diag = why;
            err = tell_or_end(talk->cmd, err, diag);
        }
    }
    turn_result_release(talk->service, &result);
    talk->cmd->interrupts = 0;
    talk->went_back = 0;
    return err;
}

/* --- commands in the conversation: each gets what stands behind its name, NULL for nothing */

static enum kv_err go_back(struct talk *talk, uint64_t n, struct kv_diag *diag) {
    struct session_info before, after;
    struct service_opened opened;
    uint64_t prefilled = 0;
    session_info(talk->session, &before);
    enum kv_err err = turn_rewind(talk->service, talk->session, n, &prefilled, diag);
    session_info(talk->session, &after);
    talk->went_back = err == KV_OK;
    if (err == KV_OK && prefilled != 0)
        fprintf(talk->cmd->err, "(%" PRIu64 " tokens prefilled again)\n", prefilled);
    if (err == KV_OK || after.n == before.n)
        return err;
    /* It stands between two places: back to what is stored. */
    service_drop(talk->service, talk->session);
    talk->session = NULL;
    (void)open_talk(talk, &opened, NULL);
    return err;
}

static enum kv_err do_retry(struct talk *talk, const char *rest, struct kv_diag *diag) {
    struct turn_last last;
    struct session_info info;
    (void)rest;
    enum kv_err err = turn_last(talk->service, talk->session, &last, diag);
    if (err == KV_OK)
        err = go_back(talk, last.answer, diag);
    if (err != KV_OK)
        return err;
    session_info(talk->session, &info);
    session_reseed(talk->session, info.sampler.seed + 1);
    return chat_turn(talk, NULL, 0, diag);
}

static enum kv_err do_edit(struct talk *talk, const char *rest, struct kv_diag *diag) {
    struct turn_last last;
    if (rest == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "/edit: what instead? write /edit TEXT");
    enum kv_err err = turn_last(talk->service, talk->session, &last, diag);
    if (err == KV_OK)
        err = go_back(talk, last.message, diag);
    return err == KV_OK ? chat_turn(talk, rest, strlen(rest), diag) : err;
}

static enum kv_err do_fork(struct talk *talk, const char *rest, struct kv_diag *diag) {
    const struct snap_retain_leave leave = cmd_leave(talk->cmd, talk->service);
    const struct snap_tree tree = {service_store(talk->service), talk->cmd->alloc, talk->cmd->clock,
                                   &leave};
    const struct snap_tree_place place = {talk->cmd->session_name, NULL};
    if (rest == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "/fork: its name? write /fork NAME");
    enum kv_err err = cmd_make(talk->cmd, rest, diag);
    if (err != KV_OK)
        return err;
    snapshot_drain(service_snapshot(talk->service));
    cmd_write_begin(talk->cmd, talk->service);
    err = snap_tree_fork(&tree, &place, rest, diag);
    cmd_write_end(talk->cmd, talk->service);
    cmd_made(talk->cmd, rest);
    if (err == KV_OK)
        fprintf(talk->cmd->err, "(forked as it was last saved)\n");
    return err;
}

static enum kv_err do_save(struct talk *talk, const char *rest, struct kv_diag *diag) {
    struct receipt receipt;
    enum kv_err err = service_save_tag(talk->service, talk->session, rest, &receipt, diag);
    if (err == KV_OK)
        receipt_print_line(&receipt, talk->cmd->err);
    return err;
}

static enum kv_err do_sleep(struct talk *talk, const char *rest, struct kv_diag *diag) {
    struct receipt receipt;
    (void)rest;
    enum kv_err err = service_sleep(talk->service, talk->session, &receipt, diag);
    if (err == KV_OK && receipt.operation != 0)
        receipt_print_line(&receipt, talk->cmd->err);
    return err;
}

static enum kv_err do_help(struct talk *talk, const char *rest, struct kv_diag *diag) {
    (void)talk, (void)rest, (void)diag;
    fputs(chat_help, talk->cmd->err);
    return KV_OK;
}

static enum kv_err do_quit(struct talk *talk, const char *rest, struct kv_diag *diag) {
    (void)talk, (void)rest, (void)diag;
    return KV_OK;
}

static const struct chat_command {
    const char *name;
    int takes, ends; /* words behind it; the chat */
    enum kv_err (*run)(struct talk *talk, const char *rest, struct kv_diag *diag);
} chat_commands[] = {
    {"/retry", 0, 0, do_retry}, {"/edit", 1, 0, do_edit},   {"/fork", 1, 0, do_fork},
    {"/save", 1, 0, do_save},   {"/sleep", 0, 1, do_sleep}, {"/quit", 0, 1, do_quit},
    {"/help", 0, 0, do_help},
};

static const struct chat_command *find_command(const char *line, const char **rest_out) {
    size_t length = strcspn(line, " ");
    const char *rest = line + length + strspn(line + length, " ");
    *rest_out = rest[0] != 0 ? rest : NULL;
    for (size_t i = 0; i < sizeof chat_commands / sizeof chat_commands[0]; i++)
        if (strlen(chat_commands[i].name) == length &&
            memcmp(chat_commands[i].name, line, length) == 0 &&
            (*rest_out == NULL || chat_commands[i].takes))
            return &chat_commands[i];
    return NULL;
}

/* 1 when the line was a command; *over_out 1 when it ends the chat, *err_out when it failed so. */
static int slash(struct talk *talk, const char *line, int *over_out, enum kv_err *err_out,
                 struct kv_diag *diag) {
    const char *rest = NULL;
    if (line[0] != '/')
        return 0;
    const struct chat_command *command = find_command(line, &rest);
    enum kv_err err =
        command != NULL
            ? command->run(talk, rest, diag)
            : kv_diag_set(diag, KV_ERR_INVALID,
                          "%.60s: no such command; /help lists them; put a space in front to say "
                          "it to the model",
                          line);
    *over_out = command != NULL && command->ends && err == KV_OK;
    *err_out = tell_or_end(talk->cmd, err, diag);
    return 1;
}

static uint64_t tend(void *context) {
    const struct talk *talk = context;
    /* The daemon's engine thread looks after everybody. */
    return talk->cmd->host != NULL ? UINT64_MAX : service_tend(talk->service);
}

/* The session may have gone to sleep while nobody typed. */
static enum kv_err be_awake(struct talk *talk, struct kv_diag *diag) {
    struct service_opened opened;
    service_settle(talk->service, talk->cmd->session_name);
    talk->session = session_find(service_engine(talk->service), talk->cmd->session_name);
    if (talk->session != NULL)
        return KV_OK;
    enum kv_err err = open_talk(talk, &opened, diag);
    if (err == KV_OK)
        receipt_print_line(&opened.receipt, talk->cmd->err);
    return err;
}

static enum kv_err chat_loop(struct talk *talk, struct line_edit *edit, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    int over = 0, interrupts_in_row = 0;
    while (err == KV_OK && !over && !talk->cmd->leave) {
        const char *line = NULL;
        size_t bytes = 0;
        cmd_pause(talk->cmd);
        enum line_edit_got got = line_edit_read(edit, &line, &bytes);
        err = cmd_resume(talk->cmd, diag);
        if (err != KV_OK)
            break;
        if (got == LINE_EDIT_INTERRUPTED) {
            talk->cmd->interrupts = 0;
            over = ++interrupts_in_row >= 2;
            if (!over)
                fprintf(talk->cmd->err, "\n(ctrl-C again, or /quit, leaves)\n");
            continue;
        }
        interrupts_in_row = 0;
        if (got == LINE_EDIT_END)
            break;
        if (got == LINE_EDIT_TOO_LONG) {
            err = kv_diag_set(diag, KV_ERR_LIMIT, "a message is longer than %d bytes",
                              LINE_EDIT_BYTES_MAX);
            break;
        }
        if (bytes == 0)
            continue;
        err = be_awake(talk, diag);
        if (err != KV_OK || slash(talk, line, &over, &err, diag))
            continue;
        err = chat_turn(talk, line, bytes, diag);
    }
    return err;
}

/* Turns whose save failed are in memory alone: there may be room by now. */
static enum kv_err save_at_last(struct talk *talk, struct kv_diag *diag) {
    struct receipt receipt;
    service_settle(talk->service, talk->cmd->session_name);
    struct session *session = session_find(service_engine(talk->service), talk->cmd->session_name);
    if (session == NULL || service_is_saved(session))
        return KV_OK;
    enum kv_err err = service_save(talk->service, session, 0, &receipt, diag);
    if (err == KV_OK)
        receipt_print_line(&receipt, talk->cmd->err);
    else
        kv_diag_prefix(diag, "what was said since the last save is lost");
    return err;
}

enum kv_err cmd_chat(struct cmd *cmd, struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct talk talk = {.cmd = cmd, .show = 1};
    struct service_opened opened;
    struct line_edit *edit = NULL;
    memset(&opened, 0, sizeof opened);
    cmd->session_name = cmd->config->session != NULL ? cmd->config->session : "chat";
    KV_TRY(session_check_name(cmd->session_name, diag));
    if (cmd->result != NULL) {
        talk.said = cJSON_AddArrayToObject(cmd->result, "turns");
        talk.show = 0;
    }
    cmd_take_signals(cmd);
    /* Setting up a terminal, and giving it back, may wait for who holds its output. */
    KV_TRY(line_edit_open(cmd, &edit, diag));
    KV_TRY(cmd_open_service(cmd, CMD_CREATE, look_talker, cmd, &talk.service, diag));
    KV_TRY(open_talk(&talk, &opened, diag));
    talk.opened = opened;
    greet(&talk, &opened);
    warn_birth_flags(cmd, opened.found);
    line_edit_while_idle(edit, tend, &talk);
    err = chat_loop(&talk, edit, diag);
    if (err == KV_OK)
        err = save_at_last(&talk, diag);
done:
    if (talk.service != NULL && service_note(talk.service)[0] != 0)
        fprintf(cmd->err, "coldplane: %s\n", service_note(talk.service));
    cmd_close_service(cmd, talk.service);
    line_edit_close(edit);
    return err;
}
