#!/bin/sh
# tools/check.sh - `make check`: every rule that a program can check; OBJECTS as arguments.
#
# Responsible for: the files to check, rules over several files, mutable globals read from the
# object files, clang-format where it is installed.
# Not responsible for: rules inside one file (tools/tidy.awk).
#
# A mutable global that cannot be avoided is named in its file: `tidy-allow: global NAME reason`.
export LC_ALL=C
passed=0 failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# report NAME: the rule is kept when $work/found is empty.
report() {
    if [ -s "$work/found" ]; then
        echo "$1:"
        sed 's/^/  /' "$work/found"
        failed=$((failed + 1))
    else
        passed=$((passed + 1))
    fi
}

find store kernels engine snapshot restore tools tests -name '*.[ch]' -o -name '*.cu' \
    -o -name '*.cuh' 2>/dev/null | sort >"$work/code"
find tools tests .ci Makefile -name '*.sh' -o -name '*.awk' -o -name '*.py' -o -name Makefile \
    -o -path .ci/run 2>/dev/null | sort >"$work/scripts"
[ "$(wc -l <"$work/code")" -ge 10 ] || {
    echo 'check: run from the root of the tree' >&2
    exit 1
}

xargs awk -f tools/tidy.awk <"$work/code" >"$work/found" 2>&1 || [ -s "$work/found" ] ||
    echo 'tools/tidy.awk died' >"$work/found"
report 'style'

xargs awk -f tools/tidy.awk <"$work/scripts" >"$work/found" 2>&1 || [ -s "$work/found" ] ||
    echo 'tools/tidy.awk died' >"$work/found"
report 'style of scripts'

sed 's,.*/,,' "$work/code" "$work/scripts" | sort | uniq -d >"$work/found"
report 'file names must be unique'

ls -A | grep -vxE '\.git|\.gitignore|\.clang-format|\.ci|Makefile|README\.md|LICENSE|build' |
    grep -vxE 'store|kernels|engine|snapshot|restore|tools|tests' >"$work/found"
report 'the top level holds only what STYLE.md names'

# Own header first, or the inner header that includes it, so that every header compiles alone.
while read -r file; do
    case $file in *.c) ;; *) continue ;; esac
    header=${file%.c}.h
    [ -f "$header" ] || continue
    first=$(grep -m 1 '^#include' "$file")
    [ "$first" = "#include \"$header\"" ] || [ "$first" = "#include \"${file%.c}_inner.h\"" ] ||
        echo "$file: first include must be \"$header\""
done <"$work/code" >"$work/found"
report 'own header first'

# One args struct for a kernel and its host twin.
for file in kernels/cuda/*.cu; do
    [ -e "$file" ] || continue
    structs=$(grep -oE 'struct (kv)?ops_[a-z0-9_]+' "$file" | sort -u | cut -d' ' -f2)
    [ -n "$structs" ] || grep -q 'definition of store/base/digest.h' "$file" ||
        echo "$file: no struct of kvops.h or ops.h shared with a host twin"
    for name in $structs; do
        grep -qE "struct $name( |\$|\*)" kernels/*.h kernels/host/*.c 2>/dev/null ||
            echo "$file: struct $name is in no header of kernels/ and no host twin"
    done
done >"$work/found"
report 'kernels and host twins share an args struct'

# Nothing can hide a mutable global from the object files. The list goes through a file, so that
# a tool that dies is not taken for an empty list.
: >"$work/found"
for object in "$@"; do
    case $object in *.cu.o) continue ;; esac
    objdump -t "$object" >"$work/symbols" || echo "$object: objdump failed" >>"$work/found"
    source=${object#build/*/}
    source=${source%.o}.c
    awk 'NF > 3 {
            section = $(NF - 2)
            if (section ~ /^\.data\.rel\.ro/) next
            if (section ~ /^\.(data|bss|tdata|tbss)(\.|$)/ || section == "*COM*") print $NF
        }' "$work/symbols" | grep -vE '^(\.|__asan|__odr|__ubsan|\.L)' | sed 's/\.[0-9]*$//' |
        while read -r name; do
            grep -q "tidy-allow: global $name [a-z]* [a-z]" "$source" ||
                echo "$source: mutable global $name"
        done >>"$work/found"
done
[ $# -gt 0 ] || echo 'no object files given' >"$work/found"
report 'no mutable globals'

if command -v clang-format >/dev/null; then
    grep '\.[ch]$' "$work/code" | xargs clang-format --dry-run -Werror 2>&1 |
        grep -E 'error:|clang-format:' | sort -u -t: -k1,1 >"$work/found"
    report 'layout (run clang-format -i on these)'
else
    echo 'check: clang-format is not installed; layout was not checked'
fi

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
