#!/bin/sh
# tools/check_twins.sh - every BREAK_ switch that a test names must make that test fail.
#
# Responsible for: building each broken twin (the files that name the switch are compiled with it
# and linked in front of the archives) and running it.
# Not responsible for: the sound programs, which `make check-twins` has built and which must pass.
#
# A switch that is named above a test case (not at the top of the file) is tried with that case, and
# with all of them only when that one does not fail.
#
# Arguments: build folder, compile command, libraries, and as a fourth the tests wanted (all of them
# when empty). A test without a switch has no twin.
set -u
build=$1 compile=$2 libraries=$3 wanted=${4:-}
twins=$build/twins
rm -rf "$twins"
mkdir -p "$twins"

twin_fails() {
    switch=$1 test=$2 case=$3 objects='' replaced=''
    for source in $(grep -lw "$switch" tests/*.c store/*.c store/*/*.c kernels/*/*.c engine/*.c \
        engine/*/*.c snapshot/*.c restore/*.c tools/*.c 2>/dev/null); do
        case $source in
        "tests/$test.c") ;;
        tests/test_* | tests/sweep.c | tests/flips.c | tests/branches.c) continue ;;
        esac
        object=$twins/$switch-$(basename "$source" .c).o
        simd=''
        case $source in *_avx2.c) simd='-mavx2 -mfma -mf16c' ;; esac
        # A twin may leave a variable unused: warnings are for the sound program.
        if [ ! -e "$object" ]; then
            $compile -Wno-error $simd "-D$switch" -c -o "$object.$worker" "$source" || return 1
            mv "$object.$worker" "$object"
        fi
        objects="$objects $object" replaced="$replaced $build/${source%.c}.o"
    done
    [ -e "$twins/link.$test" ] || {
        MAKEFLAGS='' make -s CONFIG="${build##*/}" print-link TEST="$test" >"$twins/new.$worker"
        mv "$twins/new.$worker" "$twins/link.$test"
    }
    for item in $(cat "$twins/link.$test"); do
        case " $replaced " in *" $item "*) ;; *) objects="$objects $item" ;; esac
    done
    $compile -o "$twins/$test.$switch" $objects $libraries || return 1
    # Every point of the sweep that knows the invariant; it ends at the first that is wrong. Where
    # that is late in the life, every seventh.
    case $test/$switch in
    sweep/BREAK_HALF_KNOWN) points='1 failing_index_after_its_effect' ;;
    sweep/BREAK_KIN | sweep/BREAK_GC_* | sweep/BREAK_TRIM) points='7 power_cuts' ;;
    sweep/*) points='1 power_cuts' ;;
    branches/*) points=20 ;;
    flips/*) points=100 ;;
    *) points='' ;;
    esac
    built=1
    case $case in ?*) run_fails "$case" && return 0 ;; esac
    run_fails $points
}

run_fails() {
    timeout -k 10 300 "$twins/$test.$switch" "$@" >"$twins/log.$worker" 2>&1 </dev/null
    status=$?
    [ $status -ne 0 ] && [ $status -ne 77 ] && [ $status -ne 124 ] &&
        grep -qE '^[0-9]+ passed, [1-9][0-9]* failed$' "$twins/log.$worker"
}

# TEST SWITCH CASE for each switch that the file names; CASE is the test below, if there is one.
switches_of() {
    awk -v test="$1" '
        { for (line = $0; match(line, /BREAK_[A-Z0-9_]+/); line = substr(line, RSTART + RLENGTH)) {
              name = substr(line, RSTART, RLENGTH)
              known[name] = 1
              if (below_top) waiting[name] = 1 } }
        /^ \*\// || /\*\/$/ { below_top = 1 }
        /^static void [a-z0-9_]+\(void \*\*state\)/ {
            split($3, word, "(")
            for (name in waiting) if (!(name in case_of)) case_of[name] = word[1]
            split("", waiting) }
        END { for (name in known) print test, name, case_of[name] }' "$2" | sort
}

for file in tests/test_*.c tests/sweep.c tests/flips.c tests/branches.c; do
    test=$(basename "$file" .c)
    case " ${wanted:-$test} " in *" $test "*) ;; *) continue ;; esac
    switches_of "$test" "$file"
done >"$twins/list"

# Two workers; whoever makes the folder takes the line.
work() {
    worker=$1 passed=0 failed=0 line=0
    while read -r test switch case; do
        line=$((line + 1))
        mkdir "$twins/$line" 2>/dev/null || continue
        built=0 start=$(date +%s)
        if twin_fails "$switch" "$test" "$case" 2>"$twins/errors.$worker"; then
            passed=$((passed + 1))
            echo "$test fails with $switch, as it must: $(($(date +%s) - start)) s"
        else
            failed=$((failed + 1))
            if [ $built -eq 1 ]; then echo "$test does not fail with $switch"; else
                echo "$test cannot be built with $switch:"
                cat "$twins/errors.$worker"
            fi
        fi
    done <"$twins/list"
    echo "$passed $failed" >"$twins/sum.$worker"
}
work 0 &
work 1
wait
read -r passed failed <"$twins/sum.0"
read -r p f <"$twins/sum.1"
passed=$((passed + p)) failed=$((failed + f))
[ $((passed + failed)) -gt 0 ] || {
    echo 'no test names a BREAK_ switch'
    failed=1
}
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
