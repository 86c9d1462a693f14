#!/bin/sh
# run.sh BUILD...: the plans of each are those of the first.
set -eu
for build in "$@"; do
    "$build/tests/same_plans/plan_hashes" >"$build/plan_hashes.txt"
    diff "$1/plan_hashes.txt" "$build/plan_hashes.txt" || { echo "$build plans otherwise than $1" && exit 1; }
    echo "$build: $(wc -l <"$build/plan_hashes.txt") plans"
done
