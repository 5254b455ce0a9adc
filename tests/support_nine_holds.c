/* tests/support_nine_holds.c - who kept those waiting that decode, and for how long.
 *
 * Responsible for: what support_nine_holds.h says.
 * Not responsible for: printing.
 */
#include "tests/support_nine_holds.h"

#include "store/base/clock.h"

static uint64_t now_ns(void) {
    return kv_clock_now_ns(kv_clock_system());
}

void nine_holds_away(struct nine_holds *holds) {
    if (!holds->holding)
        return;
    uint64_t ns = now_ns() - holds->since_ns;
    struct nine_place *place = &holds->places[holds->kind][holds->place];

    holds->holding = 0;
    if (ns < NINE_NOTHING_NS)
        return;
    place->count++;
    place->sum_ns += ns;
    place->most_ns = ns > place->most_ns ? ns : place->most_ns;
    if (ns > holds->since_step.hold_ns)
        holds->since_step =
            (struct nine_gap){.hold_ns = ns, .kind = holds->kind, .place = holds->place};
    holds->place += holds->place + 1 < NINE_PLACES;
}

void nine_holds_back(struct nine_holds *holds) {
    holds->holding = holds->kind != NINE_NOT_MOVING;
    holds->since_ns = now_ns();
}

void nine_holds_move(struct nine_holds *holds, enum nine_move_kind kind) {
    nine_holds_away(holds);
    holds->kind = kind;
    holds->place = 0;
    nine_holds_back(holds);
}

static void keep_long(struct nine_holds *holds, const struct nine_gap *gap) {
    struct nine_gap *least = &holds->longest[0];

    for (uint32_t i = 1; i < NINE_LONGEST; i++)
        if (holds->longest[i].ns < least->ns)
            least = &holds->longest[i];
    if (gap->ns > least->ns)
        *least = *gap;
}

void nine_holds_stepped(struct nine_holds *holds, const struct nine_stepped *step) {
    struct nine_gap gap = holds->since_step;

    gap.ns = step->gap_ns;
    gap.step_ns = step->step_ns;
    holds->since_step = (struct nine_gap){0};
    struct nine_steps *steps = &holds->steps[holds->kind];
    if (steps->count < NINE_STEPS_KEPT) {
        steps->step_ns[steps->count] = step->step_ns;
        steps->host_ns[steps->count++] = step->step_ns - step->wait_ns;
    }
    if (!step->gap_ns || !step->quiet_ns || step->gap_ns < step->quiet_ns + step->quiet_ns / 2)
        return;
    if (gap.hold_ns < step->step_ns)
        holds->slow_steps++;
    else
        holds->places[gap.kind][gap.place].gaps++;
    keep_long(holds, &gap);
}

const char *nine_move_name(enum nine_move_kind kind) {
    static const char *const names[NINE_MOVE_KINDS] = {"no move", "sleep", "wake", "save"};

    return names[kind];
}
