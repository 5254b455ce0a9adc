/* tests/support_engine.h - an engine with a model, and the small loops that tests of it repeat.
 *
 * Responsible for: opening engines over the tiny or the real model, feeding and stepping until
 * idle, greedy settings, a writer and reader of blocks that keeps bytes in memory.
 * Not responsible for: what is compared.
 *
 * Threads: the main thread.
 * Units: tokens.
 */
#ifndef TESTS_SUPPORT_ENGINE_H
#define TESTS_SUPPORT_ENGINE_H

#include "engine/engine.h"
#include "engine/transfer.h"

struct support_engine_options {
    enum engine_simd simd;
    uint32_t threads, sessions_max, slots, reserve;
    int poison;
    uint64_t shuffle_seed;
    struct engine_hooks hooks;
    const struct kv_alloc *alloc; /* NULL: the system's */
};
struct support_engine_options support_engine_default(void); /* avx2 if there, 1 thread, 8, 2000 */

/* Over the tiny model (default options) or a file's bytes. Fails the test on an error. */
struct engine *support_engine_tiny(const struct support_engine_options *options);
/* The real model; skips the test when it is absent. */
struct engine *support_engine_real(const struct support_engine_options *options);
/* A synth model by its name. */
struct engine *support_engine_synth(const struct support_engine_options *options, const char *name);

struct session_settings support_engine_greedy(const char *name, enum image_recipe recipe);
struct session *support_engine_session(struct engine *engine, const char *name,
                                       enum image_recipe recipe);
/* Random ids of plain text, not control tokens. */
void support_engine_ids(uint64_t seed, uint32_t vocab, uint32_t *ids_out, uint32_t count);
/* Steps until nothing is to do; asserts that nothing failed. */
void support_engine_run(struct engine *engine);
/* Feeds and steps until prefilled. */
void support_engine_feed(struct session *session, const uint32_t *ids, uint32_t count);
void support_engine_generate(struct session *session, uint32_t count);

#endif
