/* tests/support_gpu.h - services of the programs that try the whole engine on a GPU.
 *
 * Responsible for: slots that are poisoned and shuffled, a ladder that 1,536 tokens go down, greedy
 * answers; a session by name.
 * Not responsible for: which device, model and store.
 *
 * Threads: the main thread.
 * Units: as service.h.
 */
#ifndef TESTS_SUPPORT_GPU_H
#define TESTS_SUPPORT_GPU_H

#include "tools/service.h"

/* The usual ones and the above; model_path, store_dir, program and device are the caller's. */
void support_gpu_settings(struct service_settings *settings_out);
/* Woken or made; the program ends where neither can be (support_tally.h). */
struct session *support_gpu_session(struct service *service, const char *name);

#endif
