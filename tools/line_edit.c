/* tools/line_edit.c - one line from the person at the terminal, or from a pipe.
 *
 * Responsible for: see line_edit.h.
 * Not responsible for: what a line means.
 *
 * libedit reads through read_character, which waits for a key or a signal, whichever comes first.
 */
#include "tools/line_edit.h"

#include <histedit.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

struct line_edit {
    struct cmd *cmd;
    EditLine *terminal; /* NULL: a pipe */
    History *history;
    int interrupted;
    mbstate_t decoding;
    char *line; /* of a pipe */
    size_t capacity;
    char buffer[4096]; /* of a pipe, read but not yet given out: [at, end) */
    size_t at, end;
    int ended;
    line_edit_idle idle; /* NULL: none */
    void *idle_context;
};

static char *prompt(EditLine *terminal) {
    (void)terminal;
    return "> ";
}

/* How long to wait for a key; rounded up, so that nobody is called a little too early for ever. */
static int idle_ms(struct line_edit *edit) {
    uint64_t wait_ns = edit->idle != NULL ? edit->idle(edit->idle_context) : UINT64_MAX;
    if (wait_ns == UINT64_MAX)
        return -1;
    uint64_t wait_ms = wait_ns / 1000000 + (wait_ns % 1000000 != 0);
    return wait_ms < 1 << 30 ? (int)wait_ms : 1 << 30;
}

/* 1 when there is something to read on standard input, 0 when a signal came first. */
static int wait_for_input(struct line_edit *edit) {
    struct pollfd waits[2] = {{.fd = fileno(edit->cmd->in), .events = POLLIN},
                              {.fd = edit->cmd->signals, .events = POLLIN}};
    for (;;) {
        if (cmd_interrupted(edit->cmd)) {
            edit->interrupted = 1;
            return 0;
        }
        if (poll(waits, 2, idle_ms(edit)) > 0 && waits[0].revents != 0)
            return 1;
    }
}

static int read_character(EditLine *terminal, wchar_t *character_out) {
    struct line_edit *edit = NULL;
    char byte;
    el_get(terminal, EL_CLIENTDATA, &edit);
    for (;;) {
        if (!wait_for_input(edit) || read(fileno(edit->cmd->in), &byte, 1) != 1)
            return 0;
        size_t got = mbrtowc(character_out, &byte, 1, &edit->decoding);
        if (got == (size_t)-1)
            memset(&edit->decoding, 0, sizeof edit->decoding);
        else if (got != (size_t)-2)
            return 1;
    }
}

enum kv_err line_edit_open(struct cmd *cmd, struct line_edit **edit_out, struct kv_diag *diag) {
    struct line_edit *edit = kv_alloc_zeroed(cmd->alloc, 1, sizeof *edit);
    HistEvent event;
    if (edit == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a line");
    edit->cmd = cmd;
    *edit_out = edit;
    FILE *out = cmd->relay != NULL ? cmd->direct[0] : cmd->out;
    FILE *err = cmd->relay != NULL ? cmd->direct[1] : cmd->err;
    if (!isatty(fileno(cmd->in)) || !isatty(fileno(out)))
        return KV_OK;
    edit->terminal = el_init("coldplane", cmd->in, out, err);
    edit->history = history_init();
    if (edit->terminal == NULL || edit->history == NULL) {
        line_edit_close(edit);
        *edit_out = NULL;
        return kv_diag_set(diag, KV_ERR_NOMEM, "the terminal could not be set up");
    }
    history(edit->history, &event, H_SETSIZE, LINE_EDIT_HISTORY);
    el_set(edit->terminal, EL_CLIENTDATA, edit);
    el_set(edit->terminal, EL_PROMPT, prompt);
    el_set(edit->terminal, EL_EDITOR, "emacs");
    el_set(edit->terminal, EL_HIST, history, edit->history);
    el_set(edit->terminal, EL_GETCFN, read_character);
    return KV_OK;
}

void line_edit_while_idle(struct line_edit *edit, line_edit_idle idle, void *context) {
    edit->idle = idle;
    edit->idle_context = context;
}

void line_edit_close(struct line_edit *edit) {
    if (edit == NULL)
        return;
    if (edit->history != NULL)
        history_end(edit->history);
    if (edit->terminal != NULL)
        el_end(edit->terminal);
    kv_alloc_release(edit->cmd->alloc, edit->line);
    kv_alloc_release(edit->cmd->alloc, edit);
}

static enum line_edit_got from_terminal(struct line_edit *edit, const char **line_out,
                                        size_t *bytes_out) {
    HistEvent event;
    int count = 0;
    edit->interrupted = 0;
    const char *line = el_gets(edit->terminal, &count);
    if (edit->interrupted || line == NULL || count <= 0)
        return edit->interrupted && !edit->cmd->leave ? LINE_EDIT_INTERRUPTED : LINE_EDIT_END;
    size_t bytes = (size_t)count;
    if (bytes > LINE_EDIT_BYTES_MAX)
        return LINE_EDIT_TOO_LONG;
    void *copy = edit->line;
    if (!kv_alloc_grow(edit->cmd->alloc, &copy, &edit->capacity, bytes + 1, 1))
        return LINE_EDIT_TOO_LONG;
    edit->line = copy;
    memcpy(edit->line, line, bytes);
    while (bytes > 0 && strchr("\r\n", edit->line[bytes - 1]) != NULL)
        bytes--;
    edit->line[bytes] = 0;
    if (bytes > 0)
        history(edit->history, &event, H_ENTER, edit->line);
    *line_out = edit->line;
    *bytes_out = bytes;
    return LINE_EDIT_LINE;
}

/* The next byte of a pipe; -1 at its end or when a signal came first. */
static int pipe_byte(struct line_edit *edit) {
    if (edit->at == edit->end) {
        ssize_t got = wait_for_input(edit) ? read(fileno(edit->cmd->in), edit->buffer, 4096) : 0;
        edit->ended = got <= 0 && !edit->interrupted;
        edit->at = 0;
        edit->end = got > 0 ? (size_t)got : 0;
        if (got <= 0)
            return -1;
    }
    return (unsigned char)edit->buffer[edit->at++];
}

static enum line_edit_got from_pipe(struct line_edit *edit, const char **line_out,
                                    size_t *bytes_out) {
    size_t bytes = 0;
    void *items = edit->line;
    edit->interrupted = 0;
    if (edit->ended)
        return LINE_EDIT_END;
    for (;;) {
        if (!kv_alloc_grow(edit->cmd->alloc, &items, &edit->capacity, bytes + 2, 1) ||
            bytes > LINE_EDIT_BYTES_MAX)
            return LINE_EDIT_TOO_LONG;
        edit->line = items;
        int c = pipe_byte(edit);
        if (c < 0 || c == '\n')
            break;
        edit->line[bytes++] = (char)c;
    }
    if (edit->interrupted)
        return edit->cmd->leave ? LINE_EDIT_END : LINE_EDIT_INTERRUPTED;
    if (edit->ended && bytes == 0)
        return LINE_EDIT_END;
    if (bytes > 0 && edit->line[bytes - 1] == '\r')
        bytes--;
    edit->line[bytes] = 0;
    *line_out = edit->line;
    *bytes_out = bytes;
    return LINE_EDIT_LINE;
}

enum line_edit_got line_edit_read(struct line_edit *edit, const char **line_out,
                                  size_t *bytes_out) {
    return edit->terminal != NULL ? from_terminal(edit, line_out, bytes_out)
                                  : from_pipe(edit, line_out, bytes_out);
}
