/* store/base/polite.c - threads whose work is not what anybody waits for this moment.
 *
 * Responsible for: what polite.h says.
 * Not responsible for: which threads those are.
 */
#include "store/base/polite.h"

#include <sys/resource.h>

enum { NICE = 5 };

void kv_polite(void) {
#ifdef BREAK_POLITE
    return;
#endif
    (void)setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + NICE);
}
