#!/bin/sh
# run.sh BUILD SECONDS: runs each target of fuzz_core.cpp for SECONDS, from its corpus and from the inputs that earlier
# runs found (BUILD/found). Prints how many inputs each target ran. At a fault ends with 1; its input is left in BUILD.
set -eu
build=$1 seconds=$2
for corpus in "$(dirname "$0")"/corpus/*; do
    name=${corpus##*/}
    mkdir -p "$build/found/$name"
    KNAPFORMER_FUZZ=$name "$build/tests/fuzz/fuzz_core" -max_total_time="$seconds" -max_len=4096 -timeout=20 \
        -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="$build/fault-$name-" \
        "$build/found/$name" "$corpus" >"$build/$name.log" 2>&1 || { tail -40 "$build/$name.log" && exit 1; }
    echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$name.log") inputs"
done
