/* tests/support_http_picture.h - sessions of two owners, on the device and asleep, with receipts.
 *
 * Responsible for: one constant picture for the status page, /status and /metrics.
 * Not responsible for: being measured: the numbers are made up.
 *
 * Threads: pure.
 * Units: as serve.h.
 */
#ifndef TESTS_SUPPORT_HTTP_PICTURE_H
#define TESTS_SUPPORT_HTTP_PICTURE_H

#include "tools/serve.h"

const struct serve_picture *support_http_picture(void);

#endif
