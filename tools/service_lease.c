/* tools/service_lease.c - who works on which session, and who stands in line for it.
 *
 * Responsible for: the leases of service.h.
 * Not responsible for: what is done under one (service.c), how waiting lets others in
 * (service_share.c).
 */
#include "tools/service_inner.h"

#include <string.h>

struct service_lease *service_inner_lease(const struct service *service, const char *name) {
    for (struct service_lease *lease = service->leases; lease != NULL; lease = lease->next)
        if (strcmp(lease->name, name) == 0)
            return lease;
    return NULL;
}

int service_is_leased(struct service *service, const char *name) {
    return service_inner_lease(service, name) != NULL;
}

int service_has_others(struct service *service, const struct service_lease *lease) {
    return service->leases != lease || lease->next != NULL;
}

const struct service_lease *service_lease_at(struct service *service, uint32_t index) {
    const struct service_lease *lease = service->leases;
    while (lease != NULL && index-- > 0)
        lease = lease->next;
    return lease;
}

void service_inner_line_up(struct service *service, const char *name, const char *who,
                           struct service_lease *lease) {
    memset(lease, 0, sizeof *lease);
    memcpy(lease->name, name, strnlen(name, IMAGE_NAME_BYTES_MAX));
    memcpy(lease->who, who, strnlen(who, SERVICE_WHO_BYTES - 1));
    lease->since_ns = kv_clock_now_ns(service->clock);
    *service->leases_end = lease;
    service->leases_end = &lease->next;
}

void service_lease_end(struct service *service, struct service_lease *lease) {
    struct service_lease **at = &service->leases;
    if (lease->name[0] == 0)
        return;
    while (*at != lease)
        at = &(*at)->next;
    *at = lease->next;
    if (lease->next == NULL)
        service->leases_end = at;
    lease->name[0] = 0;
    service_changed(service);
}

enum kv_err service_lease(struct service *service, const char *name,
                          const struct service_patience *patience, struct service_lease *lease_out,
                          struct kv_diag *diag) {
    enum kv_err err = session_check_name(name, diag);
    if (err != KV_OK) {
        lease_out->name[0] = 0;
        return err;
    }
    service_inner_line_up(service, name, patience->who != NULL ? patience->who : "", lease_out);
    while (service_inner_lease(service, name) != lease_out && err == KV_OK) {
#ifdef BREAK_LEASE
        if (1)
#else
        if (kv_clock_now_ns(service->clock) >= patience->deadline_ns)
#endif
            err = kv_diag_set(diag, KV_ERR_BUSY,
                              "session %s is at work for somebody else; try again later", name);
        else if (patience->cancelled != NULL && patience->cancelled(patience->context))
            err = kv_diag_set(diag, KV_ERR_CANCELLED, "stopped while waiting for session %s", name);
        else
            service_await(service, SERVICE_LOOK_AGAIN_NS);
    }
    lease_out->since_ns = kv_clock_now_ns(service->clock);
    if (err != KV_OK)
        service_lease_end(service, lease_out);
    return err;
}
