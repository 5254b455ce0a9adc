/* tests/support_clang.h - what a build with clang needs, put in front of every file (Makefile).
 *
 * Responsible for: clang 14, which does not know every name that gcc's test of the processor takes.
 * Fuzzers run no kernel, so none may be chosen.
 * Not responsible for: anything in a build with gcc.
 *
 * Threads: none.
 * Units: none.
 */
#ifndef TESTS_SUPPORT_CLANG_H
#define TESTS_SUPPORT_CLANG_H

#define __builtin_cpu_supports(name) 0

#endif
