/* kernels/cuda/kv_digest.cu - the digest of stored bytes, computed where they lie.
 *
 * Responsible for: the definition of store/base/digest.h on the device: XXH3-64 of every piece of
 * 4,096 bytes, XXH3-128 over the list; the launcher.
 * Not responsible for: comparing digests, text (lengths that are not slots or frames).
 *
 * Moves every byte once. Expected 0.90 of the read rate; one block of 12 MiB about 20 us. Eight
 * threads a piece: thread (parity s, pair q) adds lanes 2q and 2q + 1 of stripes s, s + 2 .. of
 * each kilobyte; sums commute, so the halves meet only where the algorithm scrambles. A piece here
 * is never shorter than 1,024 bytes, so the short forms of XXH3-64 do not occur; those of XXH3-128
 * do, for lists of up to 30 pieces.
 */
#include "kernels/cuda/device_state.cuh"

enum { THREADS = 256, PIECE_THREADS = 8, CTAS_PER_COUNT = 3, BLOCK_BYTES = 1024, STRIPES = 16 };

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define MIX_1 0x165667919E3779F9ull
#define MIX_2 0x9FB21C651E98DF25ull

/* The secret of XXH3 as little-endian words. */
static __constant__ uint64_t secret_words[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

/* Eight bytes of the secret at any offset. */
static __device__ __forceinline__ uint64_t secret_at(uint32_t off) {
    uint64_t low = secret_words[off / 8], bits = off % 8 * 8;
    return bits ? low >> bits | secret_words[off / 8 + 1] << (64 - bits) : low;
}

static __device__ __forceinline__ uint64_t product_folded(uint64_t a, uint64_t b) {
    return a * b ^ __umul64hi(a, b);
}

static __device__ __forceinline__ uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= MIX_1;
    return h ^ h >> 32;
}

static __device__ __forceinline__ uint64_t lane_start(uint32_t lane) {
    return lane == 0   ? PRIME32_3
           : lane == 1 ? PRIME64_1
           : lane == 2 ? PRIME64_2
           : lane == 3 ? PRIME64_3
           : lane == 4 ? PRIME64_4
           : lane == 5 ? PRIME32_2
           : lane == 6 ? PRIME64_5
                       : PRIME32_1;
}

static __device__ __forceinline__ uint64_t product_halves(uint64_t key) {
    return (uint64_t)(uint32_t)key * (uint32_t)(key >> 32);
}

static __device__ __forceinline__ uint64_t scramble(uint64_t acc, uint64_t key) {
    return (acc ^ acc >> 47 ^ key) * PRIME32_1;
}

/* --- pieces */

/* Where a piece lies: its first byte, and the extent for pieces that cross into another part. */
struct piece_place {
    const struct cuda_kvops_extent *extent;
    const uint8_t *first;
    uint64_t off;
    uint32_t bytes;
    uint32_t together; /* bytes before the part ends */
};

static __device__ __forceinline__ piece_place place_of(const struct cuda_kvops_digest &args,
                                                       uint32_t piece) {
    piece_place at = {};

    if (piece >= args.piece_count)
        return at;
    at.extent = &args.extents[args.owner[piece]];
    uint64_t part_bytes = at.extent->part_bytes;
    at.off = (piece - at.extent->first_piece) * CUDA_KVOPS_PIECE_BYTES;
    uint64_t left = at.extent->bytes - at.off, part = at.off / part_bytes;
    uint64_t into = at.off - part * part_bytes;
    at.bytes = (uint32_t)(left < CUDA_KVOPS_PIECE_BYTES ? left : CUDA_KVOPS_PIECE_BYTES);
    at.first = at.extent->part[part] + into;
    at.together = (uint32_t)min((uint64_t)CUDA_KVOPS_PIECE_BYTES, part_bytes - into);
    return at;
}

static __device__ __forceinline__ const uint8_t *block_of(const piece_place &at, uint32_t off) {
    uint64_t part_bytes = at.extent->part_bytes, whole = at.off + off;

    if (off < at.together)
        return at.first + off;
    return at.extent->part[whole / part_bytes] + whole % part_bytes;
}

/* Secret words of one thread: stripes parity, parity + 2 .., lanes 2q and 2q + 1. */
struct thread_secret {
    uint64_t word[STRIPES];
    uint64_t last[2];
};

static __device__ __forceinline__ void add_stripe(uint64_t (&acc)[2], const ulonglong2 &data,
                                                  uint64_t key0, uint64_t key1) {
    acc[0] += data.y + product_halves(data.x ^ key0);
    acc[1] += data.x + product_halves(data.y ^ key1);
}

/* Adds the stripes of one kilobyte; in the last one the final stripe has a key of its own. */
static __device__ __forceinline__ void add_block(uint64_t (&acc)[2], const uint8_t *from,
                                                 const thread_secret &secret, bool last,
                                                 uint32_t parity) {
    ulonglong2 data[STRIPES / 2];

#pragma unroll
    for (int i = 0; i < STRIPES / 2; i++)
        data[i] = __ldcs((const ulonglong2 *)(from + i * 128));
#pragma unroll
    for (int i = 0; i < STRIPES / 2; i++) {
        bool final = i == STRIPES / 2 - 1 && last && parity;
        add_stripe(acc, data[i], final ? secret.last[0] : secret.word[2 * i],
                   final ? secret.last[1] : secret.word[2 * i + 1]);
    }
}

static __device__ __forceinline__ uint64_t hash_piece(const piece_place &at,
                                                      const thread_secret &secret) {
    uint32_t thread = threadIdx.x % PIECE_THREADS, pair = thread % 4, parity = thread / 4;
    uint64_t start[2] = {lane_start(2 * pair), lane_start(2 * pair + 1)};
    uint64_t acc[2] = {parity ? 0 : start[0], parity ? 0 : start[1]};
    unsigned group = 0xFFu << (threadIdx.x % 32 / PIECE_THREADS * PIECE_THREADS);

    for (uint32_t off = 0; off < at.bytes; off += BLOCK_BYTES) {
        bool last = off + BLOCK_BYTES == at.bytes;
        add_block(acc, block_of(at, off) + thread * 16, secret, last, parity);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            acc[i] += __shfl_xor_sync(group, acc[i], 4);
            if (!last)
                acc[i] = parity ? 0 : scramble(acc[i], secret_words[16 + 2 * pair + i]);
        }
    }
    uint64_t sum =
        product_folded(acc[0] ^ secret_at(11 + 16 * pair), acc[1] ^ secret_at(19 + 16 * pair));
    sum += __shfl_xor_sync(group, sum, 1);
    sum += __shfl_xor_sync(group, sum, 2);
    return avalanche(sum + at.bytes * PRIME64_1);
}

static __global__ void __launch_bounds__(THREADS, CTAS_PER_COUNT)
    pieces_kernel(struct cuda_kvops_digest args) {
    uint32_t thread = threadIdx.x % PIECE_THREADS, pair = thread % 4, parity = thread / 4;
    uint32_t piece = (blockIdx.x * THREADS + threadIdx.x) / PIECE_THREADS;
    uint32_t step = gridDim.x * (THREADS / PIECE_THREADS);
    thread_secret secret;

#pragma unroll
    for (uint32_t i = 0; i < STRIPES / 2; i++) {
        secret.word[2 * i] = secret_words[2 * i + parity + 2 * pair];
        secret.word[2 * i + 1] = secret_words[2 * i + parity + 2 * pair + 1];
    }
    secret.last[0] = secret_at(121 + 16 * pair);
    secret.last[1] = secret_at(129 + 16 * pair);
    piece_place at = place_of(args, piece);
    for (; piece < args.piece_count; piece += step) {
        piece_place next = place_of(args, piece + step);
        uint64_t hash = hash_piece(at, secret);
        if (thread == 0)
            args.pieces[piece] = hash;
        at = next;
    }
}

/* --- the list: one warp per extent; lanes 0..7 are the lanes of the algorithm */

struct hash128 {
    uint64_t low;
    uint64_t high;
};

static __device__ uint64_t mix_words(const uint64_t *words, uint32_t secret) {
    return product_folded(words[0] ^ secret_at(secret), words[1] ^ secret_at(secret + 8));
}

/* Two pairs of words joined into the sum. */
static __device__ void mix_pairs(hash128 &sum, const uint64_t *one, const uint64_t *two,
                                 uint32_t secret) {
    sum.low += mix_words(one, secret);
    sum.low ^= two[0] + two[1];
    sum.high += mix_words(two, secret + 16);
    sum.high ^= one[0] + one[1];
}

static __device__ hash128 middle_end(const hash128 &sum, uint64_t bytes) {
    hash128 out = {avalanche(sum.low + sum.high),
                   0 - avalanche(sum.low * PRIME64_1 + sum.high * PRIME64_4 + bytes * PRIME64_2)};
    return out;
}

static __device__ hash128 hash_one_word(uint64_t word) {
    uint64_t key = word ^ (secret_at(16) ^ secret_at(24)), factor = PRIME64_1 + (8 << 2);
    hash128 out = {key * factor, __umul64hi(key, factor)};

    out.high += out.low << 1;
    out.low ^= out.high >> 3;
    out.low ^= out.low >> 35;
    out.low *= MIX_2;
    out.low ^= out.low >> 28;
    out.high = avalanche(out.high);
    return out;
}

static __device__ uint64_t swap_bytes(uint64_t x) {
    return (uint64_t)__byte_perm((uint32_t)x, 0, 0x0123) << 32 |
           __byte_perm((uint32_t)(x >> 32), 0, 0x0123);
}

static __device__ hash128 hash_two_words(const uint64_t *words) {
    uint64_t flip_low = secret_at(32) ^ secret_at(40), flip_high = secret_at(48) ^ secret_at(56);
    uint64_t key = words[0] ^ words[1] ^ flip_low, top = words[1] ^ flip_high;
    hash128 mid = {key * PRIME64_1, __umul64hi(key, PRIME64_1)};

    mid.low += 15ull << 54;
    mid.high += top + (uint64_t)(uint32_t)top * (PRIME32_2 - 1);
    mid.low ^= swap_bytes(mid.high);
    hash128 out = {avalanche(mid.low * PRIME64_2),
                   avalanche(__umul64hi(mid.low, PRIME64_2) + mid.high * PRIME64_2)};
    return out;
}

/* Lists of 3 to 30 words, and of none. */
static __device__ hash128 hash_few_words(const uint64_t *words, uint32_t count) {
    const uint64_t *end = words + count;
    uint64_t bytes = 8ull * count;
    hash128 sum = {bytes * PRIME64_1, 0};

    if (count <= 16) {
        for (int round = count > 12 ? 3 : count > 8 ? 2 : count > 4 ? 1 : 0; round >= 0; round--)
            mix_pairs(sum, words + 2 * round, end - 2 * round - 2, 32 * round);
        return middle_end(sum, bytes);
    }
    for (int round = 0; round < 4; round++)
        mix_pairs(sum, words + 4 * round, words + 4 * round + 2, 32 * round);
    sum.low = avalanche(sum.low);
    sum.high = avalanche(sum.high);
    for (uint32_t round = 4; round < count / 4; round++)
        mix_pairs(sum, words + 4 * round, words + 4 * round + 2, 3 + 32 * (round - 4));
    mix_pairs(sum, end - 2, end - 4, 136 - 17 - 16);
    return middle_end(sum, bytes);
}

static __device__ hash128 hash_short_list(const uint64_t *words, uint32_t count) {
    hash128 none = {secret_at(64) ^ secret_at(72), secret_at(80) ^ secret_at(88)};

    if (count == 1)
        return hash_one_word(words[0]);
    if (count == 2)
        return hash_two_words(words);
    if (count > 2)
        return hash_few_words(words, count);
    for (int i = 0; i < 2; i++) {
        uint64_t h = i ? none.high : none.low;
        h = (h ^ h >> 33) * PRIME64_2;
        h = (h ^ h >> 29) * PRIME64_3;
        h ^= h >> 32;
        *(i ? &none.high : &none.low) = h;
    }
    return none;
}

/* All lanes call it; lanes of one eight agree. */
static __device__ hash128 hash_long_list(const uint64_t *words, uint32_t count) {
    uint32_t lane = threadIdx.x % 8, stripes = (count - 1) / 8, bytes = 8 * count;
    uint64_t acc = lane_start(lane);

    for (uint32_t first = 0; first < stripes; first += STRIPES) {
        uint64_t data[STRIPES];
#pragma unroll
        for (uint32_t i = 0; i < STRIPES; i++)
            data[i] = first + i < stripes ? words[8 * (first + i) + lane] : 0;
#pragma unroll
        for (uint32_t i = 0; i < STRIPES; i++) {
            uint64_t other = __shfl_xor_sync(~0u, data[i], 1);
            if (first + i < stripes)
                acc += other + product_halves(data[i] ^ secret_words[i + lane]);
        }
        if (first + STRIPES <= (bytes - 1) / BLOCK_BYTES * STRIPES)
            acc = scramble(acc, secret_words[16 + lane]);
    }
    uint64_t last = words[count - 8 + lane];
    acc += __shfl_xor_sync(~0u, last, 1) + product_halves(last ^ secret_at(121 + 8 * lane));
    uint64_t other = __shfl_xor_sync(~0u, acc, 1), a = lane % 2 ? other : acc;
    uint64_t b = lane % 2 ? acc : other;
    uint32_t pair = lane / 2;
    hash128 out = {product_folded(a ^ secret_at(11 + 16 * pair), b ^ secret_at(19 + 16 * pair)),
                   product_folded(a ^ secret_at(117 + 16 * pair), b ^ secret_at(125 + 16 * pair))};
    for (int stride = 2; stride < 8; stride *= 2) {
        out.low += __shfl_xor_sync(~0u, out.low, stride);
        out.high += __shfl_xor_sync(~0u, out.high, stride);
    }
    out.low = avalanche(out.low + bytes * PRIME64_1);
    out.high = avalanche(out.high + ~(bytes * PRIME64_2));
    return out;
}

static __global__ void __launch_bounds__(32) list_kernel(struct cuda_kvops_digest args) {
    const struct cuda_kvops_extent *extent = &args.extents[blockIdx.x];
    const uint64_t *words = args.pieces + extent->first_piece;
    uint32_t count =
        (uint32_t)((extent->bytes + CUDA_KVOPS_PIECE_BYTES - 1) / CUDA_KVOPS_PIECE_BYTES);
    hash128 hash = count > 30 ? hash_long_list(words, count) : hash_short_list(words, count);

    if (threadIdx.x == 0)
        *(ulonglong2 *)(args.digests + 16 * blockIdx.x) = make_ulonglong2(hash.low, hash.high);
}

extern "C" cudaError_t cuda_kvops_digest(const struct cuda_kvops_digest *args,
                                         cudaStream_t stream) {
    uint32_t per_cta = THREADS / PIECE_THREADS, ctas = (args->piece_count + per_cta - 1) / per_cta;
    int device, count;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess || args->extent_count == 0)
        return error;
    if (ctas > (uint32_t)count * CTAS_PER_COUNT)
        ctas = (uint32_t)count * CTAS_PER_COUNT;
    if (ctas > 0)
        pieces_kernel<<<ctas, THREADS, 0, stream>>>(*args);
    list_kernel<<<args->extent_count, 32, 0, stream>>>(*args);
    return cudaGetLastError();
}
