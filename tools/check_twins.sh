#!/bin/sh
# tools/check_twins.sh - every BREAK_ switch that a test names must make that test fail.
#
# Responsible for: building each broken twin (the files that name the switch are compiled with it
# and linked in front of the archives) and running it.
# Not responsible for: the sound programs, which `make check-twins` has built and which must pass.
#
# Arguments: build folder, compile command, libraries, and as a fourth the tests wanted (all of them
# when empty). A test without a switch has no twin.
set -u
build=$1 compile=$2 libraries=$3 wanted=${4:-}
twins=$build/twins
mkdir -p "$twins"

twin_fails() {
    switch=$1 test=$2 objects='' replaced=''
    for source in $(grep -lw "$switch" tests/*.c store/*.c store/*/*.c kernels/*/*.c engine/*.c \
        engine/*/*.c snapshot/*.c restore/*.c tools/*.c 2>/dev/null); do
        case $source in
        "tests/$test.c") ;;
        tests/test_* | tests/sweep.c | tests/flips.c | tests/branches.c) continue ;;
        esac
        object=$twins/$test.$switch-$(basename "$source" .c).o
        simd=''
        case $source in *_avx2.c) simd='-mavx2 -mfma -mf16c' ;; esac
        # A twin may leave a variable unused: warnings are for the sound program.
        $compile -Wno-error $simd "-D$switch" -c -o "$object" "$source" || return 1
        objects="$objects $object" replaced="$replaced $build/${source%.c}.o"
    done
    for item in $(MAKEFLAGS='' make -s CONFIG="${build##*/}" print-link TEST="$test"); do
        case " $replaced " in *" $item "*) ;; *) objects="$objects $item" ;; esac
    done
    $compile -o "$twins/$test.$switch" $objects $libraries || return 1
    # Every point of the sweep that knows the invariant; it ends at the first that is wrong.
    case $test/$switch in
    sweep/BREAK_HALF_KNOWN) points='1 failing_index_after_its_effect' ;;
    sweep/*) points='1 power_cuts' ;;
    branches/*) points=20 ;;
    *) points='' ;;
    esac
    timeout -k 10 300 "$twins/$test.$switch" $points >"$twins/log.$worker" 2>&1 </dev/null
    status=$?
    built=1
    [ $status -ne 0 ] && [ $status -ne 77 ] && [ $status -ne 124 ] &&
        grep -qE '^[0-9]+ passed, [1-9][0-9]* failed$' "$twins/log.$worker"
}

for file in tests/test_*.c tests/sweep.c tests/flips.c tests/branches.c; do
    test=$(basename "$file" .c)
    case " ${wanted:-$test} " in *" $test "*) ;; *) continue ;; esac
    grep -oE '\bBREAK_[A-Z0-9_]+' "$file" | sort -u | sed "s/^/$test /"
done >"$twins/list"

# Worker 0 takes the odd lines of the list, worker 1 the even ones.
work() {
    worker=$1 passed=0 failed=0 line=0
    while read -r test switch; do
        line=$((line + 1))
        [ $((line % 2)) -ne "$worker" ] || continue
        built=0
        if twin_fails "$switch" "$test" 2>"$twins/errors.$worker"; then
            passed=$((passed + 1))
            echo "$test fails with $switch, as it must"
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
rm -f "$twins"/sum.*
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
