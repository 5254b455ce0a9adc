/* tools/config.h - flags and the configuration file as one struct.
 *
 * Responsible for: the table of all settings, COLDPLANE_HOME (the only environment variable), the
 * file COLDPLANE_HOME/config, flags over file over defaults, sizes with units, --show-config.
 * Not responsible for: what a command does with a setting.
 *
 * The file holds lines `key = value`; a key is a flag's name without the dashes, `#` begins a
 * comment. Flags may stand anywhere; `--` ends them; `--flag=value` is `--flag value`.
 *
 * Threads: pure but for config_load, which reads the environment and one file.
 * Units: sizes in bytes; B, KiB, MiB, GiB, TiB and kB, MB, GB, TB are understood.
 * Errors: INVALID (flag or line, what is wrong and what would be right), LIMIT, IO.
 */
#ifndef TOOLS_CONFIG_H
#define TOOLS_CONFIG_H

#include "engine/engine.h"
#include "store/base/diag.h"

#include <stdio.h>

struct cJSON;

enum { CONFIG_PATH_BYTES = 4096, CONFIG_WORDS_MAX = 8, CONFIG_FILE_BYTES_MAX = 65536 };
enum { CONFIG_REQUESTS_MAX = 256 }; /* as many as there are connections */

/* Which flags a command takes. */
enum config_group {
    CONFIG_COMMON = 1 << 0,  /* json, help, show-config, store */
    CONFIG_ENGINE = 1 << 1,  /* model, device, threads, simd, slots-memory, … */
    CONFIG_CREATE = 1 << 2,  /* recipe, ages, temperature, …: what a new session is made with */
    CONFIG_TURN = 1 << 3,    /* max-tokens */
    CONFIG_PROMPT = 1 << 4,  /* prompt */
    CONFIG_SESSION = 1 << 5, /* session */
    CONFIG_NEEDLE = 1 << 6,  /* key, value, ask, expect, answer-prefix */
    CONFIG_TOKENS = 1 << 7,  /* special */
    CONFIG_BENCH = 1 << 8,   /* tokens, size, build */
    CONFIG_WRITE = 1 << 9,   /* store-max, may-degrade, write-per-… */
    CONFIG_GC = 1 << 10,     /* dry-run, rate */
    CONFIG_FSCK = 1 << 11,   /* read-data, repair, rebuild-index */
    CONFIG_SCRUB = 1 << 12,  /* rate, restart, keep-lower */
    CONFIG_IMPORT = 1 << 13, /* as, any-model */
    CONFIG_EXPIRE = 1 << 14, /* undo */
    CONFIG_TAG = 1 << 15,    /* tag */
    CONFIG_REMOVE = 1 << 16, /* purge */
    CONFIG_BACK = 1 << 17,   /* to */
    CONFIG_TOP = 1 << 18,    /* once */
    CONFIG_SERVE = 1 << 19,  /* listen, no-key, …: of coldplaned */
    CONFIG_SYSTEM = 1 << 20, /* system */
    CONFIG_WAKING = 1 << 21, /* wake */
    CONFIG_TEXT = 1 << 22    /* text */
};

/* How a stored session comes back for a turn. */
enum config_wake { CONFIG_WAKE_RESTORE, CONFIG_WAKE_FASTER, CONFIG_WAKE_RECOMPUTE };

struct config {
    char home[CONFIG_PATH_BYTES], store[CONFIG_PATH_BYTES], model[CONFIG_PATH_BYTES];
    uint64_t store_max_bytes; /* UINT64_MAX: no limit */
    uint32_t threads;
    struct config_device {
        enum engine_device kind;
        uint32_t index; /* of cuda:N */
    } device;
    uint64_t device_bytes; /* UINT64_MAX: no limit */
    enum engine_simd simd;
    int wake;       /* enum config_wake */
    int eager, fit; /* of struct service_settings */
    uint64_t ram_bytes;
    uint32_t idle_seconds, slots_low_percent, slots_high_percent;
    uint64_t slots_bytes;
    uint32_t reserve_slots, sessions_max, probes;
    struct image_policy policy;
    struct image_sampler sampler;
    uint32_t tokens_max;
    const char *system, *session, *prompt, *key, *value, *as, *ask, *expect, *answer_prefix, *tag,
        *to;                                      /* NULL: not given */
    uint64_t bench_tokens, bench_bytes;           /* bench_tokens 0: not given */
    uint64_t rate_bytes;                          /* 0: unbounded */
    uint64_t write_second_bytes, write_day_bytes; /* 0: unbounded */
    int json, help, show, version, special, build, posix_io;
    int dry_run, read_data, repair, rebuild_index, restart, any_model, purge, once, text;
    const char *words[CONFIG_WORDS_MAX]; /* what is not a flag: command and its arguments */
    uint32_t word_count;
    int may_degrade, keep_lower, undo;
    /* The first line of the file that means nothing. Only commands that explain go on then. */
    enum kv_err file_err;
    struct kv_diag file_diag;
    uint64_t given[2],
        in_file[2];             /* bit per entry of the table: came as a flag, stands in the file */
    const char *listen, *hosts; /* ADDRESS:PORT; names separated by commas, NULL: none */
    uint32_t requests_max, wait_seconds, stop_seconds;
    int remote, no_key, log_text;
    char file_text[CONFIG_FILE_BYTES_MAX + 1];
};

/* Reads environment, file and flags. `config_out` is large: not for a small stack. Words are
 * borrowed from argv. json, help and version are set as far as known also on an error. Commands
 * that explain (help, version, --show-config) are not stopped by a broken file: it is told in
 * file_err and file_diag, and every line that can be read counts. */
enum kv_err config_load(int argc, char **argv, struct config *config_out, struct kv_diag *diag);
/* As above for somebody whose COLDPLANE_HOME is `home`: the environment is not read. */
enum kv_err config_load_for(const char *home, int argc, char **argv, struct config *config_out,
                            struct kv_diag *diag);
/* The first flag of `groups` that was given and says something else than `other` has, without its
 * dashes; NULL when there is none. */
const char *config_differs(const struct config *config, const struct config *other,
                           unsigned groups);
/* Where a service manager wants to be told, NULL: nobody does. */
const char *config_notify_socket(void);
/* INVALID, naming the first flag given that does not belong to `groups` of command `command`. */
enum kv_err config_check_flags(const struct config *config, unsigned groups, const char *command,
                               struct kv_diag *diag);
/* 1 when `flag` (without dashes) came as a flag; as a flag or in the file. */
int config_given(const struct config *config, const char *flag);
int config_stated(const struct config *config, const char *flag);
/* Part of config_load (config_policy.c): recipe, policy, top and ages must fit. INVALID. */
enum kv_err config_settle_policy(struct config *config, struct kv_diag *diag);
/* All settings in the file's own form: what is printed can be saved as the file. */
void config_show(const struct config *config, FILE *out);
/* Adds "home" and the object "settings": numbers as digits, null where there is none. */
void config_show_json(const struct config *config, struct cJSON *to);
/* The flags of `groups` with their meaning, one line each. */
void config_help(unsigned groups, FILE *out);

/* "78.6GiB" → bytes. INVALID. */
enum kv_err config_parse_bytes(const char *text, uint64_t *bytes_out, struct kv_diag *diag);

#endif
