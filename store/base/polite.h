/* store/base/polite.h - threads whose work is not what anybody waits for this moment.
 *
 * Responsible for: a lower priority of the calling thread.
 * Not responsible for: which threads those are.
 *
 * Threads: any.
 * Units: none.
 */
#ifndef STORE_BASE_POLITE_H
#define STORE_BASE_POLITE_H

/* From now on whoever computes goes before the calling thread; on Linux it is that thread alone. It
 * stays so, and no thread needs a right for it. Threads that it starts begin as polite. */
void kv_polite(void);

#endif
