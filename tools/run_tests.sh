#!/bin/sh
# tools/run_tests.sh - run each test program with a time limit, add up their closing lines.
#
# Responsible for: never letting a crash, a leak report, a time-out or an empty run count as a pass;
# as many programs at a time as JOBS says (the number of cores), told in the order of the arguments.
# Not responsible for: building the programs (Makefile).
#
# Exit status 77 means that the program could not run here and counts as skipped. A program that
# fails is shown whole. The last line is `N passed, N failed`.
limit_s=${TEST_LIMIT_S:-900}
jobs=${JOBS:-$(nproc)}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

# By its new name a sum is whole, and what is told of the program stands.
end() {
    echo "$2" >"$1/sum.new"
    mv "$1/sum.new" "$1/sum"
}

# What is to be told of program $1, and `passed failed skipped` in the file beside its log.
run_one() {
    log=$2/log
    start=$(date +%s)
    timeout -k 10 "$limit_s" "$1" >"$log" 2>&1 </dev/null
    status=$?
    name=${1##*/}
    wall=$(($(date +%s) - start))
    if [ $status -eq 77 ]; then
        printf '%-28s skipped\n' "$name"
        end "$2" "0 0 $name"
        return
    fi
    line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    p=${line%% *} f=${line#*, } f=${f%% *}
    p=${p:-0} f=${f:-0}
    [ $status -eq 0 ] || [ "$f" -gt 0 ] || f=1 # died, leaked or timed out after its closing line
    [ "$p" -gt 0 ] || [ "$f" -gt 0 ] || f=1    # ran nothing
    printf '%-28s %4d passed, %d failed %4d s\n' "$name" "$p" "$f" "$wall"
    if [ "$f" -gt 0 ]; then
        echo "--- $1, exit status $status (124 is the limit of $limit_s s)"
        cat "$log"
        echo "---"
    fi
    end "$2" "$p $f"
}

# Whoever makes the folder runs the program; its number says that it is over.
work() {
    number=0
    for program; do
        number=$((number + 1))
        mkdir "$dir/$number" 2>/dev/null || continue
        run_one "$program" "$dir/$number" >"$dir/$number/told"
        echo "$number"
    done
}

tell() {
    passed=0 failed=0 skipped='' next=1
    while read -r _; do
        while [ -e "$dir/$next/sum" ]; do
            cat "$dir/$next/told"
            read -r p f name <"$dir/$next/sum"
            passed=$((passed + p)) failed=$((failed + f))
            skipped="$skipped${name:+ $name}"
            next=$((next + 1))
        done
    done
    # A worker that died has left programs untold.
    [ $next -gt "$1" ] || failed=$((failed + 1))
    [ $((passed + failed)) -gt 0 ] || failed=1
    [ -z "$skipped" ] || echo "skipped:$skipped"
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
}

{
    worker=0
    while [ $worker -lt "$jobs" ]; do
        worker=$((worker + 1))
        work "$@" &
    done
    wait
} | tell $#
