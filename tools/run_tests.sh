#!/bin/sh
# tools/run_tests.sh - run each test program with a time limit, add up their closing lines.
#
# Responsible for: never letting a crash, a leak report, a time-out or an empty run count as a pass.
# Not responsible for: building the programs (Makefile).
#
# Exit status 77 means that the program could not run here and counts as skipped. A program that
# fails is shown whole. The last line is `N passed, N failed`.
limit_s=${TEST_LIMIT_S:-900}
passed=0 failed=0 skipped=''
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    start=$(date +%s)
    timeout -k 10 "$limit_s" "$program" >"$log" 2>&1 </dev/null
    status=$?
    name=${program##*/}
    wall=$(($(date +%s) - start))
    if [ $status -eq 77 ]; then
        skipped="$skipped $name"
        printf '%-28s skipped\n' "$name"
        continue
    fi
    line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    p=${line%% *} f=${line#*, } f=${f%% *}
    p=${p:-0} f=${f:-0}
    [ $status -eq 0 ] || [ "$f" -gt 0 ] || f=1 # died, leaked or timed out after its closing line
    [ "$p" -gt 0 ] || [ "$f" -gt 0 ] || f=1    # ran nothing
    printf '%-28s %4d passed, %d failed %4d s\n' "$name" "$p" "$f" "$wall"
    if [ "$f" -gt 0 ]; then
        echo "--- $program, exit status $status (124 is the limit of $limit_s s)"
        cat "$log"
        echo "---"
    fi
    passed=$((passed + p)) failed=$((failed + f))
done
[ $((passed + failed)) -gt 0 ] || failed=1
[ -z "$skipped" ] || echo "skipped:$skipped"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
