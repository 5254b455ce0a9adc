/* kernels/cuda/kv_plan.cu - which CTA attends to which part of a batch.
 *
 * Responsible for: cutting sequences into units and spreading them evenly, on the host.
 * Not responsible for: uploading the plan; the bits of a result, which no plan changes.
 *
 * Whole nodes while they fill every CTA equally often; what is left is cut into single runs when
 * that is even, because a unit of one run costs a merge and a partial of its own. Runs and tail
 * pages, four at a time, go to the least loaded CTA. Nodes of a CTA follow each other, so that most
 * share their queries. Weights are times in units of a sixth of a run. Where a CTA per run fits on
 * the device at once, every CTA gets one and a warp per page (kv_decode_short.cu).
 */
#include <string.h>

#include "kernels/cuda/device_state.cuh"

enum { WEIGHT_TAIL = 6, WEIGHT_RUN_MAX = 16, FILL_RUNS_MAX = 2, ALIGN_BYTES = 16 };

static const uint32_t weight_run[CUDA_KVOPS_CODES] = {6, WEIGHT_RUN_MAX, 8, 7};

struct planner {
    const struct kvops_attend *args;
    uint32_t ctas;
    uint32_t form;
    uint32_t parts;                   /* of a KV head's query heads: four or eight each */
    uint64_t full[CUDA_KVOPS_CODES];  /* units of whole nodes of each code: possible, */
    uint64_t whole[CUDA_KVOPS_CODES]; /* and chosen */
    uint64_t weight;                  /* of all units */
    size_t nodes;                     /* (seq, KV head, node) */
    size_t units_off;                 /* in the plan's memory */
    struct cuda_kvops_unit *units;
    uint8_t *splits;
    uint32_t *load;  /* [cta] */
    uint32_t *count; /* [cta] */
    uint32_t *heap;  /* [cta]: the least loaded first, of equals the first */
};

static enum cuda_kvops_code code_of(const struct kvops_seq *seq) {
    uint8_t tier = seq->block_count > 0 ? seq->blocks[0].tier : (uint8_t)LAYOUT_K8V4;

    return tier == LAYOUT_TIER_BF16   ? CUDA_KVOPS_BF16
           : tier == LAYOUT_TIER_FP8  ? CUDA_KVOPS_FP8
           : tier == LAYOUT_TIER_K8I4 ? CUDA_KVOPS_K8I4
                                      : CUDA_KVOPS_PLANES;
}

static uint32_t nodes_of(const struct kvops_seq *seq) {
    return (state_runs(seq) + STATE_NODE_RUNS - 1) / STATE_NODE_RUNS;
}

static uint32_t tail_units(const struct kvops_seq *seq) {
    return (state_tails(seq) + STATE_NODE_RUNS - 1) / STATE_NODE_RUNS;
}

/* The form for few tokens: possible, and all units run at once. */
static uint32_t brief_of(const struct kvops_attend *args, const struct cuda_kvops_device *device,
                         uint32_t parts) {
    uint64_t units = 0;

    for (uint32_t i = 0; i < args->seq_count; i++) {
        if (code_of(&args->seqs[i]) != CUDA_KVOPS_PLANES)
            return 0;
        units += state_runs(&args->seqs[i]) + tail_units(&args->seqs[i]);
    }
    units *= (uint64_t)args->pool.geometry.kv_heads * parts;
    return units <= device->short_ctas[args->pool.geometry.head_dim == 128] ? CUDA_KVOPS_BRIEF : 0;
}

static void measure(struct planner *plan, const struct kvops_attend *args,
                    const struct cuda_kvops_device *device, uint32_t grain) {
    uint32_t heads = args->pool.geometry.kv_heads, wide_dim = args->pool.geometry.head_dim == 128;
    uint32_t group = args->q_heads / heads, parts = (group + STATE_HEADS - 1) / STATE_HEADS;

    memset(plan, 0, sizeof *plan);
    plan->args = args;
    plan->form = grain == 0 ? brief_of(args, device, parts) : 0;
    plan->ctas =
        plan->form & CUDA_KVOPS_BRIEF ? device->short_ctas[wide_dim] : device->ctas[wide_dim];
    if (parts > 1 && !(plan->form & CUDA_KVOPS_BRIEF)) {
        plan->form |= CUDA_KVOPS_EIGHT;
        parts = (parts + 1) / 2;
    }
    plan->parts = parts;
    for (uint32_t i = 0; i < args->seq_count; i++) {
        const struct kvops_seq *seq = &args->seqs[i];
        enum cuda_kvops_code code = code_of(seq);
        uint64_t each = (uint64_t)heads * plan->parts;
        plan->nodes += (size_t)heads * nodes_of(seq);
        plan->full[code] += each * (state_runs(seq) / STATE_NODE_RUNS);
        plan->weight += each * (state_runs(seq) * weight_run[code] + tail_units(seq) * WEIGHT_TAIL);
    }
    plan->units_off = args->seq_count * 2 * sizeof(uint32_t) + plan->nodes;
    plan->units_off = (plan->units_off + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

/* No load passes the mean by more than a node of each code; a unit weighs at least 6. */
static size_t rounds_max(const struct planner *plan) {
    uint64_t load = plan->weight / plan->ctas + CUDA_KVOPS_CODES * STATE_NODE_RUNS * WEIGHT_RUN_MAX;
    return (size_t)load / WEIGHT_TAIL + 3;
}

static size_t bytes_of(const struct planner *plan) {
    return plan->units_off + rounds_max(plan) * plan->ctas * sizeof(struct cuda_kvops_unit) +
           3 * plan->ctas * sizeof(uint32_t);
}

size_t cuda_kvops_plan_bytes(const struct kvops_attend *args,
                             const struct cuda_kvops_device *device) {
    struct planner plan;
    size_t bytes;

    measure(&plan, args, device, 0);
    bytes = bytes_of(&plan);
    measure(&plan, args, device, 1);
    return bytes_of(&plan) > bytes ? bytes_of(&plan) : bytes;
}

static int is_less(const struct planner *plan, uint32_t a, uint32_t b) {
    return plan->load[a] < plan->load[b] || (plan->load[a] == plan->load[b] && a < b);
}

static void sink(struct planner *plan, uint32_t at) {
    uint32_t *heap = plan->heap, moving = heap[at];

    for (uint32_t child; (child = 2 * at + 1) < plan->ctas; at = child) {
        child += child + 1 < plan->ctas && is_less(plan, heap[child + 1], heap[child]);
        if (!is_less(plan, heap[child], moving))
            break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

static void order(struct planner *plan) {
    for (uint32_t cta = 0; cta < plan->ctas; cta++)
        plan->heap[cta] = cta;
    for (uint32_t at = plan->ctas / 2; at-- > 0;)
        sink(plan, at);
}

static void give(struct planner *plan, const struct cuda_kvops_unit *unit, uint32_t cta,
                 uint32_t weight) {
    plan->units[(size_t)plan->count[cta] * plan->ctas + cta] = *unit;
    plan->count[cta]++;
    plan->load[cta] += weight;
}

/* Between two orders nobody else is given anything. */
static void give_least(struct planner *plan, const struct cuda_kvops_unit *unit, uint32_t weight) {
    give(plan, unit, plan->heap[0], weight);
    sink(plan, 0);
}

/* All units of one kind and code, in order of sequence, KV head, part, place. */
static void give_kind(struct planner *plan, enum cuda_kvops_kind kind, enum cuda_kvops_code code) {
    uint32_t heads = plan->args->pool.geometry.kv_heads, item = 0;
    int node = kind == CUDA_KVOPS_NODE;
    uint32_t step = node ? STATE_NODE_RUNS : 1, weight = step * weight_run[code];
    const uint8_t *split = plan->splits;
    uint64_t given = 0;

    order(plan);
    for (uint32_t i = 0; i < plan->args->seq_count; i++) {
        const struct kvops_seq *seq = &plan->args->seqs[i];
        uint32_t items = state_runs(seq) + state_tails(seq);
        uint32_t end = code == code_of(seq) ? state_runs(seq) : 0;
        for (uint32_t at = 0; at < heads * plan->parts; at++) {
            struct cuda_kvops_unit unit = {};
            unit.seq = i;
            unit.head = (uint8_t)(at / plan->parts);
            unit.part = (uint8_t)(at % plan->parts);
            unit.kind = (uint8_t)kind;
            unit.code = (uint8_t)code;
            for (unit.first = 0; unit.first < end; unit.first += step) {
                unit.item = item + unit.head * items + unit.first;
                if (split[unit.head * nodes_of(seq) + unit.first / STATE_NODE_RUNS] == node)
                    continue;
                if (node)
                    give(plan, &unit, (uint32_t)(given++ * plan->ctas / plan->whole[code]), weight);
                else
                    give_least(plan, &unit, weight);
            }
        }
        split += heads * nodes_of(seq);
        item += heads * items;
    }
}

static void give_tails(struct planner *plan) {
    uint32_t heads = plan->args->pool.geometry.kv_heads, item = 0;

    order(plan);
    for (uint32_t i = 0; i < plan->args->seq_count; i++) {
        const struct kvops_seq *seq = &plan->args->seqs[i];
        uint32_t runs = state_runs(seq), tails = state_tails(seq);
        for (uint32_t at = 0; at < heads * plan->parts; at++) {
            struct cuda_kvops_unit unit = {};
            unit.seq = i;
            unit.head = (uint8_t)(at / plan->parts);
            unit.part = (uint8_t)(at % plan->parts);
            unit.kind = CUDA_KVOPS_TAIL;
            unit.code = CUDA_KVOPS_BF16;
            for (unit.first = 0; unit.first < tails; unit.first += STATE_NODE_RUNS) {
                unit.item = item + unit.head * (runs + tails) + runs + unit.first;
                give_least(plan, &unit, WEIGHT_TAIL);
            }
        }
        item += heads * (runs + tails);
    }
}

/* Decides for every node whether its runs are units of their own. */
static void split_nodes(struct planner *plan, uint32_t grain) {
    uint32_t heads = plan->args->pool.geometry.kv_heads, ctas = plan->ctas;
    uint64_t whole[CUDA_KVOPS_CODES];
    uint8_t *split = plan->splits;

    for (int code = 0; code < CUDA_KVOPS_CODES; code++) {
        uint64_t rest = plan->full[code] % ctas;
        int cut = (rest * STATE_NODE_RUNS + ctas - 1) / ctas <= FILL_RUNS_MAX;
        whole[code] = plan->full[code] - (cut ? rest : 0);
    }
    for (uint32_t i = 0; i < plan->args->seq_count; i++) {
        const struct kvops_seq *seq = &plan->args->seqs[i];
        uint32_t nodes = nodes_of(seq);
        for (uint32_t at = 0; at < heads * nodes; at++) {
            int full = (at % nodes + 1) * STATE_NODE_RUNS <= state_runs(seq);
            uint64_t *left = &whole[code_of(seq)];
            int stay = grain == 1 || (grain != 2 && full && *left >= plan->parts);
            if (stay && grain != 1)
                *left -= plan->parts;
            if (stay)
                plan->whole[code_of(seq)] += plan->parts;
            *split++ = !stay;
        }
    }
}

/* Everything that the plan reads of a sequence, in 64 bits; the chunk is there or not for all. */
int cuda_kvops_plan_same(const struct kvops_attend *args, uint64_t *known) {
    uint64_t head = (uint64_t)args->q_heads << 32 | args->seq_count;
    int same = known[0] == head && args->seq_count < CUDA_KVOPS_PLAN_KNOWN;

    known[0] = head;
    for (uint32_t i = 0; i < args->seq_count && i + 1 < CUDA_KVOPS_PLAN_KNOWN; i++) {
        const struct kvops_seq *seq = &args->seqs[i];
        uint64_t now =
            (uint64_t)state_runs(seq) << 32 | (uint64_t)state_tails(seq) << 8 | code_of(seq);
        same &= known[1 + i] == now;
        known[1 + i] = now;
    }
    return same;
}

size_t cuda_kvops_plan_make(const struct kvops_attend *args, const struct cuda_kvops_device *device,
                            uint32_t grain, void *host, const void *device_memory,
                            struct cuda_kvops_plan *plan_out) {
    uint32_t heads = args->pool.geometry.kv_heads, item = 0, node = 0, rounds = 0;
    uint32_t *seqs = (uint32_t *)host;
    struct planner plan;

    measure(&plan, args, device, grain);
    plan.splits = (uint8_t *)host + args->seq_count * 2 * sizeof(uint32_t);
    plan.units = (struct cuda_kvops_unit *)((uint8_t *)host + plan.units_off);
    plan.load = (uint32_t *)(plan.units + rounds_max(&plan) * plan.ctas);
    plan.count = plan.load + plan.ctas;
    plan.heap = plan.count + plan.ctas;
    memset(plan.load, 0, 2 * plan.ctas * sizeof *plan.load);
    for (uint32_t i = 0; i < args->seq_count; i++) {
        seqs[2 * i] = item;
        seqs[2 * i + 1] = node;
        item += heads * (state_runs(&args->seqs[i]) + state_tails(&args->seqs[i]));
        node += heads * nodes_of(&args->seqs[i]);
    }
    split_nodes(&plan, plan.form & CUDA_KVOPS_BRIEF ? 2 : grain);
    for (int code = 0; code < CUDA_KVOPS_CODES; code++) {
        give_kind(&plan, CUDA_KVOPS_NODE, (enum cuda_kvops_code)code);
        give_kind(&plan, CUDA_KVOPS_RUN, (enum cuda_kvops_code)code);
    }
    give_tails(&plan);
    for (uint32_t cta = 0; cta < plan.ctas; cta++) {
        memset(&plan.units[(size_t)plan.count[cta] * plan.ctas + cta], 0, sizeof *plan.units);
        memset(&plan.units[(size_t)(plan.count[cta] + 1) * plan.ctas + cta], 0, sizeof *plan.units);
        rounds = plan.count[cta] > rounds ? plan.count[cta] : rounds;
    }
    plan_out->seqs = (const uint32_t *)device_memory;
    plan_out->splits = (const uint8_t *)device_memory + args->seq_count * 2 * sizeof(uint32_t);
    plan_out->units =
        (const struct cuda_kvops_unit *)((const uint8_t *)device_memory + plan.units_off);
    plan_out->ctas = plan.ctas;
    plan_out->form = plan.form;
    return plan.units_off + (size_t)(rounds + 2) * plan.ctas * sizeof(struct cuda_kvops_unit);
}
