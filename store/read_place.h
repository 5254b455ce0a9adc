/* store/read_place.h - where the bytes of one extent belong.
 *
 * Responsible for: whether they fit, copying and unzipping them there, their digest there.
 * Not responsible for: reading them (store_read.c).
 *
 * Threads: pure; a codec has one owner.
 * Units: bytes.
 */
#ifndef STORE_READ_PLACE_H
#define STORE_READ_PLACE_H

#include "store/codec.h"
#include "store/store_read.h"

const char *read_place_label(const struct store_read *read); /* never NULL */
/* Why a read has the result it has: `error` is an errno, or else `why` says it. */
void read_place_tell(const struct store_read *read, int error, const char *why,
                     struct kv_diag *diag);
/* INVALID: the pieces are not as long as the extent, or its codec is unknown. */
enum kv_err read_place_check(const struct store_read *read, struct kv_diag *diag);
/* 1 when every piece begins, and all but the last end, at a page. */
int read_place_is_pages(const struct store_read *read);
/* Bytes of a raw extent, from `off` on, into the pieces. */
void read_place_scatter(const struct store_read *read, uint64_t off, const uint8_t *from,
                        size_t count);
int read_place_zeros(const uint8_t *bytes, size_t count);
/* A compressed extent into the pieces. CORRUPT, NOMEM. */
enum kv_err read_place_unzip(struct codec *codec, const struct store_read *read,
                             const uint8_t *packed);
int read_place_digest_holds(const struct store_read *read);

#endif
