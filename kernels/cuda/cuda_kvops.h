/* kernels/cuda/cuda_kvops.h - launchers of the CUDA twins of kvops.h and of the digest.
 *
 * Responsible for: seal, decode attention with its plan and combine, prefill attention, digests of
 * extents.
 * Not responsible for: memory, uploads, streams, synchronising: the caller's.
 *
 * A launcher takes the argument struct of the host twin. The struct itself is read on the host
 * during the call; every pointer inside it (pool, q, out, seqs, partials, blocks, window pages,
 * hidden bits) is an address of the device. Launchers only enqueue; the error is that of the
 * launch. Codes, planes, META, bad_token and digests have the bits of the host twin. Attention
 * keeps the tree of kvops.h up to runs and nodes, so its bits depend on the sequence alone: not on
 * the batch, the plan or the number of CTAs; against the host twin see kv_decode.cu for the bound.
 *
 * Threads: a plan has one owner; launchers may run on any thread.
 * Units: bytes, tokens, items as in kvops.h.
 */
#ifndef KERNELS_CUDA_CUDA_KVOPS_H
#define KERNELS_CUDA_CUDA_KVOPS_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kvops.h"

/* CTAs that run at once on the current device, one wave; [0] head_dim 64, [1] head_dim 128. Also
 * raises the shared memory limits, so it must succeed once per device before the launchers. */
struct cuda_kvops_device {
    uint32_t ctas[2];
    uint32_t short_ctas[2]; /* of the form for few tokens */
};
cudaError_t cuda_kvops_open(struct cuda_kvops_device *device_out);

enum cuda_kvops_kind {
    CUDA_KVOPS_END = 0,
    CUDA_KVOPS_NODE, /* four runs, a warp each */
    CUDA_KVOPS_RUN,  /* one run, a warp per block */
    CUDA_KVOPS_TAIL  /* four of: sinks, window pages, chunk pages; a warp each; BF16 */
};

/* How the tokens of a unit are kept: one way for all blocks of a sequence. */
enum cuda_kvops_code {
    CUDA_KVOPS_PLANES = 0,
    CUDA_KVOPS_BF16,
    CUDA_KVOPS_FP8,
    CUDA_KVOPS_K8I4,
    CUDA_KVOPS_CODES
};

/* Work of one CTA; its partial goes to `item`, numbered as kvops_decode_items does. */
struct cuda_kvops_unit {
    uint32_t seq;
    uint32_t first; /* run, or tail page */
    uint32_t item;  /* of the first run or tail page */
    uint8_t head;   /* KV head */
    uint8_t part;   /* query heads 4 * part .. of it, or 8 * part .. (form) */
    uint8_t kind;   /* enum cuda_kvops_kind */
    uint8_t code;   /* enum cuda_kvops_code */
};

/* Which kernel a plan is for. */
enum cuda_kvops_form {
    CUDA_KVOPS_EIGHT = 1, /* a CTA serves eight query heads of a KV head at once, else four */
    CUDA_KVOPS_BRIEF = 2  /* every CTA has one unit, a warp per page */
};

/* Which CTA does what; the same for all layers of a step. The memory that it points to may change
 * between replays of a captured step; ctas and form are part of the launch. Units [round][cta]; a
 * CTA stops at END; units over planes come before all others. */
struct cuda_kvops_plan {
    const struct cuda_kvops_unit *units;
    const uint32_t *seqs;  /* [seq][2]: its first item, its first byte in splits */
    const uint8_t *splits; /* [seq][kv head][node]: 1 when the node's runs are units of their own */
    uint32_t ctas;
    uint32_t form; /* bits of enum cuda_kvops_form */
};
/* 1 when a plan of grain 0 for `args` is the one that was made for what `known` describes: zeroes
 * at first, and `args` from now on. The same device and pool throughout. */
enum { CUDA_KVOPS_PLAN_KNOWN = 130 };
int cuda_kvops_plan_same(const struct kvops_attend *args, uint64_t *known);
size_t cuda_kvops_plan_bytes(const struct kvops_attend *args,
                             const struct cuda_kvops_device *device);
/* Here `args` is the host's copy, with host pointers; it reads counts and tiers only. Fills `host`
 * (plan_bytes, 16-byte aligned) and the plan with addresses relative to `device_memory`; returns
 * the bytes to upload there. `grain` 0 chooses units and the form by load, 1 whole nodes, 2 single
 * runs, 3 units by load but not the brief form. */
size_t cuda_kvops_plan_make(const struct kvops_attend *args, const struct cuda_kvops_device *device,
                            uint32_t grain, void *host, const void *device_memory,
                            struct cuda_kvops_plan *plan_out);

/* overlap 1: start before the preceding kernel of the stream has ended (programmatic dependent
 * launch, sm_90). Blocks, tables, the plan and all BF16 pages but a sequence's newest must then
 * have been complete before that kernel started; q, the newest page and the chunk are read after
 * its end. A sequence has at most 1,048,576 tokens. */
struct cuda_kvops_launch {
    const struct kvops_attend *args;
    const struct cuda_kvops_plan *plan;
    cudaStream_t stream;
    int overlap;
};
cudaError_t cuda_kvops_decode(const struct cuda_kvops_launch *launch);
cudaError_t cuda_kvops_combine(const struct cuda_kvops_launch *launch);

/* `row_count_max`: the largest row_count of the sequences, exactly. `tier`: of any of their blocks;
 * all are FP8, all K8I4, or none is either. Of one sequence BF16 where it has no blocks. */
cudaError_t cuda_kvops_prefill(const struct kvops_attend *args, uint32_t row_count_max,
                               enum layout_tier tier, cudaStream_t stream);

cudaError_t cuda_kvops_seal(const struct kvops_seal *args, cudaStream_t stream);
cudaError_t cuda_kvops_append(const struct kvops_append *args, cudaStream_t stream);

/* An extent of store/base/digest.h that lies in equal parts (slots, or one META frame). `bytes` is
 * parts times part_bytes, a multiple of 1,024 as slots and frames are; parts 64-byte aligned. */
enum { CUDA_KVOPS_EXTENT_PARTS = LAYOUT_BLOCK_SLOTS, CUDA_KVOPS_PIECE_BYTES = 4096 };
struct cuda_kvops_extent {
    uint64_t first_piece; /* pieces of all extents before it */
    uint64_t bytes;
    uint64_t part_bytes;
    const uint8_t *part[CUDA_KVOPS_EXTENT_PARTS];
};
struct cuda_kvops_digest {
    const struct cuda_kvops_extent *extents;
    uint64_t *pieces;      /* [piece_count], scratch */
    const uint32_t *owner; /* [piece_count]: the extent of a piece */
    uint8_t *digests;      /* [extent][16], written; 16-byte aligned */
    uint32_t extent_count;
    uint32_t piece_count;
};
cudaError_t cuda_kvops_digest(const struct cuda_kvops_digest *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
