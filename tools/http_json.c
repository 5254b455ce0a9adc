/* tools/http_json.c - JSON from strangers: strict, shallow and counted before a tree is made of it.
 *
 * Responsible for: see http_json.h.
 * Not responsible for: numbers beyond a double (they become infinite in the tree; whoever reads a
 * number checks its range).
 *
 * BREAK_JSON_DEPTH lets values nest without end.
 */
#include "tools/http_json.h"

#include "engine/model/utf8.h"
#include "store/base/alloc.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <string.h>

struct check {
    const char *text;
    size_t bytes, at;
    uint32_t values, depth;
    struct kv_diag *diag;
};

static enum kv_err wrong(const struct check *check, const char *what) {
    return kv_diag_set(check->diag, KV_ERR_INVALID, "not JSON: byte %zu %s", check->at, what);
}

static int peek(const struct check *check) {
    return check->at < check->bytes ? (unsigned char)check->text[check->at] : -1;
}

static void skip_space(struct check *check) {
    while (check->at < check->bytes && strchr(" \t\r\n", check->text[check->at]) != NULL &&
           check->text[check->at] != 0)
        check->at++;
}

/* Four hexadecimal digits behind \u, or -1. */
static int take_hex(struct check *check) {
    int value = 0;
    for (int i = 0; i < 4; i++, check->at++) {
        int c = peek(check);
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static enum kv_err check_escape(struct check *check) {
    int c = peek(check);
    check->at++;
    if (c > 0 && strchr("\"\\/bfnrt", c) != NULL)
        return KV_OK;
    if (c != 'u')
        return wrong(check, "ends an escape that does not exist");
    int unit = take_hex(check);
    if (unit < 0)
        return wrong(check, "is no hexadecimal digit of a \\u escape");
    if (unit == 0)
        return wrong(check, "ends a zero character, which no text may hold");
    if (unit >= 0xdc00 && unit < 0xe000)
        return wrong(check, "ends the second half of a surrogate pair without the first");
    if (unit < 0xd800 || unit >= 0xdc00)
        return KV_OK;
    if (check->bytes - check->at < 6 || memcmp(check->text + check->at, "\\u", 2) != 0)
        return wrong(check, "follows half of a surrogate pair");
    check->at += 2;
    unit = take_hex(check);
    if (unit < 0xdc00 || unit >= 0xe000)
        return wrong(check, "follows half of a surrogate pair");
    return KV_OK;
}

static enum kv_err check_string(struct check *check) {
    if (peek(check) != '"')
        return wrong(check, "should begin a string");
    check->at++;
    for (;;) {
        int c = peek(check);
        if (c < 0)
            return wrong(check, "is the end, inside a string");
        if (c == '"') {
            check->at++;
            return KV_OK;
        }
        if (c < 0x20)
            return wrong(check, "is a control character inside a string");
        if (c == '\\') {
            check->at++;
            enum kv_err err = check_escape(check);
            if (err != KV_OK)
                return err;
            continue;
        }
        if (c < 0x80) {
            check->at++;
            continue;
        }
        int length =
            utf8_length((const uint8_t *)check->text + check->at, check->bytes - check->at);
        if (length <= 0)
            return wrong(check, "is no part of a UTF-8 character");
        check->at += (size_t)length;
    }
}

static size_t take_digits(struct check *check) {
    size_t first = check->at;
    while (peek(check) >= '0' && peek(check) <= '9')
        check->at++;
    return check->at - first;
}

static enum kv_err check_number(struct check *check) {
    if (peek(check) == '-')
        check->at++;
    if (peek(check) == '0')
        check->at++;
    else if (take_digits(check) == 0)
        return wrong(check, "begins no value");
    if (peek(check) == '.') {
        check->at++;
        if (take_digits(check) == 0)
            return wrong(check, "should be a digit");
    }
    if (peek(check) == 'e' || peek(check) == 'E') {
        check->at++;
        if (peek(check) == '+' || peek(check) == '-')
            check->at++;
        if (take_digits(check) == 0)
            return wrong(check, "should be a digit");
    }
    return KV_OK;
}

static enum kv_err check_word(struct check *check) {
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t bytes = strlen(words[i]);
        if (check->bytes - check->at >= bytes &&
            memcmp(check->text + check->at, words[i], bytes) == 0) {
            check->at += bytes;
            return KV_OK;
        }
    }
    return wrong(check, "begins no value");
}

static enum kv_err check_value(struct check *check);

/* The members of an object or the items of an array, from behind the opening to the closing. */
static enum kv_err check_inside(struct check *check, int close) {
    skip_space(check);
    if (peek(check) == close) {
        check->at++;
        return KV_OK;
    }
    for (;;) {
        enum kv_err err = KV_OK;
        skip_space(check);
        if (close == '}') {
            err = check_string(check);
            if (err != KV_OK)
                return err;
            skip_space(check);
            if (peek(check) != ':')
                return wrong(check, "should be a colon");
            check->at++;
        }
        err = check_value(check);
        if (err != KV_OK)
            return err;
        if (peek(check) == close) {
            check->at++;
            return KV_OK;
        }
        if (peek(check) != ',')
            return wrong(check, close == '}' ? "should be a comma or a closing brace"
                                             : "should be a comma or a closing bracket");
        check->at++;
    }
}

static enum kv_err check_value(struct check *check) {
    enum kv_err err = KV_OK;
    skip_space(check);
    if (++check->values > HTTP_JSON_VALUES_MAX)
        return kv_diag_set(check->diag, KV_ERR_LIMIT, "more than %d JSON values",
                           HTTP_JSON_VALUES_MAX);
    int c = peek(check);
    if (c == '{' || c == '[') {
#ifndef BREAK_JSON_DEPTH
        if (check->depth == HTTP_JSON_DEPTH_MAX)
            return kv_diag_set(check->diag, KV_ERR_LIMIT,
                               "JSON nested more than %d deep at byte %zu", HTTP_JSON_DEPTH_MAX,
                               check->at);
#endif
        check->depth++;
        check->at++;
        err = check_inside(check, c == '{' ? '}' : ']');
        check->depth--;
    } else if (c == '"') {
        err = check_string(check);
    } else if (c == 't' || c == 'f' || c == 'n') {
        err = check_word(check);
    } else {
        err = c < 0 ? wrong(check, "is the end, where a value should begin") : check_number(check);
    }
    if (err == KV_OK)
        skip_space(check);
    return err;
}

enum kv_err http_json_check(const char *text, size_t bytes, struct kv_diag *diag) {
    struct check check = {text, bytes, 0, 0, 0, diag};
    enum kv_err err = check_value(&check);
    if (err == KV_OK && check.at != bytes)
        return wrong(&check, "follows the end of the value");
    return err;
}

void http_json_text(cJSON *to, const char *name, const char *text, size_t bytes) {
    const struct kv_alloc *alloc = kv_alloc_system();
    char *valid = kv_alloc_zeroed(alloc, TEXT_VALID_GROWTH, bytes + 1);
    if (valid == NULL)
        return;
    size_t count = 0;
    for (size_t first = 0; first < bytes;) {
        size_t run = strnlen(text + first, bytes - first);
        count += text_valid(text + first, run, valid + count);
        first += run;
        if (first < bytes) {
            count += text_valid("\xff", 1, valid + count);
            first++;
        }
    }
    cJSON *item = cJSON_CreateString(valid);
    if (item != NULL &&
        !(name != NULL ? cJSON_AddItemToObject(to, name, item) : cJSON_AddItemToArray(to, item)))
        cJSON_Delete(item);
    kv_alloc_release(alloc, valid);
}
