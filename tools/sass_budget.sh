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
# The budget is a percentage of what a multiprocessor of an A100 has while its share of 1.8 TB/s
# brings a page (108 multiprocessors at 1,410 MHz, four schedulers): four issue slots a clock, two
# for the integer unit (16 lanes a scheduler), 1/2 for conversions and exponentials (4 lanes).
#
# The page loop over planes is, of the innermost loops with products of int8, the one with most. A
# count is of it as compiled, both sides of every branch but of the one that loads V at 8 bits, so
# it is what a page can cost at most at tiers up to K8V4; the copies of sm_80 are part of it.
set -eu
out=${1:-build/sass}
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

# count FUNCTION-PATTERN NAME BYTES BUDGET: a row per unit and a verdict.
count() {
    awk -v pattern="$1" -v name="$2" -v bytes="$3" -v budget="$4" '
        /^\.text\./ { here = $0 ~ pattern; next }
        !here { next }
        /^\.L/ { label[substr($1, 1, length($1) - 1)] = n; next }
        /\/\*[0-9a-f]+\*\// {
            line = $0
            sub(/^[^\/]*\/\*[0-9a-f]+\*\/ */, "", line)
            sub(/^@!?U?P[0-9T]+ +/, "", line)
            split(line, word, /[ .;]/)
            op[n] = word[1]
            vx[n] = word[1] == "LDG" && line ~ /^LDG[.A-Z]*\.128 /
            if (word[1] == "BRA" && match(line, /\.L_x_[0-9]+/))
                target[n] = substr(line, RSTART, RLENGTH)
            n++
        }
        END {
            for (i = 0; i < n; i++) { # loops with products
                if (!(i in target) || !(target[i] in label)) continue
                held = 0
                for (j = label[target[i]]; j <= i; j++) held += op[j] == "IMMA"
                if (held > 0) { from[++loops] = label[target[i]]; to[loops] = i; has[loops] = held }
            }
            for (i = 1; i <= loops; i++) { # of the innermost of them the one with most
                for (j = 1; j <= loops; j++)
                    if (i != j && from[i] <= from[j] && to[j] <= to[i]) break
                if (j <= loops || has[i] <= products) continue
                products = has[i]
                begin = from[i]
                end = to[i]
            }
            if (begin == "") { print name ": no page loop found"; exit 1 }
            for (i = begin; i <= end; i++) { # what a branch skips of a page without VX
                if (!(i in target) || (past = label[target[i]]) <= i || past > end) continue
                for (j = i + 1; j < past && !vx[j]; j++) continue
                if (j == past) continue
                for (j = i + 1; j < past; j++) skipped[j] = 1
            }
            alu = "^(LOP3|SHF|PRMT|IADD3|ISETP|SEL|FSEL|FSETP|FMNMX|IMNMX|LEA|PLOP3|VOTE|IABS|" \
                  "FLO|SGXT|BMSK|LOP|P2R|R2P|MOV|CS2R)$"
            for (i = begin; i <= end; i++) {
                if (i in skipped) { left_out++; continue }
                total++
                if (op[i] ~ alu) integer++
                else if (op[i] ~ /^(MUFU|I2F|F2I|F2F|I2I|POPC)$/) slow++
            }
            clocks = bytes / (1.8e12 / 108) * 1.41e9
            bad = 0
            bad += row("issue", total, 4 * clocks)
            bad += row("integer", integer, 2 * clocks)
            bad += row("conversion", slow, clocks / 2)
            printf "%s: %d left out, of V at 8 bits\n", name, left_out
            bad += left_out == 0
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
# DIM 128, then 64; four query heads, then eight. Bytes of a page at K8V4.
count 'decode_kernelILi128ELi1E' 'dim 128, 4 heads' 12544 30
count 'decode_kernelILi64ELi1E' 'dim 64, 4 heads' 6400 33
count 'decode_kernelILi128ELi2E' 'dim 128, 8 heads' 12544 30
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
