/* tools/coldplane.c - the command line program.
 *
 * Responsible for: main: finding the command, its arguments and flags, printing the result and the
 * one line of an error, the exit code.
 * Not responsible for: the commands (cmd_*.c).
 */
#include "tools/cmd.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static enum kv_err find_command(const struct config *config, const struct cmd_entry **entry_out,
                                struct kv_diag *diag) {
    const char *name = config->words[0];
    for (uint32_t i = 0; cmd_at(i) != NULL; i++)
        if (strcmp(cmd_at(i)->name, name) == 0) {
            *entry_out = cmd_at(i);
            return KV_OK;
        }
    return kv_diag_set(diag, KV_ERR_INVALID, "%.60s: no such command; `coldplane help` lists them",
                       name);
}

static enum kv_err check_words(const struct config *config, const struct cmd_entry *entry,
                               struct kv_diag *diag) {
    uint32_t words = config->word_count - 1;
    if (words >= entry->words_least && words <= entry->words_most)
        return KV_OK;
    return kv_diag_set(diag, KV_ERR_INVALID, "%s: %s; usage: coldplane %s %s", entry->name,
                       words < entry->words_least ? "an argument is missing" : "too many arguments",
                       entry->name, entry->arguments);
}

static enum kv_err dispatch(struct cmd *cmd, int *done_out, struct kv_diag *diag) {
    const struct config *config = cmd->config;
    const struct cmd_entry *entry = NULL;
    *done_out = 0;
    if (config->show) {
        config_show(config, stdout);
        return KV_OK;
    }
    if (config->version)
        return cmd_version(cmd, diag);
    if (config->word_count == 0) {
        if (!config->help)
            return kv_diag_set(diag, KV_ERR_INVALID, "which command? `coldplane help` lists them");
        cmd_print_overview();
        return KV_OK;
    }
    enum kv_err err = find_command(config, &entry, diag);
    if (err == KV_OK && config->help) {
        cmd_print_help(entry);
        return KV_OK;
    }
    if (err == KV_OK)
        err = check_words(config, entry, diag);
    if (err == KV_OK)
        err = config_check_flags(config, entry->groups, entry->name, diag);
    *done_out = err == KV_OK;
    return err == KV_OK ? entry->run(cmd, diag) : err;
}

static void print_result(struct cmd *cmd, enum kv_err err, const struct kv_diag *diag) {
    if (err != KV_OK) {
        cJSON *error = cJSON_AddObjectToObject(cmd->result, "error");
        cJSON_AddStringToObject(error, "code", kv_err_name(err));
        cJSON_AddStringToObject(error, "text", diag->text);
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
    struct cmd cmd = {.config = &config, .alloc = kv_alloc_system(), .clock = kv_clock_system()};
    int ran = 0;
    hold_standard_descriptors();
    setlocale(LC_CTYPE, "C.UTF-8");
    enum kv_err err = config_load(argc, argv, &config, &diag);
    cmd.result = config.json ? cJSON_CreateObject() : NULL;
    cmd.session_name = config.word_count > 1 ? config.words[1] : NULL;
    signal(SIGPIPE, SIG_IGN);
    cmd.signals = -1;
    if (err == KV_OK)
        err = dispatch(&cmd, &ran, &diag);
    if (cmd.result != NULL && (ran || config.version || err != KV_OK))
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
