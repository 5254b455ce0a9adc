/* tools/config.c - flags and the configuration file as one struct.
 *
 * Responsible for: one table from which parsing, --show-config and the help of flags are made.
 * Not responsible for: meaning of the values (the commands).
 */
#include "tools/config.h"

#include "store/base/bytes.h"
#include "store/store.h"
#include "tools/json_text.h"
#include "tools/service.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum kind {
    KIND_SWITCH,
    KIND_TEXT,
    KIND_PATH,
    KIND_BYTES,
    KIND_U32,
    KIND_U64,
    KIND_F32,
    KIND_DEVICE,
    KIND_SIMD,
    KIND_CHOICE, /* an int: which of the words of `value` */
    KIND_RECIPE,
    KIND_AGES
};

struct setting {
    const char *name, *alias;
    enum kind kind;
    size_t off;
    uint64_t least, most; /* of integers and sizes */
    unsigned groups;
    int in_file;
    const char *value, *help;
};

#define AT(field) offsetof(struct config, field)

static const struct setting settings[] = {
    {"help", "h", KIND_SWITCH, AT(help), 0, 1, CONFIG_COMMON, 0, "", "help of the command"},
    {"json", NULL, KIND_SWITCH, AT(json), 0, 1, CONFIG_COMMON, 1, "", "one JSON document"},
    {"show-config", NULL, KIND_SWITCH, AT(show), 0, 1, CONFIG_COMMON, 0, "",
     "print all settings in force and stop"},
    {"version", NULL, KIND_SWITCH, AT(version), 0, 1, CONFIG_COMMON, 0, "", "as `version`"},
    {"store", NULL, KIND_PATH, AT(store), 0, 0, CONFIG_COMMON, 1, "DIR",
     "folder of the store (COLDPLANE_HOME/store)"},
    {"posix-io", NULL, KIND_SWITCH, AT(posix_io), 0, 1, CONFIG_COMMON, 1, "",
     "plain system calls instead of io_uring"},
    {"store-max", NULL, KIND_BYTES, AT(store_max_bytes), 1 << 20, UINT64_MAX, CONFIG_WRITE, 1,
     "SIZE|none", "the store never grows beyond this"},
    {"may-degrade", NULL, KIND_SWITCH, AT(may_degrade), 0, 1, CONFIG_WRITE, 1, "",
     "at store-max: take planes of cold sessions, then old snapshots"},
    {"write-per-second", NULL, KIND_BYTES, AT(write_second_bytes), 0, UINT64_MAX, CONFIG_WRITE, 1,
     "SIZE", "what the background may write; 0 is no limit"},
    {"write-per-day", NULL, KIND_BYTES, AT(write_day_bytes), 0, UINT64_MAX, CONFIG_WRITE, 1, "SIZE",
     "the same for a day; a save never waits, it counts"},
    {"model", "m", KIND_PATH, AT(model), 0, 0, CONFIG_ENGINE | CONFIG_TOKENS, 1, "FILE",
     "GGUF file of the model"},
    {"threads", "t", KIND_U32, AT(threads), 1, 256, CONFIG_ENGINE, 1, "N",
     "threads that compute (all cores online)"},
    {"simd", NULL, KIND_SIMD, AT(simd), 0, 0, CONFIG_ENGINE, 1, "auto|avx2|c",
     "instructions to compute with"},
    {"device", NULL, KIND_DEVICE, AT(device), 0, 0, CONFIG_ENGINE, 1, "auto|cpu|cuda:N",
     "what computes; auto takes a GPU where there is one"},
    {"device-memory", NULL, KIND_BYTES, AT(device_bytes), 1 << 20, UINT64_C(1) << 44, CONFIG_ENGINE,
     1, "SIZE", "most memory of a GPU, reserved at start"},
    {"slots-memory", NULL, KIND_BYTES, AT(slots_bytes), 1 << 20, UINT64_C(1) << 44, CONFIG_ENGINE,
     1, "SIZE", "memory for KV slots, reserved at start"},
    {"reserve-slots", NULL, KIND_U32, AT(reserve_slots), 0, 1 << 30, CONFIG_ENGINE, 1, "N",
     "slots never given to a session"},
    {"sessions", NULL, KIND_U32, AT(sessions_max), 1, 1024, CONFIG_ENGINE, 1, "N",
     "sessions held on the device at once"},
    {"probes", NULL, KIND_U32, AT(probes), 0, IMAGE_PROBES_MAX, CONFIG_ENGINE, 1, "N",
     "spans of a session's own text chosen before sleep, asked at a wake"},
    {"idle-seconds", NULL, KIND_U32, AT(idle_seconds), 0, 1 << 30, CONFIG_ENGINE, 1, "N",
     "a session unused for so long goes to sleep; 0 is never"},
    {"slots-low", NULL, KIND_U32, AT(slots_low_percent), 0, 100, CONFIG_ENGINE, 1, "PERCENT",
     "with fewer free slots blocks are lowered, unused sessions sleep …"},
    {"slots-high", NULL, KIND_U32, AT(slots_high_percent), 0, 100, CONFIG_ENGINE, 1, "PERCENT",
     "… until so many are free"},
    {"restore", NULL, KIND_CHOICE, AT(eager), 0, 0, CONFIG_ENGINE, 1, "exact|eager",
     "eager answers from coarse planes while the others are read"},
    {"tiers", NULL, KIND_CHOICE, AT(fit), 0, 0, CONFIG_ENGINE, 1, "exact|fit",
     "fit wakes at the coarsest tier where there are too few slots"},
    {"ram-tier", NULL, KIND_BYTES, AT(ram_bytes), 0, UINT64_C(1) << 44, CONFIG_ENGINE, 1, "SIZE",
     "memory that keeps sessions that went to sleep; 0 keeps none"},
    {"wake", NULL, KIND_CHOICE, AT(wake), 0, 0, CONFIG_ENGINE, 1, "restore|faster|recompute",
     "for a turn: stored memory, or prefill the tokens again; says which"},
    {"recipe", NULL, KIND_RECIPE, AT(policy), 0, 0, CONFIG_CREATE, 1, "v3|v2|bf16",
     "how a new session keeps its KV"},
    {"policy", NULL, KIND_CHOICE, AT(policy.pressure), 0, 0, CONFIG_CREATE, 1, "age|pressure",
     "what lowers its old blocks: their age, or slots that run short"},
    {"top", NULL, KIND_CHOICE, AT(policy.top_k8v8), 0, 0, CONFIG_CREATE, 1, "k8v4|k8v8",
     "tier at which its blocks begin"},
    {"ages", NULL, KIND_AGES, AT(policy), 0, 0, CONFIG_CREATE, 1, "A,B,C|none",
     "distances in tokens of the tiers below the top in a new session"},
    {"temperature", NULL, KIND_F32, AT(sampler.temperature), 0, 0, CONFIG_CREATE, 1, "X",
     "0 always takes the likeliest token"},
    {"top-p", NULL, KIND_F32, AT(sampler.top_p), 0, 0, CONFIG_CREATE, 1, "X",
     "likeliest tokens up to this probability; 1 keeps all"},
    {"top-k", NULL, KIND_U32, AT(sampler.top_k), 1, UINT32_MAX, CONFIG_CREATE, 1, "N",
     "this many likeliest tokens"},
    {"seed", NULL, KIND_U64, AT(sampler.seed), 0, UINT64_MAX, CONFIG_CREATE, 1, "N",
     "of the random numbers of a new session"},
    {"system", NULL, KIND_TEXT, AT(system), 0, 0, CONFIG_TURN, 1, "TEXT",
     "system message of a new session"},
    {"max-tokens", "n", KIND_U32, AT(tokens_max), 1, IMAGE_TOKENS_MAX, CONFIG_TURN, 1, "N",
     "longest answer"},
    {"prompt", "p", KIND_TEXT, AT(prompt), 0, 0, CONFIG_PROMPT, 0, "TEXT",
     "what to say; - reads it from standard input"},
    {"session", "s", KIND_TEXT, AT(session), 0, 0, CONFIG_SESSION, 0, "NAME",
     "session to talk to (default: `chat`)"},
    {"key", NULL, KIND_TEXT, AT(key), 0, 0, CONFIG_NEEDLE, 0, "K", "name of the fact"},
    {"value", NULL, KIND_TEXT, AT(value), 0, 0, CONFIG_NEEDLE, 0, "V", "the fact itself"},
    {"ask", NULL, KIND_TEXT, AT(ask), 0, 0, CONFIG_NEEDLE, 0, "TEXT",
     "question about a fact that was said in the chat"},
    {"expect", NULL, KIND_TEXT, AT(expect), 0, 0, CONFIG_NEEDLE, 0, "TEXT",
     "its answer, as it stands in the chat"},
    {"answer-prefix", NULL, KIND_TEXT, AT(answer_prefix), 0, 0, CONFIG_NEEDLE, 0, "TEXT",
     "how the answer begins, up to the fact"},
    {"as", NULL, KIND_TEXT, AT(as), 0, 0, CONFIG_IMPORT, 0, "NAME",
     "name of the session here (default: the one in the file)"},
    {"any-model", NULL, KIND_SWITCH, AT(any_model), 0, 1, CONFIG_IMPORT, 0, "",
     "needs no model: whether it is the right one is seen when the session is woken"},
    {"tag", NULL, KIND_TEXT, AT(tag), 0, 0, CONFIG_TAG, 0, "T",
     "name under which the snapshot stays: NAME@T"},
    {"to", NULL, KIND_TEXT, AT(to), 0, 0, CONFIG_BACK, 0, "N|turn:K",
     "go back to the first N tokens, or to the end of turn K as `show` counts them"},
    {"purge", NULL, KIND_SWITCH, AT(purge), 0, 1, CONFIG_REMOVE, 0, "",
     "also write every segment again without what was removed, and the index"},
    {"once", NULL, KIND_SWITCH, AT(once), 0, 1, CONFIG_TOP, 0, "", "one picture and no more"},
    {"special", NULL, KIND_SWITCH, AT(special), 0, 1, CONFIG_TOKENS, 0, "",
     "control tokens written in the text become their ids"},
    {"tokens", NULL, KIND_U64, AT(bench_tokens), 512, IMAGE_TOKENS_MAX, CONFIG_BENCH, 0, "N",
     "length of the measured session or text"},
    {"size", NULL, KIND_BYTES, AT(bench_bytes), 16 << 20, UINT64_C(1) << 36, CONFIG_BENCH, 0,
     "SIZE", "bytes to write and read"},
    {"build", NULL, KIND_SWITCH, AT(build), 0, 1, CONFIG_BENCH, 0, "",
     "make the measured session first when it is not there"},
    {"dry-run", NULL, KIND_SWITCH, AT(dry_run), 0, 1, CONFIG_GC, 0, "",
     "say what would be done and change nothing"},
    {"rate", NULL, KIND_BYTES, AT(rate_bytes), 4096, UINT64_MAX, CONFIG_GC | CONFIG_SCRUB, 0,
     "SIZE", "at most so many bytes per second (default: as fast as it goes)"},
    {"restart", NULL, KIND_SWITCH, AT(restart), 0, 1, CONFIG_SCRUB, 0, "",
     "from the front instead of where the last run ended"},
    {"keep-lower", NULL, KIND_SWITCH, AT(keep_lower), 0, 1, CONFIG_SCRUB, 0, "",
     "give up damaged planes that only refine; their sessions stay at a lower tier"},
    {"undo", NULL, KIND_SWITCH, AT(undo), 0, 1, CONFIG_EXPIRE, 0, "",
     "the session must not go after all"},
    {"read-data", NULL, KIND_SWITCH, AT(read_data), 0, 1, CONFIG_FSCK, 0, "",
     "read and digest every extent, check roots and block chains"},
    {"repair", NULL, KIND_SWITCH, AT(repair), 0, 1, CONFIG_FSCK, 0, "",
     "mend what can be mended without losing anything more"},
    {"rebuild-index", NULL, KIND_SWITCH, AT(rebuild_index), 0, 1, CONFIG_FSCK, 0, "",
     "first make the index anew from the segments"},
};

enum { SETTING_COUNT = sizeof settings / sizeof settings[0] };
_Static_assert(SETTING_COUNT <= 64, "struct config.given has a bit for each");

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

static enum kv_err parse_u64(const char *text, const struct setting *setting, uint64_t *out,
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
    const struct setting any = {.least = 1, .most = IMAGE_TOKENS_MAX};
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

/* The words of "exact|eager" by number; NULL behind the last. */
static const char *choice(const struct setting *setting, int index, size_t *length_out) {
    const char *at = setting->value;
    for (; index > 0 && at[strcspn(at, "|")] != 0; index--)
        at += strcspn(at, "|") + 1;
    *length_out = strcspn(at, "|");
    return index == 0 ? at : NULL;
}

static enum kv_err parse_choice(const char *text, const struct setting *setting, int *out,
                                struct kv_diag *diag) {
    size_t length;
    const char *word;
    for (int i = 0; (word = choice(setting, i, &length)) != NULL; i++)
        if (strlen(text) == length && memcmp(text, word, length) == 0) {
            *out = i;
            return KV_OK;
        }
    return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is none of %s", text, setting->value);
}

static enum kv_err parse_word(const char *text, const struct setting *setting, void *field,
                              struct kv_diag *diag) {
    static const char *const simds[] = {"auto", "c", "avx2"};
    if (setting->kind == KIND_RECIPE) {
        struct image_policy *policy = field;
        if (strcmp(text, "v3") == 0)
            policy->recipe = IMAGE_RECIPE_V3;
        else if (strcmp(text, "v2") == 0)
            policy->recipe = IMAGE_RECIPE_V2;
        else if (strcmp(text, "bf16") == 0)
            policy->recipe = IMAGE_RECIPE_BF16;
        else
            return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is not a recipe; take v3, v2 or bf16",
                               text);
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
    const struct setting index = {.least = 0, .most = 255};
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

static enum kv_err set_value(struct config *config, const struct setting *setting, const char *text,
                             struct kv_diag *diag) {
    void *field = (char *)config + setting->off;
    uint64_t number = 0;
    enum kv_err err = KV_OK;
    switch (setting->kind) {
    case KIND_SWITCH:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
            return kv_diag_set(diag, KV_ERR_INVALID, "'%s' is neither yes nor no", text);
        *(int *)field = text[0] == 'y';
        return KV_OK;
    case KIND_TEXT:
        *(const char **)field = text;
        return KV_OK;
    case KIND_PATH:
        if (text[0] == 0 || strlen(text) >= CONFIG_PATH_BYTES)
            return kv_diag_set(diag, KV_ERR_INVALID, "a path of 1 to %d bytes is needed",
                               CONFIG_PATH_BYTES - 1);
        memcpy(field, text, strlen(text) + 1);
        return KV_OK;
    case KIND_BYTES:
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
    case KIND_U32:
        err = parse_u64(text, setting, &number, diag);
        if (err == KV_OK)
            *(uint32_t *)field = (uint32_t)number;
        return err;
    case KIND_U64:
        return parse_u64(text, setting, field, diag);
    case KIND_F32:
        return parse_f32(text, field, diag);
    case KIND_AGES:
        return parse_ages(text, field, diag);
    case KIND_DEVICE:
        return parse_device(text, field, diag);
    case KIND_CHOICE:
        return parse_choice(text, setting, field, diag);
    case KIND_SIMD:
    case KIND_RECIPE:
        break;
    }
    return parse_word(text, setting, field, diag);
}

static const struct setting *find_setting(const char *name, size_t length) {
    for (size_t i = 0; i < SETTING_COUNT; i++) {
        const struct setting *setting = &settings[i];
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
    const struct setting *setting = find_setting(key, strlen(key));
    if (setting == NULL || !setting->in_file)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "'%s' is not a setting; `coldplane --show-config` lists them", key);
    enum kv_err err = set_value(config, setting, trimmed(equals + 1), diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "%s", key);
    config->in_file |= UINT64_C(1) << (setting - settings);
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

static enum kv_err read_flag(struct config *config, int argc, char **argv, int *at,
                             struct kv_diag *diag) {
    const char *word = argv[*at];
    const char *name = word + (word[1] == '-' ? 2 : 1);
    size_t length = strcspn(name, "=");
    const struct setting *setting = find_setting(name, length);
    if (setting == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "%.*s: no such flag; `coldplane help` lists commands and flags",
                           (int)(strcspn(word, "=") < 100 ? strcspn(word, "=") : 100), word);
    const char *value = name[length] == '=' ? name + length + 1 : NULL;
    if (value == NULL && setting->kind == KIND_SWITCH)
        value = "yes";
    if (value == NULL && *at + 1 < argc)
        value = argv[++*at];
    if (value == NULL)
        return kv_diag_set(diag, KV_ERR_INVALID, "--%s: a value is missing; write --%s %s",
                           setting->name, setting->name, setting->value);
    enum kv_err err = set_value(config, setting, value, diag);
    if (err != KV_OK)
        kv_diag_prefix(diag, "--%s", setting->name);
    config->given |= UINT64_C(1) << (setting - settings);
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

static enum kv_err set_defaults(struct config *config, struct kv_diag *diag) {
    const char *home = getenv("COLDPLANE_HOME");
    const char *user = getenv("HOME");
    int length;
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
        const struct setting *setting = find_setting(name, strlen(name));
        i += setting != NULL && setting->kind != KIND_SWITCH;
    }
    return 0;
}

/* Commands that only explain are wanted most when the file is broken. */
static int explains(const struct config *config) {
    return config->help || config->show || config->version ||
           (config->word_count > 0 &&
            (strcmp(config->words[0], "help") == 0 || strcmp(config->words[0], "version") == 0));
}

static int is_in_file(const struct config *config, const char *name) {
    return (config->in_file >> (find_setting(name, strlen(name)) - settings) & 1) != 0;
}

enum kv_err config_load(int argc, char **argv, struct config *config_out, struct kv_diag *diag) {
    memset(config_out, 0, sizeof *config_out);
    config_out->json = asked_for_json(argc, argv);
    enum kv_err err = set_defaults(config_out, diag);
    if (err == KV_OK) {
        config_out->file_err = read_file(config_out, &config_out->file_diag);
        err = read_flags(config_out, argc, argv, diag);
    }
    if (err == KV_OK && config_out->file_err != KV_OK && !explains(config_out))
        err = kv_diag_set(diag, config_out->file_err, "%s", config_out->file_diag.text);
    return err == KV_OK ? config_settle_policy(config_out, diag) : err;
}

int config_given(const struct config *config, const char *flag) {
    const struct setting *setting = find_setting(flag, strlen(flag));
    return setting != NULL && (config->given >> (setting - settings) & 1) != 0;
}

int config_stated(const struct config *config, const char *flag) {
    return config_given(config, flag) || is_in_file(config, flag);
}

enum kv_err config_check_flags(const struct config *config, unsigned groups, const char *command,
                               struct kv_diag *diag) {
    for (size_t i = 0; i < SETTING_COUNT; i++)
        if ((config->given >> i & 1) != 0 && (settings[i].groups & (groups | CONFIG_COMMON)) == 0)
            return kv_diag_set(diag, KV_ERR_INVALID,
                               "--%s means nothing to `%s`; `coldplane %s --help` lists its flags",
                               settings[i].name, command, command);
    return KV_OK;
}

static void show_ages(const struct image_policy *policy, FILE *out) {
    if (policy->age_count == 0)
        fprintf(out, "none");
    for (uint32_t i = 0; i < policy->age_count; i++)
        fprintf(out, "%s%" PRIu64, i > 0 ? "," : "", policy->ages[i]);
}

/* Of settings whose value is a text; else NULL. */
static const char *text_of(const struct config *config, const struct setting *setting) {
    static const char *const simds[] = {"auto", "c", "avx2"};
    const void *field = (const char *)config + setting->off;
    switch (setting->kind) {
    case KIND_TEXT:
        return *(const char *const *)field;
    case KIND_PATH:
        return field;
    case KIND_SIMD:
        return simds[*(const enum engine_simd *)field - ENGINE_SIMD_AUTO];
    case KIND_RECIPE:
        return image_recipe_name(((const struct image_policy *)field)->recipe);
    default:
        return NULL;
    }
}

static int is_unset(const struct config *config, const struct setting *setting) {
    const void *field = (const char *)config + setting->off;
    return (setting->kind == KIND_TEXT && *(const char *const *)field == NULL) ||
           (setting->kind == KIND_BYTES && *(const uint64_t *)field == UINT64_MAX);
}

/* "auto", "cpu" or "cuda:1". */
static void device_text(const struct config_device *device, char text[16]) {
    if (device->kind == ENGINE_DEVICE_CUDA)
        snprintf(text, 16, "cuda:%u", device->index & 255);
    else
        snprintf(text, 16, "%s", device->kind == ENGINE_DEVICE_AUTO ? "auto" : "cpu");
}

static void show_value(const struct config *config, const struct setting *setting, FILE *out) {
    char device[16];
    size_t length;
    const void *field = (const char *)config + setting->off;
    const char *text = text_of(config, setting);
    if (setting->kind == KIND_BYTES && is_unset(config, setting)) {
        fprintf(out, "none");
        return;
    }
    switch (setting->kind) {
    case KIND_SWITCH:
        fprintf(out, "%s", *(const int *)field ? "yes" : "no");
        break;
    case KIND_BYTES:
    case KIND_U64:
        fprintf(out, "%" PRIu64, *(const uint64_t *)field);
        break;
    case KIND_U32:
        fprintf(out, "%" PRIu32, *(const uint32_t *)field);
        break;
    case KIND_F32:
        fprintf(out, "%g", (double)*(const float *)field);
        break;
    case KIND_AGES:
        show_ages(field, out);
        break;
    case KIND_DEVICE:
        device_text(field, device);
        fprintf(out, "%s", device);
        break;
    case KIND_CHOICE:
        text = choice(setting, *(const int *)field, &length);
        fprintf(out, "%.*s", (int)length, text);
        break;
    default:
        fprintf(out, "%s", text != NULL ? text : "");
    }
}

static void show_ages_json(const struct image_policy *policy, cJSON *ages) {
    for (uint32_t i = 0; i < policy->age_count; i++)
        cJSON_AddItemToArray(ages, cJSON_CreateNumber((double)policy->ages[i]));
}

static void show_value_json(const struct config *config, const struct setting *setting, cJSON *to) {
    const void *field = (const char *)config + setting->off;
    const char *word;
    char digits[32];
    size_t length;
    if (is_unset(config, setting)) {
        cJSON_AddNullToObject(to, setting->name);
        return;
    }
    switch (setting->kind) {
    case KIND_SWITCH:
        cJSON_AddBoolToObject(to, setting->name, *(const int *)field);
        break;
    case KIND_BYTES:
    case KIND_U64:
        json_text_u64(to, setting->name, *(const uint64_t *)field);
        break;
    case KIND_U32:
        json_text_u64(to, setting->name, *(const uint32_t *)field);
        break;
    case KIND_F32:
        snprintf(digits, sizeof digits, "%g", (double)*(const float *)field);
        cJSON_AddRawToObject(to, setting->name, digits);
        break;
    case KIND_DEVICE:
        device_text(field, digits);
        json_text(to, setting->name, digits);
        break;
    case KIND_AGES:
        show_ages_json(field, cJSON_AddArrayToObject(to, setting->name));
        break;
    case KIND_CHOICE:
        word = choice(setting, *(const int *)field, &length);
        snprintf(digits, sizeof digits, "%.*s", (int)length, word);
        json_text(to, setting->name, digits);
        break;
    default:
        json_text(to, setting->name, text_of(config, setting));
    }
}

void config_show_json(const struct config *config, cJSON *to) {
    json_text(to, "home", config->home);
    cJSON *values = cJSON_AddObjectToObject(to, "settings");
    for (size_t i = 0; i < SETTING_COUNT; i++)
        if (settings[i].in_file)
            show_value_json(config, &settings[i], values);
}

void config_show(const struct config *config, FILE *out) {
    fprintf(out, "# COLDPLANE_HOME is %s; this is its file `config` as in force now\n",
            config->home);
    if (config->file_err != KV_OK)
        fprintf(out, "# %s\n", config->file_diag.text);
    for (size_t i = 0; i < SETTING_COUNT; i++) {
        const struct setting *setting = &settings[i];
        if (!setting->in_file)
            continue;
        int left_out = is_unset(config, setting) && setting->kind == KIND_TEXT;
        fprintf(out, "%s%s = ", left_out ? "# " : "", setting->name);
        show_value(config, setting, out);
        fprintf(out, "\n");
    }
}

void config_help(unsigned groups, FILE *out) {
    for (size_t i = 0; i < SETTING_COUNT; i++) {
        char name[64];
        if ((settings[i].groups & groups) == 0)
            continue;
        snprintf(name, sizeof name, "--%s%s%s", settings[i].name,
                 settings[i].value[0] != 0 ? " " : "", settings[i].value);
        fprintf(out, "  %-26s %s\n", name, settings[i].help);
    }
}
