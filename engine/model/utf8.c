/* engine/model/utf8.c - one UTF-8 character at a time.
 *
 * Responsible for: the ranges of well-formed UTF-8.
 * Not responsible for: what to do with other bytes.
 */
#include "engine/model/utf8.h"

int utf8_length(const uint8_t *at, size_t left) {
    uint8_t lead = at[0];
    /* The second byte's range is what rules out overlong forms, surrogates and large values. */
    uint8_t second_min = 0x80, second_max = 0xbf;
    int length;
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return UTF8_INVALID;
    length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead == 0xe0)
        second_min = 0xa0;
    if (lead == 0xed)
        second_max = 0x9f;
    if (lead == 0xf0)
        second_min = 0x90;
    if (lead == 0xf4)
        second_max = 0x8f;
    for (int i = 1; i < length; i++) {
        if ((size_t)i >= left)
            return UTF8_UNFINISHED;
        if (at[i] < (i == 1 ? second_min : 0x80) || at[i] > (i == 1 ? second_max : 0xbf))
            return UTF8_INVALID;
    }
    return length;
}
