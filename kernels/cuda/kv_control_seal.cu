/* kernels/cuda/kv_control_seal.cu - BF16 window pages to FP8 or K8I4, bit-equal to the host twin.
 *
 * Responsible for: the codes of kernels/host/kv_control.c, one page of one layer and KV head per
 * CTA, a token per warp; the launcher.
 * Not responsible for: K's code in K8I4 (device_seal.cuh), choosing slots, planes (kv_seal.cu).
 *
 * Moves, per page, layer and KV head at head_dim 128: 32,768 B in, 16,384 B (FP8) or 13,312 B
 * (K8I4) out. Expected: as kv_seal.cu or faster; nothing is tuned. Every product, sum and quotient
 * is an intrinsic that rounds alone.
 */
#include "kernels/cuda/device_control.cuh"
#include "kernels/cuda/device_seal.cuh"

enum { WARPS = 8, THREADS = 32 * WARPS, E4M3_MAX = 0x7e, NIBBLE_MAX = 15 };

#define E4M3_LARGEST 448.0f
#define E4M3_NORMAL_MIN 0x1p-6f
#define HALF_LARGEST 65504.0f
#define HALF_NORMAL_MIN 0x1p-14f

static __device__ __forceinline__ uint32_t e4m3_of(float x) {
    uint32_t sign = __float_as_uint(x) >> 31 << 7, bits = __float_as_uint(fabsf(x)), code;

    if (fabsf(x) >= E4M3_LARGEST)
        code = E4M3_MAX;
    else if (fabsf(x) < E4M3_NORMAL_MIN)
        code = __float_as_uint(__fadd_rn(fabsf(x), 0x1p14f)) - __float_as_uint(0x1p14f);
    else
        code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    return sign | code;
}

static __device__ __forceinline__ uint32_t half_toward(float x, int up) {
    float size = fabsf(x), scaled = __fmul_rn(size, 0x1p24f);
    int away = up == (x > 0.0f);
    uint32_t half;

    if (size < HALF_NORMAL_MIN) {
        half = (uint32_t)scaled;
        half += away && (float)half != scaled;
    } else {
        half = (__float_as_uint(size) >> 13) - ((127 - 15) << 10);
        half += away && (__float_as_uint(size) & 0x1fff) != 0;
    }
    return half | (x < 0.0f && half != 0 ? 0x8000 : 0);
}

/* Adjacent bytes of a lane, at the address of the first. */
template <int N> static __device__ __forceinline__ void put_bytes(uint8_t *to, uint32_t bytes) {
    if (N == 1)
        *to = (uint8_t)bytes;
    else if (N == 2)
        *(uint16_t *)to = (uint16_t)bytes;
    else
        *(uint32_t *)to = bytes;
}

template <int DIM>
static __device__ __forceinline__ void load_token(const uint16_t *x, float (&y)[DIM / 32]) {
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        y[i] = __uint_as_float((uint32_t)x[threadIdx.x % 32 * (DIM / 32) + i] << 16);
}

/* False, and zero codes, when a value is not finite. */
template <int DIM>
static __device__ __forceinline__ bool encode_e4m3(const uint16_t *x, uint8_t *codes) {
    constexpr int OWN = DIM / 32;
    uint32_t lane = threadIdx.x % 32, bytes = 0;
    float y[OWN];
    bool good = true;

    load_token<DIM>(x, y);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        good = good && fabsf(y[i]) < INFINITY;
        bytes |= e4m3_of(y[i]) << 8 * i;
    }
    good = __all_sync(~0u, good);
    put_bytes<OWN>(codes + lane * OWN, good ? bytes : 0);
    return good;
}

/* False, and the codes of zeros, when fp16 cannot hold a value. */
template <int DIM>
static __device__ __forceinline__ bool encode_groups(const uint16_t *x, uint8_t *nibbles,
                                                     uint32_t *groups) {
    constexpr int OWN = DIM / 32, LANES = LAYOUT_GROUP_DIMS / OWN;
    uint32_t lane = threadIdx.x % 32, bytes = 0;
    float y[OWN], low = INFINITY, high = -INFINITY;
    bool good = true;

    load_token<DIM>(x, y);
#pragma unroll
    for (int i = 0; i < OWN; i++)
        good = good && fabsf(y[i]) <= HALF_LARGEST;
    good = __all_sync(~0u, good);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        y[i] = good ? y[i] : 0.0f;
        low = fminf(low, y[i]);
        high = fmaxf(high, y[i]);
    }
#pragma unroll
    for (int stride = LANES / 2; stride > 0; stride /= 2) {
        low = fminf(low, __shfl_xor_sync(~0u, low, stride));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, stride));
    }
    uint32_t low_bits = half_toward(low, 0);
    float least = __half2float(__ushort_as_half((uint16_t)low_bits));
    uint32_t scale_bits = max(half_toward(__fdiv_rn(__fsub_rn(high, least), (float)NIBBLE_MAX), 1),
                              (uint32_t)SCALE_MIN_BITS);
    float scale = __half2float(__ushort_as_half((uint16_t)scale_bits));
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float code = floorf(__fadd_rn(__fdiv_rn(__fsub_rn(y[i], least), scale), 0.5f));
        bytes |= (uint32_t)fminf(code, (float)NIBBLE_MAX) << 4 * i;
    }
    put_bytes<OWN / 2>(nibbles + lane * (OWN / 2), bytes);
    if (lane % LANES == 0)
        groups[lane / LANES] = scale_bits | low_bits << 16;
    return good;
}

/* Grid: (page, layer * kv_heads + head). */
template <int DIM, bool CODES>
static __global__ void __launch_bounds__(THREADS)
    control_seal_kernel(const __grid_constant__ struct kvops_seal args) {
    uint32_t row = blockIdx.y, index = blockIdx.x;
    control_page page = control_page_of<DIM, CODES>(args.pool, args.block.slot, row, index);

    if (CODES)
        for (uint32_t at = 128 + 4 * DIM + 4 * threadIdx.x; at < 8 * DIM; at += 4 * THREADS)
            *(uint32_t *)(page.groups + at) = 0;
    for (uint32_t n = threadIdx.x / 32; n < 2 * LAYOUT_PAGE_TOKENS; n += WARPS) {
        uint32_t value = n / LAYOUT_PAGE_TOKENS, t = n % LAYOUT_PAGE_TOKENS;
        uint32_t half = t / LAYOUT_HALF_TOKENS, off = t % LAYOUT_HALF_TOKENS * DIM;
        const uint16_t *x = token_at<DIM>(args.pool, args.pages[index], row, value, t);
        bool good;
        if (!CODES)
            good = encode_e4m3<DIM>(x, (value ? page.v[half] : page.k[half]) + off);
        else if (value == 0)
            good = encode<DIM>(x, (int8_t *)page.k[half] + off, 0, (uint16_t *)page.groups + t);
        else
            good = encode_groups<DIM>(x, page.v[0] + t * (DIM / 2),
                                      (uint32_t *)(page.groups + 128) + t * (DIM / 64));
        if (!good && threadIdx.x % 32 == 0) /* -1 is the largest unsigned number */
            atomicMin((unsigned *)&args.bad_token[row], index * LAYOUT_PAGE_TOKENS + t);
    }
}

cudaError_t seal_control(const struct kvops_seal *args, cudaStream_t stream) {
    dim3 grid(LAYOUT_BLOCK_PAGES, args->pool.geometry.layers * args->pool.geometry.kv_heads);
    bool small = args->pool.geometry.head_dim == 64;

    if (args->block.tier == LAYOUT_TIER_FP8 && small)
        control_seal_kernel<64, false><<<grid, THREADS, 0, stream>>>(*args);
    else if (args->block.tier == LAYOUT_TIER_FP8)
        control_seal_kernel<128, false><<<grid, THREADS, 0, stream>>>(*args);
    else if (small)
        control_seal_kernel<64, true><<<grid, THREADS, 0, stream>>>(*args);
    else
        control_seal_kernel<128, true><<<grid, THREADS, 0, stream>>>(*args);
    return cudaGetLastError();
}
