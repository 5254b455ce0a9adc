/* tools/config.c - flags and the configuration file as one struct.
 *
 * Responsible for: one table from which parsing, --show-config and the help of flags are made;
 * parsing.
 * Not responsible for: showing (config_show.c), meaning of the values (the commands).
 */
#include "tools/config.h"

#include "store/base/bytes.h"
#include "store/store.h"
#include "tools/config_inner.h"
#include "tools/service.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AT(field) offsetof(struct config, field)

static const struct config_setting settings[] = {
    {"help", "h", CONFIG_KIND_SWITCH, AT(help), 0, 1, CONFIG_COMMON, 0, "", "help of the command"},
    {"json", NULL, CONFIG_KIND_SWITCH, AT(json), 0, 1, CONFIG_COMMON, 1, "", "one JSON document"},
    {"show-config", NULL, CONFIG_KIND_SWITCH, AT(show), 0, 1, CONFIG_COMMON, 0, "",
     "print all settings in force and stop"},
    {"version", NULL, CONFIG_KIND_SWITCH, AT(version), 0, 1, CONFIG_COMMON, 0, "", "as `version`"},
    {"store", NULL, CONFIG_KIND_PATH, AT(store), 0, 0, CONFIG_COMMON, 1, "DIR",
     "folder of the store (COLDPLANE_HOME/store)"},
    {"posix-io", NULL, CONFIG_KIND_SWITCH, AT(posix_io), 0, 1, CONFIG_COMMON, 1, "",
     "plain system calls instead of io_uring"},
    {"store-max", NULL, CONFIG_KIND_BYTES, AT(store_max_bytes), 1 << 20, UINT64_MAX, CONFIG_WRITE,
     1, "SIZE|none", "the store never grows beyond this"},
    {"may-degrade", NULL, CONFIG_KIND_SWITCH, AT(may_degrade), 0, 1, CONFIG_WRITE, 1, "",
     "at store-max: take planes of cold sessions, then old snapshots"},
    {"write-per-second", NULL, CONFIG_KIND_BYTES, AT(write_second_bytes), 0, UINT64_MAX,
     CONFIG_WRITE, 1, "SIZE", "what the background may write; 0 is no limit"},
    {"write-per-day", NULL, CONFIG_KIND_BYTES, AT(write_day_bytes), 0, UINT64_MAX, CONFIG_WRITE, 1,
     "SIZE", "the same for a day; a save never waits, it counts"},
    {"model", "m", CONFIG_KIND_PATH, AT(model), 0, 0, CONFIG_ENGINE | CONFIG_TOKENS | CONFIG_TEXT,
     1, "FILE", "GGUF file of the model, or synth:small, synth:8b"},
    {"threads", "t", CONFIG_KIND_U32, AT(threads), 1, 256, CONFIG_ENGINE, 1, "N",
     "threads that compute (all cores online)"},
    {"simd", NULL, CONFIG_KIND_SIMD, AT(simd), 0, 0, CONFIG_ENGINE, 1, "auto|avx2|c",
     "instructions to compute with"},
    {"device", NULL, CONFIG_KIND_DEVICE, AT(device), 0, 0, CONFIG_ENGINE, 1, "auto|cpu|cuda:N",
     "what computes; auto takes a GPU where there is one"},
    {"device-memory", NULL, CONFIG_KIND_BYTES, AT(device_bytes), 1 << 20, UINT64_C(1) << 44,
     CONFIG_ENGINE, 1, "SIZE", "most memory of a GPU, reserved at start"},
    {"slots-memory", NULL, CONFIG_KIND_BYTES, AT(slots_bytes), 1 << 20, UINT64_C(1) << 44,
     CONFIG_ENGINE, 1, "SIZE", "memory for KV slots, reserved at start"},
    {"reserve-slots", NULL, CONFIG_KIND_U32, AT(reserve_slots), 0, 1 << 30, CONFIG_ENGINE, 1, "N",
     "slots never given to a session"},
    {"sessions", NULL, CONFIG_KIND_U32, AT(sessions_max), 1, 1024, CONFIG_ENGINE, 1, "N",
     "sessions held on the device at once"},
    {"probes", NULL, CONFIG_KIND_U32, AT(probes), 0, IMAGE_PROBES_MAX, CONFIG_ENGINE, 1, "N",
     "spans of a session's own text chosen before sleep, asked at a wake"},
    {"idle-seconds", NULL, CONFIG_KIND_U32, AT(idle_seconds), 0, 1 << 30, CONFIG_ENGINE, 1, "N",
     "a session unused for so long goes to sleep; 0 is never"},
    {"slots-low", NULL, CONFIG_KIND_U32, AT(slots_low_percent), 0, 100, CONFIG_ENGINE, 1, "PERCENT",
     "with fewer free slots blocks are lowered, unused sessions sleep …"},
    {"slots-high", NULL, CONFIG_KIND_U32, AT(slots_high_percent), 0, 100, CONFIG_ENGINE, 1,
     "PERCENT", "… until so many are free"},
    {"restore", NULL, CONFIG_KIND_CHOICE, AT(eager), 0, 0, CONFIG_ENGINE, 1, "exact|eager",
     "eager answers from coarse planes while the others are read"},
    {"tiers", NULL, CONFIG_KIND_CHOICE, AT(fit), 0, 0, CONFIG_ENGINE, 1, "exact|fit",
     "fit wakes at the coarsest tier where there are too few slots"},
    {"ram-tier", NULL, CONFIG_KIND_BYTES, AT(ram_bytes), 0, UINT64_C(1) << 44, CONFIG_ENGINE, 1,
     "SIZE", "memory that keeps sessions that went to sleep; 0 keeps none"},
    {"wake", NULL, CONFIG_KIND_CHOICE, AT(wake), 0, 0, CONFIG_WAKING, 1, "restore|faster|recompute",
     "for a turn: stored memory, or prefill the tokens again; says which"},
    {"recipe", NULL, CONFIG_KIND_RECIPE, AT(policy), 0, 0, CONFIG_CREATE, 1, "v3|v2|v1|fp8|bf16",
     "how a new session keeps its KV"},
    {"policy", NULL, CONFIG_KIND_CHOICE, AT(policy.pressure), 0, 0, CONFIG_CREATE, 1,
     "age|pressure", "what lowers its old blocks: their age, or slots that run short"},
    {"top", NULL, CONFIG_KIND_CHOICE, AT(policy.top_k8v8), 0, 0, CONFIG_CREATE, 1, "k8v4|k8v8",
     "tier at which its blocks begin"},
    {"ages", NULL, CONFIG_KIND_AGES, AT(policy), 0, 0, CONFIG_CREATE, 1, "A,B,C|none",
     "distances in tokens of the tiers below the top in a new session"},
    {"temperature", NULL, CONFIG_KIND_F32, AT(sampler.temperature), 0, 0, CONFIG_CREATE, 1, "X",
     "0 always takes the likeliest token"},
    {"top-p", NULL, CONFIG_KIND_F32, AT(sampler.top_p), 0, 0, CONFIG_CREATE, 1, "X",
     "likeliest tokens up to this probability; 1 keeps all"},
    {"top-k", NULL, CONFIG_KIND_U32, AT(sampler.top_k), 1, UINT32_MAX, CONFIG_CREATE, 1, "N",
     "this many likeliest tokens"},
    {"seed", NULL, CONFIG_KIND_U64, AT(sampler.seed), 0, UINT64_MAX, CONFIG_CREATE, 1, "N",
     "of the random numbers of a new session"},
    {"system", NULL, CONFIG_KIND_TEXT, AT(system), 0, 0, CONFIG_SYSTEM, 1, "TEXT",
     "system message of a new session"},
    {"max-tokens", "n", CONFIG_KIND_U32, AT(tokens_max), 1, IMAGE_TOKENS_MAX, CONFIG_TURN, 1, "N",
     "longest answer"},
    {"prompt", "p", CONFIG_KIND_TEXT, AT(prompt), 0, 0, CONFIG_PROMPT, 0, "TEXT",
     "what to say; - reads it from standard input"},
    {"session", "s", CONFIG_KIND_TEXT, AT(session), 0, 0, CONFIG_SESSION, 0, "NAME",
     "session to talk to (default: `chat`)"},
    {"key", NULL, CONFIG_KIND_TEXT, AT(key), 0, 0, CONFIG_NEEDLE, 0, "K", "name of the fact"},
    {"value", NULL, CONFIG_KIND_TEXT, AT(value), 0, 0, CONFIG_NEEDLE, 0, "V", "the fact itself"},
    {"ask", NULL, CONFIG_KIND_TEXT, AT(ask), 0, 0, CONFIG_NEEDLE, 0, "TEXT",
     "question about a fact that was said in the chat"},
    {"expect", NULL, CONFIG_KIND_TEXT, AT(expect), 0, 0, CONFIG_NEEDLE, 0, "TEXT",
     "its answer, as it stands in the chat"},
    {"answer-prefix", NULL, CONFIG_KIND_TEXT, AT(answer_prefix), 0, 0, CONFIG_NEEDLE, 0, "TEXT",
     "how the answer begins, up to the fact"},
    {"as", NULL, CONFIG_KIND_TEXT, AT(as), 0, 0, CONFIG_IMPORT, 0, "NAME",
     "name of the session here (default: the one in the file)"},
    {"any-model", NULL, CONFIG_KIND_SWITCH, AT(any_model), 0, 1, CONFIG_IMPORT, 0, "",
     "needs no model: whether it is the right one is seen when the session is woken"},
    {"tag", NULL, CONFIG_KIND_TEXT, AT(tag), 0, 0, CONFIG_TAG, 0, "T",
     "name under which the snapshot stays: NAME@T"},
    {"to", NULL, CONFIG_KIND_TEXT, AT(to), 0, 0, CONFIG_BACK, 0, "N|turn:K",
     "go back to the first N tokens, or to the end of turn K as `show` counts them"},
    {"purge", NULL, CONFIG_KIND_SWITCH, AT(purge), 0, 1, CONFIG_REMOVE, 0, "",
     "also write every segment again without what was removed, and the index"},
    {"text", NULL, CONFIG_KIND_SWITCH, AT(text), 0, 1, CONFIG_TEXT, 0, "",
     "what was said, turn by turn"},
    {"once", NULL, CONFIG_KIND_SWITCH, AT(once), 0, 1, CONFIG_TOP, 0, "",
     "one picture and no more"},
    {"listen", NULL, CONFIG_KIND_TEXT, AT(listen), 0, 0, CONFIG_SERVE, 1, "ADDRESS:PORT",
     "where HTTP is spoken; beyond this machine only with --remote"},
    {"remote", NULL, CONFIG_KIND_SWITCH, AT(remote), 0, 1, CONFIG_SERVE, 1, "",
     "--listen may be an address that others reach; the key travels unencrypted"},
    {"hosts", NULL, CONFIG_KIND_TEXT, AT(hosts), 0, 0, CONFIG_SERVE, 1, "NAME,NAME",
     "names that clients may call this machine by, besides localhost"},
    {"no-key", NULL, CONFIG_KIND_SWITCH, AT(no_key), 0, 1, CONFIG_SERVE, 1, "",
     "whoever reaches the port may ask"},
    {"log-text", NULL, CONFIG_KIND_SWITCH, AT(log_text), 0, 1, CONFIG_SERVE, 1, "",
     "what is said stands in the log, too"},
    {"requests", NULL, CONFIG_KIND_U32, AT(requests_max), 1, CONFIG_REQUESTS_MAX, CONFIG_SERVE, 1,
     "N", "requests at work and waiting; more are told to try later"},
    {"wait-seconds", NULL, CONFIG_KIND_U32, AT(wait_seconds), 1, 3600, CONFIG_SERVE, 1, "N",
     "longest wait of a request for its session or for slots"},
    {"stop-seconds", NULL, CONFIG_KIND_U32, AT(stop_seconds), 0, 3600, CONFIG_SERVE, 1, "N",
     "answers under way may take so long to end after SIGTERM"},
    {"special", NULL, CONFIG_KIND_SWITCH, AT(special), 0, 1, CONFIG_TOKENS, 0, "",
     "control tokens written in the text become their ids"},
    {"tokens", NULL, CONFIG_KIND_U64, AT(bench_tokens), 512, IMAGE_TOKENS_MAX, CONFIG_BENCH, 0, "N",
     "length of the measured session or text"},
    {"size", NULL, CONFIG_KIND_BYTES, AT(bench_bytes), 16 << 20, UINT64_C(1) << 36, CONFIG_BENCH, 0,
     "SIZE", "bytes to write and read"},
    {"build", NULL, CONFIG_KIND_SWITCH, AT(build), 0, 1, CONFIG_BENCH, 0, "",
     "make the measured session first when it is not there"},
    {"dry-run", NULL, CONFIG_KIND_SWITCH, AT(dry_run), 0, 1, CONFIG_GC, 0, "",
     "say what would be done and change nothing"},
    {"rate", NULL, CONFIG_KIND_BYTES, AT(rate_bytes), 4096, UINT64_MAX, CONFIG_GC | CONFIG_SCRUB, 0,
     "SIZE", "at most so many bytes per second (default: as fast as it goes)"},
    {"restart", NULL, CONFIG_KIND_SWITCH, AT(restart), 0, 1, CONFIG_SCRUB, 0, "",
     "from the front instead of where the last run ended"},
    {"keep-lower", NULL, CONFIG_KIND_SWITCH, AT(keep_lower), 0, 1, CONFIG_SCRUB, 0, "",
     "give up damaged planes that only refine; their sessions stay at a lower tier"},
    {"undo", NULL, CONFIG_KIND_SWITCH, AT(undo), 0, 1, CONFIG_EXPIRE, 0, "",
     "the session must not go after all"},
    {"read-data", NULL, CONFIG_KIND_SWITCH, AT(read_data), 0, 1, CONFIG_FSCK, 0, "",
     "read and digest every extent, check roots and block chains"},
    {"repair", NULL, CONFIG_KIND_SWITCH, AT(repair), 0, 1, CONFIG_FSCK, 0, "",
     "mend what can be mended without losing anything more"},
    {"rebuild-index", NULL, CONFIG_KIND_SWITCH, AT(rebuild_index), 0, 1, CONFIG_FSCK, 0, "",
     "first make the index anew from the segments"},
};

enum { SETTING_COUNT = sizeof settings / sizeof settings[0] };
_Static_assert(SETTING_COUNT <= 128, "struct config.given has a bit for each");

size_t config_inner_count(void) {
    return SETTING_COUNT;
}

const struct config_setting *config_inner_at(size_t index) {
    return &settings[index];
}

static void mark(uint64_t bits[2], size_t index) {
    bits[index / 64] |= UINT64_C(1) << (index % 64);
}

int config_inner_is_marked(const uint64_t bits[2], size_t index) {
    return (bits[index / 64] >> (index % 64) & 1) != 0;
}

static const struct {
    const char *name;
    double bytes;
} units[] = {
    {"B", 1},
    {"", 1},
    {"KiB", 1024.0},
    {"MiB", 1048576.0},
    {"GiB", 1073741824.0},
    {"kB", 1e3},
    {"MB", 1e6},
    {"GB", 1e9},
    {"TB", 1e12},
    {"TiB", 1099511627776.0},
    {"K", 1024},
    {"M", 1048576.0},
    {"G", 1073741824.0},
    {"T", 1099511627776.0},
};

enum kv_err config_parse_bytes(const char *text, uint64_t *bytes_out, struct kv_diag *diag) {
    char *end = NULL;
    errno = 0;
    double number = isdigit((unsigned char)text[0]) ? strtod(text, &end) : -1;
    if (number >= 0 && errno == 0 && isfinite(number)) {
        while (*end == ' ')
            end++;
        for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
            double bytes = number * units[i].bytes;
            if (strcasecmp(end, units[i].name) != 0 || bytes > 9.2e18)
                continue;
            *bytes_out = (uint64_t)bytes;
            return KV_OK;
        }
    }
    return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is not a size; write it as 512MiB or 78.6GiB",
                       text);
}

static enum kv_err parse_u64(const char *text, const struct config_setting *setting, uint64_t *out,
                             struct kv_diag *diag) {
    char *end = NULL;
    errno = 0;
    uint64_t number = isdigit((unsigned char)text[0]) ? strtoull(text, &end, 10) : 0;
    if (end == NULL || *end != 0 || errno != 0 || number < setting->least || number > setting->most)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "'%s' is not a whole number from %" PRIu64 " to %" PRIu64, text,
                           setting->least, setting->most);
    *out = number;
    return KV_OK;
}

static enum kv_err parse_ages(const char *text, struct image_policy *policy, struct kv_diag *diag) {
    const struct config_setting any = {.least = 1, .most = IMAGE_TOKENS_MAX};
    struct image_policy parsed = {
        .recipe = policy->recipe, .top_k8v8 = policy->top_k8v8, .pressure = policy->pressure};
    if (strcmp(text, "none") == 0) {
        *policy = parsed;
        return KV_OK;
    }
    while (*text != 0) {
        char one[24] = "";
        size_t length = strcspn(text, ",");
        if (length >= sizeof one || parsed.age_count == IMAGE_AGES_MAX)
            return kv_diag_set(diag, KV_ERR_INVALID, "at most four distances, as 512,1024,1536");
        memcpy(one, text, length);
        uint64_t *age = &parsed.ages[parsed.age_count];
        enum kv_err err = parse_u64(one, &any, age, diag);
        if (err != KV_OK)
            return err;
#ifndef BREAK_AGES_ORDER
        if (parsed.age_count > 0 && *age < age[-1])
            return kv_diag_set(diag, KV_ERR_INVALID, "distances must not fall: 512,1024,1536");
#endif
        parsed.age_count++;
        text += length;
        if (*text == ',' && *++text == 0)
            return kv_diag_set(diag, KV_ERR_INVALID, "a distance is missing behind the last ','");
    }
    if (parsed.age_count == 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "no distances; write 512,1024,1536 or none");
    *policy = parsed;
    return KV_OK;
}

static enum kv_err parse_choice(const char *text, const struct config_setting *setting, int *out,
                                struct kv_diag *diag) {
    size_t length;
    const char *word;
    for (int i = 0; (word = config_inner_choice(setting, i, &length)) != NULL; i++)
        if (strlen(text) == length && memcmp(text, word, length) == 0) {
            *out = i;
            return KV_OK;
        }
    return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is none of %s", text, setting->value);
}

static enum kv_err parse_word(const char *text, const struct config_setting *setting, void *field,
                              struct kv_diag *diag) {
    static const char *const simds[] = {"auto", "c", "avx2"};
    if (setting->kind == CONFIG_KIND_RECIPE) {
        struct image_policy *policy = field;
        enum image_recipe recipe = image_recipe_of(text);
        if (recipe == 0)
            return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is not a recipe; take %s", text,
                               image_recipe_names);
        policy->recipe = recipe;
        return KV_OK;
    }
    for (int i = 0; i < 3; i++)
        if (strcmp(text, simds[i]) == 0) {
            *(enum engine_simd *)field = (enum engine_simd)(ENGINE_SIMD_AUTO + i);
            return KV_OK;
        }
    return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is none of auto, avx2 and c", text);
}

static enum kv_err parse_device(const char *text, struct config_device *device,
                                struct kv_diag *diag) {
    const struct config_setting index = {.least = 0, .most = 255};
    uint64_t number = 0;
    if (strcmp(text, "auto") == 0 || strcmp(text, "cpu") == 0) {
        *device =
            (struct config_device){text[0] == 'a' ? ENGINE_DEVICE_AUTO : ENGINE_DEVICE_CPU, 0};
        return KV_OK;
    }
    if (strncmp(text, "cuda:", 5) != 0 || parse_u64(text + 5, &index, &number, NULL) != KV_OK)
        return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is none of auto, cpu and cuda:0 to cuda:255",
                           text);
    *device = (struct config_device){ENGINE_DEVICE_CUDA, (uint32_t)number};
    return KV_OK;
}

static enum kv_err parse_f32(const char *text, float *out, struct kv_diag *diag) {
    char *end = NULL;
    errno = 0;
    float number = strtof(text, &end);
    if (end == text || *end != 0 || errno != 0 || !isfinite(number) || number < 0)
        return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is not a number of 0 or more", text);
    *out = number;
    return KV_OK;
}

static enum kv_err set_value(struct config *config, const struct config_setting *setting,
                             const char *text, struct kv_diag *diag) {
    void *field = (char *)config + setting->off;
    uint64_t number = 0;
    enum kv_err err = KV_OK;
    switch (setting->kind) {
    case CONFIG_KIND_SWITCH:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
            return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is neither yes nor no", text);
        *(int *)field = text[0] == 'y';
        return KV_OK;
    case CONFIG_KIND_TEXT:
        *(const char **)field = text;
        return KV_OK;
    case CONFIG_KIND_PATH:
        if (text[0] == 0 || strlen(text) >= CONFIG_PATH_BYTES)
            return kv_diag_set(diag, KV_ERR_INVALID, "a path of 1 to %d bytes is needed",
                               CONFIG_PATH_BYTES - 1);
        memcpy(field, text, strlen(text) + 1);
        return KV_OK;
    case CONFIG_KIND_BYTES:
        if ((setting->off == AT(store_max_bytes) || setting->off == AT(device_bytes)) &&
            strcmp(text, "none") == 0) {
            *(uint64_t *)field = UINT64_MAX;
            return KV_OK;
        }
        err = config_parse_bytes(text, &number, diag);
        if (err == KV_OK && (number < setting->least || number > setting->most))
            err = kv_diag_set(diag, KV_ERR_INVALID,
                              "'%s' is not between %" PRIu64 " and %" PRIu64 " bytes", text,
                              setting->least, setting->most);
        if (err == KV_OK)
            *(uint64_t *)field = number;
        return err;
    case CONFIG_KIND_U32:
        err = parse_u64(text, setting, &number, diag);
        if (err == KV_OK)
            *(uint32_t *)field = (uint32_t)number;
        return err;
    case CONFIG_KIND_U64:
        return parse_u64(text, setting, field, diag);
    case CONFIG_KIND_F32:
        return parse_f32(text, field, diag);
    case CONFIG_KIND_AGES:
        return parse_ages(text, field, diag);
    case CONFIG_KIND_DEVICE:
        return parse_device(text, field, diag);
    case CONFIG_KIND_CHOICE:
        return parse_choice(text, setting, field, diag);
    case CONFIG_KIND_SIMD:
    case CONFIG_KIND_RECIPE:
        break;
    }
    return parse_word(text, setting, field, diag);
}

static const struct config_setting *find_setting(const char *name, size_t length) {
    for (size_t i = 0; i < SETTING_COUNT; i++) {
        const struct config_setting *setting = &settings[i];
        if ((strlen(setting->name) == length && memcmp(name, setting->name, length) == 0) ||
            (setting->alias != NULL && strlen(setting->alias) == length &&
             memcmp(name, setting->alias, length) == 0))
            return setting;
    }
    return NULL;
}

/* Cuts white space at both ends, in place. */
static char *trimmed(char *text) {
    while (*text == ' ' || *text == '\t')
        text++;
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL)
        text[--length] = 0;
    return text;
}

static enum kv_err read_line(struct config *config, char *line, struct kv_diag *diag) {
    line = trimmed(line);
    if (line[0] == 0 || line[0] == '#')
        return KV_OK;
    char *equals = strchr(line, '=');
    if (equals == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "no '='; write `key = value`");
    *equals = 0;
    const char *key = trimmed(line);
    const struct config_setting *setting = find_setting(key, strlen(key));
    if (setting == NULL || !setting->in_file)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "'%s' is not a setting; `coldplane --show-config` lists them", key);
    enum kv_err err = set_value(config, setting, trimmed(equals + 1), diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "%s", key);
    mark(config->in_file, (size_t)(setting - settings));
    return err;
}

static enum kv_err read_file(struct config *config, struct kv_diag *diag) {
    char path[CONFIG_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/config", config->home);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        if (errno == ENOENT || errno == ENOTDIR)
            return KV_OK;
        return kv_diag_errno(diag, KV_ERR_IO, errno, "configuration %s", path);
    }
    size_t size = fread(config->file_text, 1, sizeof config->file_text, file);
    int failed = ferror(file);
    fclose(file);
    if (failed)
        return kv_diag_set(diag, KV_ERR_IO, "configuration %s cannot be read", path);
    if (size > CONFIG_FILE_BYTES_MAX || memchr(config->file_text, 0, size) != NULL)
        return kv_diag_set(diag, KV_ERR_LIMIT, "configuration %s is not a text of at most %d bytes",
                           path, CONFIG_FILE_BYTES_MAX);
    config->file_text[size] = 0;
    int number = 1;
    enum kv_err first = KV_OK;
    for (char *line = config->file_text; line != NULL; number++) {
        char *next = strchr(line, '\n');
        if (next != NULL)
            *next++ = 0;
        enum kv_err err = read_line(config, line, first == KV_OK ? diag : NULL);
        if (err != KV_OK && first == KV_OK) {
            kv_diag_prefix(diag, "configuration %s, line %d", path, number);
            first = err;
        }
        line = next;
    }
    return first;
}

static int is_daemon(const char *program) {
    const char *slash = strrchr(program, '/');
    return strcmp(slash != NULL ? slash + 1 : program, "coldplaned") == 0;
}

static enum kv_err read_flag(struct config *config, int argc, char **argv, int *at,
                             struct kv_diag *diag) {
    const char *word = argv[*at];
    const char *name = word + (word[1] == '-' ? 2 : 1);
    size_t length = strcspn(name, "=");
    const struct config_setting *setting = find_setting(name, length);
    if (setting == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "%.*s: no such flag; `%s` lists %sflags",
                           (int)(strcspn(word, "=") < 100 ? strcspn(word, "=") : 100), word,
                           is_daemon(argv[0]) ? "coldplaned --help" : "coldplane help",
                           is_daemon(argv[0]) ? "its " : "commands and ");
    const char *value = name[length] == '=' ? name + length + 1 : NULL;
    if (value == NULL && setting->kind == CONFIG_KIND_SWITCH)
        value = "yes";
    if (value == NULL && *at + 1 < argc)
        value = argv[++*at];
    if (value == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "--%s: a value is missing; write --%s %s",
                           setting->name, setting->name, setting->value);
    enum kv_err err = set_value(config, setting, value, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "--%s", setting->name);
    mark(config->given, (size_t)(setting - settings));
    return err;
}

static enum kv_err read_flags(struct config *config, int argc, char **argv, struct kv_diag *diag) {
    enum kv_err first = KV_OK;
    int flags_over = 0;
    for (int i = 1; i < argc; i++) {
        if (!flags_over && strcmp(argv[i], "--") == 0) {
            flags_over = 1;
        } else if (!flags_over && argv[i][0] == '-' && argv[i][1] != 0) {
            enum kv_err err = read_flag(config, argc, argv, &i, first == KV_OK ? diag : NULL);
            first = first == KV_OK ? err : first;
        } else if (config->word_count < CONFIG_WORDS_MAX) {
            config->words[config->word_count++] = argv[i];
        } else if (first == KV_OK) {
            first = kv_diag_set(diag, KV_ERR_INVALID,
                                "%.60s: too many arguments; put text in quotes", argv[i]);
        }
    }
    return first;
}

static enum kv_err set_defaults(const char *home, struct config *config, struct kv_diag *diag) {
    const char *user = home == NULL ? getenv("HOME") : NULL;
    int length;
    if (home == NULL)
        home = getenv("COLDPLANE_HOME");
    if (home != NULL && home[0] != 0)
        length = snprintf(config->home, sizeof config->home, "%s", home);
    else if (user != NULL && user[0] != 0)
        length = snprintf(config->home, sizeof config->home, "%s/.coldplane", user);
    else
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "neither COLDPLANE_HOME nor HOME is set; set "
                           "COLDPLANE_HOME to a folder of your own");
    if (length >= CONFIG_PATH_BYTES - 100)
        return kv_diag_set(diag, KV_ERR_LIMIT, "the path in COLDPLANE_HOME is longer than %d bytes",
                           CONFIG_PATH_BYTES - 100);
    snprintf(config->store, sizeof config->store, "%.3995s/store", config->home);
    snprintf(config->model, sizeof config->model, "%.3995s/models/SmolLM2-135M-Instruct.Q4_1.gguf",
             config->home);
    struct service_settings usual;
    service_settings_usual(&usual);
    config->threads = usual.threads;
    config->device = (struct config_device){usual.device, usual.cuda_index};
    config->device_bytes = usual.device_memory_bytes;
    config->simd = usual.simd;
    config->slots_bytes = usual.slot_budget_bytes;
    config->reserve_slots = usual.reserve_slots;
    config->sessions_max = usual.sessions_max;
    config->store_max_bytes = usual.store_bytes_max;
    config->policy = usual.policy;
    config->sampler = usual.sampler;
    config->probes = usual.probes;
    config->idle_seconds = 600;
    config->slots_low_percent = usual.slots_low_percent;
    config->slots_high_percent = usual.slots_high_percent;
    config->tokens_max = 512;
    config->listen = "127.0.0.1:8080";
    config->requests_max = 64;
    config->wait_seconds = 30;
    config->stop_seconds = 10;
    config->bench_bytes = UINT64_C(256) << 20;
    return KV_OK;
}

/* --json decides how an error is told, so it is looked for before anything can fail. A word that is
 * another flag's value is not a flag. */
static int asked_for_json(int argc, char **argv) {
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        const char *name = argv[i] + (argv[i][0] == '-' && argv[i][1] == '-' ? 2 : 1);
        if (strcmp(argv[i], "--json") == 0)
            return 1;
        if (argv[i][0] != '-' || argv[i][1] == 0)
            continue;
        const struct config_setting *setting = find_setting(name, strlen(name));
        i += setting != NULL && setting->kind != CONFIG_KIND_SWITCH;
    }
    return 0;
}

/* Commands that only explain are wanted most when the file is broken. */
static int explains(const struct config *config) {
    return config->help || config->show || config->version ||
           (config->word_count > 0 &&
            (strcmp(config->words[0], "help") == 0 || strcmp(config->words[0], "version") == 0));
}

const char *config_notify_socket(void) {
    return getenv("NOTIFY_SOCKET");
}

static int is_in_file(const struct config *config, const char *name) {
    return config_inner_is_marked(config->in_file,
                                  (size_t)(find_setting(name, strlen(name)) - settings));
}

enum kv_err config_load(int argc, char **argv, struct config *config_out, struct kv_diag *diag) {
    return config_load_for(NULL, argc, argv, config_out, diag);
}

enum kv_err config_load_for(const char *home, int argc, char **argv, struct config *config_out,
                            struct kv_diag *diag) {
    memset(config_out, 0, sizeof *config_out);
    config_out->json = asked_for_json(argc, argv);
    enum kv_err err = set_defaults(home, config_out, diag);
    if (err == KV_OK) {
        config_out->file_err = read_file(config_out, &config_out->file_diag);
        err = read_flags(config_out, argc, argv, diag);
    }
    if (err == KV_OK && config_out->file_err != KV_OK && !explains(config_out))
        err = kv_diag_set(diag, config_out->file_err, "%s", config_out->file_diag.text);
    return err == KV_OK ? config_settle_policy(config_out, diag) : err;
}

int config_given(const struct config *config, const char *flag) {
    const struct config_setting *setting = find_setting(flag, strlen(flag));
    return setting != NULL && config_inner_is_marked(config->given, (size_t)(setting - settings));
}

int config_stated(const struct config *config, const char *flag) {
    return config_given(config, flag) || is_in_file(config, flag);
}

enum kv_err config_check_flags(const struct config *config, unsigned groups, const char *command,
                               struct kv_diag *diag) {
    for (size_t i = 0; i < SETTING_COUNT; i++)
        if (config_inner_is_marked(config->given, i) &&
            (settings[i].groups & (groups | CONFIG_COMMON)) == 0)
            return kv_diag_set(
                diag, KV_ERR_INVALID, "--%s means nothing to `%s`; `%s%s --help` lists its flags",
                settings[i].name, command, is_daemon(command) ? "" : "coldplane ", command);
    return KV_OK;
}
