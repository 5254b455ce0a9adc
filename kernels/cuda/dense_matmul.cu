/* kernels/cuda/dense_matmul.cu - matrix products of fp32 rows with BF16 weights on tensor cores.
 *
 * Responsible for: struct ops_matmul on the device for any number of rows, several products over
 * the same x in one launch; weights of every type as BF16 rows.
 * Not responsible for: attention, choosing which rows go together.
 *
 * The bits of a row depend on x, W and k alone: not on the other rows, their number, n, the kernel
 * taken or the device's size. k is cut into PARTS ranges of whole units of 32; a part adds its
 * units in order, two m16n8k16 MMAs each (a thread's 16 bytes of W and of x are the operands of
 * both, so k is permuted inside a unit, in both kernels alike); parts are then added left to right
 * in fp32, and the residual last. No sum is shared by CTAs. x is rounded to BF16 (nearest even).
 *
 * Against the fp32 twin over the same BF16 weights: |difference| of an output is at most
 * (2^-8 + (k / 16 + 2k + 10) * 2^-23) * sum|x w|: rounding of x, then fp32 sums that may truncate.
 *
 * Moves W once per 16 rows (thin kernel, to 16 rows) or per 128 rows (wide kernel), and x once per
 * CTA. Expected on an H200: thin 0.9 of the copy rate over weights; wide 300 TFLOP/s at 256 rows.
 * The thin kernel asks for weights before the previous kernel of the stream has ended (sm_90).
 */
#include <cuda_bf16.h>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_dense.cuh"

enum { PARTS = 8, THREADS = 32 * PARTS, THIN_ROWS = 16, WIDE_OUTPUTS = 128, WIDE_STAGES = 5 };

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
    const float *x;         /* thin */
    const uint16_t *x_bf16; /* wide */
    uint64_t x_stride;
    uint32_t count;
    uint32_t rows;
    uint32_t k;
    uint32_t tiles;
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

static __device__ __forceinline__ void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}

static __device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

static __device__ __forceinline__ uint4 shared_get(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void mma(float acc[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* One unit of k: `low` and `high` hold 8 weights of outputs g and g + 8, `b` 8 values of a row. */
static __device__ __forceinline__ void multiply_unit(float acc[4], const uint4 &low,
                                                     const uint4 &high, const uint4 &b) {
    mma(acc, {low.x, high.x, low.y, high.y}, b.x, b.y);
    mma(acc, {low.z, high.z, low.w, high.w}, b.z, b.w);
}

static __device__ __forceinline__ uint32_t pair_bf16(float first, float second) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *(const uint32_t *)&pair;
}

static __device__ __forceinline__ uint4 eight_bf16(const float4 &first, const float4 &second) {
    return make_uint4(pair_bf16(first.x, first.y), pair_bf16(first.z, first.w),
                      pair_bf16(second.x, second.y), pair_bf16(second.z, second.w));
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
};

template <int MT, int NT>
static __device__ __forceinline__ void thin_request(const struct products &args,
                                                    thin_ring<MT, NT> &ring) {
    if (ring.tile < args.tiles && ring.unit < ring.end) {
        const struct product &product = product_of(args, ring.tile);
        uint32_t lane = threadIdx.x % 32;
        uint32_t first = (ring.tile - product.first_tile) * MT * 16 + lane / 4;
        uint32_t to = ring.shared + ring.stage * thin_shape<MT, NT>::STAGE_BYTES;
        const uint16_t *from = product.weight + ring.unit * OPS_K_UNIT + lane % 4 * 8;
        bool two = ring.unit + 1 < ring.end;
#pragma unroll
        for (int half = 0; half < MT * 2; half++) {
            uint64_t row = min(first + half * 8, product.n - 1);
            copy16(to + half * 512, from + row * args.k);
            if (two)
                copy16(to + (MT * 2 + half) * 512, from + row * args.k + OPS_K_UNIT);
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

/* A step of x: [n8][unit][half] of this lane's row and 8 values; rows beyond the count are zero. */
template <int NT> struct thin_rows { float4 of[NT][2][2]; };

template <int NT>
static __device__ __forceinline__ void thin_load_x(const struct products &args, uint32_t unit,
                                                   uint32_t end, thin_rows<NT> &out) {
    uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (uint32_t u = 0; u < 2; u++) {
            uint32_t row = nt * 8 + lane / 4;
            const float *from =
                args.x + row * args.x_stride + (unit + u) * OPS_K_UNIT + lane % 4 * 8;
            bool there = row < args.rows && unit + u < end;
            out.of[nt][u][0] = there ? __ldcg((const float4 *)from) : make_float4(0, 0, 0, 0);
            out.of[nt][u][1] = there ? __ldcg((const float4 *)from + 1) : make_float4(0, 0, 0, 0);
        }
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
                multiply_unit(acc[mt][nt], low, high, b[nt][u]);
        }
    }
}

/* Adds the parts and the residual of one tile; values lie as [row][output]. */
template <int MT, int NT>
static __device__ __forceinline__ void thin_finish(const struct products &args, uint32_t tile,
                                                   const float (&acc)[MT][NT][4], float *sums) {
    constexpr uint32_t VALUES = thin_shape<MT, NT>::VALUES;
    const struct product &product = product_of(args, tile);
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
        uint32_t row = i / (MT * 16);
        uint32_t output = (tile - product.first_tile) * MT * 16 + i % (MT * 16);
        if (row >= args.rows || output >= product.n)
            continue;
        uint64_t at = row * product.y_stride + output;
        float before = product.residual ? __ldcg(product.residual + at) : 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (uint32_t part = 0; part < PARTS; part++)
            sum = __fadd_rn(sum, sums[part * VALUES + i]);
        product.y[at] = product.residual ? __fadd_rn(before, sum) : sum;
    }
    __syncthreads();
}

template <int MT, int NT>
static __global__ void __launch_bounds__(THREADS, 2)
    thin_kernel(const __grid_constant__ struct products args) {
    using shape = thin_shape<MT, NT>;
    extern __shared__ __align__(16) uint8_t shared[];
    uint32_t warp = threadIdx.x / 32;
    uint32_t base = (uint32_t)__cvta_generic_to_shared(shared) +
                    warp * shape::STAGES * shape::STAGE_BYTES + threadIdx.x % 32 * 16;
    uint32_t first = part_first(args.k, warp), end = part_first(args.k, warp + 1), stage = 0;
    thin_ring<MT, NT> ring = {base, 0, blockIdx.x, first, first, end};
    thin_rows<NT> x;

    dense_let_next_start();
    for (uint32_t i = 0; i + 1 < shape::STAGES; i++)
        thin_request(args, ring);
    dense_wait_for_previous();
    thin_load_x(args, first, end, x);
    for (uint32_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
        float acc[MT][NT][4] = {};
        for (uint32_t unit = first; unit < end; unit += 2) {
            uint4 b[NT][2];
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int u = 0; u < 2; u++)
                    b[nt][u] = eight_bf16(x.of[nt][u][0], x.of[nt][u][1]);
            thin_load_x(args, unit + 2 < end ? unit + 2 : first, end, x);
            copy_wait<shape::STAGES - 2>();
            thin_step<MT, NT>(base + stage * shape::STAGE_BYTES, unit + 1 < end, b, acc);
            stage = stage + 1 == shape::STAGES ? 0 : stage + 1;
            thin_request(args, ring);
        }
        thin_finish<MT, NT>(args, tile, acc, (float *)(shared + shape::RING));
    }
}

/* --- more rows: a CTA takes 128 outputs of 16 * NT rows; four warps of outputs, two of rows */

template <int NT> struct wide_shape {
    static constexpr uint32_t ROWS = 16 * NT;
    static constexpr uint32_t STAGE_BYTES = (WIDE_OUTPUTS + ROWS) * OPS_K_UNIT * 2;
    static constexpr uint32_t BYTES = WIDE_STAGES * STAGE_BYTES;
};

/* One unit of k into a stage: W [128][32], then x [ROWS][32]. */
template <int NT>
static __device__ __forceinline__ void wide_request(const struct products &args,
                                                    const struct product &product, uint32_t unit,
                                                    uint32_t stage) {
    uint32_t to = stage + threadIdx.x * 16, part = threadIdx.x % 4 * 8 + unit * OPS_K_UNIT;
    uint32_t output = (blockIdx.x - product.first_tile) * WIDE_OUTPUTS + threadIdx.x / 4;
    uint32_t row = blockIdx.y * wide_shape<NT>::ROWS + threadIdx.x / 4;

    if (unit < args.k / OPS_K_UNIT) {
#pragma unroll
        for (uint32_t i = 0; i < WIDE_OUTPUTS / 64; i++)
            copy16(to + i * 4096,
                   product.weight + (uint64_t)min(output + i * 64, product.n - 1) * args.k + part);
        to += WIDE_OUTPUTS * OPS_K_UNIT * 2;
#pragma unroll
        for (uint32_t i = 0; i < (wide_shape<NT>::ROWS + 63) / 64; i++)
            copy16(to + i * 4096,
                   args.x_bf16 + (uint64_t)min(row + i * 64, args.rows - 1) * args.k + part);
    }
    copy_commit();
}

template <int NT> struct wide_sums {
    float part[2][NT][4];
    float total[2][NT][4];
};

template <int NT>
static __device__ __forceinline__ void wide_unit(uint32_t stage, wide_sums<NT> &sums) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t w = stage + (warp % 4 * 32 + lane / 4) * 64 + lane % 4 * 16;
    uint32_t x = stage + WIDE_OUTPUTS * 64 + (warp / 4 * 8 * NT + lane / 4) * 64 + lane % 4 * 16;
    uint4 low[2], high[2];

#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
        low[mt] = shared_get(w + mt * 1024);
        high[mt] = shared_get(w + mt * 1024 + 512);
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        uint4 b = shared_get(x + nt * 512);
#pragma unroll
        for (int mt = 0; mt < 2; mt++)
            multiply_unit(sums.part[mt][nt], low[mt], high[mt], b);
    }
}

template <int NT> static __device__ __forceinline__ void wide_fold(wide_sums<NT> &sums) {
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.total[mt][nt][i] = __fadd_rn(sums.total[mt][nt][i], sums.part[mt][nt][i]);
                sums.part[mt][nt][i] = 0.0f;
            }
}

template <int NT>
static __device__ __forceinline__ void
wide_store(const struct products &args, const struct product &product, const wide_sums<NT> &sums) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t first_output =
        (blockIdx.x - product.first_tile) * WIDE_OUTPUTS + warp % 4 * 32 + lane / 4;
    uint32_t first_row = blockIdx.y * wide_shape<NT>::ROWS + warp / 4 * 8 * NT + lane % 4 * 2;

#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
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

template <int NT>
static __global__ void __launch_bounds__(THREADS, NT <= 4 ? 2 : 1)
    wide_kernel(const __grid_constant__ struct products args) {
    extern __shared__ __align__(16) uint8_t shared[];
    uint32_t base = (uint32_t)__cvta_generic_to_shared(shared), part = 0, bound;
    const struct product &product = product_of(args, blockIdx.x);
    wide_sums<NT> sums = {};

    dense_let_next_start();
    dense_wait_for_previous();
    for (uint32_t i = 0; i + 1 < WIDE_STAGES; i++)
        wide_request<NT>(args, product, i, base + i * wide_shape<NT>::STAGE_BYTES);
    bound = part_first(args.k, 1);
    for (uint32_t unit = 0; unit < args.k / OPS_K_UNIT; unit++) {
        copy_wait<WIDE_STAGES - 2>();
        __syncthreads();
        wide_request<NT>(args, product, unit + WIDE_STAGES - 1,
                         base +
                             (unit + WIDE_STAGES - 1) % WIDE_STAGES * wide_shape<NT>::STAGE_BYTES);
        for (; unit == bound; bound = part_first(args.k, part + 1)) {
            wide_fold(sums);
            part++;
        }
        wide_unit<NT>(base + unit % WIDE_STAGES * wide_shape<NT>::STAGE_BYTES, sums);
    }
    wide_fold(sums);
    wide_store<NT>(args, product, sums);
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

extern "C" cudaError_t cuda_ops_open(struct cuda_ops_device *device_out) {
    struct kernel {
        const void *function;
        uint32_t bytes;
    } kernels[] = {{(const void *)thin_kernel<1, 1>, thin_shape<1, 1>::BYTES},
                   {(const void *)thin_kernel<2, 2>, thin_shape<2, 2>::BYTES},
                   {(const void *)wide_kernel<4>, wide_shape<4>::BYTES},
                   {(const void *)wide_kernel<8>, wide_shape<8>::BYTES}};
    int device, count, major, ctas[2];
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    for (struct kernel &kernel : kernels)
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(
                kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)kernel.bytes);
    for (int i = 0; i < 2; i++)
        if (error == cudaSuccess)
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas[i], kernels[i].function,
                                                                  THREADS, kernels[i].bytes);
    if (error != cudaSuccess)
        return error;
    for (int i = 0; i < 2; i++)
        device_out->thin_ctas[i] = (uint32_t)(ctas[i] * count);
    device_out->overlap = major >= 9;
    return cudaSuccess;
}

extern "C" size_t cuda_ops_matmul_scratch_bytes(uint32_t rows, uint32_t k) {
    return rows > THIN_ROWS ? (size_t)rows * k * sizeof(uint16_t) : 0;
}

/* Products in launch order; `outputs` is what a tile of the kernel has. */
static struct products products_of(const struct cuda_ops_matmul *launch, uint32_t outputs) {
    const struct ops_matmul *args = launch->args;
    struct products products = {};

    products.x = args->x;
    products.x_bf16 = launch->scratch;
    products.x_stride = args->x_stride;
    products.count = launch->count;
    products.rows = args->rows;
    products.k = args->weight.k;
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

template <int MT, int NT>
static cudaError_t launch_thin(const struct cuda_ops_matmul *launch, uint32_t ctas) {
    struct products products = products_of(launch, 16 * MT);
    void *arguments[] = {&products};

    return dense_launch((const void *)thin_kernel<MT, NT>,
                        {dim3(products.tiles < ctas ? products.tiles : ctas), dim3(THREADS),
                         thin_shape<MT, NT>::BYTES, launch->stream, launch->device->overlap},
                        arguments);
}

template <int NT> static cudaError_t launch_wide(const struct cuda_ops_matmul *launch) {
    struct products products = products_of(launch, WIDE_OUTPUTS);
    const struct ops_matmul *args = launch->args;
    dim3 round_grid(products.rows, (products.k / 8 + THREADS - 1) / THREADS);
    dim3 grid(products.tiles, (products.rows + 16 * NT - 1) / (16 * NT));
    void *rounding[] = {(void *)&args->x, (void *)&products.x_stride, &products.k,
                        (void *)&launch->scratch};
    void *arguments[] = {&products};
    cudaError_t error = dense_launch(
        (const void *)round_kernel,
        {round_grid, dim3(THREADS), 0, launch->stream, launch->device->overlap}, rounding);

    if (error != cudaSuccess)
        return error;
    return dense_launch(
        (const void *)wide_kernel<NT>,
        {grid, dim3(THREADS), wide_shape<NT>::BYTES, launch->stream, launch->device->overlap},
        arguments);
}

extern "C" cudaError_t cuda_ops_matmul(const struct cuda_ops_matmul *launch) {
    uint32_t rows = launch->args->rows;

    if (rows == 0)
        return cudaSuccess;
    if (rows <= 8)
        return launch_thin<1, 1>(launch, launch->device->thin_ctas[0]);
    if (rows <= THIN_ROWS)
        return launch_thin<2, 2>(launch, launch->device->thin_ctas[1]);
    return rows <= 64 ? launch_wide<4>(launch) : launch_wide<8>(launch);
}

/* Thread: one k of an output, so that writes are contiguous; the panel's unit stays in L1. */
static __global__ void __launch_bounds__(THREADS)
    weight_rows_kernel(const __grid_constant__ struct ops_weight packed, uint16_t *rows) {
    uint64_t k = blockIdx.x * (uint64_t)THREADS + threadIdx.x, unit_bytes;

    if (k >= packed.k)
        return;
    unit_bytes = dense_unit_bytes(packed.type);
    for (uint32_t n = blockIdx.y; n < packed.n; n += gridDim.y) {
        const uint8_t *unit =
            packed.bytes +
            ((uint64_t)(n / OPS_PANEL) * (packed.k / OPS_K_UNIT) + k / OPS_K_UNIT) * unit_bytes;
        rows[(uint64_t)n * packed.k + k] =
            dense_to_bf16(dense_widen(packed.type, unit, n % OPS_PANEL, (uint32_t)k % OPS_K_UNIT));
    }
}

extern "C" cudaError_t cuda_ops_weight_rows(const struct ops_weight *packed, uint16_t *rows,
                                            cudaStream_t stream) {
    dim3 grid((packed->k + THREADS - 1) / THREADS, packed->n < 65535 ? packed->n : 65535);

    weight_rows_kernel<<<grid, THREADS, 0, stream>>>(*packed, rows);
    return cudaGetLastError();
}
