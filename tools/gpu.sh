#!/bin/sh
# tools/gpu.sh - builds the CUDA kernels alone, checks them against their twins, times them.
#
# Responsible for: a build that needs only the CUDA toolkit and gcc, parity, sanitizer, timing;
# results as JSON and logs in the folder given.
# Not responsible for: the engine on the device, hosts without a GPU.
#
# Usage: tools/gpu.sh OUT [build|parity|sanitize|bench|all], from the root of the tree. Without a
# GPU `build` still compiles everything for sm_80 and sm_90. COMMIT names the sources in results.
# bench gathers everything in OUT/gpu_bench.json; make gpu-bench keeps that in tests/results/.
set -eu
out=${1:?usage: tools/gpu.sh OUT [build|parity|sanitize|bench|all]}
what=${2:-all}
root=${GPU_ROOT:-.}
work=${GPU_WORK:-/tmp/coldplane-gpu}
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${GPU_ARCH:-'-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a'}
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
mkdir -p "$out" "$work"

compile_host() {
    for file in kernels/*.c kernels/host/*.c; do
        case $file in *_avx2.c) simd='-mavx2 -mfma -mf16c' ;; *) simd= ;; esac
        # shellcheck disable=SC2086
        gcc -std=c11 -D_GNU_SOURCE -O2 -ffp-contract=off -fno-math-errno $simd -I. -c \
            -o "$work/host_$(basename "$file" .c).o" "$file" &
    done
    wait
}

# compile_device SUFFIX FLAGS: kernels and tests; the sm_80 copies can be forced with a flag.
compile_device() {
    suffix=$1
    shift
    for file in "$root"/kernels/cuda/*.cu "$root"/tests/gpu_*.cu; do
        # shellcheck disable=SC2086
        "$nvcc" -std=c++17 -O2 -lineinfo --Werror all-warnings -Xcompiler -Wall,-Wextra $arch "$@" \
            "-I$root" -I. -c -o "$work/$(basename "$file" .cu)$suffix.o" "$file" ||
            touch "$work/broken" &
    done
    wait
    [ ! -e "$work/broken" ] || { echo 'a kernel does not compile' >&2; exit 1; }
    for program in "$root"/tests/gpu_*.cu; do
        name=$(basename "$program" .cu)
        "$nvcc" -o "$work/$name$suffix" "$work/$name$suffix.o" \
            $(for file in "$root"/kernels/cuda/*.cu; do
                  echo "$work/$(basename "$file" .cu)$suffix.o"
              done) "$work"/host_*.o
    done
}

build() {
    rm -f "$work/broken"
    compile_host
    compile_device ''
}

parity() {
    "$work/gpu_dense" | tee "$out/dense.txt"
    "$work/gpu_parity" | tee "$out/parity.txt"
    compile_device _cp_async -DCUDA_KVOPS_CP_ASYNC=1
    echo 'the copies of sm_80:'
    "$work/gpu_parity_cp_async" | tee "$out/parity_cp_async.txt"
}

sanitize() {
    for tool in memcheck racecheck; do
        for program in gpu_parity gpu_dense; do
            timeout 300 compute-sanitizer --tool $tool "$work/$program" quick 2>&1 | tail -n 4 |
                tee "$out/${tool}_$program.txt"
        done
    done
}

bench() {
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu \
        --format=csv | tee "$out/clocks.csv"
    "$work/gpu_step" "$out/step.json" >"$out/step.txt" || { cat "$out/step.txt"; exit 1; }
    cat "$out/step.txt"
    python3 "$root/tools/gpu_peer.py" "$out/peer.json" || true
    "$work/gpu_bench" "$commit" "$out/kernels.json" >"$out/kernels.txt" ||
        { cat "$out/kernels.txt"; exit 1; }
    cat "$out/kernels.txt"
    nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu --format=csv >>"$out/clocks.csv"
    [ -s "$out/peer.json" ] || echo null >"$out/peer.json"
    {
        printf '{"command": "make gpu-bench", "commit": "%s", "date": "%s",\n' "$commit" \
            "$(date -u +%F)"
        printf '"cuda": "%s",\n"clocks": "%s",\n' \
            "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" \
            "$(tr '\n' ';' <"$out/clocks.csv" | tr -d '"')"
        printf '"step": %s,\n"torch": %s,\n"kernels": %s}\n' "$(cat "$out/step.json")" \
            "$(cat "$out/peer.json")" "$(cat "$out/kernels.json")"
    } >"$out/gpu_bench.json"
}

build
case $what in
build) ;;
parity) parity ;;
sanitize) sanitize ;;
bench) bench ;;
all) parity && sanitize && bench ;;
*) echo "unknown: $what" >&2; exit 2 ;;
esac
