/* tools/coldplane.c - the command line program.
 *
 * Responsible for: main: finding the command, its arguments and flags, printing the result and the
 * one line of an error, the exit code.
 * Not responsible for: the commands (cmd_*.c).
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static enum kv_err check_words(const struct config *config, const struct cmd_entry *entry,
                               struct kv_diag *diag) {
    uint32_t words = config->word_count - 1;
    if (words >= entry->words_least && words <= entry->words_most)
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_INVALID, "%s: %s; usage: coldplane %s %s", entry->name,
                       words < entry->words_least ? "an argument is missing" : "too many arguments",
                       entry->name, entry->arguments);
}

static enum kv_err dispatch(struct cmd *cmd, struct kv_diag *diag) {
    const struct config *config = cmd->config;
    const struct cmd_entry *entry = NULL;
    if (config->show) {
        if (cmd->result != NULL)
            config_show_json(config, cmd->result);
        else
            config_show(config, stdout);
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
        err = entry->run(cmd, diag);
    if (err == KV_OK && (entry->groups & CONFIG_WRITE) != 0)
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
        printf("%s\n", text);
    cJSON_free(text);
}

/* What was printed must have arrived; a reader that went away is its own business. */
static enum kv_err flush_output(enum kv_err err, struct kv_diag *diag) {
    errno = 0;
    if ((fflush(stdout) == 0 && !ferror(stdout)) || errno == EPIPE || err != KV_OK)
        return err;
    return kv_diag_errno(diag, KV_ERR_IO, errno, "standard output");
}

/* A standard descriptor that the caller closed would be given to the next file that is opened, so
 * that answers land in the store's files. Each gets a stand-in on which its use fails: input only
 * writes, output only reads. */
static void hold_standard_descriptors(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
            return;
}

int main(int argc, char **argv) {
    struct config config;
    struct kv_diag diag = {""};
    struct cmd cmd = {.config = &config,
                      .alloc = kv_alloc_system(),
                      .clock = kv_clock_system(),
                      .folder = AT_FDCWD,
                      .in = stdin,
                      .out = stdout,
                      .err = stderr};
    hold_standard_descriptors();
    setlocale(LC_CTYPE, "C.UTF-8");
    enum kv_err err = config_load(argc, argv, &config, &diag);
    cmd.result = config.json ? cJSON_CreateObject() : NULL;
    cmd.session_name = config.word_count > 1 ? config.words[1] : NULL;
    signal(SIGPIPE, SIG_IGN);
    cmd.signals = -1;
    if (err == KV_OK)
        err = dispatch(&cmd, &diag);
    if (cmd.result != NULL)
        print_result(&cmd, err, &diag);
    err = flush_output(err, &diag);
    if (err != KV_OK) {
        fprintf(stderr, "coldplane: ");
        text_print_clean(stderr, diag.text, strlen(diag.text));
        fprintf(stderr, "\n");
    }
    cJSON_Delete(cmd.result);
    if (cmd.signals >= 0)
        close(cmd.signals);
    return cmd_exit_code(err);
}
