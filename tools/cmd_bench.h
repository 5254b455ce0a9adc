/* tools/cmd_bench.h - what the benchmarks share.
 *
 * Responsible for: naming the machine in every result, rates as text and JSON.
 * Not responsible for: measuring (store/, engine/, cmd_bench_restore.c).
 *
 * Threads: the main thread.
 * Units: bytes, nanoseconds; rates in 1,000,000 bytes per second.
 */
#ifndef TOOLS_CMD_BENCH_H
#define TOOLS_CMD_BENCH_H

#include "tools/cmd.h"

enum { CMD_BENCH_RUNS = 11, CMD_BENCH_PEER_F16_BYTES = 23056, CMD_BENCH_PEER_Q4_BYTES = 9376 };
#define CMD_BENCH_PEER_PREFILL 230.0 /* tokens per second at 8,000 tokens */

/* CPU, cores and threads: as JSON member "host" or as a line of text. */
void cmd_bench_host(struct cmd *cmd);

/* Threads that compute for it: the daemon's own where it runs this. */
uint32_t cmd_bench_threads(const struct cmd *cmd);

/* --tokens, or `usual` when it was not given. */
uint64_t cmd_bench_tokens(const struct cmd *cmd, uint64_t usual);

/* From asking for session cmd->session_name to its first token, medians; the bytes that a wake read
 * of the disk, of `memory` those that were brought there before. The service has a RAM tier with
 * room for it. PROOF: it was not what it should be. */
struct cmd_bench_first {
    uint64_t exact_ns, eager_ns, memory_ns;
    uint64_t exact_bytes, eager_bytes, memory_bytes;
};
enum kv_err cmd_bench_first(struct cmd *cmd, struct service *service,
                            struct cmd_bench_first *first_out, struct kv_diag *diag);
void cmd_bench_first_tell(struct cmd *cmd, const struct cmd_bench_first *first);

enum kv_err cmd_bench_attention(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_bench_model(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_bench_quality(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_bench_restore(struct cmd *cmd, struct kv_diag *diag);
enum kv_err cmd_bench_rates(struct cmd *cmd, struct kv_diag *diag);

#endif
