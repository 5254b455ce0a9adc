/* tools/json_text.h - members of a JSON document that any strict reader takes.
 *
 * Responsible for: strings that are valid UTF-8 whatever bytes they came from, integers without the
 * rounding of a double.
 * Not responsible for: escaping and printing (cJSON).
 *
 * Threads: pure.
 * Units: none.
 * Errors: none; without memory the member is missing, as with cJSON's own calls.
 */
#ifndef TOOLS_JSON_TEXT_H
#define TOOLS_JSON_TEXT_H

#include <stdint.h>

struct cJSON;

/* The only way text becomes JSON here: what is not UTF-8 in it becomes U+FFFD. */
void json_text(struct cJSON *to, const char *name, const char *text);
/* All 64 bits as digits. */
void json_text_u64(struct cJSON *to, const char *name, uint64_t number);

#endif
