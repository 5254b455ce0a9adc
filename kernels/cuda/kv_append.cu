/* kernels/cuda/kv_append.cu - rows of a chunk into a BF16 page; slots from and to the processor.
 *
 * Responsible for: struct kvops_append on the device, the bytes of the host twin; handing many
 * copies over at once; small copies that wait for nobody.
 * Not responsible for: which page and token a row belongs to.
 *
 * Moves 4 bytes per value of K and V. Expected: 3 us for one row, bound by latency; 64 rows of the
 * 8B geometry, 16 MiB, at the copy rate. Grid: (layer and KV head, K or V); 16 bytes a thread.
 * Copies move their bytes once over the bus. Expected: 64 of 1 MiB at 0.99 of the rate of one large
 * copy; handed over one at a time they reach 0.87.
 * The engine for copies serves one stream for as long as that has any: beside a session that comes
 * out of memory a step's few kilobytes waited for tens of milliseconds. Threads that read the
 * processor's memory share the bus with it. Expected: 4 us up to 64 KiB, then the rate of the bus.
 */
#include "kernels/cuda/cuda_kvops.h"
#include "kernels/cuda/cuda_ops.h"

enum { THREADS = 128, COPY_BYTES = 16, READ_THREADS = 256, READ_CTAS = 64, READ_DEEP = 4 };

/* Where layout_run puts a run: K and V of a head follow each other, 4 runs each, and no run
 * straddles a slot, because the runs of a slot are a whole number. */
static __global__ void __launch_bounds__(THREADS)
    append_kernel(const __grid_constant__ struct kvops_append args, uint64_t slot_raw_bytes,
                  uint64_t slot_bytes) {
    uint32_t dim = args.pool.geometry.head_dim, heads = args.pool.geometry.kv_heads;
    uint32_t layer = blockIdx.x / heads, head = blockIdx.x % heads, value = blockIdx.y;
    uint32_t each = dim * 2 / COPY_BYTES;
    uint64_t row = ((uint64_t)layer * 2 + value) * heads + head;
    const uint4 *from =
        (const uint4 *)(args.chunk + (row * args.chunk_rows + args.first_row) * dim);

    for (uint32_t i = threadIdx.x; i < args.count * each; i += THREADS) {
        uint32_t token = args.page_token + i / each;
        uint64_t off = (((uint64_t)blockIdx.x * 2 + value) * LAYOUT_PAGE_TOKENS + token) * dim * 2;
        uint32_t slot = args.page.slot[off / slot_raw_bytes];
        *(uint4 *)(args.pool.slots + slot * slot_bytes + off % slot_raw_bytes +
                   i % each * COPY_BYTES) = from[i];
    }
}

extern "C" cudaError_t cuda_kvops_append(const struct kvops_append *args, cudaStream_t stream) {
    const struct layout_geometry *geometry = &args->pool.geometry;

    append_kernel<<<dim3(geometry->layers * geometry->kv_heads, 2), THREADS, 0, stream>>>(
        *args, layout_slot_raw_bytes(geometry), layout_slot_bytes(geometry));
    return cudaGetLastError();
}

extern "C" cudaError_t cuda_ops_copy(const struct cuda_ops_copies *copies, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;

#if CUDART_VERSION >= 13000
    struct cudaMemcpyAttributes attributes = {};
    size_t of_first = 0;

    if (copies->count > 1) {
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        return cudaMemcpyBatchAsync(copies->to, copies->from, copies->bytes, copies->count,
                                    &attributes, &of_first, 1, stream);
    }
#endif
    for (uint32_t i = 0; i < copies->count && error == cudaSuccess; i++)
        error = cudaMemcpyAsync(copies->to[i], copies->from[i], copies->bytes[i], cudaMemcpyDefault,
                                stream);
    return error;
}

/* Whoever comes behind may look before it waits (programmatic dependent launch), but does not start
 * before every thread here has ended: so each makes sure that what it wrote can be seen. */
static __global__ void __launch_bounds__(READ_THREADS)
    read_kernel(uint8_t *to, const uint8_t *from, uint64_t bytes, uint64_t wide) {
    uint64_t thread = blockIdx.x * (uint64_t)READ_THREADS + threadIdx.x;
    uint64_t step = gridDim.x * (uint64_t)READ_THREADS, count = wide / COPY_BYTES;

    for (uint64_t i = thread; i < count; i += READ_DEEP * step) {
        uint4 data[READ_DEEP];
#pragma unroll
        for (int k = 0; k < READ_DEEP; k++)
            if (i + k * step < count)
                data[k] = __ldcv((const uint4 *)from + i + k * step);
#pragma unroll
        for (int k = 0; k < READ_DEEP; k++)
            if (i + k * step < count)
                ((uint4 *)to)[i + k * step] = data[k];
    }
    for (uint64_t i = wide + thread; i < bytes; i += step)
        to[i] = __ldcv(from + i);
    __threadfence();
}

extern "C" cudaError_t cuda_ops_read(void *to, const void *from, size_t bytes,
                                     cudaStream_t stream) {
    int apart = ((uintptr_t)to | (uintptr_t)from) % COPY_BYTES != 0;
    uint64_t wide = apart ? 0 : bytes / COPY_BYTES * COPY_BYTES;
    uint64_t ctas = ((wide ? wide / COPY_BYTES : bytes) + READ_THREADS - 1) / READ_THREADS;

    if (bytes == 0)
        return cudaSuccess;
    if (ctas > READ_CTAS)
        ctas = READ_CTAS;
    read_kernel<<<(uint32_t)ctas, READ_THREADS, 0, stream>>>((uint8_t *)to, (const uint8_t *)from,
                                                             bytes, wide);
    return cudaGetLastError();
}
