/* tools/json_text.c - members of a JSON document that any strict reader takes.
 *
 * Responsible for: see json_text.h.
 * Not responsible for: what is said (the commands).
 */
#include "tools/json_text.h"

#include "tools/text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

void json_text(cJSON *to, const char *name, const char *text) {
    const struct kv_alloc *alloc = kv_alloc_system();
    size_t bytes = strlen(text);
    char *valid = kv_alloc_zeroed(alloc, TEXT_VALID_GROWTH, bytes + 1);
    if (valid == NULL)
        return;
    text_valid(text, bytes, valid);
    cJSON_AddStringToObject(to, name, valid);
    kv_alloc_release(alloc, valid);
}

void json_text_u64(cJSON *to, const char *name, uint64_t number) {
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRIu64, number);
    cJSON_AddRawToObject(to, name, digits);
}
