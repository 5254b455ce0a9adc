/* kernels/cuda/dense_gemm.cu - struct ops_matmul of many rows by cuBLASLt.
 *
 * Responsible for: finding the library when the program runs (it has half a gigabyte, so it is
 * neither linked nor needed where there is no GPU), choosing algorithms, running them.
 * Not responsible for: what happens where it is missing (dense_matmul.cu).
 *
 * In the library's words the weights are A, transposed, x is B, y is C and D; all column-major.
 * Moves W, x and y once for 256 rows. Expected on an H200 at 256 rows of an 8B model: 510 to 680
 * TFLOP/s, with 1,024 outputs 230; with norm, rounding and SwiGLU a layer has 480, ours 170. A call
 * costs the processor 16 us.
 */
#include "kernels/cuda/cuda_gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define LIBRARY "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

enum { CANDIDATES = 16, ALIGNMENT = 16, N_UNIT = 8 };

struct calls {
    decltype(&cublasLtCreate) create;
    decltype(&cublasLtDestroy) destroy;
    decltype(&cublasLtGetVersion) version;
    decltype(&cublasLtMatmulDescCreate) product_create;
    decltype(&cublasLtMatmulDescDestroy) product_destroy;
    decltype(&cublasLtMatmulDescSetAttribute) product_set;
    decltype(&cublasLtMatrixLayoutCreate) layout_create;
    decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
    decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
    decltype(&cublasLtMatmulPreferenceCreate) preference_create;
    decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    decltype(&cublasLtMatmulAlgoGetHeuristic) candidates;
    decltype(&cublasLtMatmulAlgoCheck) check;
    decltype(&cublasLtMatmulAlgoConfigGetAttribute) config_get;
    decltype(&cublasLtMatmul) multiply;
};
static const char *const names[] = {"cublasLtCreate",
                                    "cublasLtDestroy",
                                    "cublasLtGetVersion",
                                    "cublasLtMatmulDescCreate",
                                    "cublasLtMatmulDescDestroy",
                                    "cublasLtMatmulDescSetAttribute",
                                    "cublasLtMatrixLayoutCreate",
                                    "cublasLtMatrixLayoutDestroy",
                                    "cublasLtMatrixLayoutSetAttribute",
                                    "cublasLtMatmulPreferenceCreate",
                                    "cublasLtMatmulPreferenceDestroy",
                                    "cublasLtMatmulPreferenceSetAttribute",
                                    "cublasLtMatmulAlgoGetHeuristic",
                                    "cublasLtMatmulAlgoCheck",
                                    "cublasLtMatmulAlgoConfigGetAttribute",
                                    "cublasLtMatmul"};
static_assert(sizeof(struct calls) == sizeof names &&
                  sizeof names == sizeof((struct cuda_gemm *)0)->call,
              "a name for every call, room for all");

static const struct calls &calls_of(const struct cuda_gemm *gemm) {
    return *(const struct calls *)gemm->call;
}

static cublasLtHandle_t handle_of(const struct cuda_gemm *gemm) {
    return (cublasLtHandle_t)gemm->handle;
}

static cublasLtMatmulDesc_t product_of(const struct cuda_gemm *gemm) {
    return (cublasLtMatmulDesc_t)gemm->product;
}

static cublasLtMatrixLayout_t layout_of(void *layout) {
    return (cublasLtMatrixLayout_t)layout;
}

template <class T>
static bool layout_set(const struct cuda_gemm *gemm, void *layout,
                       cublasLtMatrixLayoutAttribute_t which, T value) {
    return calls_of(gemm).layout_set(layout_of(layout), which, &value, sizeof value) ==
           CUBLAS_STATUS_SUCCESS;
}

/* W [n][k], x [rows][k] and y [rows][n], y_stride apart. */
static bool lay(const struct cuda_gemm *gemm, const struct cuda_gemm_shape *shape, uint32_t rows,
                uint64_t y_stride) {
    const struct {
        void *layout;
        uint64_t rows, columns;
        int64_t stride;
    } all[] = {{gemm->w, shape->k, shape->n, shape->k},
               {gemm->x, shape->k, rows, shape->k},
               {gemm->y, shape->n, rows, (int64_t)y_stride}};
    bool good = true;

    for (const auto &each : all)
        good = good && layout_set(gemm, each.layout, CUBLASLT_MATRIX_LAYOUT_ROWS, each.rows) &&
               layout_set(gemm, each.layout, CUBLASLT_MATRIX_LAYOUT_COLS, each.columns) &&
               layout_set(gemm, each.layout, CUBLASLT_MATRIX_LAYOUT_LD, each.stride);
    return good;
}

/* --- opening */

static void *find_library(void) {
    void *library = dlopen(LIBRARY, RTLD_LAZY | RTLD_LOCAL);

    return library ? library : dlopen("/usr/local/cuda/lib64/" LIBRARY, RTLD_LAZY | RTLD_LOCAL);
}

static bool make(struct cuda_gemm *gemm) {
    const struct calls &calls = calls_of(gemm);
    cublasOperation_t transposed = CUBLAS_OP_T;

    return calls.create((cublasLtHandle_t *)&gemm->handle) == CUBLAS_STATUS_SUCCESS &&
           calls.product_create((cublasLtMatmulDesc_t *)&gemm->product, CUBLAS_COMPUTE_32F,
                                CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
           calls.product_set(product_of(gemm), CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                             sizeof transposed) == CUBLAS_STATUS_SUCCESS &&
           calls.layout_create((cublasLtMatrixLayout_t *)&gemm->w, CUDA_R_16BF, 1, 1, 1) ==
               CUBLAS_STATUS_SUCCESS &&
           calls.layout_create((cublasLtMatrixLayout_t *)&gemm->x, CUDA_R_16BF, 1, 1, 1) ==
               CUBLAS_STATUS_SUCCESS &&
           calls.layout_create((cublasLtMatrixLayout_t *)&gemm->y, CUDA_R_32F, 1, 1, 1) ==
               CUBLAS_STATUS_SUCCESS;
}

/* A line to the text; what does not fit is left out whole. */
static void tell(struct cuda_gemm *gemm, const char *line) {
    size_t bytes = strlen(line);

    if (gemm->text_bytes + bytes >= sizeof gemm->text)
        return;
    memcpy(gemm->text + gemm->text_bytes, line, bytes + 1);
    gemm->text_bytes += (uint32_t)bytes;
}

extern "C" const char *cuda_gemm_open(struct cuda_gemm *gemm) {
    void *library = find_library();
    const char *why = library ? NULL : LIBRARY " was not found";
    char line[64];

    for (uint32_t i = 0; i < CUDA_GEMM_CALLS && !why; i++) {
        gemm->call[i] = dlsym(library, names[i]);
        why = gemm->call[i] ? NULL : LIBRARY " lacks a function";
    }
    if (!why && !make(gemm))
        why = LIBRARY " does not start";
    if (why) {
        tell(gemm, "no cublaslt\n");
        return why;
    }
    snprintf(line, sizeof line, "cublaslt %zu\n", calls_of(gemm).version());
    tell(gemm, line);
    return NULL;
}

extern "C" void cuda_gemm_close(struct cuda_gemm *gemm) {
    const struct calls &calls = calls_of(gemm);

    for (void *layout : {gemm->w, gemm->x, gemm->y})
        if (layout)
            (void)calls.layout_destroy(layout_of(layout));
    if (gemm->product)
        (void)calls.product_destroy(product_of(gemm));
    if (gemm->handle)
        (void)calls.destroy(handle_of(gemm));
    *gemm = (struct cuda_gemm){};
}

/* --- pinning */

static uint32_t config(const struct cuda_gemm *gemm, const cublasLtMatmulAlgo_t *algorithm,
                       cublasLtMatmulAlgoConfigAttributes_t which) {
    uint32_t value = 0;
    size_t bytes;

    /* Some have two bytes: the rest stays zero. */
    if (calls_of(gemm).config_get(algorithm, which, &value, sizeof value, &bytes) !=
        CUBLAS_STATUS_SUCCESS)
        (void)calls_of(gemm).config_get(algorithm, which, &value, sizeof(uint16_t), &bytes);
    return value;
}

/* `gemm` is laid out for some other number of rows afterwards. */
static bool fits(const struct cuda_gemm *gemm, const struct cuda_gemm_shape *shape,
                 const cublasLtMatmulAlgo_t *algorithm) {
    if (config(gemm, algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
        config(gemm, algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) !=
            CUBLASLT_REDUCTION_SCHEME_NONE)
        return false;
    for (uint32_t rows = 1; rows <= CUDA_GEMM_ROWS; rows++) {
        cublasLtMatmulHeuristicResult_t result;
        if (!lay(gemm, shape, rows, shape->n) ||
            calls_of(gemm).check(handle_of(gemm), product_of(gemm), layout_of(gemm->w),
                                 layout_of(gemm->x), layout_of(gemm->y), layout_of(gemm->y),
                                 algorithm, &result) != CUBLAS_STATUS_SUCCESS ||
            result.workspaceSize != 0)
            return false;
    }
    return true;
}

static int ask(const struct cuda_gemm *gemm, cublasLtMatmulPreference_t preference,
               cublasLtMatmulHeuristicResult_t found[CANDIDATES]) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const struct calls &calls = calls_of(gemm);
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = ALIGNMENT;
    int count = 0;

    if (calls.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                             sizeof schemes) != CUBLAS_STATUS_SUCCESS)
        return 0;
    for (cublasLtMatmulPreferenceAttributes_t which : alignments)
        if (calls.preference_set(preference, which, &alignment, sizeof alignment) !=
            CUBLAS_STATUS_SUCCESS)
            return 0;
    if (calls.candidates(handle_of(gemm), product_of(gemm), layout_of(gemm->w), layout_of(gemm->x),
                         layout_of(gemm->y), layout_of(gemm->y), preference, CANDIDATES, found,
                         &count) != CUBLAS_STATUS_SUCCESS)
        return 0;
    return count;
}

static bool choose(const struct cuda_gemm *gemm, struct cuda_gemm_shape *shape) {
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    cublasLtMatmulPreference_t preference = NULL;
    int count = 0;

    static_assert(sizeof shape->algorithm == sizeof found[0].algo, "an algorithm is kept as words");
    if (calls_of(gemm).preference_create(&preference) != CUBLAS_STATUS_SUCCESS)
        return false;
    if (lay(gemm, shape, CUDA_GEMM_ROWS, shape->n))
        count = ask(gemm, preference, found);
    (void)calls_of(gemm).preference_destroy(preference);
    for (int i = 0; i < count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && fits(gemm, shape, &found[i].algo)) {
            memcpy(shape->algorithm, &found[i].algo, sizeof shape->algorithm);
            return true;
        }
    return false;
}

static void tell_shape(struct cuda_gemm *gemm, const struct cuda_gemm_shape *shape) {
    static const cublasLtMatmulAlgoConfigAttributes_t all[] = {
        CUBLASLT_ALGO_CONFIG_ID,
        CUBLASLT_ALGO_CONFIG_TILE_ID,
        CUBLASLT_ALGO_CONFIG_STAGES_ID,
        CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
        CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
        CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,
        CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID};
    const cublasLtMatmulAlgo_t *algorithm = (const cublasLtMatmulAlgo_t *)shape->algorithm;
    char line[128];
    int at = snprintf(line, sizeof line, "%u x %u:", shape->n, shape->k);

    for (cublasLtMatmulAlgoConfigAttributes_t which : all)
        if (shape->usable)
            at += snprintf(line + at, sizeof line - at, " %u", config(gemm, algorithm, which));
    snprintf(line + at, sizeof line - at, "%s\n", shape->usable ? "" : " none");
    tell(gemm, line);
}

static const struct cuda_gemm_shape *find(const struct cuda_gemm *gemm, uint32_t n, uint32_t k) {
    for (uint32_t i = 0; i < gemm->shape_count; i++)
        if (gemm->shapes[i].n == n && gemm->shapes[i].k == k)
            return &gemm->shapes[i];
    return NULL;
}

extern "C" void cuda_gemm_pin(struct cuda_gemm *gemm, uint32_t n, uint32_t k) {
    struct cuda_gemm_shape *shape = &gemm->shapes[gemm->shape_count];

    if (!gemm->y || find(gemm, n, k) || gemm->shape_count == CUDA_GEMM_SHAPES)
        return;
    *shape = (struct cuda_gemm_shape){n, k, {}, 0};
    shape->usable = n % N_UNIT == 0 && choose(gemm, shape);
    gemm->shape_count++;
    tell_shape(gemm, shape);
}

/* --- running */

extern "C" int cuda_gemm_takes(const struct cuda_gemm *gemm, const struct ops_matmul *args) {
    const struct cuda_gemm_shape *shape = find(gemm, args->weight.n, args->weight.k);

    return shape && shape->usable && (uintptr_t)args->y % ALIGNMENT == 0 &&
           (uintptr_t)args->residual % ALIGNMENT == 0 &&
           args->y_stride * sizeof(float) % ALIGNMENT == 0;
}

static cudaError_t error_of(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS            ? cudaSuccess
           : status == CUBLAS_STATUS_ALLOC_FAILED     ? cudaErrorMemoryAllocation
           : status == CUBLAS_STATUS_EXECUTION_FAILED ? cudaErrorLaunchFailure
                                                      : cudaErrorInvalidValue;
}

extern "C" cudaError_t cuda_gemm_multiply(struct cuda_gemm *gemm, const struct ops_matmul *args,
                                          const uint16_t *x, cudaStream_t stream) {
    const struct cuda_gemm_shape *shape = find(gemm, args->weight.n, args->weight.k);
    const float add = 1.0f, leave = 0.0f;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

    for (uint32_t row = 0, rows; row < args->rows && status == CUBLAS_STATUS_SUCCESS; row += rows) {
        float *y = args->y + row * args->y_stride;
        const float *before = args->residual ? args->residual + row * args->y_stride : y;
        rows = args->rows - row;
        rows = rows < (uint32_t)CUDA_GEMM_ROWS ? rows : (uint32_t)CUDA_GEMM_ROWS;
        if (!lay(gemm, shape, rows, args->y_stride))
            return cudaErrorInvalidValue;
        status = calls_of(gemm).multiply(
            handle_of(gemm), product_of(gemm), &add, args->weight.bytes, layout_of(gemm->w),
            x + (uint64_t)row * shape->k, layout_of(gemm->x), args->residual ? &add : &leave,
            before, layout_of(gemm->y), y, layout_of(gemm->y),
            (const cublasLtMatmulAlgo_t *)shape->algorithm, NULL, 0, stream);
    }
    return error_of(status);
}
