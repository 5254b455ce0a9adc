#!/bin/sh
# tools/gpu.sh - checks and times coldplane on a GPU: kernels alone, then the whole engine.
#
# Responsible for: a build of the kernels that needs only the CUDA toolkit and gcc; parity with the
# host twins, with the copies of sm_80 too, sanitizers, the engine where its libraries and a model
# are there, timing; logs and JSON in the folder given; `N passed, N failed`.
# Not responsible for: hosts without a GPU, where `build` still compiles everything.
#
# Usage: tools/gpu.sh OUT [build|parity|sanitize|engine|test|bench], from the root of the tree.
# test is parity, sanitize and engine, kept in OUT/gpu_test.json; bench is OUT/gpu_bench.json.
#
# GPU_DEBS=folder of .deb files: the engine's libraries with headers, unpacked beside the build:
# both packages of every line of engine_packages below, of Debian 12 (`apt-get download` them where
# there is a net; elsewhere those of the same libraries). MODEL=file.gguf, else
# the default model where `make setup` puts it. COMMIT names the sources. GPU_BUILT=1: all of it was
# built elsewhere, into GPU_WORK and build/. What is missing is skipped and said so, in the log and
# in the JSON.
set -eu
out=${1:?usage: tools/gpu.sh OUT [build|parity|sanitize|engine|test|bench]}
what=${2:-test}
work=${GPU_WORK:-/tmp/coldplane-gpu}
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${GPU_ARCH:-'-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a'}
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
passed=0 failed=0 programs='' skipped=''
mkdir -p "$out" "$work"

# --- building, as many files at a time as there are cores

compile_host() {
    mkdir -p "$work/kernels/host"
    for simd in '' '-mavx2 -mfma -mf16c'; do
        ls kernels/*.c kernels/host/*.c |
            if [ -z "$simd" ]; then grep -v _avx2; else grep _avx2; fi |
            xargs -P "$(nproc)" -I FILE gcc -std=c11 -D_GNU_SOURCE -O2 -ffp-contract=off \
                -fno-math-errno $simd -I. -c -o "$work/FILE.o" FILE
    done
}

# compile_device SUFFIX PROGRAMS FLAGS: kernels and the programs; a flag forces the sm_80 copies.
compile_device() {
    suffix=$1 names=$2
    shift 2
    rm -rf "$work/tests" "$work/kernels/cuda"
    mkdir -p "$work/tests" "$work/kernels/cuda"
    ls kernels/cuda/*.cu $(printf 'tests/%s.cu ' $names) | xargs -P "$(nproc)" -I FILE \
        "$nvcc" -std=c++17 -O2 -lineinfo --Werror all-warnings -Xcompiler -Wall,-Wextra $arch "$@" \
        -I. -c -o "$work/FILE.o" FILE
    for name in $names; do
        "$nvcc" -o "$work/$name$suffix" "$work/tests/$name.cu.o" "$work"/kernels/cuda/*.o \
            "$work"/kernels/host/*.o $(find "$work/kernels" -maxdepth 1 -name '*.o')
    done
}

# Of every source, whichever checkout holds it and however old its files are.
sources_digest() {
    find kernels engine store tests tools Makefile -type f ! -path 'tests/results/*' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
}

# Not again for the same sources; the digest is taken first, so that an edit meanwhile is seen.
build() {
    [ -z "${GPU_BUILT:-}" ] || return 0
    wanted="$arch $(sources_digest)"
    [ "$(cat "$work/built" 2>/dev/null)" != "$wanted" ] || return 0
    rm -f "$work/built"
    compile_host
    compile_device '' 'gpu_dense gpu_parity gpu_bench gpu_products'
    echo "$wanted" >"$work/built"
}

# --- checking

# run NAME COMMAND: its last `N passed, N failed` counts; a program that ends badly has failed; a
# part that it says is `skipped: WHY` is skipped here too.
run() {
    name=$1 status=0
    shift
    echo "--- $name"
    "$@" >"$out/$name.txt" 2>&1 || status=$?
    line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed$' "$out/$name.txt" | tail -n 1)
    p=${line%% *} f=${line#*, } f=${f%% *}
    [ -n "$line" ] || { p=0 f=1; }
    [ $status -eq 0 ] || [ "$f" -gt 0 ] || f=1
    grep -av '^ok ' "$out/$name.txt" | tail -n 40
    [ $status -eq 0 ] || echo "$name ended with $status"
    note "$name" "\"passed\": $p, \"failed\": $f"
    passed=$((passed + p)) failed=$((failed + f))
    why=$(sed -n 's/^skipped: //p' "$out/$name.txt" | head -n 1)
    [ -z "$why" ] || skip "$name, a part" "$why"
}

note() {
    programs="$programs${programs:+,
}  \"$1\": {$2}"
}

skip() {
    echo "--- $1: SKIPPED: $2"
    note "$1" "\"skipped\": \"$(echo "$2" | tr -d '"\\')\""
    skipped="${skipped}NOT TESTED: $1: $2
"
}

parity() {
    run gpu_dense "$work/gpu_dense"
    run gpu_parity "$work/gpu_parity"
    [ -n "${GPU_BUILT:-}" ] || compile_device _cp_async gpu_parity -DCUDA_KVOPS_CP_ASYNC=1
    run gpu_parity_cp_async "$work/gpu_parity_cp_async"
}

sanitize() {
    [ -x "$sanitizer" ] || { skip sanitizers 'compute-sanitizer is not installed'; return 0; }
    for tool in memcheck racecheck; do
        for program in gpu_parity gpu_dense; do
            run "${tool}_$program" timeout 600 "$sanitizer" --tool $tool --error-exitcode 9 \
                "$work/$program" quick
        done
    done
}

# HEADER LIBRARY PACKAGES: what the gpu_* programs of the engine are compiled and linked with.
engine_packages='liburing.h uring liburing-dev liburing2
lmdb.h lmdb liblmdb-dev liblmdb0
zstd.h zstd libzstd-dev libzstd1
xxhash.h xxhash libxxhash-dev libxxhash0
sodium.h sodium libsodium-dev libsodium23
pcre2.h pcre2-8 libpcre2-dev libpcre2-8-0
cjson/cJSON.h cjson libcjson-dev libcjson1
microhttpd.h microhttpd libmicrohttpd-dev libmicrohttpd12
histedit.h edit libedit-dev libedit2
cmocka.h cmocka libcmocka-dev libcmocka0'

# One line for all that is missing; nothing where the programs can be built.
missing_packages() {
    echo "$engine_packages" | while read -r header library dev own; do
        prelude='#define PCRE2_CODE_UNIT_WIDTH 8'
        printf "$prelude\n#include <%s>\n" stdio.h stdarg.h stddef.h stdint.h setjmp.h "$header" |
            gcc -D_GNU_SOURCE -fsyntax-only -x c - 2>/dev/null || { printf '%s ' "$dev"; continue; }
        echo 'int main(void) { return 0; }' | gcc -x c -o "$work/probe" - -Wl,--as-needed \
            "-l$library" 2>/dev/null || printf '%s or %s ' "$dev" "$own"
    done
}

unpack_debs() {
    [ -n "${GPU_DEBS:-}" ] || return 0
    rm -rf "$work/debs"
    for deb in "$GPU_DEBS"/*.deb; do
        dpkg-deb -x "$deb" "$work/debs"
    done
    usr=$work/debs/usr triple=$(gcc -print-multiarch)
    export CPATH="$usr/include:$usr/include/$triple"
    export LIBRARY_PATH="$usr/lib/$triple:$work/debs/lib/$triple:$usr/lib"
    export LD_LIBRARY_PATH="$LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

engine() {
    model=${MODEL:-${COLDPLANE_HOME:-$HOME/.coldplane}/models/$(sed -n 's/^model_name=//p' \
        tools/setup.sh)}
    command -v make >/dev/null || [ -n "${GPU_BUILT:-}" ] || {
        skip gpu_engine 'make is not installed'
        return 0
    }
    unpack_debs
    missing=''
    [ -n "${GPU_BUILT:-}" ] || missing=$(missing_packages)
    [ -z "$missing" ] || {
        skip gpu_engine "missing packages: $missing- GPU_DEBS=folder brings them along"
        return 0
    }
    [ -f "$model" ] || { skip gpu_engine "no model at $model: give MODEL=file.gguf"; return 0; }
    [ -n "${GPU_BUILT:-}" ] || make -s -j"$(nproc)" CUDA=1 \
        build/release/tests/gpu_engine build/release/tests/gpu_faults \
        build/release/tests/gpu_prompts build/release/tests/gpu_harm
    run gpu_engine timeout 600 build/release/tests/gpu_engine "$model" tests/oracle/oracle.json \
        "$out/engine.json" "$commit"
    [ "$f" -eq 0 ] || rm -f "$out/engine.json"
    run gpu_prompts timeout 120 build/release/tests/gpu_prompts
    run gpu_faults timeout 300 build/release/tests/gpu_faults "$model" "$out/faults.json"
    [ "$f" -eq 0 ] || rm -f "$out/faults.json"
    run gpu_harm timeout 300 build/release/tests/gpu_harm "$out/harm.json" "$commit"
    [ "$f" -eq 0 ] || rm -f "$out/harm.json"
    [ -x "$sanitizer" ] || {
        skip memcheck_gpu_engine 'compute-sanitizer is not installed'
        return 0
    }
    run memcheck_gpu_engine timeout 600 "$sanitizer" --tool memcheck --error-exitcode 9 \
        build/release/tests/gpu_engine "$model" tests/oracle/oracle.json "$out/quick.json" \
        "$commit" quick
}

json_or_null() {
    if [ -s "$1" ]; then cat "$1"; else echo null; fi
}

driver() {
    nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1
}

tell_test() {
    {
        printf '{"command": "make gpu-test", "commit": "%s", "date": "%s",\n' "$commit" \
            "$(date -u +%FT%TZ)"
        printf '"gpu": "%s", "driver": "%s", "cuda": "%s",\n' \
            "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" "$(driver)" \
            "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
        printf '"programs": {\n%s\n},\n"engine": %s,\n"faults": %s,\n"harm": %s}\n' \
            "$programs" "$(json_or_null "$out/engine.json")" \
            "$(json_or_null "$out/faults.json")" "$(json_or_null "$out/harm.json")"
    } >"$out/gpu_test.json"
}

bench() {
    : >"$out/peers.txt"
    if command -v python3 >/dev/null; then
        python3 tools/gpu_peer.py >"$out/peers.txt" 2>/dev/null ||
            echo 'tools/gpu_peer.py failed' >>"$out/peers.txt"
    fi
    "$work/gpu_bench" "$out/cases.json" "$commit" "$(driver)" "$out/peers.txt" \
        >"$out/gpu_bench.txt" || { cat "$out/gpu_bench.txt"; exit 1; }
    cat "$out/gpu_bench.txt"
    "$work/gpu_products" "$out/products.json" >"$out/gpu_products.txt"
    cat "$out/gpu_products.txt"
    {
        sed '$ s/}$/,/' "$out/cases.json"
        printf '"products": %s}\n' "$(cat "$out/products.json")"
    } >"$out/gpu_bench.json"
}

build
rm -f "$out/engine.json" "$out/faults.json" "$out/harm.json" # of an earlier run
case $what in
build) exit 0 ;;
bench) bench; exit 0 ;;
parity) parity ;;
sanitize) sanitize ;;
engine) engine ;;
test) parity; sanitize; engine ;;
*) echo "unknown: $what" >&2; exit 2 ;;
esac
tell_test
printf '%s' "$skipped"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
