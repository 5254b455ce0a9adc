/* tests/gpu_products.cu - time of a prompt's matrix products, as JSON.
 *
 * Responsible for: the products of the layers of a Llama-3.1-8B geometry, norms and SwiGLU
 * included, by number of rows: rows of chunks through cuBLASLt and through our own kernels, and
 * single rows beside a chunk. Weights of several layers, so that none stays in L2.
 * Not responsible for: whether they are right (gpu_dense.cu), attention (gpu_bench.cu).
 *
 * Usage: gpu_products FILE. Times are medians of a graph of all layers, divided by their number.
 */
#include "kernels/cuda/cuda_ops.h"
#include "tests/gpu_scene.cuh"

#include <algorithm>

enum { LAYERS = 6, HIDDEN = 4096, KV = 1024, FFN = 14336, ROWS = 280, REPEATS = 15 };

struct layer {
    const uint16_t *q, *k, *v, *o, *gate, *up, *down;
};

struct stage {
    layer layers[LAYERS];
    float *x, *normed, *q, *k, *v, *gate, *up, *gain;
    uint16_t *scratch;
    cudaStream_t stream;
    struct cuda_ops_device device;
};

static __global__ void fill_weights(uint16_t *at, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        at[i] = (uint16_t)((z >> 40 & 0x80FF) | 0x3C00); /* 2^-7 to 2^-5, both signs */
    }
}

template <class T> static T *take(size_t count) {
    T *at;
    GPU_TRY(cudaMalloc((void **)&at, count * sizeof(T)));
    return at;
}

static const uint16_t *make_weight(size_t n, size_t k) {
    uint16_t *at = take<uint16_t>(n * k);
    fill_weights<<<1024, 256>>>(at, n * k);
    return at;
}

static void make_stage(stage &stage) {
    std::vector<float> x((size_t)ROWS * HIDDEN), gain(HIDDEN, 1.0f);
    gpu_random source = {4711};

    for (float &value : x)
        value = source.normal();
    GPU_TRY(cuda_ops_open(&stage.device));
    GPU_TRY(cudaStreamCreateWithFlags(&stage.stream, cudaStreamNonBlocking));
    for (layer &one : stage.layers)
        one = {make_weight(HIDDEN, HIDDEN), make_weight(KV, HIDDEN),  make_weight(KV, HIDDEN),
               make_weight(HIDDEN, HIDDEN), make_weight(FFN, HIDDEN), make_weight(FFN, HIDDEN),
               make_weight(HIDDEN, FFN)};
    stage.x = take<float>(x.size()), stage.gain = take<float>(HIDDEN);
    stage.normed = take<float>(x.size()), stage.q = take<float>(x.size());
    stage.k = take<float>((size_t)ROWS * KV), stage.v = take<float>((size_t)ROWS * KV);
    stage.gate = take<float>((size_t)ROWS * FFN), stage.up = take<float>((size_t)ROWS * FFN);
    stage.scratch = take<uint16_t>((size_t)ROWS * FFN);
    GPU_TRY(cudaMemcpy(stage.x, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
    GPU_TRY(cudaMemcpy(stage.gain, gain.data(), gain.size() * 4, cudaMemcpyHostToDevice));
    GPU_TRY(cudaDeviceSynchronize());
}

struct spread {
    uint32_t rows, singles;
};

static struct ops_matmul product(const uint16_t *weight, uint32_t n, uint32_t k, const float *x,
                                 float *y, const spread &spread) {
    return {{OPS_BF16, n, k, (const uint8_t *)weight}, x, NULL, y, k, n, spread.rows};
}

static void multiply(const stage &stage, const struct ops_matmul *args, uint32_t count,
                     const spread &spread, float *glu) {
    struct ops_rmsnorm norm = {stage.x, stage.gain,  stage.normed, HIDDEN,
                               HIDDEN,  spread.rows, HIDDEN,       1e-5f};
    struct cuda_ops_matmul launch = {&stage.device,
                                     args,
                                     count,
                                     spread.singles,
                                     stage.scratch,
                                     stage.stream,
                                     count > 1 ? &norm : NULL,
                                     glu};

    GPU_TRY(cuda_ops_matmul(&launch));
}

enum part { ALL, QKV, O, GATE_UP, DOWN, PARTS };
static const char *const part_names[] = {"layer", "qkv", "o", "gate and up", "down"};

/* The attention's result is q here, which changes no time. Adding to x would make it grow. */
static void record(const stage &stage, const layer &of, const spread &spread, enum part part) {
    struct ops_matmul qkv[3] = {product(of.q, HIDDEN, HIDDEN, stage.normed, stage.q, spread),
                                product(of.k, KV, HIDDEN, stage.normed, stage.k, spread),
                                product(of.v, KV, HIDDEN, stage.normed, stage.v, spread)};
    struct ops_matmul wide[2] = {product(of.gate, FFN, HIDDEN, stage.normed, stage.gate, spread),
                                 product(of.up, FFN, HIDDEN, stage.normed, stage.up, spread)};
    struct ops_matmul o = product(of.o, HIDDEN, HIDDEN, stage.q, stage.normed, spread);
    struct ops_matmul down = product(of.down, HIDDEN, FFN, stage.gate, stage.normed, spread);

    o.residual = down.residual = stage.x;
    if (part == ALL || part == QKV)
        multiply(stage, qkv, 3, spread, NULL);
    if (part == ALL || part == O)
        multiply(stage, &o, 1, spread, NULL);
    if (part == ALL || part == GATE_UP)
        multiply(stage, wide, 2, spread, stage.gate);
    if (part == ALL || part == DOWN)
        multiply(stage, &down, 1, spread, NULL);
}

static double operations(enum part part) {
    const double of[PARTS] = {0, (HIDDEN + 2.0 * KV) * HIDDEN, (double)HIDDEN * HIDDEN,
                              2.0 * FFN * HIDDEN, (double)FFN * HIDDEN};
    return 2 * (part == ALL ? of[QKV] + of[O] + of[GATE_UP] + of[DOWN] : of[part]);
}

static double median_us(const stage &stage, const spread &spread, enum part part) {
    std::vector<float> times;
    cudaEvent_t begin, end;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    record(stage, stage.layers[0], spread, part); /* kernels are loaded outside the recording */
    GPU_TRY(cudaStreamSynchronize(stage.stream));
    GPU_TRY(cudaStreamBeginCapture(stage.stream, cudaStreamCaptureModeThreadLocal));
    for (const layer &one : stage.layers)
        record(stage, one, spread, part);
    GPU_TRY(cudaStreamEndCapture(stage.stream, &graph));
    GPU_TRY(cudaGraphInstantiate(&exec, graph, 0));
    GPU_TRY(cudaEventCreate(&begin));
    GPU_TRY(cudaEventCreate(&end));
    for (int i = 0; i < REPEATS + 3; i++) {
        float ms;
        GPU_TRY(cudaEventRecord(begin, stage.stream));
        GPU_TRY(cudaGraphLaunch(exec, stage.stream));
        GPU_TRY(cudaEventRecord(end, stage.stream));
        GPU_TRY(cudaEventSynchronize(end));
        GPU_TRY(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3)
            times.push_back(ms * 1000 / LAYERS);
    }
    GPU_TRY(cudaEventDestroy(begin));
    GPU_TRY(cudaEventDestroy(end));
    GPU_TRY(cudaGraphExecDestroy(exec));
    GPU_TRY(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

int main(int argc, char **argv) {
    static const spread spreads[] = {{1, 1},  {9, 9},   {64, 64}, {2, 0},
                                     {64, 0}, {256, 0}, {257, 1}, {265, 9}};
    static const uint32_t shapes[][2] = {
        {HIDDEN, HIDDEN}, {KV, HIDDEN}, {FFN, HIDDEN}, {HIDDEN, FFN}};
    static struct cuda_gemm gemm;
    static stage stage;
    const char *why;
    FILE *json;
    int items = 0;

    if (argc < 2 || !(json = fopen(argv[1], "w"))) {
        fprintf(stderr, "usage: gpu_products FILE\n");
        return 1;
    }
    make_stage(stage);
    why = cuda_gemm_open(&gemm);
    for (const uint32_t *shape : shapes)
        cuda_gemm_pin(&gemm, shape[0], shape[1]);
    printf("%s%s%s", why ? why : "", why ? "\n" : "", gemm.text);
    fprintf(json, "{\"library\": \"%.*s\", ", (int)strcspn(gemm.text, "\n"), gemm.text);
    fprintf(json, "\"layers\": %d, \"repeats\": %d, \"cases\": [", LAYERS, REPEATS);
    for (int by = 0; by < (why ? 1 : 2); by++) {
        stage.device.gemm = by ? &gemm : NULL;
        for (const spread &spread : spreads) {
            if (by && spread.singles == spread.rows)
                continue;
            for (int part = ALL; part < PARTS; part++) {
                double us = median_us(stage, spread, (enum part)part);
                double rate = operations((enum part)part) * spread.rows / us * 1e-6;
                printf("%-9s %3u rows, %2u single  %-12s %8.2f us  %6.1f TFLOP/s\n",
                       by ? "cuBLASLt" : "ours", spread.rows, spread.singles, part_names[part], us,
                       rate);
                fflush(stdout);
                fprintf(json,
                        "%s\n  {\"chunk\": \"%s\", \"rows\": %u, \"singles\": %u, \"part\": "
                        "\"%s\", \"median_us\": %.2f, \"tflops\": %.1f}",
                        items++ ? "," : "", by ? "cublaslt" : "own", spread.rows, spread.singles,
                        part_names[part], us, rate);
            }
        }
    }
    fprintf(json, "\n]}\n");
    fclose(json);
    cuda_gemm_close(&gemm);
    return 0;
}
