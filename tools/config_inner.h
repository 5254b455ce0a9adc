/* tools/config_inner.h - the table of settings, for the files that read and show it.
 *
 * Responsible for: what one setting is, looking at the table.
 * Not responsible for: the contract (config.h).
 *
 * Threads: pure.
 * Units: none.
 */
#ifndef TOOLS_CONFIG_INNER_H
#define TOOLS_CONFIG_INNER_H

#include "tools/config.h"

#include <stddef.h>

enum config_kind {
    CONFIG_KIND_SWITCH,
    CONFIG_KIND_TEXT,
    CONFIG_KIND_PATH,
    CONFIG_KIND_BYTES,
    CONFIG_KIND_U32,
    CONFIG_KIND_U64,
    CONFIG_KIND_F32,
    CONFIG_KIND_DEVICE,
    CONFIG_KIND_SIMD,
    CONFIG_KIND_CHOICE, /* an int: which of the words of `value` */
    CONFIG_KIND_RECIPE,
    CONFIG_KIND_AGES
};

struct config_setting {
    const char *name, *alias;
    enum config_kind kind;
    size_t off;
    uint64_t least, most; /* of integers and sizes */
    unsigned groups;
    int in_file;
    const char *value, *help;
};

size_t config_inner_count(void);
const struct config_setting *config_inner_at(size_t index);
int config_inner_is_marked(const uint64_t bits[2], size_t index);
const char *config_inner_choice(const struct config_setting *setting, int value,
                                size_t *length_out);

#endif
