/* tests/support_tensor.h - random GGUF tensors and the exact value of each of their weights.
 *
 * Responsible for: a second, independent reading of the block formats, in double precision.
 * Not responsible for: packing or multiplying (that is what the tests compare with this).
 *
 * Threads: pure.
 * Units: rows are outputs n, columns inputs k.
 */
#ifndef TESTS_SUPPORT_TENSOR_H
#define TESTS_SUPPORT_TENSOR_H

#include "kernels/ops.h"
#include "tests/testing.h"

enum { SUPPORT_TENSOR_TYPES = 6 };

extern const enum ops_type support_tensor_types[SUPPORT_TENSOR_TYPES];

struct support_tensor {
    enum ops_type type;
    uint32_t n;
    uint32_t k;
    uint8_t *source;          /* as in a file */
    struct ops_weight weight; /* the same, packed */
};

/* Finite weights of magnitude about 1, negative scales and subnormal halves among them. */
struct support_tensor support_tensor_make(enum ops_type type, uint32_t n, uint32_t k,
                                          struct testing_random *random);
void support_tensor_drop(struct support_tensor *tensor);

double support_tensor_value(const struct support_tensor *tensor, uint32_t row, uint32_t column);

#endif
