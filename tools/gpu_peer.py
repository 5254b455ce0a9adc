# tools/gpu_peer.py - times torch's attention at the shapes of bench attention.
#
# Responsible for: decode of one query row (flash and cuDNN, grouped heads) at 131,072 tokens and a
# chunk of 256 rows at 8,192 tokens, in BF16; one KV head of each answer against fp32.
# Not responsible for: our kernels.
#
# Prints `peer NAME ROWS TOKENS MEDIAN_US P99_US`, of one layer; says so where torch is not.
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
except ImportError:
    print('torch is not installed: no comparison')
    sys.exit(0)

LAYERS, Q_HEADS, KV_HEADS, DIM, REPEATS, ERROR_MAX = 8, 32, 8, 128, 31, 0.02
BACKENDS = {'flash': SDPBackend.FLASH_ATTENTION, 'cudnn': SDPBackend.CUDNN_ATTENTION}


def times_ms(run):
    times = []
    for i in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)


def error_of(q, k, v, answer):
    """Of KV head 0, all of its query heads and rows."""
    group = Q_HEADS // KV_HEADS
    q, k, v, answer = q[0, :group].float(), k[0, 0].float(), v[0, 0].float(), answer[0, :group]
    scores = q @ k.T / DIM ** 0.5
    rows, tokens = scores.shape[-2:]
    hidden = torch.ones(rows, tokens, dtype=torch.bool, device='cuda').triu(tokens - rows + 1)
    exact = scores.masked_fill(hidden, float('-inf')).softmax(-1) @ v
    return ((answer.float() - exact).norm() / exact.norm()).item()


def measure(rows, tokens, backend):
    shape = (1, KV_HEADS, tokens, DIM)
    cache = [[torch.randn(shape, device='cuda', dtype=torch.bfloat16) for _ in range(2)]
             for _ in range(LAYERS)]
    q = torch.randn((1, Q_HEADS, rows, DIM), device='cuda', dtype=torch.bfloat16)
    # Aligned to the end, which is_causal is not.
    mask = causal_lower_right(rows, tokens) if rows > 1 else None
    answers = []

    def run():
        for k, v in cache:
            answers[:] = [torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True)]
    with sdpa_kernel([backend]):
        times = times_ms(run)
    error = error_of(q, *cache[-1], answers[0])
    if not error < ERROR_MAX:
        raise RuntimeError(f'wrong answer: error {error}')
    return times


for rows, tokens in ((1, 131072), (256, 8192)):
    for name, backend in BACKENDS.items():
        try:
            times = measure(rows, tokens, backend)
        except RuntimeError as error:
            print(f'torch {name} rows {rows}: {str(error).splitlines()[0]}')
            continue
        median, p99 = (times[i] / LAYERS * 1000 for i in (len(times) // 2, len(times) - 1))
        print(f'peer {name} {rows} {tokens} {median:.2f} {p99:.2f}', flush=True)
print(f'torch {torch.__version__}')
