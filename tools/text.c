/* tools/text.c - text for people: clean, short, with units.
 *
 * Responsible for: see text.h.
 * Not responsible for: what is printed (the commands).
 */
#include "tools/text.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>

/* C0, DEL, C1, and the direction marks U+200E, 200F, 202A to 202E, 2066 to 2069. */
static int is_unwanted(uint32_t c) {
#ifdef BREAK_CLEAN_TEXT
    return 0;
#endif
    if (c == '\n' || c == '\t')
        return 0;
    return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x200e || c == 0x200f ||
           (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

/* Length of the character at `at`; 0 when the bytes there are not UTF-8: overlong forms,
 * surrogates and values beyond U+10FFFF are not. */
static size_t character(const uint8_t *at, size_t left, uint32_t *c_out) {
    size_t length = at[0] < 0x80 ? 1 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    uint32_t c = length == 1 ? at[0] : at[0] & (0x7fU >> length);
    if (length > left || (at[0] >= 0x80 && at[0] < 0xc2) || at[0] > 0xf4)
        return 0;
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (at[i] & 0x3f);
    }
    if ((length == 3 && c < 0x800) || (length == 4 && c < 0x10000) || c > 0x10ffff ||
        (c >= 0xd800 && c < 0xe000))
        return 0;
    *c_out = c;
    return length;
}

void text_print_clean(FILE *out, const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        uint32_t c = 0;
        size_t length = character((const uint8_t *)text + at, bytes - at, &c);
        if (length == 0)
            fputc('?', out);
        else if (!is_unwanted(c))
            fwrite(text + at, 1, length, out);
        at += length == 0 ? 1 : length;
    }
}

size_t text_valid(const char *text, size_t bytes, char *out) {
    size_t at = 0, wrote = 0;
    while (at < bytes) {
        uint32_t c = 0;
        size_t length = character((const uint8_t *)text + at, bytes - at, &c);
        if (length == 0)
            memcpy(out + wrote, "\xef\xbf\xbd", 3);
        else
            memcpy(out + wrote, text + at, length);
        wrote += length == 0 ? 3 : length;
        at += length == 0 ? 1 : length;
    }
    out[wrote] = 0;
    return wrote;
}

int text_is_plain(const char *text) {
    size_t bytes = strlen(text), at = 0;
    while (at < bytes) {
        uint32_t c = 0;
        size_t length = character((const uint8_t *)text + at, bytes - at, &c);
        if (length == 0 || c == '\n' || c == '\t' || is_unwanted(c))
            return 0;
        at += length;
    }
    return 1;
}

const char *text_size(uint64_t bytes, char out[TEXT_SHORT_BYTES]) {
    static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1024 && unit < 4) {
        value /= 1024;
        unit++;
    }
    snprintf(out, TEXT_SHORT_BYTES, unit == 0 ? "%.0f %s" : "%.1f %s", value, names[unit]);
    return out;
}

const char *text_duration(uint64_t ns, char out[TEXT_SHORT_BYTES]) {
    if (ns >= 10000000000U)
        snprintf(out, TEXT_SHORT_BYTES, "%.1f s", (double)ns / 1e9);
    else if (ns >= 1000000000U)
        snprintf(out, TEXT_SHORT_BYTES, "%.2f s", (double)ns / 1e9);
    else if (ns >= 1000000U)
        snprintf(out, TEXT_SHORT_BYTES, ns >= 100000000U ? "%.0f ms" : "%.1f ms", (double)ns / 1e6);
    else
        snprintf(out, TEXT_SHORT_BYTES, "%.0f µs", (double)ns / 1e3);
    return out;
}

const char *text_age(uint64_t ns, char out[TEXT_SHORT_BYTES]) {
    uint64_t seconds = ns / 1000000000U;
    if (seconds < 120)
        snprintf(out, TEXT_SHORT_BYTES, "%" PRIu64 " s", seconds);
    else if (seconds < 7200)
        snprintf(out, TEXT_SHORT_BYTES, "%" PRIu64 " min", seconds / 60);
    else if (seconds < 172800)
        snprintf(out, TEXT_SHORT_BYTES, "%" PRIu64 " h", seconds / 3600);
    else
        snprintf(out, TEXT_SHORT_BYTES, "%" PRIu64 " d", seconds / 86400);
    return out;
}

const char *text_count(uint64_t count, const char *noun, char out[TEXT_SHORT_BYTES]) {
    size_t length = strlen(noun);
    int hisses = length > 2 && strcmp(noun + length - 2, "ch") == 0;
    snprintf(out, TEXT_SHORT_BYTES, "%" PRIu64 " %.10s%s", count, noun,
             count == 1 ? ""
             : hisses   ? "es"
                        : "s");
    return out;
}

const char *text_when(uint64_t wall_ns, char out[TEXT_SHORT_BYTES]) {
    time_t seconds = (time_t)(wall_ns / 1000000000U);
    struct tm parts;
    if (gmtime_r(&seconds, &parts) == NULL ||
        strftime(out, TEXT_SHORT_BYTES, "%Y-%m-%d %H:%M:%S", &parts) == 0)
        snprintf(out, TEXT_SHORT_BYTES, "?");
    return out;
}

enum kv_err text_read_all(FILE *in, const struct kv_alloc *alloc, char **text_out,
                          size_t *bytes_out, struct kv_diag *diag) {
    void *text = NULL;
    size_t capacity = 0, bytes = 0;
    enum kv_err err = KV_OK;
    while (err == KV_OK) {
        if (!kv_alloc_grow(alloc, &text, &capacity, bytes + 65536, 1)) {
            err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for more than %zu bytes of input",
                              bytes);
            break;
        }
        size_t got = fread((char *)text + bytes, 1, 65535, in);
        bytes += got;
        if (bytes > TEXT_STREAM_BYTES_MAX)
            err = kv_diag_set(diag, KV_ERR_LIMIT, "standard input is longer than %d MiB",
                              TEXT_STREAM_BYTES_MAX >> 20);
        else if (got < 65535 && ferror(in))
            err = kv_diag_errno(diag, KV_ERR_IO, errno, "standard input");
        else if (got < 65535)
            break;
    }
    if (err != KV_OK) {
        kv_alloc_release(alloc, text);
        return err;
    }
    ((char *)text)[bytes] = 0;
    *text_out = text;
    *bytes_out = bytes;
    return KV_OK;
}
