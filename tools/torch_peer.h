/* tools/torch_peer.h - torch's attention timed by the script that this program carries.
 *
 * Responsible for: running tools/gpu_peer.py with python3 where there is one, its figures.
 * Not responsible for: what is timed (gpu_peer.py), our own kernels.
 *
 * Threads: the main thread; waits for the other program.
 * Units: microseconds.
 */
#ifndef TOOLS_TORCH_PEER_H
#define TOOLS_TORCH_PEER_H

#include "kernels/cuda/cuda_bench.h"

enum { TORCH_PEER_MAX = 16, TORCH_PEER_TEXT_BYTES = 160 };

struct torch_peer {
    struct cuda_bench_peer peers[TORCH_PEER_MAX];
    uint32_t count;
    char note
        [TORCH_PEER_TEXT_BYTES]; /* the last other line: torch's version, or why there is none */
};
/* Where it cannot run, count is 0 and the note says why. */
void torch_peer_run(struct torch_peer *out);

/* One line of the script's; 1 when it held a figure. */
int torch_peer_line(struct torch_peer *out, const char *line);

#endif
