/* tests/support_gpu.c - what gpu_engine and gpu_faults open alike.
 *
 * Responsible for: the contract of support_gpu.h.
 * Not responsible for: what is tried.
 */
#include "tests/support_gpu.h"

#include "tests/support_tally.h"

void support_gpu_settings(struct service_settings *settings_out) {
    service_settings_usual(settings_out);
    settings_out->slot_budget_bytes = UINT64_C(600) << 20;
    settings_out->poison_free_slots = 1;
    settings_out->shuffle_seed = 4711;
    settings_out->policy =
        (struct image_policy){.recipe = IMAGE_RECIPE_V3, .age_count = 3, .ages = {512, 1024, 1536}};
    settings_out->sampler =
        (struct image_sampler){.temperature = 0, .top_p = 1, .top_k = 1, .seed = 1};
}

struct session *support_gpu_session(struct service *service, const char *name) {
    const struct service_lookup lookup = {.create = 1};
    struct service_opened opened;
    struct session *session = NULL;
    struct kv_diag diag = {""};

    tally_need(service_session(service, name, &lookup, &session, &opened, &diag), &diag, name);
    return session;
}
