/* tests/support_golden.h - stores that were made once, and recipes that break copies of them.
 *
 * Responsible for: reading a file of tests/golden/, doing its damage to a copy of a store, handing
 * out the report that must come of it.
 * Not responsible for: making the report.
 *
 * A file has lines `flip FILE OFF BITS`, `cut FILE BYTES`, `remove FILE`, `copy FILE FROM TO PAGES`
 * or `nothing`, then `report`, then what must come out. The stores and the damage are never edited:
 * a later version adds its own beside them.
 *
 * Threads: the main thread.
 * Units: bytes, pages.
 */
#ifndef TESTS_SUPPORT_GOLDEN_H
#define TESTS_SUPPORT_GOLDEN_H

enum { SUPPORT_GOLDEN_TEXT_BYTES = 8192 };

/* Fails the test when a line cannot be understood. */
void support_golden_break(const char *file_path, const char *dir,
                          char expected_out[SUPPORT_GOLDEN_TEXT_BYTES]);
/* Calls `each` with the path of every recipe in a folder; returns how many. */
unsigned support_golden_each(const char *folder, void (*each)(const char *file_path));

#endif
