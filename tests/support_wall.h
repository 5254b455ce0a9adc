/* tests/support_wall.h - a device whose memory the processor cannot reach.
 *
 * Responsible for: taking the place of the host device in every program that includes this header:
 * addresses of the device lead to pages without rights, and only device calls are led on to the
 * memory behind them; lent memory is copied when somebody waits for it and no earlier; failures on
 * demand, rows of chunks with bits of their own on demand.
 * Not responsible for: arithmetic (the host device behind it).
 *
 * Threads: set before engines are opened; the device as device.h says.
 * Units: bytes.
 */
#ifndef TESTS_SUPPORT_WALL_H
#define TESTS_SUPPORT_WALL_H

#include "engine/device/device.h"

/* 0: the next device is the plain host device. On at the start. */
void support_wall_set(int on);

enum support_wall_fault {
    SUPPORT_WALL_SOUND,
    SUPPORT_WALL_FAILS_ONCE, /* the next step's results cannot be fetched */
    SUPPORT_WALL_ATTENTION,  /* the next attention fails; whoever fetches next is told */
    SUPPORT_WALL_APPEND,     /* the next append fails */
    SUPPORT_WALL_COPY_OUT,   /* the next copy of a writer fails */
    SUPPORT_WALL_COPY_IN,    /* the next copy of a reader fails */
    SUPPORT_WALL_COPY_LATE,  /* the same, and whoever waits next in its lane is told */
    SUPPORT_WALL_DIGEST,     /* the next digests fail */
    SUPPORT_WALL_PUBLISH,    /* the next page that a reader fills in part cannot be looked at */
    SUPPORT_WALL_LOST        /* from the next step on nothing works */
};
void support_wall_break(enum support_wall_fault fault);
/* The same behind `sound` more that go well. */
void support_wall_break_behind(enum support_wall_fault fault, uint32_t sound);
int support_wall_is_armed(void); /* 1: what was to fail has not come yet */
/* 1: products of rows that are not among the single ones come out a little larger, as on a device
 * that multiplies the two with different kernels. Off at the start. */
void support_wall_classes(int on);
/* Called for each copy of lent memory, by who hands it over; and with NULL by who publishes, in
 * front of SUPPORT_WALL_PUBLISH. watch NULL: nobody is. */
typedef void (*support_wall_lent)(void *context, const void *to, uint64_t bytes);
void support_wall_watch(support_wall_lent watch, void *context);
/* Device calls since the program began: shows that a test came by here. */
uint64_t support_wall_calls(void);

#endif
