/* tools/receipt_print.h - a receipt as JSON and as a table.
 *
 * Responsible for: the published schema "coldplane-receipt" of version RECEIPT_VERSION: every field
 * of struct receipt under a fixed name; ids as 16 hex digits, since JSON numbers end at 2^53.
 * Not responsible for: filling receipts in.
 *
 * Threads: pure; printing to one stream.
 * Units: in the names of the fields.
 */
#ifndef TOOLS_RECEIPT_PRINT_H
#define TOOLS_RECEIPT_PRINT_H

#include "engine/receipt.h"

#include <stdio.h>

struct cJSON;

/* How a session keeps its KV: recipe, policy, top, ages or blocks lowered; and since when. */
void receipt_print_policy_json(const struct image_policy *policy, struct cJSON *to);
void receipt_print_history_json(const struct image_policy_change *policies, uint32_t count,
                                struct cJSON *to);
void receipt_print_policy(const struct image_policy *policy, FILE *out);

/* Owned by the caller (cJSON_Delete); NULL when there is no memory. */
struct cJSON *receipt_print_json(const struct receipt *receipt);
void receipt_print_table(const struct receipt *receipt, FILE *out);
/* One line: "woken, 2,048 tokens reused, 0 prefilled, 12.1 MiB read in 34 ms, bits equal". */
void receipt_print_line(const struct receipt *receipt, FILE *out);

#endif
