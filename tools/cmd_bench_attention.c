/* tools/cmd_bench_attention.c - bench attention: decode attention on the GPU against the card.
 *
 * Responsible for: choosing the size, the lines and JSON of every case, gains over our own BF16
 * kernel against the ratio of bytes.
 * Not responsible for: measuring and checking (kernels/cuda/cuda_bench.h); other programs' kernels
 * (tools/gpu_peer.py, run beside this by make gpu-bench).
 */
#include "tools/cmd_bench.h"

#include "kernels/cuda/cuda_bench.h"
#include "tools/json_text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { REPEATS = 31, TOKENS_MIN = 1024, TOKENS_STEP = 256 };

static const char *const kind_names[] = {"attention", "step", "attention in step", "step and seal"};

struct told {
    struct cmd *cmd;
    cJSON *cases;
    double plain_ms, plain_bytes; /* our BF16 kernel, one sequence */
    uint32_t count;
};

static void tell_device(void *context, const struct cuda_bench_device *device) {
    struct told *told = context;
    if (told->cmd->result != NULL) {
        cJSON *gpu = cJSON_AddObjectToObject(told->cmd->result, "gpu");
        json_text(gpu, "name", device->name);
        cJSON_AddNumberToObject(gpu, "multiprocessors", device->multiprocessors);
        cJSON_AddNumberToObject(gpu, "sm_mhz_max", device->sm_mhz_max);
        cJSON_AddNumberToObject(gpu, "memory_mhz", device->memory_mhz);
        cJSON_AddNumberToObject(gpu, "copy_bytes_per_s", device->copy_rate);
        cJSON_AddNumberToObject(gpu, "read_bytes_per_s", device->read_rate);
        told->cases = cJSON_AddArrayToObject(told->cmd->result, "cases");
        return;
    }
    printf("gpu                     %s, %" PRIu32 " multiprocessors, to %" PRIu32
           " MHz, memory %" PRIu32 " MHz\n",
           device->name, device->multiprocessors, device->sm_mhz_max, device->memory_mhz);
    printf("this run's rates        copy %.1f GB/s (read and written), pure read %.1f GB/s\n",
           device->copy_rate * 1e-9, device->read_rate * 1e-9);
    printf("%-18s %-7s %5s %9s %9s %7s %7s %9s %8s\n", "", "tier", "batch", "ms", "p99", "/copy",
           "/read", "over BF16", "error");
}

/* How much faster than our BF16 kernel, as a share of what the bytes would give. */
static double gain_of(const struct told *told, const struct cuda_bench_result *result) {
    if (result->kind != CUDA_BENCH_ATTENTION || result->batch != 1 || told->plain_ms <= 0)
        return 0;
    return told->plain_ms / result->median_ms / (told->plain_bytes / result->kv_bytes);
}

static void tell_case(void *context, const struct cuda_bench_result *result) {
    struct told *told = context;
    double gain;
    if (result->kind == CUDA_BENCH_ATTENTION && strcmp(result->tier, "BF16") == 0) {
        told->plain_ms = result->median_ms;
        told->plain_bytes = result->kv_bytes;
    }
    gain = gain_of(told, result);
    told->count++;
    if (told->cases == NULL) {
        printf("%-18s %-7s %5" PRIu32 " %9.3f %9.3f %7.3f %7.3f %9.3f %8.1e\n",
               kind_names[result->kind], result->tier, result->batch, result->median_ms,
               result->p99_ms, result->of_copy, result->of_read, gain, result->error);
        return;
    }
    cJSON *item = cJSON_CreateObject();
    json_text(item, "kind", kind_names[result->kind]);
    json_text(item, "tier", result->tier);
    cJSON_AddNumberToObject(item, "batch", result->batch);
    cJSON_AddNumberToObject(item, "tokens", result->tokens);
    cJSON_AddNumberToObject(item, "kv_bytes", result->kv_bytes);
    cJSON_AddNumberToObject(item, "bytes", result->all_bytes);
    cJSON_AddNumberToObject(item, "repeats", result->repeats);
    cJSON_AddNumberToObject(item, "median_ms", result->median_ms);
    cJSON_AddNumberToObject(item, "p99_ms", result->p99_ms);
    cJSON_AddNumberToObject(item, "of_copy", result->of_copy);
    cJSON_AddNumberToObject(item, "of_read", result->of_read);
    cJSON_AddNumberToObject(item, "gain_over_bytes", gain);
    cJSON_AddNumberToObject(item, "error_to_twin", result->error);
    cJSON_AddItemToArray(told->cases, item);
}

enum kv_err cmd_bench_attention(struct cmd *cmd, struct kv_diag *diag) {
    uint64_t tokens = cmd_bench_tokens(cmd, CUDA_BENCH_TOKENS_MAX);
    struct told told = {.cmd = cmd};
    if (tokens < TOKENS_MIN || tokens > CUDA_BENCH_TOKENS_MAX || tokens % TOKENS_STEP != 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "bench attention: --tokens %" PRIu64
                           " is not a multiple of %d from %d to %d",
                           tokens, TOKENS_STEP, TOKENS_MIN, CUDA_BENCH_TOKENS_MAX);
    struct cuda_bench_options options = {.tokens = (uint32_t)tokens,
                                         .batch_max = CUDA_BENCH_BATCH_MAX,
                                         .repeats = REPEATS,
                                         .device = tell_device,
                                         .result = tell_case,
                                         .context = &told};
    const char *why = cuda_bench_run(&options);
    if (why != NULL && strncmp(why, "wrong answer", strlen("wrong answer")) == 0)
        return kv_diag_set(diag, KV_ERR_PROOF, "bench attention: %s", why);
    if (why != NULL)
        return kv_diag_set(diag, KV_ERR_DEVICE,
                           "bench attention: %s; it needs a GPU of compute capability 8.0 or more "
                           "and a program built with CUDA=1",
                           why);
    if (told.count == 0)
        return kv_diag_set(diag, KV_ERR_PROOF, "bench attention: nothing was measured");
    return KV_OK;
}
