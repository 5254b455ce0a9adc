/* tests/support_plain_io.h - the door to the file system without threads.
 *
 * Responsible for: a queue whose requests are done when they have been submitted, and syncs and
 * space taken ahead that cost nothing, for tests that commit very often and fail nothing.
 * Not responsible for: the file calls, which are those of the product.
 *
 * Threads: as io.h.
 * Units: as io.h.
 */
#ifndef TESTS_SUPPORT_PLAIN_IO_H
#define TESTS_SUPPORT_PLAIN_IO_H

#include "store/io.h"

const struct io_door *support_plain_io_door(void);

#endif
