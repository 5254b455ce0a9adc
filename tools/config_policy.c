/* tools/config_policy.c - how a new session keeps its KV, said in several settings.
 *
 * Responsible for: refusing recipe, policy, top and ages that do not fit together, and the
 * watermarks that go with policy `pressure`.
 * Not responsible for: reading them (config.c).
 */
#include "tools/config.h"

#include <inttypes.h>
#include <string.h>

/* A flag, or a line of the file, that means nothing beside `other`. */
static enum kv_err refuse_beside(const struct config *config, const char *name, const char *other,
                                 const char *why, struct kv_diag *diag) {
    if (config_given(config, name))
        return kv_diag_set(diag, KV_ERR_INVALID, "--%s: %s; leave --%s out or change --%s", name,
                           why, name, other);
    if (config_stated(config, name) && !config_given(config, other))
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "configuration %s/config: %s, so `%s` means nothing; take one of the "
                           "two lines out",
                           config->home, why, name);
    return KV_OK;
}

enum kv_err config_settle_policy(struct config *config, struct kv_diag *diag) {
    static const char one_tier[] = "recipe bf16 has one tier only";
    struct image_policy *policy = &config->policy;
    enum kv_err err = KV_OK;
    if (policy->recipe == IMAGE_RECIPE_BF16) {
        static const char *const names[] = {"ages", "policy", "top"};
        const int said[] = {1, policy->pressure, policy->top_k8v8};
        for (int i = 0; i < 3; i++)
            if (said[i])
                KV_TRY(refuse_beside(config, names[i], "recipe", one_tier, diag));
        *policy = (struct image_policy){.recipe = IMAGE_RECIPE_BF16};
    }
    if (policy->pressure) {
        KV_TRY(refuse_beside(config, "ages", "policy", "policy pressure knows no ages", diag));
        policy->age_count = 0;
        memset(policy->ages, 0, sizeof policy->ages);
        if (!config_stated(config, "slots-low") && !config_stated(config, "slots-high")) {
            config->slots_low_percent = 5;
            config->slots_high_percent = 15;
        }
    }
    if (policy->recipe != IMAGE_RECIPE_BF16 && policy->age_count > image_steps(policy))
        err = kv_diag_set(diag, KV_ERR_INVALID,
                          "--ages: %" PRIu32 " distances; the ladder from %s down has %" PRIu32
                          " steps with recipe %s",
                          policy->age_count, layout_tier_name(image_top(policy)),
                          image_steps(policy), image_recipe_name(policy->recipe));
done:
    return err;
}
