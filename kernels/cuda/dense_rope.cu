/* kernels/cuda/dense_rope.cu - RoPE of q and k and the BF16 write of K and V.
 *
 * Responsible for: struct ops_rope on the device, bit-equal to the host twin.
 * Not responsible for: the tables (ops_rope_table_fill), choosing where K and V go.
 *
 * Moves 8 bytes per value of q and 6 per value of k and v. Expected: 2 us for a decode step, bound
 * by latency. Grid: (row, part of the row's heads); q heads first, then k, then v.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { THREADS = 256 };

/* Pair i of a head of x, rotated, to (*first, *second). */
static __device__ __forceinline__ void rotate(const struct ops_rope &args, const float *x,
                                              uint32_t i, float2 *out) {
    uint32_t half = args.head_dim / 2;
    uint64_t at = (uint64_t)args.positions[blockIdx.x] * half + i;
    uint32_t one = args.pairing == OPS_PAIR_ADJACENT ? 2 * i : i;
    uint32_t two = args.pairing == OPS_PAIR_ADJACENT ? 2 * i + 1 : i + half;
    float a = x[one], b = x[two], c = args.cos_table[at], s = args.sin_table[at];

    out->x = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    out->y = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
}

static __global__ void __launch_bounds__(THREADS)
    rope_kernel(const __grid_constant__ struct ops_rope args) {
    uint32_t half = args.head_dim / 2, item = blockIdx.y * THREADS + threadIdx.x;
    uint32_t head = item / half, i = item % half, row = blockIdx.x;
    uint32_t one = args.pairing == OPS_PAIR_ADJACENT ? 2 * i : i;
    uint32_t two = args.pairing == OPS_PAIR_ADJACENT ? 2 * i + 1 : i + half;
    const struct ops_kv_dest *dest = args.dest + row;
    float2 pair;

    dense_let_next_start();
    dense_wait_for_previous();
    if (head < args.q_heads) {
        float *q = args.q + row * args.q_stride + (uint64_t)head * args.head_dim;
        rotate(args, q, i, &pair);
        q[one] = pair.x;
        q[two] = pair.y;
        return;
    }
    head -= args.q_heads;
    if (head >= 2 * args.kv_heads)
        return;
    bool value = head >= args.kv_heads;
    head -= value ? args.kv_heads : 0;
    uint64_t off = row * args.kv_stride + (uint64_t)head * args.head_dim;
    uint16_t *to = (value ? dest->v : dest->k) + head * dest->head_stride;
    if (value)
        pair = make_float2(args.v[off + one], args.v[off + two]);
    else
        rotate(args, args.k + off, i, &pair);
    to[one] = dense_to_bf16(pair.x);
    to[two] = dense_to_bf16(pair.y);
}

extern "C" cudaError_t cuda_ops_rope(const struct ops_rope *args, cudaStream_t stream) {
    uint32_t items = (args->q_heads + 2 * args->kv_heads) * (args->head_dim / 2);

    void *arguments[] = {(void *)args};

    if (args->rows == 0)
        return cudaSuccess;
    return dense_launch((const void *)rope_kernel,
                        {dim3(args->rows, (items + THREADS - 1) / THREADS), dim3(THREADS), 0,
                         stream, dense_can_overlap()},
                        arguments);
}
