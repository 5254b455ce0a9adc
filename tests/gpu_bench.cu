/* tests/gpu_bench.cu - bench attention without the program around it: one run, one JSON.
 *
 * Responsible for: running cuda_bench_run where only the CUDA toolkit is installed, lines of text
 * and JSON of every case and goal.
 * Not responsible for: measuring and checking (kernels/cuda/cuda_bench.h), running other programs.
 *
 * Usage: gpu_bench FILE COMMIT DRIVER [PEERS [TOKENS]]; PEERS holds the lines of tools/gpu_peer.py.
 * Ends with 1 after an error or a wrong answer; a missed goal is no error.
 */
#include "kernels/cuda/cuda_bench.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <cuda_runtime_api.h>

enum { REPEATS = 31, PEERS_MAX = 16 };

static FILE *json;
static int cases, goals, hits, measured;
static struct cuda_bench_peer peers[PEERS_MAX];
static uint32_t peer_count;

static void put_device(void *, const struct cuda_bench_device *device) {
    printf("%s, %u multiprocessors, at %.0f MHz (to %u), memory %u MHz: copy %.1f GB/s, read %.1f "
           "GB/s\n",
           device->name, device->multiprocessors, device->sm_mhz, device->sm_mhz_max,
           device->memory_mhz, device->copy_rate * 1e-9, device->read_rate * 1e-9);
    fprintf(json,
            "\"gpu\": \"%s\", \"multiprocessors\": %u,\n\"sm_mhz_max\": %u, \"sm_mhz\": %.0f, "
            "\"memory_mhz\": %u,\n\"copy_bytes_per_s\": %.5g, \"read_bytes_per_s\": %.5g,\n"
            "\"cases\": [",
            device->name, device->multiprocessors, device->sm_mhz_max, device->sm_mhz,
            device->memory_mhz, device->copy_rate, device->read_rate);
}

static void put_result(void *, const struct cuda_bench_result *result) {
    const char *name = cuda_bench_kind_name(result->kind), *tier = result->tier ? result->tier : "";

    printf("%-18s %-7s %u x %6u%s %8.3f ms p99 %8.3f  %.3f /copy %.3f /read  error %.1e  %.0f "
           "MHz\n",
           name, tier, result->batch, result->tokens, result->ragged ? " ragged" : "       ",
           result->median_ms, result->p99_ms, result->of_copy, result->of_read, result->error,
           result->sm_mhz);
    fflush(stdout);
    fprintf(json,
            "%s\n  {\"kind\": \"%s\", \"tier\": \"%s\", \"batch\": %u, \"tokens\": %u, "
            "\"ragged\": %s,\n   \"kv_bytes\": %.0f, \"bytes\": %.0f, \"repeats\": %u, "
            "\"median_ms\": %.4f, \"p99_ms\": %.4f,\n   \"of_copy\": %.4f, \"of_read\": %.4f, "
            "\"error_to_twin\": %.3g, \"floats_that_differ\": %zu, \"sm_mhz\": %.0f}",
            cases++ ? "," : "", name, tier, result->batch, result->tokens,
            result->ragged ? "true" : "false", result->kv_bytes, result->all_bytes, result->repeats,
            result->median_ms, result->p99_ms, result->of_copy, result->of_read, result->error,
            result->different, result->sm_mhz);
}

static void put_goal(void *, const struct cuda_bench_goal *goal) {
    if (!goals)
        fprintf(json, "\n],\n\"goals\": [");
    fprintf(json, "%s\n  {\"what\": \"%s\", \"goal\": \"%s %g\", \"stretch\": %g, ",
            goals++ ? "," : "", goal->what, goal->at_most ? "<=" : ">=", goal->goal, goal->stretch);
    if (!goal->measured) {
        printf("%-58s goal %s %-5g not measured\n", goal->what,
               goal->at_most ? "<=" : ">=", goal->goal);
        fprintf(json, "\"value\": null, \"hit\": null}");
        return;
    }
    measured++;
    hits += goal->hit;
    printf("%-58s goal %s %-5g value %-9.4g %s\n", goal->what,
           goal->at_most ? "<=" : ">=", goal->goal, goal->value, goal->hit ? "hit" : "MISSED");
    fprintf(json, "\"value\": %.4g, \"hit\": %s}", goal->value, goal->hit ? "true" : "false");
}

/* Lines `peer NAME ROWS TOKENS MEDIAN_US P99_US`; others are passed on. */
static void read_peers(const char *path) {
    FILE *file = fopen(path, "r");
    char line[256];

    while (file && fgets(line, sizeof line, file)) {
        struct cuda_bench_peer *peer = &peers[peer_count];
        if (peer_count < PEERS_MAX &&
            sscanf(line, "peer %23s %u %u %lf %lf", peer->name, &peer->rows, &peer->tokens,
                   &peer->median_us, &peer->p99_us) == 5 &&
            peer->median_us > 0)
            peer_count++;
        fputs(line, stdout);
    }
    if (file)
        fclose(file);
}

static void put_head(const char *commit, const char *driver) {
    time_t now = time(NULL);
    char date[32];

    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    fprintf(json,
            "{\"command\": \"make gpu-bench\", \"commit\": \"%s\", \"date\": \"%s\",\n"
            "\"driver\": \"%s\", \"cuda\": \"%d.%d\",\n\"torch\": [",
            commit, date, driver, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    for (uint32_t i = 0; i < peer_count; i++)
        fprintf(json,
                "%s\n  {\"backend\": \"%s\", \"rows\": %u, \"tokens\": %u, \"median_us\": %.2f, "
                "\"p99_us\": %.2f}",
                i ? "," : "", peers[i].name, peers[i].rows, peers[i].tokens, peers[i].median_us,
                peers[i].p99_us);
    fprintf(json, "],\n");
}

int main(int argc, char **argv) {
    struct cuda_bench_options options = {};

    if (argc < 4 || !(json = fopen(argv[1], "w"))) {
        fprintf(stderr, "usage: gpu_bench FILE COMMIT DRIVER [PEERS [TOKENS]]\n");
        return 1;
    }
    if (argc > 4)
        read_peers(argv[4]);
    put_head(argv[2], argv[3]);
    options.tokens = CUDA_BENCH_TOKENS_MAX;
    if (argc > 5)
        options.tokens = (uint32_t)strtoul(argv[5], NULL, 10);
    options.batch_max = CUDA_BENCH_BATCH_MAX;
    options.repeats = REPEATS;
    options.peers = peers;
    options.peer_count = peer_count;
    options.device = put_device;
    options.result = put_result;
    options.goal = put_goal;
    const char *why = cuda_bench_run(&options);
    fprintf(json, "%s\n],\n\"error\": %s%s%s}\n", goals ? "" : "\"cases\": [", why ? "\"" : "",
            why ? why : "null", why ? "\"" : "");
    fclose(json);
    printf("%s; %d of %d goals hit\n", why ? why : "all answers checked", hits, measured);
    return why || cases == 0;
}
