/* tools/serve_find.c - which session a request goes on in.
 *
 * Responsible for: names: the client's own, that of a session which begins alike, or a new one that
 * nobody has.
 * Not responsible for: which one begins alike (prefix.c), whether it still does under its lease
 * (serve_turn.c).
 */
#include "tools/serve_find.h"

#include "tools/serve_inner.h"

#include <stdio.h>
#include <string.h>

/* The time in nanoseconds is unique as long as no clock goes back; then the name is taken and the
 * next number is tried. */
static enum kv_err new_name(struct serve *serve, struct serve_place *place, struct kv_diag *diag) {
    struct service *service = serve->service;
    uint64_t number = kv_clock_wall_ns(serve->clock);
    enum kv_err err = KV_OK;
    for (place->create = 1; err == KV_OK; number++) {
        struct snapshot_entry entry;
        snprintf(place->session, sizeof place->session, "api-%016llx", (unsigned long long)number);
        if (session_find(service_engine(service), place->session) != NULL ||
            service_is_leased(service, place->session))
            continue;
        err = snapshot_find(service_store(service), &serve->alloc, place->session, &entry, NULL);
    }
    return err == KV_ERR_NOT_FOUND ? KV_OK
                                   : kv_diag_set(diag, err, "no name can be found for a session");
}

static int is_leased(void *context, const char *name) {
    return service_is_leased(((struct serve *)context)->service, name);
}

static enum kv_err find_alike(struct serve *serve, const struct serve_find *find,
                              struct serve_place *place, struct kv_diag *diag) {
    const struct turn_rendered *rendered = find->rendered;
    const struct prefix_wish wish = {.owner = find->request->owner,
                                     .ids = rendered->ids.items,
                                     .count = rendered->ids.count,
                                     .spans = rendered->spans.items,
                                     .span_count = rendered->spans.count,
                                     .is_busy = is_leased,
                                     .context = serve};
    enum kv_err err = prefix_find(serve->prefix, &wish, &place->from, diag);
    if (err != KV_OK || !place->from.found || place->from.forks)
        return err == KV_OK ? new_name(serve, place, diag) : err;
    memcpy(place->session, place->from.name, sizeof place->session);
    return KV_OK;
}

enum kv_err serve_find_place(struct serve *serve, const struct serve_find *find,
                             struct serve_place *place_out, struct kv_diag *diag) {
    const char *named = find->request->session;
    memset(place_out, 0, sizeof *place_out);
    if (named == NULL)
        return find_alike(serve, find, place_out, diag);
    enum kv_err err = session_check_name(named, diag);
    if (err != KV_OK)
        return err;
    memcpy(place_out->session, named, strlen(named) + 1);
    place_out->create = 1;
    return KV_OK;
}
