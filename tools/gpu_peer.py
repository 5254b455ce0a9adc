# tools/gpu_peer.py - times torch's attention at the shapes of tests/gpu_bench.cu, as JSON.
#
# Responsible for: decode of one query row (flash and cuDNN, grouped heads) at 131,072 tokens and a
# chunk of 256 rows at 8,192 tokens, in BF16.
# Not responsible for: our kernels. Usage: gpu_peer.py FILE; says so and ends where torch is not.
import json
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print('torch is not installed: no comparison')
    sys.exit(0)

LAYERS, Q_HEADS, KV_HEADS, DIM, REPEATS = 8, 32, 8, 128, 31
BACKENDS = {'flash': SDPBackend.FLASH_ATTENTION, 'cudnn': SDPBackend.CUDNN_ATTENTION}


def time_ms(run):
    times = []
    for i in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure(rows, tokens, backend, causal):
    shape = (1, KV_HEADS, tokens, DIM)
    cache = [[torch.randn(shape, device='cuda', dtype=torch.bfloat16) for _ in range(2)]
             for _ in range(LAYERS)]
    q = torch.randn((1, Q_HEADS, rows, DIM), device='cuda', dtype=torch.bfloat16)
    mask = None
    if causal:  # aligned to the end, which is_causal is not
        from torch.nn.attention.bias import causal_lower_right
        mask = causal_lower_right(rows, tokens)

    def run():
        for k, v in cache:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                                             enable_gqa=True)
    with sdpa_kernel([backend]):
        return time_ms(run) / LAYERS * 1000


results = []
for rows, tokens, causal in ((1, 131072, False), (256, 8192, True)):
    for name, backend in BACKENDS.items():
        try:
            us = measure(rows, tokens, backend, causal)
        except RuntimeError as error:
            print(f'torch {name} rows {rows}: {str(error).splitlines()[0]}')
            continue
        print(f'torch {torch.__version__} {name} rows {rows} tokens {tokens}: {us:.1f} us/layer')
        results.append({'backend': name, 'rows': rows, 'tokens': tokens, 'us_per_layer': us,
                        'torch': torch.__version__})
with open(sys.argv[1], 'w') as file:
    json.dump(results, file, indent=1)
