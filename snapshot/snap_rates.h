/* snapshot/snap_rates.h - how fast this machine is, kept with the store it was measured on.
 *
 * Responsible for: one record with the rates of disk, copy and prefill; what they say a wake and a
 * prefill of the same tokens would take.
 * Not responsible for: measuring (tools/cmd_rates.c), choosing (tools/service.h).
 *
 * Threads: get: any; put: the one that writes, with no batch open; estimates: pure.
 * Units: bytes per second, nanoseconds.
 */
#ifndef SNAPSHOT_SNAP_RATES_H
#define SNAPSHOT_SNAP_RATES_H

#include "store/base/diag.h"
#include "store/base/digest.h"
#include "store/store.h"

struct snap_rates {
    uint64_t measured_ns; /* wall clock */
    struct kv_digest model, numerics;
    uint32_t threads;
    float read, unzip, digest, copy; /* bytes per second; read: as stored, the others: raw */
    /* A token is prefilled in prefill_ns + depth × prefill_deeper_ns; the one row of a fingerprint
     * takes step_ns + depth × step_deeper_ns. */
    float prefill_ns, prefill_deeper_ns, step_ns, step_deeper_ns;
};

/* NOT_FOUND when nothing was measured (or not by a program that wrote this form), IO, NOMEM. */
enum kv_err snap_rates_get(struct store *store, struct snap_rates *rates_out, struct kv_diag *diag);
/* Replaces what was there. INVALID for rates that are no positive numbers; NO_SPACE, IO, NOMEM. */
enum kv_err snap_rates_put(struct store *store, const struct snap_rates *rates,
                           struct kv_diag *diag);

struct snap_rates_load {
    uint64_t stored_bytes, raw_bytes; /* that a wake reads */
    uint64_t n_kv;
    uint32_t probe_rows; /* tokens of the probes that it asks */
};
uint64_t snap_rates_wake_ns(const struct snap_rates *rates, const struct snap_rates_load *load);
uint64_t snap_rates_prefill_ns(const struct snap_rates *rates, uint64_t n_kv);

#endif
