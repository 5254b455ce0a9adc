/* tests/gpu_step.cu - bench attention without the program around it, as JSON.
 *
 * Responsible for: running cuda_bench_run where only the CUDA toolkit is installed.
 * Not responsible for: measuring and checking (kernels/cuda/cuda_bench.h).
 *
 * Usage: gpu_step FILE [TOKENS]. Ends with 1 after an error or a wrong answer.
 */
#include "kernels/cuda/cuda_bench.h"

#include <cstdio>
#include <cstdlib>

enum { REPEATS = 31 };

static FILE *json;
static int items;

static void put_device(void *, const struct cuda_bench_device *device) {
    printf("%s: copy %.1f GB/s, read %.1f GB/s\n", device->name, device->copy_rate * 1e-9,
           device->read_rate * 1e-9);
    fprintf(json,
            "{\"gpu\": \"%s\", \"multiprocessors\": %u, \"sm_mhz_max\": %u, \"memory_mhz\": %u, "
            "\"copy_bytes_per_s\": %.5g, \"read_bytes_per_s\": %.5g, \"cases\": [",
            device->name, device->multiprocessors, device->sm_mhz_max, device->memory_mhz,
            device->copy_rate, device->read_rate);
}

static void put_result(void *, const struct cuda_bench_result *result) {
    static const char *const names[] = {"attention", "step", "attention in step", "step and seal"};

    printf("%-18s %-7s %u x %u  %8.3f ms p99 %8.3f  %.3f /copy %.3f /read  error %.1e\n",
           names[result->kind], result->tier, result->batch, result->tokens, result->median_ms,
           result->p99_ms, result->of_copy, result->of_read, result->error);
    fflush(stdout);
    fprintf(json,
            "%s\n  {\"kind\": \"%s\", \"tier\": \"%s\", \"batch\": %u, \"tokens\": %u, "
            "\"kv_bytes\": %.0f, \"bytes\": %.0f, \"repeats\": %u, \"median_ms\": %.4f, "
            "\"p99_ms\": %.4f, \"of_copy\": %.4f, \"of_read\": %.4f, \"error_to_twin\": %.3g}",
            items++ ? "," : "", names[result->kind], result->tier, result->batch, result->tokens,
            result->kv_bytes, result->all_bytes, result->repeats, result->median_ms, result->p99_ms,
            result->of_copy, result->of_read, result->error);
}

int main(int argc, char **argv) {
    struct cuda_bench_options options = {
        CUDA_BENCH_TOKENS_MAX, CUDA_BENCH_BATCH_MAX, REPEATS, put_device, put_result, NULL};

    if (argc < 2 || !(json = fopen(argv[1], "w"))) {
        fprintf(stderr, "usage: gpu_step FILE [TOKENS]\n");
        return 1;
    }
    if (argc > 2)
        options.tokens = (uint32_t)strtoul(argv[2], NULL, 10);
    const char *why = cuda_bench_run(&options);
    if (items > 0)
        fprintf(json, "\n]}\n");
    fclose(json);
    printf("%s\n", why ? why : "all answers checked");
    return why || items == 0;
}
