/* engine/model/template_inner.h - what a recognised chat template consists of.
 *
 * Responsible for: what template_make.c fills and template.c reads.
 * Not responsible for: anything outside these two files.
 *
 * Threads: as template.h.
 * Units: bytes; token ids.
 */
#ifndef ENGINE_MODEL_TEMPLATE_INNER_H
#define ENGINE_MODEL_TEMPLATE_INNER_H

#include "engine/model/template.h"

struct template {
    const struct kv_alloc *alloc;
    const struct tokenizer *tokenizer;
    enum template_kind kind;
    uint32_t open_id;       /* opens a turn */
    uint32_t header_end_id; /* Llama-3: ends the role */
    uint32_t end_id;        /* ends a turn */
    int32_t bos_id;         /* in front of the first turn, or TOKENIZER_NONE */
    char *system;           /* default system message */
    size_t system_bytes;
    char *preamble; /* in front of every system message */
    size_t preamble_bytes;
};

#endif
