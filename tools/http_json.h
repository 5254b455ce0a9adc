/* tools/http_json.h - JSON from strangers: strict, shallow and counted before a tree is made of it.
 *
 * Responsible for: refusing what is not JSON with the byte where it goes wrong, depth and number of
 * values, text with any bytes as a member of an answer.
 * Not responsible for: what members mean (http_request.h), trees and printing (cJSON).
 *
 * cJSON takes more than JSON (leading zeros, a zero character that cuts a text) and grows a tree of
 * 64 bytes for each `1,`; behind this check it does neither.
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef TOOLS_HTTP_JSON_H
#define TOOLS_HTTP_JSON_H

#include "store/base/diag.h"

#include <stddef.h>

struct cJSON;

enum { HTTP_JSON_DEPTH_MAX = 32, HTTP_JSON_VALUES_MAX = 1 << 20 };

/* KV_OK: one JSON value with white space around it, valid UTF-8, no zero character and no half of a
 * surrogate pair in any text. INVALID with the byte and what was wrong there; LIMIT: nested deeper
 * or more values than the maxima above. */
enum kv_err http_json_check(const char *text, size_t bytes, struct kv_diag *diag);

/* Adds a string; what is not UTF-8 in it, and a zero byte, becomes U+FFFD. Without memory the
 * member is missing, as with cJSON's own calls. `name` NULL: to the end of an array. */
void http_json_text(struct cJSON *to, const char *name, const char *text, size_t bytes);

#endif
