/* kernels/cuda/dense_matmul.cu - matrix products of fp32 rows with BF16 weights on tensor cores.
 *
 * Responsible for: struct ops_matmul on the device for any number of rows, several products over
 * the same x in one launch, with the norm before and the SwiGLU behind them where that is asked for
 * (the bits of the separate kernels).
 * Not responsible for: attention, choosing which rows go together, rows of chunks where cuBLASLt is
 * there (dense_gemm.cu).
 *
 * The bits of a single row depend on x, W and k alone: not on the other rows, their number, n, the
 * kernel taken or the device's size. k is cut into PARTS ranges of whole units of 32; a part adds
 * its units in order, two m16n8k16 MMAs each (a thread's 16 bytes of W and of x are the operands of
 * both, so k is permuted inside a unit, in both kernels alike); parts are then added left to right
 * in fp32, and the residual last. No sum is shared by CTAs. x is rounded to BF16 (nearest even).
 *
 * Against the fp32 twin over the same BF16 weights: |difference| of an output is at most
 * (2^-8 + (k / 16 + 2k + 10) * 2^-23) * sum|x w|: rounding of x, then fp32 sums that may truncate.
 *
 * Moves W once to 16 rows (thin kernel) or once per 64 rows (wide kernel), and x once per CTA.
 * Expected on an H200: thin 0.82 (4,096 outputs) to 1.0 of the copy rate at one row; wide 135
 * to 175 TFLOP/s. The thin kernel asks for weights before the previous kernel has ended (sm_90).
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"
#include "kernels/cuda/device_mma.cuh"

enum {
    PARTS = 8,
    THREADS = 32 * PARTS,
    NARROW_ROWS = 2, /* thin kernels by row count */
    NORM_PART = 512, /* values of a row that a warp fetches for the norm */
    HALF_ROWS = 8,
    THIN_ROWS = 16
};

struct product {
    const uint16_t *weight;
    const float *residual;
    float *y;
    uint64_t y_stride;
    uint32_t n;
    uint32_t first_tile;
};

struct products {
    struct product of[CUDA_OPS_PRODUCTS_MAX];
    const float *x;         /* to NARROW_ROWS */
    const uint16_t *x_bf16; /* of more, [row][k] */
    uint64_t x_stride;
    uint32_t count;
    uint32_t rows;
    uint32_t k;
    uint32_t tiles;
    const float *gain; /* of the norm that makes x, if it is done here */
    float eps;
    float *glu; /* [rows][n] SwiGLU of the two products, if it is done here */
};

static __device__ __forceinline__ uint32_t part_first(uint32_t k, uint32_t part) {
    return k / OPS_K_UNIT * part / PARTS;
}

static __device__ __forceinline__ const struct product &product_of(const struct products &args,
                                                                   uint32_t tile) {
    uint32_t i = 0;

    while (i + 1 < args.count && tile >= args.of[i + 1].first_tile)
        i++;
    return args.of[i];
}

/* --- up to 16 rows: a CTA takes 16 * MT outputs at a time, each warp one part of k, with a ring of
 * weights of its own that runs on from tile to tile. A step is two units. */

template <int MT, int NT> struct thin_shape {
    static constexpr uint32_t STAGES = MT == 1 ? 6 : 3;
    static constexpr uint32_t STAGE_BYTES = MT * 2048; /* [unit][m16][half][lane] 16 bytes */
    static constexpr uint32_t RING = PARTS * STAGES * STAGE_BYTES;
    static constexpr uint32_t VALUES = MT * 16 * NT * 8; /* of a part */
    static constexpr uint32_t BYTES = RING + PARTS * VALUES * 4;
};

/* Where the ring of a warp is. */
template <int MT, int NT> struct thin_ring {
    uint32_t shared; /* this lane's 16 bytes of stage 0 */
    uint32_t stage;
    uint32_t tile;
    uint32_t unit;
    uint32_t first;
    uint32_t end;
    uint64_t policy;
};

/* Row of W for half `half` of a tile; with GLU halves take turns between gate and up. */
template <int MT, bool GLU>
static __device__ __forceinline__ const uint16_t *thin_weights(const struct products &args,
                                                               uint32_t tile, uint32_t half) {
    const struct product &product = GLU ? args.of[half % 2] : product_of(args, tile);
    uint32_t first = (tile - args.of[0].first_tile) * MT * 8 + half / 2 * 8;

    if (!GLU)
        first = (tile - product.first_tile) * MT * 16 + half * 8;
    return product.weight + (uint64_t)min(first + threadIdx.x % 32 / 4, product.n - 1) * args.k;
}

template <int MT, int NT, bool GLU>
static __device__ __forceinline__ void thin_request(const struct products &args,
                                                    thin_ring<MT, NT> &ring) {
    if (ring.tile < args.tiles && ring.unit < ring.end) {
        uint32_t to = ring.shared + ring.stage * thin_shape<MT, NT>::STAGE_BYTES;
        uint32_t at = ring.unit * OPS_K_UNIT + threadIdx.x % 4 * 8;
        bool two = ring.unit + 1 < ring.end;
#pragma unroll
        for (uint32_t half = 0; half < MT * 2; half++) {
            const uint16_t *from = thin_weights<MT, GLU>(args, ring.tile, half) + at;
            copy16_once(to + half * 512, from, ring.policy);
            if (two)
                copy16_once(to + (MT * 2 + half) * 512, from + OPS_K_UNIT, ring.policy);
        }
        ring.unit += 2;
        if (ring.unit >= ring.end) {
            ring.unit = ring.first;
            ring.tile += gridDim.x;
        }
    }
    ring.stage = ring.stage + 1 == thin_shape<MT, NT>::STAGES ? 0 : ring.stage + 1;
    copy_commit();
}

/* Where x comes from: fp32, BF16 rounded before, or fp32 that still has to be normed. */
enum thin_x { THIN_PLAIN, THIN_ROUNDED, THIN_NORMED };

/* A step of x: [n8][unit] 8 values of this lane's row; rows beyond the count are zero. */
template <int NT, enum thin_x FROM>
struct thin_rows {
    uint4 of[NT][2][2]; /* the second half is not used when rounded */
    float4 gain[2][2];  /* when to be normed */
    float inverse;
};

template <int NT, enum thin_x FROM>
static __device__ __forceinline__ void thin_load_x(const struct products &args, uint32_t unit,
                                                   uint32_t end, thin_rows<NT, FROM> &out) {
    uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t u = 0; u < 2; u++) {
        uint32_t at = (unit + u) * OPS_K_UNIT + lane % 4 * 8;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t row = nt * 8 + lane / 4;
            const uint4 *from = FROM == THIN_ROUNDED
                                    ? (const uint4 *)(args.x_bf16 + (uint64_t)row * args.k + at)
                                    : (const uint4 *)(args.x + row * args.x_stride + at);
            bool there = row < args.rows && unit + u < end;
#pragma unroll
            for (int half = 0; half < (FROM == THIN_ROUNDED ? 1 : 2); half++)
                out.of[nt][u][half] = there ? __ldcg(from + half) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int half = 0; FROM == THIN_NORMED && half < 2; half++)
            out.gain[u][half] = unit + u < end ? __ldg((const float4 *)(args.gain + at) + half)
                                               : make_float4(0, 0, 0, 0);
    }
}

static __device__ __forceinline__ float4 normed(const float4 &x, float inverse,
                                                const float4 &gain) {
    return make_float4(
        __fmul_rn(__fmul_rn(x.x, inverse), gain.x), __fmul_rn(__fmul_rn(x.y, inverse), gain.y),
        __fmul_rn(__fmul_rn(x.z, inverse), gain.z), __fmul_rn(__fmul_rn(x.w, inverse), gain.w));
}

template <int NT, enum thin_x FROM>
static __device__ __forceinline__ uint4 thin_operand(const thin_rows<NT, FROM> &x, int nt, int u) {
    float4 first = *(const float4 *)&x.of[nt][u][0], second = *(const float4 *)&x.of[nt][u][1];

    if (FROM == THIN_ROUNDED)
        return x.of[nt][u][0];
    if (FROM == THIN_NORMED) {
        first = normed(first, x.inverse, x.gain[u][0]);
        second = normed(second, x.inverse, x.gain[u][1]);
    }
    return eight_bf16(first, second);
}

/* 1 / rms of the only row, with the sum of the norm's own kernel. Every warp lends the stage of its
 * ring that is not asked for yet, `spare`, to an eighth of the row; the first warp adds. */
static __device__ __forceinline__ float thin_norm(const struct products &args, float *spare,
                                                  uint32_t ring_floats, float *inverse) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < NORM_PART / 32; i++) {
        uint32_t at = warp * NORM_PART + i * 32 + lane;
        spare[warp * ring_floats + i * 32 + lane] = at < args.k ? __ldcg(args.x + at) : 0.0f;
    }
    __syncthreads();
    if (warp == 0) {
        float own = dense_inverse_rms(args.k, args.eps, [=](uint32_t i) {
            return spare[i / NORM_PART * ring_floats + i % NORM_PART];
        });
        if (lane == 0)
            *inverse = own;
    }
    __syncthreads();
    return *inverse;
}

template <int MT, int NT>
static __device__ __forceinline__ void thin_step(uint32_t from, bool two, const uint4 (&b)[NT][2],
                                                 float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int u = 0; u < 2; u++) {
        if (u == 1 && !two)
            break;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            uint4 low = shared_get(from + ((u * MT + mt) * 2) * 512);
            uint4 high = shared_get(from + ((u * MT + mt) * 2 + 1) * 512);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                multiply<0>(acc[mt][nt], low, high, b[nt][u]);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                multiply<1>(acc[mt][nt], low, high, b[nt][u]);
        }
    }
}

/* The parts of value i of a tile, added. */
template <uint32_t VALUES>
static __device__ __forceinline__ float thin_sum(const float *sums, uint32_t i) {
    float sum = 0.0f;

#pragma unroll
    for (uint32_t part = 0; part < PARTS; part++)
        sum = __fadd_rn(sum, sums[part * VALUES + i]);
    return sum;
}

/* Value i of a tile, [row][output], with the residual. */
template <int MT, uint32_t VALUES>
static __device__ __forceinline__ void thin_put(const struct products &args, uint32_t tile,
                                                const float *sums, uint32_t i) {
    const struct product &product = product_of(args, tile);
    uint32_t row = i / (MT * 16);
    uint32_t output = (tile - product.first_tile) * MT * 16 + i % (MT * 16);
    uint64_t at = row * product.y_stride + output;

    if (row >= args.rows || output >= product.n)
        return;
    float before = product.residual ? __ldcg(product.residual + at) : 0.0f;
    float sum = thin_sum<VALUES>(sums, i);
    product.y[at] = product.residual ? __fadd_rn(before, sum) : sum;
}

/* Values i (gate) and i + 8 (up) of a tile. */
template <int MT, uint32_t VALUES>
static __device__ __forceinline__ void thin_put_glu(const struct products &args, uint32_t tile,
                                                    const float *sums, uint32_t i) {
    uint32_t row = i / (MT * 16), in_tile = i % (MT * 16);
    uint32_t output = tile * MT * 8 + in_tile / 16 * 8 + in_tile % 8;

    if (in_tile % 16 >= 8 || row >= args.rows || output >= args.of[0].n)
        return;
    args.glu[(uint64_t)row * args.of[0].n + output] =
        dense_swiglu(thin_sum<VALUES>(sums, i), thin_sum<VALUES>(sums, i + 8));
}

template <int MT, int NT, bool GLU>
static __device__ __forceinline__ void thin_finish(const struct products &args, uint32_t tile,
                                                   const float (&acc)[MT][NT][4], float *sums) {
    constexpr uint32_t VALUES = thin_shape<MT, NT>::VALUES;
    uint32_t lane = threadIdx.x % 32;
    float *own = sums + threadIdx.x / 32 * VALUES;

#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                own[(nt * 8 + lane % 4 * 2 + i % 2) * MT * 16 + mt * 16 + lane / 4 + i / 2 * 8] =
                    acc[mt][nt][i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < VALUES; i += THREADS) {
        if (GLU)
            thin_put_glu<MT, VALUES>(args, tile, sums, i);
        else
            thin_put<MT, VALUES>(args, tile, sums, i);
    }
    __syncthreads();
}

template <int MT, int NT, enum thin_x FROM, bool GLU>
static __global__ void __launch_bounds__(THREADS, 2)
    thin_kernel(const __grid_constant__ struct products args) {
    using shape = thin_shape<MT, NT>;
    extern __shared__ __align__(16) uint8_t shared[];
    float *sums = (float *)(shared + shape::RING);
    uint32_t warp = threadIdx.x / 32;
    uint32_t base = (uint32_t)__cvta_generic_to_shared(shared) +
                    warp * shape::STAGES * shape::STAGE_BYTES + threadIdx.x % 32 * 16;
    uint32_t first = part_first(args.k, warp), end = part_first(args.k, warp + 1), stage = 0;
    thin_ring<MT, NT> ring = {base, 0, blockIdx.x, first, first, end, copy_once_policy()};
    thin_rows<NT, FROM> x;

    dense_let_next_start();
    for (uint32_t i = 0; i + 1 < shape::STAGES; i++)
        thin_request<MT, NT, GLU>(args, ring);
    dense_wait_for_previous();
    thin_load_x(args, first, end, x);
    if (FROM == THIN_NORMED) {
        static_assert(FROM != THIN_NORMED || shape::STAGE_BYTES == NORM_PART * 4,
                      "a stage is lent");
        float *spare = (float *)(shared + (shape::STAGES - 1) * shape::STAGE_BYTES);
        x.inverse = thin_norm(args, spare, shape::STAGES * shape::STAGE_BYTES / 4, sums);
        __syncthreads(); /* sums is used again */
    }
    for (uint32_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
        float acc[MT][NT][4] = {};
        for (uint32_t unit = first; unit < end; unit += 2) {
            uint4 b[NT][2];
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int u = 0; u < 2; u++)
                    b[nt][u] = thin_operand(x, nt, u);
            thin_load_x(args, unit + 2 < end ? unit + 2 : first, end, x);
            copy_wait<shape::STAGES - 2>();
            thin_step<MT, NT>(base + stage * shape::STAGE_BYTES, unit + 1 < end, b, acc);
            stage = stage + 1 == shape::STAGES ? 0 : stage + 1;
            thin_request<MT, NT, GLU>(args, ring);
        }
        thin_finish<MT, NT, GLU>(args, tile, acc, sums);
    }
}

/* --- more rows: a CTA takes 64 outputs of 64 rows, a warp 32 of each. A step is two units. */

enum {
    WIDE_OUTPUTS = 64,
    WIDE_ROWS = 64,
    WIDE_THREADS = 128,
    WIDE_STAGES = 6,
    WIDE_UNIT_BYTES = (WIDE_OUTPUTS + WIDE_ROWS) * OPS_K_UNIT * 2,
    WIDE_STAGE_BYTES = 2 * WIDE_UNIT_BYTES,
    WIDE_BYTES = WIDE_STAGES * WIDE_STAGE_BYTES,
    WIDE_COPIES = WIDE_OUTPUTS * 4 / WIDE_THREADS /* of 16 bytes, by a thread, of W and of x each */
};

/* What a thread copies of every unit: 16 bytes of a row of each. Rows that do not exist are not
 * copied: their sums are of what lies there and go nowhere. */
struct wide_source {
    const uint16_t *w[WIDE_COPIES];
    const uint16_t *x[WIDE_COPIES];
};

static __device__ __forceinline__ wide_source wide_from(const struct products &args,
                                                        const struct product &product) {
    uint32_t output = (blockIdx.y - product.first_tile) * WIDE_OUTPUTS + threadIdx.x / 4;
    uint32_t row = blockIdx.x * WIDE_ROWS + threadIdx.x / 4, part = threadIdx.x % 4 * 8;
    wide_source from;

#pragma unroll
    for (uint32_t i = 0; i < WIDE_COPIES; i++, output += WIDE_THREADS / 4)
        from.w[i] = output < product.n ? product.weight + (uint64_t)output * args.k + part : NULL;
#pragma unroll
    for (uint32_t i = 0; i < WIDE_COPIES; i++, row += WIDE_THREADS / 4)
        from.x[i] = row < args.rows ? args.x_bf16 + (uint64_t)row * args.k + part : NULL;
    return from;
}

/* Two units of k into a stage: [unit]{W [64][32], x [64][32]}; the pointers go on. */
static __device__ __forceinline__ void wide_request(wide_source &from, uint32_t units,
                                                    uint32_t to) {
#pragma unroll
    for (uint32_t u = 0; u < 2; u++) {
        if (u >= units)
            break;
#pragma unroll
        for (uint32_t i = 0; i < WIDE_COPIES; i++)
            if (from.w[i])
                copy16(to + u * WIDE_UNIT_BYTES + i * WIDE_THREADS * 16,
                       from.w[i] + u * OPS_K_UNIT);
#pragma unroll
        for (uint32_t i = 0; i < WIDE_COPIES; i++)
            if (from.x[i])
                copy16(to + u * WIDE_UNIT_BYTES + WIDE_OUTPUTS * 64 + i * WIDE_THREADS * 16,
                       from.x[i] + u * OPS_K_UNIT);
    }
#pragma unroll
    for (const uint16_t *&at : from.w)
        at += at ? 2 * OPS_K_UNIT : 0;
#pragma unroll
    for (const uint16_t *&at : from.x)
        at += at ? 2 * OPS_K_UNIT : 0;
    copy_commit();
}

enum { WIDE_NT = 4 };

struct wide_sums {
    float part[2][WIDE_NT][4];
    float total[2][WIDE_NT][4];
};

/* `stage` is a unit of it. */
static __device__ __forceinline__ void wide_unit(uint32_t stage, wide_sums &sums) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t w = stage + (warp % 2 * 32 + lane / 4) * 64 + lane % 4 * 16;
    uint32_t x = stage + (WIDE_OUTPUTS + warp / 2 * 32 + lane / 4) * 64 + lane % 4 * 16;
    uint4 low[2], high[2], b[WIDE_NT];

#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
        low[mt] = shared_get(w + mt * 1024);
        high[mt] = shared_get(w + mt * 1024 + 512);
    }
#pragma unroll
    for (int nt = 0; nt < WIDE_NT; nt++)
        b[nt] = shared_get(x + nt * 512);
#pragma unroll
    for (int i = 0; i < 2 * WIDE_NT; i++)
        multiply<0>(sums.part[i % 2][i / 2], low[i % 2], high[i % 2], b[i / 2]);
#pragma unroll
    for (int i = 0; i < 2 * WIDE_NT; i++)
        multiply<1>(sums.part[i % 2][i / 2], low[i % 2], high[i % 2], b[i / 2]);
}

static __device__ __forceinline__ void wide_fold(wide_sums &sums) {
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < WIDE_NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.total[mt][nt][i] = __fadd_rn(sums.total[mt][nt][i], sums.part[mt][nt][i]);
                sums.part[mt][nt][i] = 0.0f;
            }
}

static __device__ __forceinline__ void wide_store(const struct products &args,
                                                  const struct product &product, uint32_t tile_row,
                                                  const wide_sums &sums) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t first_output =
        (blockIdx.y - product.first_tile) * WIDE_OUTPUTS + warp % 2 * 32 + lane / 4;
    uint32_t first_row = tile_row + warp / 2 * 32 + lane % 4 * 2;

#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < WIDE_NT; nt++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t row = first_row + nt * 8 + i % 2;
                uint32_t output = first_output + mt * 16 + i / 2 * 8;
                uint64_t at = row * product.y_stride + output;
                if (row >= args.rows || output >= product.n)
                    continue;
                float sum = sums.total[mt][nt][i];
                product.y[at] =
                    product.residual ? __fadd_rn(__ldcg(product.residual + at), sum) : sum;
            }
}

static __global__ void __launch_bounds__(WIDE_THREADS, 2)
    wide_kernel(const __grid_constant__ struct products args) {
    extern __shared__ __align__(16) uint8_t shared[];
    uint32_t base = (uint32_t)__cvta_generic_to_shared(shared), units = args.k / OPS_K_UNIT;
    uint32_t part = 0, bound = part_first(args.k, 1);
    const struct product &product = product_of(args, blockIdx.y);
    wide_sums sums = {};

    wide_source from = wide_from(args, product);
    uint32_t put = base + threadIdx.x * 16, asked = 0, get = base;

    dense_let_next_start();
    dense_wait_for_previous();
    for (uint32_t i = 0; i + 1 < WIDE_STAGES; i++, asked += 2)
        wide_request(from, asked < units ? units - asked : 0, put + i * WIDE_STAGE_BYTES);
    put += (WIDE_STAGES - 1) * WIDE_STAGE_BYTES;
    for (uint32_t unit = 0; unit < units; unit += 2, asked += 2) {
        copy_wait<WIDE_STAGES - 2>();
        __syncthreads();
        wide_request(from, asked < units ? units - asked : 0, put);
        put = put + WIDE_STAGE_BYTES < base + WIDE_BYTES ? put + WIDE_STAGE_BYTES
                                                         : base + threadIdx.x * 16;
#pragma unroll
        for (uint32_t u = 0; u < 2; u++) {
            if (unit + u >= units)
                break;
            for (; unit + u == bound; bound = part_first(args.k, ++part + 1))
                wide_fold(sums);
            wide_unit(get + u * WIDE_UNIT_BYTES, sums);
        }
        get = get + WIDE_STAGE_BYTES < base + WIDE_BYTES ? get + WIDE_STAGE_BYTES : base;
    }
    wide_fold(sums);
    wide_store(args, product, blockIdx.x * WIDE_ROWS, sums);
}

static __global__ void __launch_bounds__(THREADS)
    round_kernel(const float *x, uint64_t x_stride, uint32_t k, uint16_t *out) {
    uint32_t at = (blockIdx.y * THREADS + threadIdx.x) * 8;

    dense_let_next_start();
    dense_wait_for_previous();
    if (at >= k)
        return;
    const float4 *from = (const float4 *)(x + blockIdx.x * x_stride + at);
    *(uint4 *)(out + (uint64_t)blockIdx.x * k + at) = eight_bf16(__ldcg(from), __ldcg(from + 1));
}

/* --- launchers */

struct kernel {
    const void *function;
    uint32_t bytes; /* shared */
    uint32_t outputs;
};

enum { SHAPES = 3, THIN_FORMS = 8 };

template <int MT, int NT, enum thin_x FROM, bool GLU> static struct kernel thin_form() {
    return {(const void *)thin_kernel<MT, NT, FROM, GLU>, thin_shape<MT, NT>::BYTES,
            GLU ? MT * 8 : MT * 16};
}

/* [shape][what is done here]; the shapes are those of cuda_ops_device.thin_ctas. */
static void thin_forms(struct kernel forms[THIN_FORMS]) {
    forms[0] = thin_form<1, 1, THIN_PLAIN, false>();
    forms[1] = thin_form<1, 1, THIN_PLAIN, true>();
    forms[2] = thin_form<1, 1, THIN_NORMED, false>();
    forms[3] = thin_form<1, 1, THIN_NORMED, true>();
    forms[4] = thin_form<2, 1, THIN_ROUNDED, false>();
    forms[5] = thin_form<2, 1, THIN_ROUNDED, true>();
    forms[6] = thin_form<2, 2, THIN_ROUNDED, false>();
    forms[7] = thin_form<2, 2, THIN_ROUNDED, true>();
}

extern "C" cudaError_t cuda_ops_open(struct cuda_ops_device *device_out) {
    struct kernel kernels[THIN_FORMS + 1];
    int device, count, major, ctas[SHAPES];
    cudaError_t error = cudaGetDevice(&device);

    thin_forms(kernels);
    kernels[THIN_FORMS] = {(const void *)wide_kernel, WIDE_BYTES, 0};
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    for (struct kernel &kernel : kernels)
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(
                kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)kernel.bytes);
    for (int i = 0; i < SHAPES; i++) {
        const struct kernel &kernel = kernels[i == 0 ? 3 : 2 * i + 3];
        if (error == cudaSuccess)
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas[i], kernel.function,
                                                                  THREADS, kernel.bytes);
    }
    if (error != cudaSuccess)
        return error;
    for (int i = 0; i < SHAPES; i++)
        device_out->thin_ctas[i] = (uint32_t)(ctas[i] * count);
    device_out->overlap = major >= 9;
    device_out->gemm = NULL;
    return cudaSuccess;
}

extern "C" size_t cuda_ops_matmul_scratch_bytes(uint32_t rows, uint32_t singles, uint32_t k) {
    return rows > NARROW_ROWS || rows > singles ? (size_t)rows * k * sizeof(uint16_t) : 0;
}

/* Products in launch order; a tile has `outputs` of one product, or of both with GLU. */
static struct products products_of(const struct cuda_ops_matmul *launch, uint32_t outputs) {
    const struct ops_matmul *args = launch->args;
    struct products products = {};

    products.x = args->x;
    products.x_bf16 = launch->scratch;
    products.x_stride = args->x_stride;
    products.count = launch->count;
    products.rows = args->rows;
    products.k = args->weight.k;
    if (launch->norm) {
        products.x = launch->norm->x;
        products.x_stride = launch->norm->x_stride;
        products.gain = launch->norm->gain;
        products.eps = launch->norm->eps;
    }
    products.glu = launch->glu;
    for (uint32_t i = 0; i < launch->count; i++) {
        products.of[i] = {(const uint16_t *)args[i].weight.bytes,
                          args[i].residual,
                          args[i].y,
                          args[i].y_stride,
                          args[i].weight.n,
                          products.tiles};
        products.tiles += (args[i].weight.n + outputs - 1) / outputs;
    }
    return products;
}

/* x as BF16 in scratch, normed if wanted. */
static cudaError_t launch_round(const struct cuda_ops_matmul *launch) {
    const struct ops_matmul *args = launch->args;
    uint64_t stride = args->x_stride;
    uint32_t k = args->weight.k;
    dim3 grid(args->rows, (k / 8 + THREADS - 1) / THREADS);
    void *arguments[] = {(void *)&args->x, &stride, &k, (void *)&launch->scratch};

    if (launch->norm)
        return dense_norm_rounded(launch->norm, launch->scratch, launch->stream);
    return dense_launch((const void *)round_kernel,
                        {grid, dim3(THREADS), 0, launch->stream, launch->device->overlap},
                        arguments);
}

static cudaError_t launch_thin(const struct cuda_ops_matmul *launch, uint32_t shape) {
    uint32_t ctas = launch->device->thin_ctas[shape];
    struct kernel forms[THIN_FORMS];
    struct products products;
    void *arguments[] = {&products};

    thin_forms(forms);
    const struct kernel &form =
        forms[(shape == 0 ? (launch->norm ? 2 : 0) : 2 * shape + 2) + (launch->glu ? 1 : 0)];
    products = products_of(launch, form.outputs);
    if (launch->glu)
        products.tiles = products.of[1].first_tile; /* a tile has its share of both */
    return dense_launch(form.function,
                        {dim3(products.tiles < ctas ? products.tiles : ctas), dim3(THREADS),
                         form.bytes, launch->stream, launch->device->overlap},
                        arguments);
}

/* SwiGLU of products that were made apart. */
static cudaError_t launch_glu(const struct cuda_ops_matmul *launch) {
    const struct ops_matmul *args = launch->args;

    if (!launch->glu)
        return cudaSuccess;
    struct ops_swiglu glu = {args[0].y, args[1].y, launch->glu,
                             (size_t)args->rows * args->weight.n};
    return cuda_ops_swiglu(&glu, launch->stream);
}

static cudaError_t launch_wide(const struct cuda_ops_matmul *launch) {
    struct products products = products_of(launch, WIDE_OUTPUTS);
    dim3 grid((products.rows + WIDE_ROWS - 1) / WIDE_ROWS, products.tiles);
    void *arguments[] = {&products};
    cudaError_t error = dense_launch(
        (const void *)wide_kernel,
        {grid, dim3(WIDE_THREADS), WIDE_BYTES, launch->stream, launch->device->overlap}, arguments);

    return error == cudaSuccess ? launch_glu(launch) : error;
}

/* Whether the thin kernel can do the norm itself. */
static bool norm_fits(const struct cuda_ops_matmul *launch) {
    return launch->args->rows == 1 && launch->args->weight.k <= PARTS * NORM_PART;
}

/* By the kernels of this file. */
static cudaError_t multiply_singles(const struct cuda_ops_matmul *launch) {
    uint32_t rows = launch->args->rows;
    cudaError_t error;

    if (rows == 0)
        return cudaSuccess;
    if (rows <= NARROW_ROWS && launch->norm && !norm_fits(launch)) {
        struct cuda_ops_matmul rest = *launch;
        rest.norm = NULL;
        error = cuda_ops_rmsnorm(launch->norm, launch->stream);
        return error == cudaSuccess ? launch_thin(&rest, 0) : error;
    }
    if (rows <= NARROW_ROWS)
        return launch_thin(launch, 0);
    error = launch_round(launch);
    if (error != cudaSuccess)
        return error;
    if (rows <= THIN_ROWS)
        return launch_thin(launch, rows <= HALF_ROWS ? 1 : 2);
    return launch_wide(launch);
}

/* Rows of chunks, where every product is taken by the library. */
static cudaError_t multiply_chunk(const struct cuda_ops_matmul *launch) {
    cudaError_t error = launch_round(launch);

    for (uint32_t i = 0; i < launch->count && error == cudaSuccess; i++)
        error = cuda_gemm_multiply(launch->device->gemm, &launch->args[i], launch->scratch,
                                   launch->stream);
    return error == cudaSuccess ? launch_glu(launch) : error;
}

/* Some rows of a launch as a launch of their own. */
struct span {
    struct ops_matmul args[CUDA_OPS_PRODUCTS_MAX];
    struct ops_rmsnorm norm;
    struct cuda_ops_matmul launch;
};

static void span_of(const struct cuda_ops_matmul *launch, uint32_t first, uint32_t rows,
                    struct span *span_out) {
    span_out->launch = *launch;
    span_out->launch.args = span_out->args;
    span_out->launch.scratch += (uint64_t)first * launch->args->weight.k;
    for (uint32_t i = 0; i < launch->count; i++) {
        struct ops_matmul *args = &span_out->args[i];
        *args = launch->args[i];
        args->x += first * args->x_stride;
        args->y += first * args->y_stride;
        args->residual += args->residual ? first * args->y_stride : 0;
        args->rows = rows;
    }
    if (launch->norm) {
        span_out->norm = *launch->norm;
        span_out->norm.x += first * launch->norm->x_stride;
        span_out->norm.y += first * launch->norm->y_stride;
        span_out->norm.rows = rows;
        span_out->launch.norm = &span_out->norm;
    }
    if (launch->glu)
        span_out->launch.glu += (uint64_t)first * launch->args->weight.n;
}

/* Whether rows of chunks go through the library: a matter of the weights alone. */
static bool library_takes(const struct cuda_ops_matmul *launch) {
    uint64_t weights = 0;

    if (!launch->device->gemm)
        return false;
    for (uint32_t i = 0; i < launch->count; i++) {
        if (!cuda_gemm_takes(launch->device->gemm, &launch->args[i]))
            return false;
        weights += (uint64_t)launch->args[i].weight.n * launch->args[i].weight.k;
    }
    return weights >= CUDA_OPS_LIBRARY_WEIGHTS;
}

extern "C" cudaError_t cuda_ops_matmul(const struct cuda_ops_matmul *launch) {
    uint32_t rows = launch->args->rows, singles = launch->singles;
    struct span span;
    cudaError_t error;

    if (singles >= rows || !library_takes(launch))
        return multiply_singles(launch);
    span_of(launch, 0, singles, &span);
    error = multiply_singles(&span.launch);
    if (error != cudaSuccess)
        return error;
    span_of(launch, singles, rows - singles, &span);
    return multiply_chunk(&span.launch);
}
