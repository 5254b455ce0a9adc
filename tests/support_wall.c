/* tests/support_wall.c - a device whose memory the processor cannot reach.
 *
 * Responsible for: what support_wall.h says.
 * Not responsible for: arithmetic.
 */
#include "tests/support_wall.h"

#include "engine/device/pinned.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { RANGES_MAX = 32, SEQS_MAX = 160, ROWS_MAX = 512, LENT_MAX = 4096 };

enum kv_err __real_device_host_open(const struct device_host_settings *settings,
                                    struct device **device_out, struct kv_diag *diag);
enum kv_err __wrap_device_host_open(const struct device_host_settings *settings,
                                    struct device **device_out, struct kv_diag *diag);

struct range {
    uint8_t *wall; /* what the engine sees */
    uint8_t *real;
    uint64_t bytes;
};

struct wall {
    struct device device;
    struct device *inner;
    const struct kv_alloc *alloc;
    struct pinned kept;
    struct range ranges[RANGES_MAX];
    struct kvops_seq seqs[SEQS_MAX];
    struct ops_kv_dest dest[ROWS_MAX];
    struct device_copy lent[LENT_MAX]; /* that nobody has waited for: they have not begun */
    uint32_t lent_count;
    uint64_t lent_ended;         /* before those */
    int failed;                  /* an operation, since results were fetched */
    int late[DEVICE_LANE_COUNT]; /* a copy, since the lane was waited for */
};

static int wall_off, wall_classes;
static support_wall_lent wall_watch;
static void *wall_watcher;
static _Atomic int wall_fault, wall_sound;
static _Atomic uint64_t wall_calls;

void support_wall_set(int on) {
    wall_off = !on;
}

void support_wall_classes(int on) {
    wall_classes = on;
}

void support_wall_watch(support_wall_lent watch, void *context) {
    wall_watch = watch;
    wall_watcher = context;
}

void support_wall_break_behind(enum support_wall_fault fault, uint32_t sound) {
    wall_sound = (int)sound;
    wall_fault = (int)fault;
}

void support_wall_break(enum support_wall_fault fault) {
    support_wall_break_behind(fault, 0);
}

int support_wall_is_armed(void) {
    return wall_fault != SUPPORT_WALL_SOUND;
}

uint64_t support_wall_calls(void) {
    return wall_calls;
}

static int breaks(struct wall *wall, enum support_wall_fault fault) {
    int expected = (int)fault;

    if (wall->device.lost)
        return 1;
    if (wall_fault == SUPPORT_WALL_LOST && fault == SUPPORT_WALL_FAILS_ONCE) {
        wall->device.lost = 1;
        snprintf(wall->device.trouble, sizeof wall->device.trouble, "the wall has come down");
        wall_fault = SUPPORT_WALL_SOUND;
        return 1;
    }
    if (wall_fault == expected && atomic_fetch_sub(&wall_sound, 1) > 0)
        return 0;
    if (!atomic_compare_exchange_strong(&wall_fault, &expected, SUPPORT_WALL_SOUND))
        return 0;
    snprintf(wall->device.trouble, sizeof wall->device.trouble, "the wall fails once");
    return 1;
}

static struct wall *wall_of(struct device *device) {
    wall_calls++;
    return (struct wall *)device;
}

/* The memory behind an address of the device. */
static void *behind(const struct wall *wall, const void *address) {
    const uint8_t *at = address;

    if (!at)
        return NULL;
    for (uint32_t i = 0; i < RANGES_MAX; i++) {
        const struct range *range = &wall->ranges[i];
        if (range->wall && at >= range->wall && at < range->wall + range->bytes)
            return range->real + (at - range->wall);
    }
    assert(!"an address that is not the device's");
    return NULL;
}

static void wall_close(struct device *device) {
    struct wall *wall = wall_of(device);

    pinned_release(&wall->kept);
    device_close(wall->inner);
    kv_alloc_release(wall->alloc, wall);
}

static void *wall_get(struct device *device, uint64_t bytes) {
    struct wall *wall = wall_of(device);
    struct range *range = wall->ranges;

    while (range->wall)
        range++;
    assert(range < wall->ranges + RANGES_MAX);
    range->real = wall->inner->ops->get(wall->inner, bytes);
    if (!range->real)
        return NULL;
    range->wall = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert(range->wall != MAP_FAILED);
    range->bytes = bytes;
    return range->wall;
}

static void wall_put(struct device *device, void *memory) {
    struct wall *wall = wall_of(device);
    struct range *range = wall->ranges;

    while (range->wall != memory)
        range++;
    munmap(range->wall, range->bytes);
    wall->inner->ops->put(wall->inner, range->real);
    *range = (struct range){NULL, NULL, 0};
}

static uint64_t wall_room(struct device *device) {
    (void)wall_of(device);
    return UINT64_MAX;
}

static void *wall_host_get(struct device *device, uint64_t bytes) {
    struct wall *wall = wall_of(device);

    return wall->inner->ops->host_get(wall->inner, bytes);
}

static void *take_kept(void *context, uint64_t bytes) {
    return kv_alloc_aligned(((struct wall *)context)->alloc, bytes, 4096);
}

static void give_kept(void *context, void *at) {
    kv_alloc_release(((struct wall *)context)->alloc, at);
}

static void *wall_host_keep(struct device *device, uint64_t bytes) {
    return pinned_keep(&wall_of(device)->kept, bytes);
}

static void wall_host_put(struct device *device, void *memory) {
    struct wall *wall = wall_of(device);

    if (pinned_has(&wall->kept, memory, 1))
        pinned_put(&wall->kept, memory);
    else
        wall->inner->ops->host_put(wall->inner, memory);
}

static void *wall_mapped(struct device *device, void *at) {
    (void)behind(wall_of(device), at);
    return NULL;
}

static void wall_fill(struct device *device, const struct device_fill *fill) {
    struct wall *wall = wall_of(device);

    for (uint32_t i = 0; i < fill->part_count; i++) {
        void *part = behind(wall, fill->part[i]);
        const struct device_fill own = {&part, 1, fill->pattern, fill->part_bytes};
        wall->inner->ops->fill(wall->inner, &own);
    }
}

static enum kv_err wall_copy_in(struct device *device, enum device_lane lane,
                                const struct device_copy *copies, uint32_t count) {
    struct wall *wall = wall_of(device);

    if ((lane == DEVICE_IN || lane == DEVICE_LENT) && breaks(wall, SUPPORT_WALL_COPY_IN))
        return KV_ERR_DEVICE;
    if ((lane == DEVICE_IN || lane == DEVICE_LENT) && breaks(wall, SUPPORT_WALL_COPY_LATE)) {
        wall->late[lane] = 1;
        return KV_OK;
    }
    for (uint32_t i = 0; i < count && lane == DEVICE_LENT; i++) {
        assert(wall->lent_count < LENT_MAX);
        wall->lent[wall->lent_count++] = copies[i];
        if (wall_watch)
            wall_watch(wall_watcher, copies[i].to, copies[i].bytes);
    }
    for (uint32_t i = 0; i < count && lane != DEVICE_LENT; i++)
        if (copies[i].bytes)
            memcpy(behind(wall, copies[i].to), copies[i].from, copies[i].bytes);
    return KV_OK;
}

/* An operation that fails tells nobody. */
static int attention_fails(struct wall *wall) {
    int fails = breaks(wall, SUPPORT_WALL_ATTENTION);

    wall->failed |= fails;
    wall->device.faults += (uint64_t)fails;
    return fails;
}

static int fetch_fails(struct wall *wall) {
    int fails = breaks(wall, SUPPORT_WALL_FAILS_ONCE) || wall->failed;

    wall->failed = 0;
    return fails;
}

static enum kv_err wall_copy_out(struct device *device, enum device_lane lane,
                                 const struct device_copy *copies, uint32_t count) {
    struct wall *wall = wall_of(device);

    if (lane == DEVICE_IN && count && wall_fault == SUPPORT_WALL_PUBLISH && wall_watch)
        wall_watch(wall_watcher, NULL, 0);
    if ((lane == DEVICE_OUT && breaks(wall, SUPPORT_WALL_COPY_OUT)) ||
        (lane == DEVICE_IN && count && breaks(wall, SUPPORT_WALL_PUBLISH)) ||
        (lane == DEVICE_STEP && fetch_fails(wall)))
        return KV_ERR_DEVICE;
    for (uint32_t i = 0; i < count; i++)
        if (copies[i].bytes)
            memcpy(copies[i].to, behind(wall, copies[i].from), copies[i].bytes);
    return KV_OK;
}

static enum kv_err wall_digest(struct device *device, enum device_lane lane,
                               const struct device_extent *extents, uint32_t count,
                               struct kv_digest *digests_out) {
    struct wall *wall = wall_of(device);

    if (breaks(wall, SUPPORT_WALL_DIGEST))
        return KV_ERR_DEVICE;
    for (uint32_t i = 0; i < count; i++) {
        struct device_extent extent = extents[i];
        for (uint32_t part = 0; part < extent.part_count; part++)
            extent.part[part] = behind(wall, extent.part[part]);
        wall->inner->ops->digest(wall->inner, lane, &extent, 1, &digests_out[i]);
    }
    return wall->device.lost ? KV_ERR_DEVICE : KV_OK;
}

static uint64_t wall_sent(struct device *device, enum device_lane lane) {
    return lane == DEVICE_LENT ? wall_of(device)->lent_ended + wall_of(device)->lent_count : 0;
}

/* The oldest first, and no more than was asked for. */
static enum kv_err wall_wait_sent(struct device *device, enum device_lane lane, uint64_t sent) {
    struct wall *wall = wall_of(device);
    uint32_t due = sent > wall->lent_ended ? (uint32_t)(sent - wall->lent_ended) : 0;

    assert(lane == DEVICE_LENT && due <= wall->lent_count);
    for (uint32_t i = 0; i < due; i++) {
        const struct device_copy *copy = &wall->lent[i];
        memcpy(behind(wall, copy->to), copy->from, copy->bytes);
    }
    wall->lent_count -= due;
    wall->lent_ended += due;
    memmove(wall->lent, wall->lent + due, wall->lent_count * sizeof wall->lent[0]);
    return wall->device.lost || wall->late[lane] ? KV_ERR_DEVICE : KV_OK;
}

static enum kv_err wall_wait(struct device *device, enum device_lane lane) {
    struct wall *wall = wall_of(device);

    if (lane == DEVICE_LENT)
        (void)wall_wait_sent(device, lane, wall->lent_ended + wall->lent_count);
    int late = wall->late[lane];
    wall->late[lane] = 0;
    return wall->device.lost || late ? KV_ERR_DEVICE : KV_OK;
}

static enum kv_err wall_scratch(struct device *device, uint64_t bytes) {
    struct wall *wall = wall_of(device);

    return wall->inner->ops->scratch(wall->inner, bytes);
}

static uint64_t wall_weight_bytes(enum device_use use, enum ops_type type, uint32_t n, uint32_t k) {
    (void)use;
    return ops_weight_bytes(type, n, k);
}

static enum kv_err wall_weight_load(struct device *device, enum device_use use,
                                    struct ops_weight *weight, const uint8_t *tensor) {
    struct wall *wall = wall_of(device);
    struct ops_weight real = *weight;

    real.bytes = behind(wall, weight->bytes);
    return wall->inner->ops->weight_load(wall->inner, use, &real, tensor);
}

static int wall_repeat_begin(struct device *device, uint64_t shape) {
    (void)wall_of(device);
    (void)shape;
    return 1;
}

static void wall_repeat_end(struct device *device) {
    (void)wall_of(device);
}

/* The planned sequences have the processor's pointers: all of them are looked at. */
static void wall_plan(struct device *device, uint32_t plan, const struct kvops_attend *singles) {
    uint32_t tiers = 0;

    (void)wall_of(device), (void)plan;
    for (uint32_t i = 0; i < singles->seq_count; i++)
        for (uint32_t block = 0; block < singles->seqs[i].block_count; block++)
            tiers |= 1u << singles->seqs[i].blocks[block].tier;
    assert(tiers < 1u << LAYOUT_TIER_COUNT);
}

static void wall_embed(struct device *device, const struct ops_embed *args) {
    struct wall *wall = wall_of(device);
    struct ops_embed real = *args;

    real.table.bytes = behind(wall, args->table.bytes);
    real.ids = behind(wall, args->ids);
    real.out = behind(wall, args->out);
    wall->inner->ops->embed(wall->inner, &real);
}

static void wall_rmsnorm(struct device *device, const struct ops_rmsnorm *args) {
    struct wall *wall = wall_of(device);
    struct ops_rmsnorm real = *args;

    real.x = behind(wall, args->x);
    real.gain = behind(wall, args->gain);
    real.y = behind(wall, args->y);
    wall->inner->ops->rmsnorm(wall->inner, &real);
}

static void wall_matmul(struct device *device, const struct device_matmuls *args) {
    struct wall *wall = wall_of(device);
    struct ops_matmul real[DEVICE_MATMULS_MAX];
    struct device_matmuls all = {real, args->count, args->singles, args->class, NULL, NULL};

    for (uint32_t i = 0; i < args->count; i++) {
        real[i] = args->args[i];
        real[i].weight.bytes = behind(wall, real[i].weight.bytes);
        real[i].x = behind(wall, real[i].x);
        real[i].residual = behind(wall, real[i].residual);
        real[i].y = behind(wall, real[i].y);
    }
    wall->inner->ops->matmul(wall->inner, &all);
    for (uint32_t i = 0; wall_classes && i < args->count; i++)
        for (uint32_t row = args->singles; row < real[i].rows; row++)
            for (uint32_t n = 0; n < real[i].weight.n; n++)
                real[i].y[row * real[i].y_stride + n] *= 1.0001f;
}

static void wall_rope(struct device *device, const struct ops_rope *args) {
    struct wall *wall = wall_of(device);
    const struct ops_kv_dest *dest = behind(wall, args->dest);
    struct ops_rope real = *args;

    assert(args->rows <= ROWS_MAX);
    for (uint32_t i = 0; i < args->rows; i++)
        wall->dest[i] = (struct ops_kv_dest){behind(wall, dest[i].k), behind(wall, dest[i].v),
                                             dest[i].head_stride};
    real.q = behind(wall, args->q);
    real.k = behind(wall, args->k);
    real.v = behind(wall, args->v);
    real.dest = wall->dest;
    real.positions = behind(wall, args->positions);
    real.cos_table = behind(wall, args->cos_table);
    real.sin_table = behind(wall, args->sin_table);
    wall->inner->ops->rope(wall->inner, &real);
}

static void wall_swiglu(struct device *device, const struct ops_swiglu *args) {
    struct wall *wall = wall_of(device);
    struct ops_swiglu real = *args;

    real.gate = behind(wall, args->gate);
    real.up = behind(wall, args->up);
    real.y = behind(wall, args->y);
    wall->inner->ops->swiglu(wall->inner, &real);
}

static void wall_finite(struct device *device, const struct ops_finite *args) {
    struct wall *wall = wall_of(device);
    struct ops_finite real = *args;

    real.x = behind(wall, args->x);
    real.bad = behind(wall, args->bad);
    wall->inner->ops->finite(wall->inner, &real);
}

static void wall_top(struct device *device, const struct ops_top *args) {
    struct wall *wall = wall_of(device);
    struct ops_top real = *args;

    real.logits = behind(wall, args->logits);
    real.top = behind(wall, args->top);
    ops_top_select(&real, 0, real.rows);
}

static struct kvops_pool pool_behind(const struct wall *wall, const struct kvops_pool *pool) {
    return (struct kvops_pool){pool->geometry, behind(wall, pool->slots), behind(wall, pool->meta)};
}

static struct kvops_attend attend_behind(struct wall *wall, const struct kvops_attend *args) {
    const struct kvops_seq *seqs = behind(wall, args->seqs);
    struct kvops_attend real = *args;

    assert(args->seq_count <= SEQS_MAX);
    for (uint32_t i = 0; i < args->seq_count; i++) {
        struct kvops_seq *seq = &wall->seqs[i];
        *seq = seqs[i];
        seq->blocks = behind(wall, seq->blocks);
        seq->window = behind(wall, seq->window);
        seq->chunk_k = behind(wall, seq->chunk_k);
        seq->chunk_v = behind(wall, seq->chunk_v);
        seq->hidden_blocks = behind(wall, seq->hidden_blocks);
    }
    real.pool = pool_behind(wall, &args->pool);
    real.q = behind(wall, args->q);
    real.out = behind(wall, args->out);
    real.partials = behind(wall, args->partials);
    real.seqs = wall->seqs;
    return real;
}

static void wall_prefill(struct device *device, const struct kvops_attend *args, uint32_t rows_max,
                         enum layout_tier tier) {
    struct wall *wall = wall_of(device);
    struct kvops_attend real = attend_behind(wall, args);

    if (attention_fails(wall))
        return;
    for (uint32_t i = 0; i < real.seq_count; i++)
        assert(real.seqs[i].row_count <= rows_max &&
               (real.seqs[i].block_count == 0 ||
                !layout_tier_is_control(real.seqs[i].blocks[0].tier) ||
                real.seqs[i].blocks[0].tier == tier));
    wall->inner->ops->prefill(wall->inner, &real, rows_max, tier);
}

static void wall_decode(struct device *device, const struct kvops_attend *args) {
    struct wall *wall = wall_of(device);
    struct kvops_attend real = attend_behind(wall, args);

    if (attention_fails(wall))
        return;
    wall->inner->ops->decode(wall->inner, &real);
}

static void wall_seal(struct device *device, const struct kvops_seal *args) {
    struct wall *wall = wall_of(device);
    struct kvops_seal real = *args;

    real.pool = pool_behind(wall, &args->pool);
    real.bad_token = behind(wall, args->bad_token);
    wall->inner->ops->seal(wall->inner, &real);
}

static enum kv_err wall_append(struct device *device, const struct kvops_append *args) {
    struct wall *wall = wall_of(device);
    struct kvops_append real = *args;

    if (breaks(wall, SUPPORT_WALL_APPEND))
        return KV_ERR_DEVICE;
    real.pool = pool_behind(wall, &args->pool);
    real.chunk = behind(wall, args->chunk);
    return wall->inner->ops->append(wall->inner, &real);
}

static uint64_t wall_fma_rate(struct device *device, uint64_t iterations) {
    struct wall *wall = wall_of(device);

    return wall->inner->ops->fma_rate(wall->inner, iterations);
}

static const struct device_ops wall_ops = {
    .close = wall_close,
    .get = wall_get,
    .put = wall_put,
    .room = wall_room,
    .host_get = wall_host_get,
    .host_keep = wall_host_keep,
    .host_put = wall_host_put,
    .mapped = wall_mapped,
    .fill = wall_fill,
    .copy_in = wall_copy_in,
    .copy_out = wall_copy_out,
    .digest = wall_digest,
    .wait = wall_wait,
    .sent = wall_sent,
    .wait_sent = wall_wait_sent,
    .scratch = wall_scratch,
    .weight_bytes = wall_weight_bytes,
    .weight_load = wall_weight_load,
    .repeat_begin = wall_repeat_begin,
    .repeat_end = wall_repeat_end,
    .plan = wall_plan,
    .embed = wall_embed,
    .rmsnorm = wall_rmsnorm,
    .matmul = wall_matmul,
    .rope = wall_rope,
    .swiglu = wall_swiglu,
    .finite = wall_finite,
    .top = wall_top,
    .prefill = wall_prefill,
    .decode = wall_decode,
    .seal = wall_seal,
    .append = wall_append,
    .fma_rate = wall_fma_rate,
};

enum kv_err __wrap_device_host_open(const struct device_host_settings *settings,
                                    struct device **device_out, struct kv_diag *diag) {
    struct device *inner = NULL;
    enum kv_err err = __real_device_host_open(settings, &inner, diag);

    if (err != KV_OK || wall_off) {
        *device_out = inner;
        return err;
    }
    struct wall *wall = kv_alloc_zeroed(settings->alloc, 1, sizeof *wall);
    if (!wall) {
        device_close(inner);
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the device");
    }
    wall->device = *inner;
    wall->device.ops = &wall_ops;
    wall->inner = inner;
    wall->alloc = settings->alloc;
    pinned_init(&wall->kept, take_kept, give_kept, wall);
    *device_out = &wall->device;
    return KV_OK;
}
