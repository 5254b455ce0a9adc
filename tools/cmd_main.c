/* tools/cmd_main.c - one run of the command line program, here or in the daemon.
 *
 * Responsible for: finding the command, its arguments and flags, who runs it, printing the result
 * and the one line of an error, the exit code.
 * Not responsible for: the commands (cmd_*.c), the process (coldplane.c).
 */
#include "tools/cmd.h"
#include "tools/cmd_host.h"
#include "tools/control.h"
#include "tools/json_text.h"
#include "tools/relay.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* What a daemon is asked, and how that ended. */
struct asking {
    int argc;
    char **argv;
    int answered, code; /* everything is done, printing included */
};

/* What may write, what needs the model that is in the daemon's memory, and what a daemon knows more
 * of. */
static int is_for_daemon(const struct cmd *cmd, const struct cmd_entry *entry) {
    const struct config *config = cmd->config;
    const char *word = cmd_word(cmd, 0);
    if (strcmp(entry->name, "top") == 0 || strcmp(entry->name, "ps") == 0 ||
        strcmp(entry->name, "audit") == 0)
        return 1;
    if ((entry->groups & CONFIG_WRITE) == 0)
        return 0;
    if (strcmp(entry->name, "needle") == 0)
        return strcmp(word, "ls") != 0;
    if (strcmp(entry->name, "gc") == 0)
        return !config->dry_run;
    if (strcmp(entry->name, "bench") == 0)
        return strcmp(word, "rates") == 0 || config->build;
    return 1;
}

static enum kv_err check_words(const struct config *config, const struct cmd_entry *entry,
                               struct kv_diag *diag) {
    uint32_t words = config->word_count - 1;
    if (words >= entry->words_least && words <= entry->words_most)
        return KV_OK;
    if (words == 1 && (entry->groups & CONFIG_SESSION) != 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "%s takes no argument; for session %.100s write `coldplane %s --session "
                           "%.100s`",
                           entry->name, config->words[1], entry->name, config->words[1]);
    return kv_diag_set(diag, KV_ERR_INVALID, "%s: %s; usage: coldplane %s%s%s", entry->name,
                       words < entry->words_least ? "an argument is missing" : "too many arguments",
                       entry->name, entry->arguments[0] != 0 ? " " : "", entry->arguments);
}

/* They go to the daemon when one holds the store. */
static enum kv_err run(struct cmd *cmd, const struct cmd_entry *entry, struct asking *asking,
                       struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    uint64_t begun_ns = kv_clock_wall_ns(cmd->clock);
    if (cmd->host != NULL) {
        err = cmd_host_check(cmd, entry, diag);
    } else if (is_for_daemon(cmd, entry)) {
        err = control_ask(cmd->config, asking->argc, asking->argv, &asking->code, diag);
        asking->answered = err == KV_OK;
        if (err == KV_ERR_NOT_FOUND)
            err = KV_OK;
    }
    /* A bench measures in this process what the daemon has made for it. */
    if (asking->answered && asking->code == CMD_EXIT_OK && strcmp(entry->name, "bench") == 0 &&
        strcmp(cmd_word(cmd, 0), "restore") == 0) {
        asking->answered = 0;
        cmd->built_ns = begun_ns;
    }
    return err == KV_OK && !asking->answered ? entry->run(cmd, diag) : err;
}

static enum kv_err dispatch(struct cmd *cmd, struct asking *asking, struct kv_diag *diag) {
    const struct config *config = cmd->config;
    const struct cmd_entry *entry = NULL;
    if (config->show) {
        if (cmd->result != NULL)
            config_show_json(config, cmd->result);
        else
            config_show(config, cmd->out);
        if (config->file_err != KV_OK)
            return kv_diag_set(diag, config->file_err, "%s", config->file_diag.text);
        return KV_OK;
    }
    if (config->version)
        return cmd_version(cmd, diag);
    if (config->word_count == 0 && !config->help)
        return kv_diag_set(diag, KV_ERR_INVALID, "which command? `coldplane help` lists them");
    enum kv_err err = config->word_count > 0 ? cmd_lookup(config->words[0], &entry, diag) : KV_OK;
    if (err == KV_OK && config->help) {
        cmd_give_help(cmd, entry);
        return KV_OK;
    }
    if (err == KV_OK)
        err = check_words(config, entry, diag);
    if (err == KV_OK)
        err = config_check_flags(config, entry->groups, entry->name, diag);
    if (err == KV_OK)
        err = run(cmd, entry, asking, diag);
    if (err == KV_OK && !asking->answered && (entry->groups & CONFIG_WRITE) != 0)
        cmd_warn_low(cmd);
    return err;
}

static void print_result(struct cmd *cmd, enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK) {
        cJSON *error = cJSON_AddObjectToObject(cmd->result, "error");
        json_text(error, "code", kv_err_name(err));
        json_text(error, "text", diag->text);
    }
    char *text = cJSON_Print(cmd->result);
    if (text != NULL)
        fprintf(cmd->out, "%s\n", text);
    cJSON_free(text);
}

/* What was printed must have arrived; a reader that went away is its own business. */
static enum kv_err flush_output(struct cmd *cmd, enum kv_err err, struct kv_diag *diag) {
    errno = 0;
    int error = fflush(cmd->out) == 0 && !ferror(cmd->out) ? 0 : errno != 0 ? errno : EIO;
    if (cmd->relay != NULL)
        error = relay_settle(cmd->relay);
    if (error == 0 || error == EPIPE || err != KV_OK)
        return err;
    return kv_diag_errno(diag, KV_ERR_IO, error, "standard output");
}

int cmd_main(struct cmd *cmd, int argc, char **argv) {
    struct config config;
    struct kv_diag diag = {""};
    struct asking asking = {argc, argv, 0, 0};
    cmd->config = &config;
    enum kv_err err = config_load_for(cmd->home, argc, argv, &config, &diag);
    cmd->result = config.json ? cJSON_CreateObject() : NULL;
    cmd->session_name = config.word_count > 1 ? config.words[1] : NULL;
    if (err == KV_OK)
        err = dispatch(cmd, &asking, &diag);
    if (cmd->result != NULL && !asking.answered)
        print_result(cmd, err, &diag);
    err = flush_output(cmd, err, &diag);
    if (err != KV_OK) {
        fprintf(cmd->err, "coldplane: ");
        text_print_clean(cmd->err, diag.text, strlen(diag.text));
        fprintf(cmd->err, "\n");
    }
    fflush(cmd->err);
    cJSON_Delete(cmd->result);
    cmd->config = NULL;
    return asking.answered ? asking.code : cmd_exit_code(err);
}
