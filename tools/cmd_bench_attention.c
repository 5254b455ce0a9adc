/* tools/cmd_bench_attention.c - bench attention: decode attention on the GPU against the card.
 *
 * Responsible for: choosing the size, the lines and JSON of every case and of every goal.
 * Not responsible for: measuring and checking (kernels/cuda/cuda_bench.h); torch's kernels
 * (torch_peer.h).
 */
#include "tools/cmd_bench.h"

#include "kernels/cuda/cuda_bench.h"
#include "tools/json_text.h"
#include "tools/torch_peer.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { REPEATS = 31, TOKENS_MIN = 1024, TOKENS_STEP = 256 };

struct told {
    struct cmd *cmd;
    cJSON *cases, *goals;
    uint32_t count;
};

static void tell_device(void *context, const struct cuda_bench_device *device) {
    struct told *told = context;
    if (told->cmd->result != NULL) {
        cJSON *gpu = cJSON_AddObjectToObject(told->cmd->result, "gpu");
        json_text(gpu, "name", device->name);
        cJSON_AddNumberToObject(gpu, "multiprocessors", device->multiprocessors);
        cJSON_AddNumberToObject(gpu, "sm_mhz_max", device->sm_mhz_max);
        cJSON_AddNumberToObject(gpu, "sm_mhz", device->sm_mhz);
        cJSON_AddNumberToObject(gpu, "memory_mhz", device->memory_mhz);
        cJSON_AddNumberToObject(gpu, "copy_bytes_per_s", device->copy_rate);
        cJSON_AddNumberToObject(gpu, "read_bytes_per_s", device->read_rate);
        told->cases = cJSON_AddArrayToObject(told->cmd->result, "cases");
        told->goals = cJSON_AddArrayToObject(told->cmd->result, "goals");
        return;
    }
    printf("gpu                     %s, %" PRIu32 " multiprocessors at %.0f MHz (to %" PRIu32
           "), memory %" PRIu32 " MHz\n",
           device->name, device->multiprocessors, device->sm_mhz, device->sm_mhz_max,
           device->memory_mhz);
    printf("this run's rates        copy %.1f GB/s (read and written), pure read %.1f GB/s\n",
           device->copy_rate * 1e-9, device->read_rate * 1e-9);
    printf("%-18s %-7s %5s %7s %9s %9s %7s %7s %8s %5s\n", "", "tier", "batch", "tokens", "ms",
           "p99", "/copy", "/read", "error", "MHz");
}

static void tell_case(void *context, const struct cuda_bench_result *result) {
    struct told *told = context;
    const char *kind = cuda_bench_kind_name(result->kind);
    const char *tier = result->tier != NULL ? result->tier : "";
    told->count++;
    if (told->cases == NULL) {
        printf("%-18s %-7s %5" PRIu32 " %c%6" PRIu32 " %9.3f %9.3f %7.3f %7.3f %8.1e %5.0f\n", kind,
               tier, result->batch, result->ragged ? '<' : ' ', result->tokens, result->median_ms,
               result->p99_ms, result->of_copy, result->of_read, result->error, result->sm_mhz);
        (void)fflush(stdout);
        return;
    }
    cJSON *item = cJSON_CreateObject();
    json_text(item, "kind", kind);
    json_text(item, "tier", tier);
    cJSON_AddNumberToObject(item, "batch", result->batch);
    cJSON_AddNumberToObject(item, "tokens", result->tokens);
    cJSON_AddBoolToObject(item, "ragged", result->ragged);
    cJSON_AddNumberToObject(item, "kv_bytes", result->kv_bytes);
    cJSON_AddNumberToObject(item, "bytes", result->all_bytes);
    cJSON_AddNumberToObject(item, "repeats", result->repeats);
    cJSON_AddNumberToObject(item, "median_ms", result->median_ms);
    cJSON_AddNumberToObject(item, "p99_ms", result->p99_ms);
    cJSON_AddNumberToObject(item, "of_copy", result->of_copy);
    cJSON_AddNumberToObject(item, "of_read", result->of_read);
    cJSON_AddNumberToObject(item, "error_to_twin", result->error);
    cJSON_AddNumberToObject(item, "floats_that_differ", (double)result->different);
    cJSON_AddNumberToObject(item, "sm_mhz", result->sm_mhz);
    cJSON_AddItemToArray(told->cases, item);
}

static void tell_goal(void *context, const struct cuda_bench_goal *goal) {
    struct told *told = context;
    const char *sign = goal->at_most ? "<=" : ">=";
    if (told->goals == NULL && goal->measured) {
        printf("%-58s goal %s %-5g value %-8.4g %s\n", goal->what, sign, goal->goal, goal->value,
               goal->hit ? "hit" : "MISSED");
        return;
    }
    if (told->goals == NULL) {
        printf("%-58s goal %s %-5g not measured\n", goal->what, sign, goal->goal);
        return;
    }
    cJSON *item = cJSON_CreateObject();
    json_text(item, "what", goal->what);
    json_text(item, "sign", sign);
    cJSON_AddNumberToObject(item, "goal", goal->goal);
    cJSON_AddNumberToObject(item, "stretch", goal->stretch);
    if (goal->measured) {
        cJSON_AddNumberToObject(item, "value", goal->value);
        cJSON_AddBoolToObject(item, "hit", goal->hit);
    } else {
        cJSON_AddNullToObject(item, "value");
        cJSON_AddNullToObject(item, "hit");
    }
    cJSON_AddItemToArray(told->goals, item);
}

static void tell_torch(const struct cmd *cmd, const struct torch_peer *torch) {
    cJSON *all =
        cmd->result != NULL ? cJSON_AddArrayToObject(cmd->result, "torch_attention") : NULL;
    for (uint32_t i = 0; i < torch->count; i++) {
        const struct cuda_bench_peer *peer = &torch->peers[i];
        if (all == NULL) {
            printf("torch %-17s %" PRIu32 " rows of %" PRIu32
                   " tokens: %.1f us a layer, p99 %.1f\n",
                   peer->name, peer->rows, peer->tokens, peer->median_us, peer->p99_us);
            continue;
        }
        cJSON *item = cJSON_CreateObject();
        json_text(item, "backend", peer->name);
        cJSON_AddNumberToObject(item, "rows", peer->rows);
        cJSON_AddNumberToObject(item, "tokens", peer->tokens);
        cJSON_AddNumberToObject(item, "median_us", peer->median_us);
        cJSON_AddNumberToObject(item, "p99_us", peer->p99_us);
        cJSON_AddItemToArray(all, item);
    }
    if (all == NULL)
        printf("torch                   %s\n", torch->note);
    else
        json_text(cmd->result, "torch", torch->note);
}

enum kv_err cmd_bench_attention(struct cmd *cmd, struct kv_diag *diag) {
    uint64_t tokens = cmd_bench_tokens(cmd, CUDA_BENCH_TOKENS_MAX);
    struct told told = {.cmd = cmd};
    if (tokens < TOKENS_MIN || tokens > CUDA_BENCH_TOKENS_MAX || tokens % TOKENS_STEP != 0)
        return kv_diag_set(diag, KV_ERR_INVALID,
                           "bench attention: --tokens %" PRIu64
                           " is not a multiple of %d from %d to %d",
                           tokens, TOKENS_STEP, TOKENS_MIN, CUDA_BENCH_TOKENS_MAX);
    struct torch_peer torch = {.count = 0};
    if (cuda_bench_built()) {
        if (tokens == CUDA_BENCH_TOKENS_MAX) /* no goal is computed at fewer */
            torch_peer_run(&torch);
        else
            snprintf(torch.note, sizeof torch.note, "not timed: compared at %d tokens only",
                     CUDA_BENCH_TOKENS_MAX);
        tell_torch(cmd, &torch);
    }
    struct cuda_bench_options options = {.tokens = (uint32_t)tokens,
                                         .batch_max = CUDA_BENCH_BATCH_MAX,
                                         .repeats = REPEATS,
                                         .peers = torch.peers,
                                         .peer_count = torch.count,
                                         .device = tell_device,
                                         .result = tell_case,
                                         .goal = tell_goal,
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
