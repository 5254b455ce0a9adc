/* engine/kv/slots.c - the pool of equal slots that every part of every session lives in.
 *
 * Responsible for: turning a byte budget into slots and frames, the free list.
 * Not responsible for: what stands in a slot.
 */
#include "engine/kv/slots.h"

#include "store/base/bytes.h"

#include <assert.h>

static uint64_t mix(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static void fill_free_list(struct slots *slots) {
    uint64_t state = slots->settings.shuffle_seed;

    for (uint32_t i = 0; i < slots->total; i++)
        slots->free_list[i] = slots->total - 1 - i;
    for (uint32_t i = slots->total; slots->settings.shuffle_seed && i > 1; i--) {
        uint32_t other = (uint32_t)(mix(&state) % i);
        uint32_t kept = slots->free_list[i - 1];
        slots->free_list[i - 1] = slots->free_list[other];
        slots->free_list[other] = kept;
    }
    slots->free_count = slots->total;
}

enum kv_err slots_init(const struct slots_settings *settings, struct slots *slots_out,
                       struct kv_diag *diag) {
    struct slots *slots = slots_out;
    uint64_t group, groups;

    *slots = (struct slots){.settings = *settings};
    slots->slot_bytes = layout_slot_bytes(&settings->geometry);
    slots->frame_bytes = layout_meta_frame_bytes(&settings->geometry);
    group = SLOTS_PER_FRAME * slots->slot_bytes + slots->frame_bytes;
    groups = settings->budget_bytes / group;
    if (groups > UINT32_MAX / SLOTS_PER_FRAME / 2)
        return kv_diag_set(
            diag, KV_ERR_LIMIT,
            "a slot budget of %llu bytes is too large: give less with --slots-memory",
            (unsigned long long)settings->budget_bytes);
    slots->total = (uint32_t)groups * SLOTS_PER_FRAME;
    slots->frames = (uint32_t)groups;
    slots->pool_bytes = groups * group;
    if (slots->total < LAYOUT_PAGE_SLOTS * (LAYOUT_WINDOW_PAGES_MAX + 1) + settings->reserve)
        return kv_diag_set(diag, KV_ERR_NO_SLOTS,
                           "a slot budget of %llu bytes gives %u slots; one session needs %u and "
                           "the reserve %u: give more with --slots-memory",
                           (unsigned long long)settings->budget_bytes, slots->total,
                           LAYOUT_PAGE_SLOTS * (LAYOUT_WINDOW_PAGES_MAX + 1), settings->reserve);
    slots->free_list = kv_alloc_zeroed(settings->alloc, slots->total, sizeof *slots->free_list);
    slots->pool.geometry = settings->geometry;
    slots->pool.slots = device_get(settings->device, slots->pool_bytes);
    if (!slots->free_list || !slots->pool.slots)
        return kv_diag_set(diag, KV_ERR_NOMEM,
                           "no memory for a slot pool of %llu bytes: give less with --slots-memory",
                           (unsigned long long)slots->pool_bytes);
    slots->pool.meta = slots->pool.slots + slots->total * slots->slot_bytes;
    void *const parts[] = {slots->pool.slots};
    const struct device_fill all = {parts, 1, SLOTS_POISON, slots->pool_bytes};
    if (settings->poison)
        device_fill(settings->device, &all);
    fill_free_list(slots);
    return KV_OK;
}

void slots_release(struct slots *slots) {
    if (slots->pool.slots)
        device_put(slots->settings.device, slots->pool.slots);
    kv_alloc_release(slots->settings.alloc, slots->free_list);
    *slots = (struct slots){0};
}

static void poison(struct slots *slots) {
    const struct device_fill fill = {slots->gathered, slots->gathered_count, SLOTS_POISON,
                                     slots->slot_bytes};
    const struct device_fill frames = {slots->gathered_frames, slots->gathered_frame_count,
                                       SLOTS_POISON, slots->frame_bytes};

    device_fill(slots->settings.device, &fill);
    device_fill(slots->settings.device, &frames);
    slots->gathered_count = slots->gathered_frame_count = 0;
}

static void gather(struct slots *slots, const uint32_t *given, uint32_t count) {
    for (uint32_t i = 0; slots->settings.poison && i < count; i++) {
        if (slots->gathered_count == SLOTS_GATHERED_MAX)
            poison(slots);
        slots->gathered[slots->gathered_count++] = slots_at(slots, given[i]);
    }
}

uint32_t slots_available(const struct slots *slots, uint32_t allowance) {
    uint64_t excused = (uint64_t)slots->waiting + allowance;
    uint32_t reserve = slots->settings.reserve;
    uint32_t kept = excused < reserve ? reserve - (uint32_t)excused : 0;

    return slots->free_count > kept ? slots->free_count - kept : 0;
}

void slots_take(struct slots *slots, uint32_t count, uint32_t *taken_out) {
    uint32_t used;

    assert(count <= slots->free_count);
#ifndef BREAK_GATHER
    poison(slots); /* what is written to them comes after it */
#endif
    for (uint32_t i = 0; i < count; i++)
        taken_out[i] = slots->free_list[--slots->free_count];
    used = slots->total - slots->free_count;
    slots->peak_used = used > slots->peak_used ? used : slots->peak_used;
}

void slots_put(struct slots *slots, const uint32_t *given, uint32_t count) {
    assert(count <= slots->total - slots->free_count);
    for (uint32_t i = 0; i < count; i++) {
#ifdef BREAK_LEAK
        if (i == 7)
            continue;
#endif
        assert(given[i] < slots->total);
        slots->free_list[slots->free_count++] = given[i];
    }
    gather(slots, given, count);
    if (!slots->gathering)
        poison(slots);
}

uint32_t slots_of(uint32_t streams) {
    uint32_t count = 0;

    for (uint32_t stream = 0; stream < LAYOUT_STREAM_COUNT; stream++)
        if (streams & 1u << stream)
            count += layout_stream_slots(stream);
    return count;
}

uint8_t *slots_at(const struct slots *slots, uint32_t slot) {
    assert(slot < slots->total);
    return slots->pool.slots + slot * slots->slot_bytes;
}

uint8_t *slots_frame(const struct slots *slots, uint32_t frame) {
    assert(frame < slots->frames);
    return slots->pool.meta + frame * slots->frame_bytes;
}

void slots_spoil(struct slots *slots, const uint32_t *spoiled, uint32_t count) {
    gather(slots, spoiled, count);
    poison(slots); /* whoever has them may write to them at once */
}

void slots_spoil_frame(struct slots *slots, uint32_t frame) {
    if (!slots->settings.poison)
        return;
    if (slots->gathered_frame_count == SLOTS_GATHERED_MAX)
        poison(slots);
    slots->gathered_frames[slots->gathered_frame_count++] = slots_frame(slots, frame);
    if (!slots->gathering)
        poison(slots);
}

void slots_gather(struct slots *slots) {
    slots->gathering++;
}

void slots_gather_end(struct slots *slots) {
    assert(slots->gathering > 0);
    slots->gathering--;
    if (!slots->gathering)
        poison(slots);
}
