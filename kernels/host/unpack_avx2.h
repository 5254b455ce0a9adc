/* kernels/host/unpack_avx2.h - planes of one page to signed 8-bit codes in panels, and back.
 *
 * Responsible for: the byte maps of layout.h done on whole words and registers.
 * Not responsible for: scales, floats, which tier to read.
 *
 * A panel is 8 neighbours of the fast axis: K [t / 8][d][t % 8], V [d / 8][t][d % 8]. Missing bits
 * are zero, V's top bit is flipped back, so a code is c & ~(missing bits) as layout.h numbers them.
 *
 * Threads: pure.
 * Units: bytes.
 */
#ifndef KERNELS_HOST_UNPACK_AVX2_H
#define KERNELS_HOST_UNPACK_AVX2_H

#include "kernels/host/leaf.h"

/* Both write 64 * dim bytes, 64-byte aligned. */
void unpack_avx2_k(const struct leaf_planes *page, int8_t *panels);
void unpack_avx2_v(const struct leaf_planes *page, int8_t *panels);

/* Codes [64][dim] of K or V into those planes of `page` that are not NULL. */
void unpack_avx2_write_k(const struct leaf_planes *page, const int8_t *codes);
void unpack_avx2_write_v(const struct leaf_planes *page, const int8_t *codes);

#endif
