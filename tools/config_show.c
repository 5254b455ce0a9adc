/* tools/config_show.c - the settings in force, in the file's form, as JSON, and their help.
 *
 * Responsible for: one way to write a value for each kind of setting; comparing two.
 * Not responsible for: the table, reading (config.c).
 */
#include "tools/config_inner.h"
#include "tools/json_text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

/* The words of "exact|eager" by number; NULL behind the last. */
const char *config_inner_choice(const struct config_setting *setting, int index,
                                size_t *length_out) {
    const char *at = setting->value;
    for (; index > 0 && at[strcspn(at, "|")] != 0; index--)
        at += strcspn(at, "|") + 1;
    *length_out = strcspn(at, "|");
    return index == 0 ? at : NULL;
}

static void show_ages(const struct image_policy *policy, FILE *out) {
    if (policy->age_count == 0)
        fprintf(out, "none");
    for (uint32_t i = 0; i < policy->age_count; i++)
        fprintf(out, "%s%" PRIu64, i > 0 ? "," : "", policy->ages[i]);
}

/* Of settings whose value is a text; else NULL. */
static const char *text_of(const struct config *config, const struct config_setting *setting) {
    static const char *const simds[] = {"auto", "c", "avx2"};
    const void *field = (const char *)config + setting->off;
    switch (setting->kind) {
    case CONFIG_KIND_TEXT:
        return *(const char *const *)field;
    case CONFIG_KIND_PATH:
        return field;
    case CONFIG_KIND_SIMD:
        return simds[*(const enum engine_simd *)field - ENGINE_SIMD_AUTO];
    case CONFIG_KIND_RECIPE:
        return image_recipe_name(((const struct image_policy *)field)->recipe);
    default:
        return NULL;
    }
}

static int is_unset(const struct config *config, const struct config_setting *setting) {
    const void *field = (const char *)config + setting->off;
    return (setting->kind == CONFIG_KIND_TEXT && *(const char *const *)field == NULL) ||
           (setting->kind == CONFIG_KIND_BYTES && *(const uint64_t *)field == UINT64_MAX);
}

/* "auto", "cpu" or "cuda:1". */
static void device_text(const struct config_device *device, char text[16]) {
    if (device->kind == ENGINE_DEVICE_CUDA)
        snprintf(text, 16, "cuda:%u", device->index & 255);
    else
        snprintf(text, 16, "%s", device->kind == ENGINE_DEVICE_AUTO ? "auto" : "cpu");
}

static void show_value(const struct config *config, const struct config_setting *setting,
                       FILE *out) {
    char device[16];
    size_t length;
    const void *field = (const char *)config + setting->off;
    const char *text = text_of(config, setting);
    if (setting->kind == CONFIG_KIND_BYTES && is_unset(config, setting)) {
        fprintf(out, "none");
        return;
    }
    switch (setting->kind) {
    case CONFIG_KIND_SWITCH:
        fprintf(out, "%s", *(const int *)field ? "yes" : "no");
        break;
    case CONFIG_KIND_BYTES:
    case CONFIG_KIND_U64:
        fprintf(out, "%" PRIu64, *(const uint64_t *)field);
        break;
    case CONFIG_KIND_U32:
        fprintf(out, "%" PRIu32, *(const uint32_t *)field);
        break;
    case CONFIG_KIND_F32:
        fprintf(out, "%g", (double)*(const float *)field);
        break;
    case CONFIG_KIND_AGES:
        show_ages(field, out);
        break;
    case CONFIG_KIND_DEVICE:
        device_text(field, device);
        fprintf(out, "%s", device);
        break;
    case CONFIG_KIND_CHOICE:
        text = config_inner_choice(setting, *(const int *)field, &length);
        fprintf(out, "%.*s", (int)length, text);
        break;
    default:
        fprintf(out, "%s", text != NULL ? text : "");
    }
}

const char *config_differs(const struct config *config, const struct config *other,
                           unsigned groups) {
    for (size_t i = 0; i < config_inner_count(); i++) {
        char text[2][CONFIG_PATH_BYTES + 1] = {"", ""};
        const struct config *both[2] = {config, other};
        if (!config_inner_is_marked(config->given, i) || (config_inner_at(i)->groups & groups) == 0)
            continue;
        for (int k = 0; k < 2; k++) {
            FILE *out = fmemopen(text[k], CONFIG_PATH_BYTES, "w");
            if (out == NULL)
                return config_inner_at(i)->name;
            show_value(both[k], config_inner_at(i), out);
            fclose(out);
        }
        if (strcmp(text[0], text[1]) != 0)
            return config_inner_at(i)->name;
    }
    return NULL;
}

static void show_ages_json(const struct image_policy *policy, cJSON *ages) {
    for (uint32_t i = 0; i < policy->age_count; i++)
        cJSON_AddItemToArray(ages, cJSON_CreateNumber((double)policy->ages[i]));
}

static void show_value_json(const struct config *config, const struct config_setting *setting,
                            cJSON *to) {
    const void *field = (const char *)config + setting->off;
    const char *word;
    char digits[32];
    size_t length;
    if (is_unset(config, setting)) {
        cJSON_AddNullToObject(to, setting->name);
        return;
    }
    switch (setting->kind) {
    case CONFIG_KIND_SWITCH:
        cJSON_AddBoolToObject(to, setting->name, *(const int *)field);
        break;
    case CONFIG_KIND_BYTES:
    case CONFIG_KIND_U64:
        json_text_u64(to, setting->name, *(const uint64_t *)field);
        break;
    case CONFIG_KIND_U32:
        json_text_u64(to, setting->name, *(const uint32_t *)field);
        break;
    case CONFIG_KIND_F32:
        snprintf(digits, sizeof digits, "%g", (double)*(const float *)field);
        cJSON_AddRawToObject(to, setting->name, digits);
        break;
    case CONFIG_KIND_DEVICE:
        device_text(field, digits);
        json_text(to, setting->name, digits);
        break;
    case CONFIG_KIND_AGES:
        show_ages_json(field, cJSON_AddArrayToObject(to, setting->name));
        break;
    case CONFIG_KIND_CHOICE:
        word = config_inner_choice(setting, *(const int *)field, &length);
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
    for (size_t i = 0; i < config_inner_count(); i++)
        if (config_inner_at(i)->in_file)
            show_value_json(config, config_inner_at(i), values);
}

void config_show(const struct config *config, FILE *out) {
    fprintf(out, "# COLDPLANE_HOME is %s; this is its file `config` as in force now\n",
            config->home);
    if (config->file_err != KV_OK)
        fprintf(out, "# %s\n", config->file_diag.text);
    for (size_t i = 0; i < config_inner_count(); i++) {
        const struct config_setting *setting = config_inner_at(i);
        if (!setting->in_file)
            continue;
        int left_out = is_unset(config, setting) && setting->kind == CONFIG_KIND_TEXT;
        fprintf(out, "%s%s = ", left_out ? "# " : "", setting->name);
        show_value(config, setting, out);
        fprintf(out, "\n");
    }
}

void config_help(unsigned groups, FILE *out) {
    for (size_t i = 0; i < config_inner_count(); i++) {
        char name[64];
        if ((config_inner_at(i)->groups & groups) == 0)
            continue;
        snprintf(name, sizeof name, "--%s%s%s", config_inner_at(i)->name,
                 config_inner_at(i)->value[0] != 0 ? " " : "", config_inner_at(i)->value);
        fprintf(out, "  %-26s %s\n", name, config_inner_at(i)->help);
    }
}
