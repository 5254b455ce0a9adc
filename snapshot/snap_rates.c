/* snapshot/snap_rates.c - how fast this machine is, kept with the store it was measured on.
 *
 * Responsible for: the contract of snap_rates.h.
 * Not responsible for: measuring.
 */
#include "snapshot/snap_rates.h"

#include "store/base/bytes.h"
#include "store/store_batch.h"

#include <math.h>
#include <string.h>

enum { VERSION = 1, VALUE_BYTES = 1 + 8 + 2 * KV_DIGEST_BYTES + 4 + 8 * 4 };
static const char rates_key[] = "m";

static int is_sound(const struct snap_rates *rates) {
    const float numbers[] = {rates->read,
                             rates->unzip,
                             rates->digest,
                             rates->copy,
                             rates->prefill_ns,
                             rates->step_ns,
                             1};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (!isfinite(numbers[i]) || !(numbers[i] > 0))
            return 0;
    return isfinite(rates->prefill_deeper_ns) && rates->prefill_deeper_ns >= 0 &&
           isfinite(rates->step_deeper_ns) && rates->step_deeper_ns >= 0;
}

static void read_digest(struct kv_reader *reader, struct kv_digest *digest) {
    const uint8_t *bytes = kv_read_bytes(reader, KV_DIGEST_BYTES);
    if (bytes != NULL)
        memcpy(digest->bytes, bytes, KV_DIGEST_BYTES);
}

static int decode(const void *value, size_t size, struct snap_rates *rates) {
    float *const numbers[] = {&rates->read,    &rates->unzip,         &rates->digest,
                              &rates->copy,    &rates->prefill_ns,    &rates->prefill_deeper_ns,
                              &rates->step_ns, &rates->step_deeper_ns};
    struct kv_reader reader;
    kv_reader_init(&reader, value, size);
    int version = kv_read_u8(&reader);
    rates->measured_ns = kv_read_u64(&reader);
    read_digest(&reader, &rates->model);
    read_digest(&reader, &rates->numerics);
    rates->threads = kv_read_u32(&reader);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        *numbers[i] = kv_read_f32(&reader);
    return version == VERSION && !reader.failed && kv_reader_left(&reader) == 0 && is_sound(rates);
}

enum kv_err snap_rates_get(struct store *store, struct snap_rates *rates_out,
                           struct kv_diag *diag) {
    struct store_record record;
    struct snap_rates rates = {0};
    enum kv_err err = store_get(store, rates_key, 1, &record, diag);
    if (err == KV_ERR_CORRUPT)
        err = KV_ERR_NOT_FOUND;
    if (err == KV_OK) {
        if (!decode(record.value, record.value_bytes, &rates))
            err = KV_ERR_NOT_FOUND;
        store_record_release(store, &record);
    }
    if (err == KV_ERR_NOT_FOUND)
        return kv_diag_set(diag, err,
                           "this machine was not measured for this store: `coldplane bench rates` "
                           "does it once");
    if (err == KV_OK)
        *rates_out = rates;
    return err;
}

enum kv_err snap_rates_put(struct store *store, const struct snap_rates *rates,
                           struct kv_diag *diag) {
    const float numbers[] = {rates->read,    rates->unzip,         rates->digest,
                             rates->copy,    rates->prefill_ns,    rates->prefill_deeper_ns,
                             rates->step_ns, rates->step_deeper_ns};
    uint8_t value[VALUE_BYTES];
    struct kv_writer writer;
    struct store_batch *batch = NULL;
    if (!is_sound(rates))
        return kv_diag_set(diag, KV_ERR_INVALID, "a rate is not a positive number: measure again");
    kv_writer_init(&writer, value, sizeof value);
    kv_write_u8(&writer, VERSION);
    kv_write_u64(&writer, rates->measured_ns);
    kv_write_bytes(&writer, rates->model.bytes, KV_DIGEST_BYTES);
    kv_write_bytes(&writer, rates->numerics.bytes, KV_DIGEST_BYTES);
    kv_write_u32(&writer, rates->threads);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        kv_write_f32(&writer, numbers[i]);
    const struct store_put put = {
        .key = rates_key, .key_bytes = 1, .value = value, .value_bytes = writer.off};
    enum kv_err err = store_batch_begin_removal(store, &batch, diag);
    if (err != KV_OK)
        return err;
    store_batch_cause(batch, STORE_CAUSE_CARE);
    err = store_batch_put(batch, &put, diag);
    if (err != KV_OK) {
        store_batch_abandon(batch);
        return err;
    }
    return store_batch_commit(batch, NULL, diag);
}

/* Reading, unzipping, copying and digesting overlap, so the slowest is waited for; the proof
 * follows. */
uint64_t snap_rates_wake_ns(const struct snap_rates *rates, const struct snap_rates_load *load) {
    double raw = (double)load->raw_bytes;
    double depth = (double)load->n_kv;
    const double stages[] = {(double)load->stored_bytes / (double)rates->read,
                             raw / (double)rates->unzip, raw / (double)rates->digest,
                             raw / (double)rates->copy};
    double slowest = 0;
    for (size_t i = 0; i < sizeof stages / sizeof stages[0]; i++)
        if (stages[i] > slowest)
            slowest = stages[i];
    double row = (double)rates->prefill_ns + depth * (double)rates->prefill_deeper_ns;
    double proof = (double)rates->step_ns + depth * (double)rates->step_deeper_ns +
                   (double)load->probe_rows * row;
#ifdef BREAK_RATES_PROOF
    proof = 0;
#endif
    return (uint64_t)(slowest * 1e9 + proof);
}

uint64_t snap_rates_prefill_ns(const struct snap_rates *rates, uint64_t n_kv) {
    double n = (double)n_kv;
    return (uint64_t)(n * (double)rates->prefill_ns + n * n / 2 * (double)rates->prefill_deeper_ns);
}
