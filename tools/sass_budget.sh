#!/bin/sh
# tools/sass_budget.sh - instructions per page of decode attention on sm_80 against a budget.
#
# Responsible for: compiling kv_decode.cu for sm_80, counting the machine instructions of its page
# loop by the unit that runs them, `N passed, N failed`.
# Not responsible for: times (an A100 was never measured), other kernels.
#
# Usage: tools/sass_budget.sh [OUT]. Needs nvcc, and nvdisasm from the PATH, beside nvcc or, failing
# both, the pinned package of it, fetched into OUT. Without nvcc it says so and passes.
#
# The budget is BUDGET percent of what a multiprocessor of an A100 has while its share of 1.8 TB/s
# brings a page (108 multiprocessors at 1,410 MHz, four schedulers): four issue slots a clock, two
# for the integer unit (16 lanes a scheduler), 1/2 for conversions and exponentials (4 lanes). A
# count is of the whole loop as compiled, both sides of every branch, so it is what a page can cost
# at most at tiers up to K8V4; the copies of sm_80 are part of it.
set -eu
out=${1:-build/sass}
budget=${BUDGET:-30}
nvdisasm_package=nvidia-cuda-nvdisasm==13.5.37
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo 'no nvcc: nothing to count'; echo '0 passed, 0 failed'; exit 0; }
mkdir -p "$out"

find_nvdisasm() {
    for at in "$(command -v nvdisasm || true)" "$(dirname "$nvcc")/nvdisasm" \
        "$out/package/nvidia/cu13/bin/nvdisasm"; do
        [ ! -x "$at" ] || { echo "$at"; return; }
    done
    python3 -m pip install --quiet --no-deps --target "$out/package" "$nvdisasm_package" >&2
    echo "$out/package/nvidia/cu13/bin/nvdisasm"
}

# count FUNCTION-PATTERN NAME BYTES GROUPS: a row per unit and a verdict.
count() {
    awk -v pattern="$1" -v name="$2" -v bytes="$3" -v budget="$budget" '
        /^\.text\./ { here = $0 ~ pattern; next }
        !here { next }
        /^\.L/ { label[substr($1, 1, length($1) - 1)] = n; next }
        /\/\*[0-9a-f]+\*\// {
            line = $0
            sub(/^[^\/]*\/\*[0-9a-f]+\*\/ */, "", line)
            sub(/^@!?U?P[0-9T]+ +/, "", line)
            split(line, word, /[ .;]/)
            op[n] = word[1]
            if (word[1] == "IMMA") { if (first == "") first = n; last = n }
            if (word[1] == "BRA" && match(line, /\.L_x_[0-9]+/))
                target[n] = substr(line, RSTART, RLENGTH)
            n++
        }
        END {
            for (i = last; i < n; i++) { # the smallest loop around all products
                if (!(i in target) || !(target[i] in label)) continue
                from = label[target[i]]
                if (from > first || (begin != "" && i - from >= end - begin)) continue
                begin = from
                end = i
            }
            if (begin == "") { print name ": no page loop found"; exit 1 }
            alu = "^(LOP3|SHF|PRMT|IADD3|ISETP|SEL|FSEL|FSETP|FMNMX|IMNMX|LEA|PLOP3|VOTE|IABS|" \
                  "FLO|SGXT|BMSK|LOP|P2R|R2P|MOV|CS2R)$"
            for (i = begin; i <= end; i++) {
                total++
                if (op[i] ~ alu) integer++
                else if (op[i] ~ /^(MUFU|I2F|F2I|F2F|I2I|POPC)$/) slow++
                else if (op[i] ~ /^IMMA$/) products++
            }
            clocks = bytes / (1.8e12 / 108) * 1.41e9
            bad = 0
            bad += row("issue", total, 4 * clocks)
            bad += row("integer", integer, 2 * clocks)
            bad += row("conversion", slow, clocks / 2)
            printf "%s: %d products\n", name, products
            exit bad > 0
        }
        function row(unit, used, room) {
            percent = 100 * used / room
            printf "%s: %-10s %4d of %4d a page, %4.1f %%, budget %d %%\n", name, unit, used,
                   room, percent, budget
            return percent > budget
        }' "$out/decode.sass" && passed=$((passed + 1)) || failed=$((failed + 1))
}

nvdisasm=$(find_nvdisasm)
"$nvcc" -std=c++17 -O2 -arch=sm_80 -I. -cubin -o "$out/decode.cubin" kernels/cuda/kv_decode.cu
"$nvdisasm" -c "$out/decode.cubin" >"$out/decode.sass"
passed=0 failed=0
# DIM 128, then 64; never VX; four query heads, then eight. Bytes of a page at K8V4.
count 'decode_kernelILi128ELb0ELi1E' 'dim 128, 4 heads' 12544
count 'decode_kernelILi64ELb0ELi1E' 'dim 64, 4 heads' 6400
count 'decode_kernelILi128ELb0ELi2E' 'dim 128, 8 heads' 12544
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
