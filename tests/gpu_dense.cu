/* tests/gpu_dense.cu - the CUDA twins of ops.h against plain C, bit for bit.
 *
 * Responsible for: embedding in every weight type, RMS norm, RoPE with both pairings, SwiGLU over
 * ordinary and extreme values, add; strides and odd sizes; nothing written beyond the rows.
 * Not responsible for: attention and seal (gpu_parity.cu). Ends with `N passed, N failed`.
 */
#include "kernels/cuda/cuda_ops.h"
#include "tests/gpu_scene.cuh"

static int passed, failed;
static gpu_random source = {4711};

template <class T> struct twin {
    std::vector<T> host;
    T *device;

    explicit twin(size_t count, uint8_t fill = 0xFF) : host(count) {
        memset((void *)host.data(), fill, count * sizeof(T));
        GPU_TRY(cudaMalloc((void **)&device, count * sizeof(T)));
    }
    ~twin() {
        cudaFree(device);
    }
    void send() {
        GPU_TRY(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    void normal(float size) {
        for (T &x : host)
            x = (T)(source.normal() * size);
    }
    bool same() {
        std::vector<T> back(host.size());
        GPU_TRY(cudaMemcpy(back.data(), device, back.size() * sizeof(T), cudaMemcpyDeviceToHost));
        return memcmp(back.data(), host.data(), back.size() * sizeof(T)) == 0;
    }
};

static void check(bool good, const char *what, uint32_t detail) {
    good ? passed++ : failed++;
    if (!good)
        printf("FAIL %s %u\n", what, detail);
}

static void test_norm(uint32_t width, uint32_t rows) {
    twin<float> x(rows * (width + 5)), y(rows * (width + 3)), gain(width);
    struct ops_rmsnorm host = {
        x.host.data(), gain.host.data(), y.host.data(), width + 5, width + 3, rows, width, 1e-5f};
    struct ops_rmsnorm device = host;

    x.normal(3.0f);
    gain.normal(1.0f);
    x.send(), y.send(), gain.send();
    device.x = x.device, device.y = y.device, device.gain = gain.device;
    ops_host_c()->rmsnorm(&host, 0, rows, NULL);
    GPU_TRY(cuda_ops_rmsnorm(&device, 0));
    check(y.same(), "rmsnorm", width);
}

static void test_rope(uint32_t dim, enum ops_pairing pairing) {
    enum { ROWS = 5, Q_HEADS = 6, KV_HEADS = 2, POSITIONS = 300, TOKENS = 8 };
    twin<float> q(ROWS * (Q_HEADS * dim + 4)), k(ROWS * (KV_HEADS * dim + 2)), v(k.host.size());
    twin<float> cosines(POSITIONS * dim / 2), sines(POSITIONS * dim / 2);
    twin<uint16_t> chunk(2 * KV_HEADS * TOKENS * dim);
    twin<uint32_t> positions(ROWS);
    twin<struct ops_kv_dest> dest(ROWS);
    struct ops_rope_table table = {10000.0,          NULL, dim, POSITIONS, cosines.host.data(),
                                   sines.host.data()};
    struct ops_rope host = {}, device;

    ops_rope_table_fill(&table);
    q.normal(2.0f), k.normal(2.0f), v.normal(2.0f);
    host.q = q.host.data(), host.k = k.host.data(), host.v = v.host.data();
    host.q_stride = Q_HEADS * dim + 4, host.kv_stride = KV_HEADS * dim + 2;
    host.rows = ROWS, host.q_heads = Q_HEADS, host.kv_heads = KV_HEADS, host.head_dim = dim;
    host.pairing = pairing;
    host.cos_table = cosines.host.data(), host.sin_table = sines.host.data();
    host.positions = positions.host.data(), host.dest = dest.host.data();
    device = host;
    for (uint32_t i = 0; i < ROWS; i++) {
        positions.host[i] = source.below(POSITIONS);
        dest.host[i] = {chunk.device + i * dim, chunk.device + (KV_HEADS * TOKENS + i) * dim,
                        TOKENS * dim};
    }
    q.send(), k.send(), v.send(), cosines.send(), sines.send(), chunk.send();
    positions.send(), dest.send();
    device.q = q.device, device.k = k.device, device.v = v.device;
    device.cos_table = cosines.device, device.sin_table = sines.device;
    device.positions = positions.device, device.dest = dest.device;
    GPU_TRY(cuda_ops_rope(&device, 0));
    for (uint32_t i = 0; i < ROWS; i++)
        dest.host[i] = {chunk.host.data() + i * dim,
                        chunk.host.data() + (KV_HEADS * TOKENS + i) * dim, TOKENS * dim};
    ops_host_c()->rope(&host, 0, ROWS, NULL);
    check(q.same(), "rope q", dim);
    check(chunk.same(), "rope k and v", dim);
}

static void test_values(size_t count) {
    static const float odd[] = {0.0f, -0.0f, 87.5f, -87.5f, 88.5f, -1e30f, 1e30f, 1e-30f};
    twin<float> a(count), b(count), y(count + 7), z(count + 7);
    struct ops_swiglu swiglu = {a.host.data(), b.host.data(), y.host.data(), count};
    struct ops_add add = {a.host.data(), b.host.data(), z.host.data(), count};
    struct ops_swiglu swiglu_device = {a.device, b.device, y.device, count};
    struct ops_add add_device = {a.device, b.device, z.device, count};

    a.normal(8.0f), b.normal(1.0f);
    for (size_t i = 0; i < count; i += 3)
        a.host[i] = i % 2 ? a.host[i] : odd[i / 3 % 8];
    a.send(), b.send(), y.send(), z.send();
    ops_host_c()->swiglu(&swiglu, 0, ops_swiglu_items(&swiglu), NULL);
    ops_host_c()->add(&add, 0, ops_add_items(&add), NULL);
    GPU_TRY(cuda_ops_swiglu(&swiglu_device, 0));
    GPU_TRY(cuda_ops_add(&add_device, 0));
    check(y.same(), "swiglu", (uint32_t)count);
    check(z.same(), "add", (uint32_t)count);
}

/* Random bytes as a table; exponents of fp16 and fp32 are kept small so that no NaN occurs. */
static void test_embed(enum ops_type type) {
    enum { N = 75, K = 320, ROWS = 9 };
    twin<uint8_t> table(ops_weight_bytes(type, N, K));
    twin<uint32_t> ids(ROWS);
    twin<float> out(ROWS * (K + 8));
    std::vector<uint8_t> tensor(ops_tensor_bytes(type, N, K));
    struct ops_embed host = {}, device;

    for (size_t i = 0; i < tensor.size(); i++)
        tensor[i] = (uint8_t)source.below(type == OPS_F32 || i % 2 ? 64 : 256);
    host.table.type = type, host.table.n = N, host.table.k = K;
    host.table.bytes = table.host.data();
    ops_weight_pack(&host.table, tensor.data(), table.host.data(), 0, (N + 15) / 16);
    for (uint32_t i = 0; i < ROWS; i++)
        ids.host[i] = i == 0 ? N - 1 : source.below(N);
    host.ids = ids.host.data(), host.out = out.host.data();
    host.out_stride = K + 8, host.rows = ROWS;
    device = host;
    device.table.bytes = table.device, device.ids = ids.device, device.out = out.device;
    table.send(), ids.send(), out.send();
    ops_host_c()->embed(&host, 0, ROWS, NULL);
    GPU_TRY(cuda_ops_embed(&device, 0));
    check(out.same(), "embed", type);
}

int main(void) {
    static const enum ops_type types[] = {OPS_F32, OPS_F16, OPS_BF16, OPS_Q8_0, OPS_Q4_0, OPS_Q4_1};
    static const uint32_t widths[] = {1, 31, 64, 576, 4096, 12288, 14336};

    for (uint32_t width : widths)
        test_norm(width, 7);
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        test_rope(dim, OPS_PAIR_ADJACENT);
        test_rope(dim, OPS_PAIR_HALVES);
    }
    test_values(1);
    test_values(14336 * 9);
    test_values(1300001);
    for (enum ops_type type : types)
        test_embed(type);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
