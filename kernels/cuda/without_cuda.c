/* kernels/cuda/without_cuda.c - what a program built with CUDA=0 says in place of the kernels.
 *
 * Responsible for: cuda_bench_run, which then only says so.
 * Not responsible for: anything that computes.
 */
#include "kernels/cuda/cuda_bench.h"

int cuda_bench_built(void) {
    return 0;
}

const char *cuda_bench_run(const struct cuda_bench_options *options) {
    (void)options;
    return "this program was built without CUDA";
}
