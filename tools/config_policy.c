/* tools/config_policy.c - how a new session keeps its KV, said in several settings.
 *
 * Responsible for: refusing recipe, policy, top and ages that do not fit together, and the
 * watermarks that go with policy `pressure`.
 * Not responsible for: reading them (config.c).
 */
#include "tools/config.h"

#include <inttypes.h>
#include <stdio.h>
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
    struct image_policy *policy = &config->policy;
    const struct image_policy alone = {.recipe = policy->recipe};
    int one_tier = image_steps(&alone) == 0;
    char why[48];
    enum kv_err err = KV_OK;
    if (one_tier) {
        static const char *const names[] = {"ages", "policy", "top"};
        const int said[] = {1, policy->pressure, policy->top_k8v8};
        snprintf(why, sizeof why, "recipe %s has one tier only", image_recipe_name(policy->recipe));
        for (int i = 0; i < 3; i++)
            if (said[i])
                KV_TRY(refuse_beside(config, names[i], "recipe", why, diag));
        *policy = alone;
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
    if (!one_tier && policy->age_count > image_steps(policy))
        err = kv_diag_set(diag, KV_ERR_INVALID,
                          "--ages: %" PRIu32 " distances; the ladder from %s down has %" PRIu32
                          " steps with recipe %s",
                          policy->age_count, layout_tier_name(image_top(policy)),
                          image_steps(policy), image_recipe_name(policy->recipe));
done:
    return err;
}
