/* tools/service.c - store, engine, snapshot and restore put together behind session names.
 *
 * Responsible for: order of opening and closing, the hooks, least-recently-used sleep.
 * Not responsible for: the engine thread (service_share.c), leases (service_lease.c), turns
 * (turn.c), printing.
 *
 * Slots are made free in this order: writes that are under way are waited for, since their blocks
 * then give up unread planes; then sessions under policy `pressure` take steps of their ladder;
 * then idle sessions go to sleep, the least recently used first.
 */
#include "tools/service_inner.h"

#include "store/io.h"
#include "store/store_ram.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

void service_settings_usual(struct service_settings *settings_out) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    *settings_out = (struct service_settings){
        .program = "coldplane",
        .create = 1,
        .direct_wanted = 1,
        .store_bytes_max = STORE_BYTES_UNLIMITED,
        .device = ENGINE_DEVICE_AUTO,
        .device_memory_bytes = UINT64_MAX,
        .simd = ENGINE_SIMD_AUTO,
        .threads = cores < 1     ? 1
                   : cores > 256 ? 256
                                 : (uint32_t)cores,
        .sessions_max = 64,
        .slot_budget_bytes = UINT64_C(1) << 30,
        .reserve_slots = 64,
        .queue_max = 4096,
        .probes = 2,
        .policy = {.recipe = IMAGE_RECIPE_V3, .age_count = 1, .ages = {32768, 0, 0}},
        .sampler = {0.0f, 0.9f, 50, 1},
        .alloc = kv_alloc_system(),
        .clock = kv_clock_system(),
    };
}

/* --- hooks */

static void on_block_sealed(void *context, struct session *session, struct block *block) {
    struct service *service = context;
    snapshot_block_sealed(service->snapshot, session, block);
}

static void on_planes_wanted(void *context, struct session *session, struct block *block) {
    struct service *service = context;
    restore_planes_wanted(&service->source, session, block);
}

static void on_leaving(void *context, struct session *session) {
    struct service *service = context;
    restore_keep(&service->source, session);
}

static enum kv_err show_receipt(struct service *service, const struct receipt *receipt,
                                enum kv_err err) {
    if (service->receipt != NULL && receipt->operation != 0)
        service->receipt_id = service->receipt(service->receipt_context, receipt);
    return err;
}

static uint32_t slots_free(const struct service *service) {
    struct engine_slots slots;
    engine_slots(service->engine, &slots);
    return slots.free;
}

static int is_busy(void *context, const struct session *session) {
    struct session_info info;
    session_info(session, &info);
    return service_is_leased(context, info.name);
}

/* --- room */

static struct session *least_recently_used(struct service *service, const struct session *except,
                                           uint64_t after_ns) {
    struct session *found = NULL;
    uint64_t found_ns = UINT64_MAX;
    struct session *session;
    for (uint32_t i = 0; (session = session_at(service->engine, i)) != NULL; i++) {
        struct session_info info;
        session_info(session, &info);
        if (transfer_durable(session)->pinned || service_is_leased(service, info.name))
            continue;
#ifndef BREAK_JUST_WOKEN
        if (info.unrun) /* one that was just woken runs before it makes room for others */
            continue;
#endif
#ifdef BREAK_LEAST_RECENT
        info.last_used_ns = UINT64_MAX - 1 - info.last_used_ns;
#endif
        if (session == except || info.state != SESSION_IDLE || info.last_used_ns <= after_ns ||
            info.last_used_ns >= found_ns)
            continue;
        found = session;
        found_ns = info.last_used_ns;
    }
    return found;
}

/* Puts one idle session to sleep; one that cannot be saved stays whole and the next is tried. 0
 * when there is none left. */
static int sleep_one(struct service *service, const struct session *except) {
    struct session *session;
    uint64_t tried_ns = 0;
    while ((session = least_recently_used(service, except, tried_ns)) != NULL) {
        struct kv_diag diag = {""};
        struct service_lease lease;
        struct session_info info;
        struct receipt receipt;
        session_info(session, &info);
        service_inner_line_up(service, info.name, "going to sleep", &lease);
        lease.to_sleep = 1;
        tried_ns = info.last_used_ns;
        enum kv_err err = snapshot_sleep(service->snapshot, session, 0, &receipt, &diag);
        if (err != KV_OK) {
            kv_diag_prefix(&diag, "session %s could not be put to sleep", lease.name);
            memcpy(service->note, diag.text, SERVICE_NOTE_BYTES - 1);
        }
        service_lease_end(service, &lease);
        if (show_receipt(service, &receipt, err) == KV_OK) {
            service->note[0] = 0;
            return 1;
        }
    }
    return 0;
}

static int make_some_room(struct service *service, uint32_t slots, const struct session *except) {
    uint32_t before = slots_free(service);
    if (service->snapshot == NULL)
        return 0;
    service_settle(service, NULL);
    snapshot_drain(service->snapshot);
    engine_apply(service->engine);
    /* A session that planes come behind may sleep when they have come. */
    return slots_free(service) > before || engine_relieve(service->engine, slots) > 0 ||
           sleep_one(service, except) || engine_apply(service->engine);
}

/* A sleep under way may itself run short of slots: then nobody else goes for it. Others must not
 * step or change sessions before this call is over, so its waits keep them out. */
static int on_slots_low(void *context, struct session *for_session, uint32_t slots) {
    struct service *service = context;
    struct session_info info;
    if (for_session != NULL) {
        session_info(for_session, &info);
        const struct service_lease *lease = service_inner_lease(service, info.name);
        if (lease != NULL && lease->to_sleep)
            return 0;
    }
    service->staying++;
    int changed = make_some_room(service, slots, for_session);
    service->staying--;
    return changed;
}

static uint32_t on_slots_promised(void *context) {
    struct service *service = context;
    return hearing_promised(&service->hearing, NULL);
}

static void on_away(void *context) {
    struct service *service = context;
    if (service->shared && service->staying == 0)
        baton_give(&service->baton);
}

static void on_back(void *context) {
    struct service *service = context;
    if (service->shared && !baton_is_mine(&service->baton))
        baton_take(&service->baton);
}

/* Asking a session computes as steps do: those who answer get some steps between two pieces, so
 * that it costs them one gap in a few and never every one. */
static int on_breathe(void *context, int small) {
    struct service *service = context;
    return service->shared && service->staying == 0 ? service_inner_let_step(service, small) : 0;
}

/* --- opening */

static enum kv_err open_store(struct service *service, const struct service_settings *settings,
                              int create, struct kv_diag *diag) {
    struct store_options options = store_options_usual(settings->store_dir, settings->program);
    options.read_only = settings->read_only;
    options.create = create;
    options.direct_wanted = settings->direct_wanted;
    store_options_limit(&options, settings->store_bytes_max);
    options.alloc = settings->alloc;
    options.clock = settings->clock;
    if (settings->door != NULL)
        options.door = settings->door;
    return store_open(&options, &service->store, diag);
}

static enum kv_err open_engine(struct service *service, const struct service_settings *settings,
                               struct kv_diag *diag) {
    uint8_t *model = NULL;
    uint64_t model_bytes = 0;
    struct engine_settings engine = {
        .alloc = settings->alloc,
        .clock = settings->clock,
        .hooks = {.context = service, .planes_wanted = on_planes_wanted},
        .device = settings->device,
        .cuda_index = settings->cuda_index,
        .device_memory_bytes = settings->device_memory_bytes,
        .graphs = 1,
        .simd = settings->simd,
        .threads = settings->threads,
        .sessions_max = settings->sessions_max,
        .slots_low_percent = settings->slots_low_percent,
        .slots_high_percent = settings->slots_high_percent,
        .slot_budget_bytes = settings->slot_budget_bytes,
        .reserve_slots = settings->reserve_slots,
        .poison_free_slots = settings->poison_free_slots,
        .shuffle_seed = settings->shuffle_seed,
    };
    if (!settings->read_only) {
        engine.hooks.block_sealed = on_block_sealed;
        engine.hooks.slots_low = on_slots_low;
        engine.hooks.slots_promised = on_slots_promised;
        engine.hooks.away = on_away;
        engine.hooks.back = on_back;
        engine.hooks.breathe = on_breathe;
    }
    enum kv_err err =
        service_read_model(settings->model_path, settings->alloc, &model, &model_bytes, diag);
    if (err != KV_OK)
        return err;
    err = engine_open(&engine, model, (size_t)model_bytes, &service->engine, diag);
    if (err != KV_OK && err != KV_ERR_NOMEM && err != KV_ERR_NO_SLOTS && err != KV_ERR_DEVICE)
        kv_diag_prefix(diag, "model file %s", settings->model_path);
    kv_alloc_release(settings->alloc, model);
    return err;
}

/* The store first: it is quick, and a held lock should not cost the loading of a model. One that is
 * to be made comes last, so that a model that cannot be had leaves none behind. */
static enum kv_err open_both(struct service *service, const struct service_settings *settings,
                             struct kv_diag *diag) {
    int create = settings->create && !settings->read_only, early = 0;
#ifdef BREAK_STORE_EARLY
    early = create;
#endif
    enum kv_err err = open_store(service, settings, early, diag);
    int makes = err == KV_ERR_NOT_FOUND && create;
    if (err != KV_OK && !makes)
        return err;
    if (makes)
        kv_diag_clear(diag);
    err = KV_OK;
#ifndef BREAK_LATE_LOOK
    if (settings->look != NULL)
        err = settings->look(settings->look_context, service->store, diag);
#endif
    if (err == KV_OK)
        err = open_engine(service, settings, diag);
    return err == KV_OK && makes ? open_store(service, settings, 1, diag) : err;
}

/* What opening the store repaired would be forgotten when opening fails behind it. */
static void keep_repairs(struct store *store, struct kv_diag *diag) {
    struct store_stats stats;
    store_stats_get(store, &stats);
    if (stats.opened[0] != 0)
        kv_diag_prefix(diag, "store: %s", stats.opened);
}

/* Who went to sleep by itself leaves a receipt like others. */
static void on_tended(void *context, const struct receipt *receipt) {
    (void)show_receipt(context, receipt, receipt->err);
}

static enum kv_err open_tend(struct service *service, const struct service_settings *settings,
                             struct kv_diag *diag) {
    struct engine_slots slots;
    engine_slots(service->engine, &slots);
    const struct snap_tend_settings tend = {
        .idle_ns = settings->idle_ns,
        .slots_low = (uint32_t)((uint64_t)slots.total * settings->slots_low_percent / 100),
        .slots_high = (uint32_t)((uint64_t)slots.total * settings->slots_high_percent / 100),
        .is_busy = is_busy,
        .busy_context = service,
        .receipt = on_tended,
        .receipt_context = service};
    return snap_tend_open(service->snapshot, &tend, &service->tend, diag);
}

enum kv_err service_open(const struct service_settings *settings, struct service **service_out,
                         struct kv_diag *diag) {
    enum kv_err err = KV_OK;
    struct service *service = kv_alloc_zeroed(settings->alloc, 1, sizeof *service);
    if (service == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory to begin with");
    service->alloc = *settings->alloc;
    service->clock = settings->clock;
    service->policy = settings->policy;
    service->receipt = settings->receipt;
    service->receipt_context = settings->receipt_context;
    service->sampler = settings->sampler;
    service->probes = settings->probes;
    service->wakes = (struct service_wakes){settings->eager, settings->fit};
    service->sessions_max = settings->sessions_max;
    service->leases_end = &service->leases;
    KV_TRY(open_both(service, settings, diag));
    KV_TRY(store_ram_open(service->store, settings->ram_bytes, diag));
    restore_lie(service->store, service->engine);
    KV_TRY(
        hearing_init(&service->hearing, service->engine, settings->alloc, settings->sessions_max));
    service->source = (struct restore_source){.store = service->store,
                                              .engine = service->engine,
                                              .alloc = settings->alloc,
                                              .clock = settings->clock};
    KV_TRY(restore_refine_open(settings->alloc, &service->source.refine));
    if (!settings->read_only) {
        struct snapshot_settings snapshot = {.store = service->store,
                                             .engine = service->engine,
                                             .alloc = settings->alloc,
                                             .clock = settings->clock,
                                             .queue_max = settings->queue_max,
                                             .helpers = snapshot_helpers_usual(),
                                             .probes = settings->probes,
                                             .leaving = on_leaving,
                                             .leaving_context = service};
        KV_TRY(snapshot_open(&snapshot, &service->snapshot, diag));
        KV_TRY(open_tend(service, settings, diag));
        snapshot_write_budget(service->snapshot, settings->write_second_bytes,
                              settings->write_day_bytes);
        snapshot_may_degrade(service->snapshot, settings->may_degrade);
    }
    *service_out = service;
    service = NULL;
done:
    if (service != NULL && service->store != NULL)
        keep_repairs(service->store, diag);
    service_close(service);
    return err;
}

void service_close(struct service *service) {
    if (service == NULL)
        return;
    struct kv_alloc alloc = service->alloc;
    hearing_release(&service->hearing);
    snap_tend_close(service->tend);
    if (service->snapshot != NULL)
        snapshot_close(service->snapshot);
    service->snapshot = NULL;
    /* What was posted may still want to read. A read that timed out may write into the slots until
     * the store is closed, so the engine goes last. */
    while (service->engine != NULL && engine_apply(service->engine))
        ;
    store_close(service->store);
    if (service->engine != NULL)
        engine_close(service->engine);
    restore_refine_close(service->source.refine);
    kv_alloc_release(&alloc, service);
}

struct engine *service_engine(struct service *service) {
    return service->engine;
}

struct store *service_store(struct service *service) {
    return service->store;
}

struct snapshot *service_snapshot(struct service *service) {
    return service->snapshot;
}

const struct kv_alloc *service_alloc(struct service *service) {
    return &service->alloc;
}

const struct kv_clock *service_clock(struct service *service) {
    return service->clock;
}

void service_on_receipt(struct service *service, service_receipt receipt, void *context) {
    service->receipt = receipt;
    service->receipt_context = context;
}

void service_on_lost(struct service *service, void (*lost)(void *context), void *context) {
    service->lost = lost;
    service->lost_context = context;
}

uint64_t service_receipt_id(const struct service *service) {
    return service->receipt_id;
}

const char *service_note(const struct service *service) {
    return service->note;
}

/* --- sessions */

enum kv_err service_make_room(struct service *service, uint32_t slots, struct session *except,
                              struct kv_diag *diag) {
    /* It names another's session: with many clients it is for the log alone. */
    const char *note = service->shared ? "" : service->note;
    for (;;) {
        struct engine_slots now;
        engine_slots(service->engine, &now);
        uint64_t kept = (uint64_t)now.reserve + hearing_promised(&service->hearing, except);
        uint32_t free = now.free > kept ? (uint32_t)(now.free - kept) : 0;
        if (free >= slots)
            return KV_OK;
        if (!make_some_room(service, slots + (uint32_t)(kept - now.reserve), except))
            return kv_diag_set(diag, KV_ERR_NO_SLOTS,
                               "%" PRIu32 " slots are needed, %" PRIu32 " of %" PRIu32
                               " are free beside a reserve of %" PRIu32
                               "; give more with --slots-memory%s%s",
                               slots, free, now.total, now.reserve, note[0] != 0 ? "; " : "", note);
    }
}

struct waking {
    struct restore_options options;
    struct service_wakes wakes;
};

/* Refused before anything is read: the receipt says so all the same. */
static void no_room(const char *name, enum kv_err err, struct receipt *receipt_out,
                    const struct kv_diag *diag) {
    receipt_out->operation = RECEIPT_RESTORE;
    receipt_out->err = err;
    memcpy(receipt_out->name, name, strnlen(name, IMAGE_NAME_BYTES_MAX));
    if (diag != NULL)
        memcpy(receipt_out->reason, diag->text, sizeof receipt_out->reason - 1);
}

/* A session more must not find the engine's table full while others could sleep. */
static enum kv_err make_seat(struct service *service, struct kv_diag *diag) {
    while (session_at(service->engine, service->sessions_max - 1) != NULL)
        if (service->snapshot == NULL || !sleep_one(service, NULL))
            return kv_diag_set(diag, KV_ERR_NO_SLOTS,
                               "%" PRIu32 " sessions are awake and none of them can sleep now; "
                               "allow more with --sessions",
                               service->sessions_max);
    return KV_OK;
}

/* Where what was computed of its tokens is damaged, they may be whole themselves. */
static enum kv_err with_remedy(struct service *service, const char *name, enum kv_err err,
                               struct kv_diag *diag) {
    struct image image;
    if (diag == NULL || (err != KV_ERR_CORRUPT && err != KV_ERR_PROOF))
        return err;
    const struct kv_diag own = *diag;
    image_init(&image);
    int whole = restore_image(service->store, &service->alloc, name, &image, NULL) == KV_OK;
    image_release(&image, &service->alloc);
    if (whole)
        return kv_diag_set(diag, err,
                           "%s; its tokens are whole: `coldplane run %s --prompt TEXT --wake "
                           "recompute`, with no daemon running, computes it again from them",
                           own.text, name);
    return strstr(own.text, "`coldplane scrub`") != NULL
               ? err
               : kv_diag_set(diag, err,
                             "%s; its tokens cannot be read either: `coldplane scrub` names the "
                             "snapshots of it that are whole",
                             own.text);
}

static enum kv_err wake_as(struct service *service, const char *name, const struct waking *waking,
                           struct session **session_out, struct receipt *receipt_out,
                           struct kv_diag *diag) {
    struct restore_options wake = waking->options;
    struct restore_plan plan;
    struct kv_diag small = {""};
    const char *awake = wake.as != NULL ? wake.as : name;
    memset(receipt_out, 0, sizeof *receipt_out);
    if (session_find(service->engine, awake) != NULL)
        return kv_diag_set(diag, KV_ERR_EXISTS, "session %s is awake already", awake);
    /* What becomes a branch must be whole before it goes back. */
    if (waking->wakes.eager && wake.as == NULL)
        wake.tiers = RECEIPT_TIERS_EAGER;
    enum kv_err err = restore_plan(&service->source, name, wake.snapshot, &plan, diag);
    if (err == KV_OK)
        err = make_seat(service, diag);
    if (err == KV_OK)
        err = service_make_room(service, plan.slots, NULL, diag);
    if (err == KV_ERR_NO_SLOTS && waking->wakes.fit && wake.as == NULL &&
        plan.floor_slots < plan.slots &&
        service_make_room(service, plan.floor_slots, NULL, &small) == KV_OK) {
        wake.tiers = RECEIPT_TIERS_FLOOR;
        err = KV_OK;
        kv_diag_clear(diag);
    }
    /* Others may have gone on with the session while room was made: an older one may be gone. */
    if (err == KV_OK && wake.snapshot != 0)
        err = restore_plan(&service->source, name, wake.snapshot, &plan, diag);
    if (err != KV_OK) {
        no_room(name, err, receipt_out, diag);
        /* Too few slots is for the caller to wait for, and a name that is nowhere no session. */
        int is_damage = err == KV_ERR_CORRUPT || err == KV_ERR_VERSION || err == KV_ERR_IO;
        if (is_damage && wake.snapshot == 0)
            err = with_remedy(service, name, show_receipt(service, receipt_out, err), diag);
        return err;
    }
    err = restore_wake(&service->source, name, &wake, session_out, receipt_out, diag);
    /* Nor is it damage when that happens now, or when somebody else has taken the last seat while
     * the disk was read: the caller looks again and no receipt is kept. */
    if (err == KV_ERR_NO_SLOTS || (err == KV_ERR_NOT_FOUND && wake.snapshot != 0))
        return err;
    err = show_receipt(service, receipt_out, err);
    return wake.snapshot == 0 ? with_remedy(service, name, err, diag) : err;
}

enum kv_err service_wake(struct service *service, const char *name,
                         const struct restore_options *options, struct session **session_out,
                         struct receipt *receipt_out, struct kv_diag *diag) {
    struct waking waking = {.options = {.probes_max = service->probes}, .wakes = service->wakes};
    if (options != NULL)
        waking.options = *options;
    return wake_as(service, name, &waking, session_out, receipt_out, diag);
}

enum kv_err service_prefetch(struct service *service, const char *name,
                             struct store_read_stats *stats_out, struct kv_diag *diag) {
    return restore_prefetch(&service->source, name, stats_out, diag);
}

/* What came behind sessions is told once it is over. */
static void tell_refined(struct service *service) {
    struct receipt receipt;
    while (restore_refined(&service->source, &receipt))
        (void)show_receipt(service, &receipt, KV_OK);
}

int service_refine(struct service *service, struct session *session, struct receipt *receipt_out) {
    struct receipt receipt;
    struct session_info info;
    int found = 0;
    session_info(session, &info);
    while (session_promoting(session) && engine_apply(service->engine))
        ;
    while (restore_refined(&service->source, &receipt)) {
        (void)show_receipt(service, &receipt, KV_OK);
        if (strcmp(receipt.name, info.name) != 0)
            continue;
        *receipt_out = receipt;
        found = 1;
    }
    return found;
}

uint64_t service_tend(struct service *service) {
    /* While nobody types the planes that come behind sessions come one block after the other. */
    int more = engine_balance(service->engine);
    tell_refined(service);
    if (more)
        return 0;
    if (service->tend == NULL)
        return SNAP_TEND_NEVER;
    const struct snap_tend_report *report = snap_tend_report(service->tend);
    uint64_t failed = report->failed, slept = report->slept_idle + report->slept_slots;
    uint64_t wait_ns = snap_tend_step(service->tend);
    if (report->failed != failed)
        memcpy(service->note, report->note, sizeof report->note);
    else if (report->slept_idle + report->slept_slots != slept)
        service->note[0] = 0;
    return wait_ns;
}

/* The engine thread looks after a save that it has begun; nobody else may end it. */
static int is_others_save(const struct service *service, const char *name) {
    const char *saved = service->tend != NULL ? snap_tend_under_way(service->tend) : NULL;
    return service->shared && service->staying == 0 && saved != NULL &&
           (name == NULL || strcmp(name, saved) == 0);
}

/* Now somebody waits for the session that goes to sleep. */
static void hurry(struct service *service) {
    struct session *session = session_find(service->engine, snap_tend_under_way(service->tend));
#ifdef BREAK_HURRY
    return;
#endif
    if (session != NULL)
        session_ask_patiently(session, 0);
}

void service_settle(struct service *service, const char *name) {
    while (is_others_save(service, name)) {
        hurry(service);
        service_await(service, SERVICE_LOOK_AGAIN_NS);
    }
    if (!service->shared || service->staying > 0)
        snap_tend_settle(service->tend);
}

/* NOT_FOUND, without a sentence, when it is nowhere. */
static enum kv_err owner_of(struct service *service, const char *name,
                            uint8_t owner_out[IMAGE_OWNER_BYTES], struct kv_diag *diag) {
    struct session *session = session_find(service->engine, name);
    if (session == NULL)
        return snapshot_owner(service->store, name, owner_out, diag);
    memcpy(owner_out, transfer_durable(session)->owner, IMAGE_OWNER_BYTES);
    return KV_OK;
}

static enum kv_err not_here(const char *name, struct kv_diag *diag) {
    return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                       "session %s: not in this store; `coldplane ls` lists what is there", name);
}

static enum kv_err not_yours(const char *name, struct kv_diag *diag) {
    return kv_diag_set(
        diag, KV_ERR_NOT_FOUND,
        "session %s: the name is taken, but not by this key: another one or "
        "`coldplane` itself began it, and keys never see each other's sessions; take "
        "another name, or talk to it with `coldplane chat --session %s`",
        name, name);
}

static enum kv_err create_session(struct service *service, const char *name,
                                  const struct service_lookup *lookup, struct session **session_out,
                                  struct kv_diag *diag) {
    const uint8_t *owner = lookup->owner;
    const struct session_settings settings = {
        .name = name,
        .policy = lookup->policy != NULL ? *lookup->policy : service->policy,
        .sampler = lookup->sampler != NULL ? *lookup->sampler : service->sampler};
    enum kv_err err = session_check_new_name(name, diag);
    if (err == KV_OK)
        err = make_seat(service, diag);
    if (err == KV_OK)
        err = session_create(service->engine, &settings, session_out, diag);
    if (err == KV_OK && owner != NULL)
        memcpy(transfer_durable(*session_out)->owner, owner, IMAGE_OWNER_BYTES);
    return err;
}

enum kv_err service_session(struct service *service, const char *name,
                            const struct service_lookup *lookup, struct session **session_out,
                            struct service_opened *opened_out, struct kv_diag *diag) {
    uint8_t owner[IMAGE_OWNER_BYTES];
    service_settle(service, name);
    memset(opened_out, 0, sizeof *opened_out);
    opened_out->found = SERVICE_RESIDENT;
    enum kv_err err = session_check_name(name, diag);
    if (err != KV_OK)
        return err;
    err = owner_of(service, name, owner, diag);
    if (err != KV_OK && err != KV_ERR_NOT_FOUND)
        return err;
    if (err == KV_ERR_NOT_FOUND && lookup->create) {
        opened_out->found = SERVICE_NEW;
        return create_session(service, name, lookup, session_out, diag);
    }
    int foreign =
        err == KV_OK && lookup->owner != NULL && memcmp(owner, lookup->owner, sizeof owner) != 0;
#ifdef BREAK_FOREIGN_NAME
    foreign = 0;
#endif
    if (err != KV_OK || foreign)
        return foreign ? not_yours(name, diag) : not_here(name, diag);
    *session_out = session_find(service->engine, name);
    if (*session_out != NULL)
        return KV_OK;
    const struct waking waking = {
        .options = {.skip_needles = lookup->skip_needles,
                    .probes_max = lookup->skip_needles ? 0 : service->probes,
                    .snapshot = lookup->snapshot,
                    .progress = lookup->progress,
                    .progress_context = lookup->progress_context},
        .wakes = lookup->wakes != NULL ? *lookup->wakes : service->wakes};
    opened_out->found = SERVICE_WOKEN;
    return wake_as(service, name, &waking, session_out, &opened_out->receipt, diag);
}

int service_is_saved(struct session *session) {
    const struct transfer_durable *durable = transfer_durable(session);
    struct session_info info;
    session_info(session, &info);
    return info.n_kv == 0 || (durable->snapshot != 0 && durable->n_kv == info.n_kv);
}

void service_drop(struct service *service, struct session *session) {
    struct session_info info;
    char name[IMAGE_NAME_BYTES_MAX + 1];
    session_info(session, &info);
    memcpy(name, info.name, strlen(info.name) + 1);
#ifndef BREAK_DROP_ASKED
    /* One that the engine thread is putting to sleep is being asked by it, and may go by itself. */
    service_settle(service, name);
    session = session_find(service->engine, name);
#endif
    if (session == NULL)
        return;
    if (service->snapshot != NULL)
        snapshot_drop(service->snapshot, session);
    else
        session_drop(session);
    service_changed(service);
}

static enum kv_err need_writer(const struct service *service, struct kv_diag *diag) {
    return service->snapshot != NULL
               ? KV_OK
               : kv_diag_set(diag, KV_ERR_INVALID,
                             "the store is open for reading only; nothing can be saved");
}

enum kv_err service_sleep(struct service *service, struct session *session,
                          struct receipt *receipt_out, struct kv_diag *diag) {
    struct session_info info;
    session_info(session, &info);
    memset(receipt_out, 0, sizeof *receipt_out);
    service_settle(service, info.name);
    enum kv_err err = need_writer(service, diag);
    if (err == KV_OK)
        err = snapshot_sleep(service->snapshot, session, 0, receipt_out, diag);
    tell_refined(service);
    return show_receipt(service, receipt_out, err);
}

static enum kv_err save(struct service *service, struct session *session,
                        const struct snapshot_options *options, struct receipt *receipt_out,
                        struct kv_diag *diag) {
    struct session_info info;
    session_info(session, &info);
    memset(receipt_out, 0, sizeof *receipt_out);
    service_settle(service, info.name);
    enum kv_err err = need_writer(service, diag);
    if (err == KV_OK)
        err = snapshot_save(service->snapshot, session, options, receipt_out, diag);
    tell_refined(service);
    return show_receipt(service, receipt_out, err);
}

enum kv_err service_save_tag(struct service *service, struct session *session, const char *tag,
                             struct receipt *receipt_out, struct kv_diag *diag) {
    const struct snapshot_options options = {.is_explicit = 1, .ask = 1, .tag = tag};
    return save(service, session, &options, receipt_out, diag);
}

enum kv_err service_save(struct service *service, struct session *session, int is_explicit,
                         struct receipt *receipt_out, struct kv_diag *diag) {
    const struct snapshot_options options = {.is_explicit = is_explicit, .ask = is_explicit};
    return save(service, session, &options, receipt_out, diag);
}
