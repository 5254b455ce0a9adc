/* tools/cmd_bench.c - bench: which benchmark, the machine's name, bench store.
 *
 * Responsible for: choosing the benchmark, what all of them print, running store_bench.
 * Not responsible for: the other benchmarks (cmd_bench_*.c).
 */
#include "tools/cmd_bench.h"

#include "store/io.h"
#include "store/store_bench.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void cpu_name(char *out, size_t room) {
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "re");
    snprintf(out, room, "unknown");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL)
            continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(out, room, "%s", colon + 2);
        break;
    }
    if (file != NULL)
        fclose(file);
}

uint32_t cmd_bench_threads(const struct cmd *cmd) {
    return cmd->host != NULL ? cmd->host->config->threads : cmd->config->threads;
}

void cmd_bench_host(struct cmd *cmd) {
    char name[200];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_name(name, sizeof name);
    if (cmd->result != NULL) {
        cJSON *host = cJSON_AddObjectToObject(cmd->result, "host");
        json_text(host, "cpu", name);
        cJSON_AddNumberToObject(host, "cores", (double)cores);
        cJSON_AddNumberToObject(host, "threads", cmd_bench_threads(cmd));
    } else {
        fprintf(cmd->out, "host                    %s, %ld cores, %" PRIu32 " threads\n", name,
                cores, cmd_bench_threads(cmd));
    }
}

/* `name`: bytes and time as JSON member or as a line of text. */
static void add_rate(struct cmd *cmd, const char *name, uint64_t bytes, uint64_t ns) {
    char size[TEXT_SHORT_BYTES], time[TEXT_SHORT_BYTES];
    double rate = ns == 0 ? 0 : (double)bytes * 1e3 / (double)ns;
    if (cmd->result != NULL) {
        cJSON *item = cJSON_AddObjectToObject(cmd->result, name);
        cJSON_AddNumberToObject(item, "bytes", (double)bytes);
        cJSON_AddNumberToObject(item, "ns", (double)ns);
        cJSON_AddNumberToObject(item, "mb_per_s", rate);
    } else {
        printf("%-23s %s in %s, %.0f MB/s\n", name, text_size(bytes, size), text_duration(ns, time),
               rate);
    }
}

uint64_t cmd_bench_tokens(const struct cmd *cmd, uint64_t usual) {
    return config_given(cmd->config, "tokens") ? cmd->config->bench_tokens : usual;
}

/* --- store */

static void tell_store(struct cmd *cmd, const struct store_bench_result *result) {
    uint64_t most = result->write.in_flight_max;
    if (cmd->result != NULL) {
        json_text(cmd->result, "door", result->door_name);
        cJSON_AddBoolToObject(cmd->result, "direct", result->direct);
        json_text(cmd->result, "fallback", result->fallback);
        cJSON_AddNumberToObject(cmd->result, "writes_in_flight_most", (double)most);
        cJSON_AddNumberToObject(cmd->result, "reads_in_flight_most",
                                (double)result->read.in_flight_max);
        cJSON_AddBoolToObject(cmd->result, "plain_direct", result->plain_direct);
    } else {
        printf("door                    %s%s%s%s\n", result->door_name,
               result->direct ? ", O_DIRECT" : ", buffered", result->fallback[0] != 0 ? ": " : "",
               result->fallback);
        printf("in flight at most       %" PRIu64 " writes, %" PRIu64 " reads\n", most,
               result->read.in_flight_max);
    }
    add_rate(cmd, "write_commit", result->write.bytes, result->write.ns);
    add_rate(cmd, "plain_write", result->plain_write.bytes, result->plain_write.ns);
    add_rate(cmd, "read", result->read.bytes, result->read.ns);
    add_rate(cmd, "read_and_digest", result->read_check.bytes, result->read_check.ns);
    add_rate(cmd, "plain_read", result->plain_read.bytes, result->plain_read.ns);
}

static void tell_ratio(struct cmd *cmd, const char *name, const char *text,
                       const struct store_bench_ratio *ratio) {
    if (cmd->result != NULL) {
        cJSON *item = cJSON_AddObjectToObject(cmd->result, name);
        cJSON_AddNumberToObject(item, "median", ratio->median);
        cJSON_AddNumberToObject(item, "p99", ratio->p99);
    } else {
        printf("%-48s %.2f  (p99 %.2f)\n", text, ratio->median, ratio->p99);
    }
}

/* Where a batch spends its time; the rest is digesting and copying. */
static void tell_stages(struct cmd *cmd, const struct store_bench_result *result) {
    const uint64_t ns[] = {result->write_wait_ns, result->write_sync_ns, result->write_index_ns};
    const char *const names[] = {"write_wait_ns", "fdatasync_ns", "index_commit_ns"};
    double all = (double)result->write.ns / 100;
    for (size_t i = 0; cmd->result != NULL && i < sizeof ns / sizeof ns[0]; i++)
        cJSON_AddNumberToObject(cmd->result, names[i], (double)ns[i]);
    if (cmd->result == NULL)
        printf("time of a batch         %.0f %% waiting for writes, %.0f %% fdatasync, %.0f %% "
               "index commit\n",
               (double)ns[0] / all, (double)ns[1] / all, (double)ns[2] / all);
}

static void tell_ratios(struct cmd *cmd, const struct store_bench_result *result) {
    char size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON_AddNumberToObject(cmd->result, "pairs", result->pairs);
        cJSON_AddNumberToObject(cmd->result, "batch_bytes", (double)result->batch_bytes);
        cJSON_AddNumberToObject(cmd->result, "batches", (double)result->batches);
        cJSON_AddNumberToObject(cmd->result, "index_commits", (double)result->index_commits);
        cJSON_AddNumberToObject(cmd->result, "segments_touched", (double)result->segments);
        cJSON_AddNumberToObject(cmd->result, "segment_fdatasyncs", (double)result->syncs);
    } else {
        printf("%" PRIu32 " pairs of %s, store and plain file in turns; ratios pair by pair:\n",
               result->pairs, text_size(result->batch_bytes, size));
    }
    tell_ratio(cmd, "write_over_plain", "  speed of a batch ÷ plain writer, one fdatasync",
               &result->write_speed);
    tell_ratio(cmd, "read_over_plain", "  speed of reading ÷ plain reader", &result->read_speed);
    tell_ratio(cmd, "read_and_digest_over_plain", "  the same with digests",
               &result->read_check_speed);
    tell_ratio(cmd, "nine_turns_over_one", "  wall of 9 sessions' 64 KiB in one batch ÷ of 1",
               &result->nine_turns);
    tell_ratio(cmd, "nine_blocks_over_one", "  wall of 9 sessions' 2 MiB in one batch ÷ of 1",
               &result->nine_blocks);
    tell_ratio(cmd, "nine_blocks_over_plain", "  the same 18 MiB ÷ a plain file of them",
               &result->nine_blocks_plain);
    if (cmd->result == NULL)
        printf("counted                 %" PRIu64 " batches: %" PRIu64 " index commits; %" PRIu64
               " segments touched: %" PRIu64 " fdatasyncs\n",
               result->batches, result->index_commits, result->segments, result->syncs);
}

static void on_pair(void *context, uint64_t done, uint64_t all) {
    progress_update(context, done, all);
}

static enum kv_err bench_store(struct cmd *cmd, struct kv_diag *diag) {
    char dir[CONFIG_PATH_BYTES + 16];
    struct store_bench_result result;
    snprintf(dir, sizeof dir, "%s-bench", cmd->config->store);
    struct store_bench_options options = {.store = store_options_usual(dir, "coldplane bench"),
                                          .total_bytes = cmd->config->bench_bytes,
                                          .extent_bytes = 1 << 20,
                                          .batch_bytes = 32 << 20,
                                          .seed = 1};
    options.store.alloc = cmd->alloc;
    options.store.clock = cmd->clock;
    if (cmd->config->posix_io)
        options.store.door = io_posix_door();
    struct progress progress;
    progress_begin(&progress, stderr, cmd->clock, "measuring", "pairs");
    options.progress = on_pair;
    options.context = &progress;
    enum kv_err err = store_bench(&options, &result, diag);
    progress_end(&progress);
    if (err == KV_OK && (result.write.bytes == 0 || result.read.bytes == 0))
        err = kv_diag_set(diag, KV_ERR_PROOF, "bench store: nothing was written and read back");
    if (err != KV_OK)
        return err;
    cmd_bench_host(cmd);
    tell_store(cmd, &result);
    tell_stages(cmd, &result);
    tell_ratios(cmd, &result);
    return KV_OK;
}

enum kv_err cmd_bench(struct cmd *cmd, struct kv_diag *diag) {
    const char *what = cmd_word(cmd, 0);
    if (strcmp(what, "store") == 0)
        return bench_store(cmd, diag);
    if (strcmp(what, "restore") == 0)
        return cmd_bench_restore(cmd, diag);
    if (strcmp(what, "model") == 0)
        return cmd_bench_model(cmd, diag);
    if (strcmp(what, "kv-quality") == 0)
        return cmd_bench_quality(cmd, diag);
    if (strcmp(what, "rates") == 0)
        return cmd_bench_rates(cmd, diag);
    if (strcmp(what, "attention") == 0)
        return cmd_bench_attention(cmd, diag);
    return kv_diag_set(diag, KV_ERR_INVALID,
                       "bench %.60s: no such benchmark; take store, restore, model, kv-quality, "
                       "rates or attention",
                       what);
}
