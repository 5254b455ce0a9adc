/* tools/cmd_bench_first.c - bench restore: from asking for a sleeping session to its first token.
 *
 * Responsible for: exact and eager wakes in turns, each followed by one token fed and one sampled,
 * and wakes of what was brought into memory before; the bytes each of them read.
 * Not responsible for: the measured session (cmd_bench_restore.c).
 *
 * The store reads past the page cache where it can (O_DIRECT), so every wake is a cold one; the
 * receipt of bench restore says whether it could.
 */
#include "tools/cmd_bench.h"

#include "tools/text.h"
#include "tools/turn.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

static uint64_t raw_of(const struct receipt *receipt) {
    uint64_t bytes = 0;
    for (int i = 0; i < LAYOUT_STREAM_COUNT; i++)
        bytes += receipt->raw_bytes[i];
    return bytes;
}

/* Wakes, feeds one token, takes one; the session goes unsaved when everything has come. */
static enum kv_err ask_once(struct cmd *cmd, struct service *service, enum receipt_tiers tiers,
                            uint64_t *first_ns_out, struct receipt *wake_out,
                            struct kv_diag *diag) {
    const struct restore_options options = {.probes_max = cmd->config->probes, .tiers = tiers};
    const struct turn_work work = {.context = NULL};
    struct session *session = NULL;
    struct session_info info;
    struct receipt behind;
    memset(&behind, 0, sizeof behind);
    uint64_t begun = kv_clock_now_ns(cmd->clock);
    enum kv_err err = service_wake(service, cmd->session_name, &options, &session, wake_out, diag);
    if (err != KV_OK)
        return err;
    session_info(session, &info);
    const uint32_t id = info.ids[info.n - 1];
    KV_TRY(session_feed(session, &id, 1, IMAGE_RAW, diag));
    KV_TRY(session_generate(session, 1, diag));
    KV_TRY(turn_work(service, session, &work, diag));
    *first_ns_out = kv_clock_now_ns(cmd->clock) - begun;
    int came = service_refine(service, session, &behind);
    /* What was not read before the token was read behind it, or nothing was eager about it. */
    if (tiers == RECEIPT_TIERS_EAGER && wake_out->coarse_blocks != 0 &&
        (!came || behind.err != KV_OK || raw_of(&behind) == 0))
        err = kv_diag_set(diag, KV_ERR_PROOF, "bench restore: nothing came behind an eager wake");
done:
    session_drop(session);
    return err;
}

static int by_time(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

enum kv_err cmd_bench_first(struct cmd *cmd, struct service *service,
                            struct cmd_bench_first *first_out, struct kv_diag *diag) {
    uint64_t exact[CMD_BENCH_RUNS], eager[CMD_BENCH_RUNS], memory[CMD_BENCH_RUNS];
    struct store_read_stats brought;
    struct receipt receipt;
    enum kv_err err = KV_OK;
    for (int run = 0; run < CMD_BENCH_RUNS; run++) {
        KV_TRY(ask_once(cmd, service, RECEIPT_TIERS_EXACT, &exact[run], &receipt, diag));
        first_out->exact_bytes = receipt.door_bytes;
        KV_TRY(ask_once(cmd, service, RECEIPT_TIERS_EAGER, &eager[run], &receipt, diag));
        first_out->eager_bytes = receipt.door_bytes;
    }
    KV_TRY(service_prefetch(service, cmd->session_name, &brought, diag));
    for (int run = 0; run < CMD_BENCH_RUNS; run++) {
        KV_TRY(ask_once(cmd, service, RECEIPT_TIERS_EXACT, &memory[run], &receipt, diag));
        if (receipt.door_bytes != 0 || receipt.ram_bytes == 0)
            KV_TRY(kv_diag_set(diag, KV_ERR_PROOF,
                               "bench restore: a wake from memory read %llu "
                               "bytes of the disk",
                               (unsigned long long)receipt.door_bytes));
    }
    first_out->memory_bytes = receipt.ram_bytes;
    qsort(exact, CMD_BENCH_RUNS, sizeof *exact, by_time);
    qsort(eager, CMD_BENCH_RUNS, sizeof *eager, by_time);
    qsort(memory, CMD_BENCH_RUNS, sizeof *memory, by_time);
    first_out->exact_ns = exact[CMD_BENCH_RUNS / 2];
    first_out->eager_ns = eager[CMD_BENCH_RUNS / 2];
    first_out->memory_ns = memory[CMD_BENCH_RUNS / 2];
done:
    return err;
}

static double ratio(uint64_t left, uint64_t right) {
    return right != 0 ? (double)left / (double)right : 0;
}

void cmd_bench_first_tell(struct cmd *cmd, const struct cmd_bench_first *first) {
    char time[TEXT_SHORT_BYTES], size[TEXT_SHORT_BYTES];
    if (cmd->result != NULL) {
        cJSON *to = cJSON_AddObjectToObject(cmd->result, "first_token");
        cJSON_AddNumberToObject(to, "exact_ns", (double)first->exact_ns);
        cJSON_AddNumberToObject(to, "eager_ns", (double)first->eager_ns);
        cJSON_AddNumberToObject(to, "ram_ns", (double)first->memory_ns);
        cJSON_AddNumberToObject(to, "exact_bytes", (double)first->exact_bytes);
        cJSON_AddNumberToObject(to, "eager_bytes", (double)first->eager_bytes);
        cJSON_AddNumberToObject(to, "ram_bytes", (double)first->memory_bytes);
        cJSON_AddNumberToObject(to, "eager_over_exact_time",
                                ratio(first->eager_ns, first->exact_ns));
        cJSON_AddNumberToObject(to, "eager_over_exact_bytes",
                                ratio(first->eager_bytes, first->exact_bytes));
        return;
    }
    printf("first token, wake included: exact %s, %s read\n", text_duration(first->exact_ns, time),
           text_size(first->exact_bytes, size));
    printf("                            eager %s, %s read before it: %.2f of the time, %.2f of the "
           "bytes\n",
           text_duration(first->eager_ns, time), text_size(first->eager_bytes, size),
           ratio(first->eager_ns, first->exact_ns), ratio(first->eager_bytes, first->exact_bytes));
    printf("                            from the RAM tier %s, nothing read\n",
           text_duration(first->memory_ns, time));
}
