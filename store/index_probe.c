/* store/index_probe.c - fork, walk, tell.
 *
 * Responsible for: the contract of index_probe.h.
 * Not responsible for: what is done about damage (store_open.c).
 */
#include "store/index_probe.h"

#include "store/base/alloc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* 0 when it cannot be told. */
static unsigned thread_count(void) {
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL)
        return 0;
    for (struct dirent *task = readdir(tasks); task != NULL; task = readdir(tasks))
        count += task->d_name[0] != '.';
    closedir(tasks);
    return count;
}

/* Shorter than what a pipe takes at once. */
struct answer {
    uint8_t result;
    struct kv_diag text;
};

static _Noreturn void be_child(index_probe_work work, void *context, int out, pid_t parent) {
    /* It must not outlive whoever waits for it, nor hold the store's lock then. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    struct answer answer = {.text = {""}};
    if (getppid() == parent) {
        answer.result = (uint8_t)work(context, &answer.text);
        while (write(out, &answer, sizeof answer) < 0 && errno == EINTR)
            ;
    }
    /* tidy-allow: print a forked child ends here, without the parent's clean-up */
    _exit(0);
}

enum end { ENDED, DIED, HUNG };

static enum end await_child(int in, uint64_t deadline_ns, struct answer *answer) {
    struct pollfd wait = {.fd = in, .events = POLLIN};
    uint64_t ms = deadline_ns / 1000000u;
    int ready = 0;
    do
        ready = poll(&wait, 1, ms < INT32_MAX ? (int)ms : INT32_MAX);
    while (ready < 0 && errno == EINTR);
    if (ready == 0)
        return HUNG;
    ssize_t got = 0;
    do
        got = read(in, answer, sizeof *answer);
    while (got < 0 && errno == EINTR);
    return got == (ssize_t)sizeof *answer ? ENDED : DIED;
}

enum kv_err index_probe_run(index_probe_work work, void *context, uint64_t deadline_ns,
                            int *ran_out, struct kv_diag *diag) {
    int ends[2];
    *ran_out = 0;
    int alone = thread_count() == 1;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return KV_OK;
    pid_t parent = getpid();
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        be_child(work, context, ends[1], parent);
    }
    close(ends[1]);
    if (child < 0) {
        close(ends[0]);
        return KV_OK;
    }
    *ran_out = 1;
    struct answer answer;
    enum end end = await_child(ends[0], deadline_ns, &answer);
    close(ends[0]);
    int status = 0;
    if (end == HUNG)
        kill(child, SIGKILL);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
#ifdef BREAK_PROBE
    return KV_OK;
#endif
    if (end == HUNG && !alone)
        return KV_OK;
    if (end == HUNG)
        return kv_diag_set(diag, KV_ERR_CORRUPT, "index: walking it does not come to an end");
    if (end == DIED)
        return kv_diag_set(diag, KV_ERR_CORRUPT,
                           "index: a process that walked it died (signal %d): it is damaged",
                           WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    enum kv_err err = (enum kv_err)answer.result;
    return err == KV_OK ? KV_OK : kv_diag_set(diag, err, "%s", answer.text.text);
}

/* Whatever only the parent can repeat (no memory, no access) is left to the parent. */
static enum kv_err walk(void *context, struct kv_diag *diag) {
    const struct index_options *options = context;
    struct index *index = NULL;
    struct index_copy copy = {0};
    struct fmt_state state;
    struct fmt_entry entry;
    uint8_t after[STORE_KEY_BYTES_MAX];
    struct index_range range = {.after = after};
    enum kv_err err = index_open(options, &index, diag);
    if (err == KV_OK)
        err = index_state(index, &state, diag);
    while (err == KV_OK) {
        err = index_next(index, &range, &copy, diag);
        if (err == KV_OK) {
            memcpy(after, copy.bytes, copy.key_bytes);
            range.after_bytes = copy.key_bytes;
            /* An entry that fails its check is the business of whoever reads it. */
            (void)fmt_entry_decode(copy.bytes, copy.key_bytes, copy.total_bytes, &entry);
        } else if (err == KV_ERR_NOT_FOUND) {
            err = KV_OK;
            break;
        }
    }
    index_copy_release(options->alloc, &copy);
    index_close(index);
    return err == KV_ERR_CORRUPT ? err : KV_OK;
}

enum kv_err index_probe(const struct index_options *options, uint64_t deadline_ns,
                        struct kv_diag *diag) {
    struct index_options reading = *options;
    int ran = 0;
    reading.mode = INDEX_READ;
    reading.alloc = kv_alloc_system();
    return index_probe_run(walk, &reading, deadline_ns, &ran, diag);
}
