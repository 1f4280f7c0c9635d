#!/usr/bin/env bash
# tools/bench.sh cpu|gpu: runs every benchmark and writes benchmarks/results/<date>-<host kind>.{json,md}.
# ONLY=regex limits it to benchmarks whose name matches. A script in benchmarks/python takes --json FILE; those that
# also take --device run again on a GPU under `gpu`, the others do not.
. "$(dirname "$0")/common.sh"
kind=${1:-cpu}
only=${ONLY:-.}
tools/build.sh native benchmarks
pick_python
dir=build/$(env_tag "$PY")
out=$dir/bench-$kind
rm -rf "$out"
mkdir -p "$out"
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
if [ "$kind" = cpu ]; then
  for program in "$dir"/bin/bench_*; do
    name=$(basename "$program")
    [ -x "$program" ] && [[ $name =~ $only ]] || continue
    say "$name"
    "$program" --benchmark_out="$out/$name.json" --benchmark_out_format=json || die "$name failed: a benchmark checks before it times."
  done
fi
for script in benchmarks/python/*.py; do
  name=$(basename "$script" .py)
  [[ $name =~ $only ]] || continue
  grep -q -- '"--json"' "$script" || continue
  options=()
  if [ "$kind" = gpu ]; then
    grep -q -- '"--device"' "$script" || continue
    options=(--device cuda --ranks "${RANKS:-1}")
  fi
  say "$name"
  # A missed target is a result like any other: it is written down, and the run goes on.
  "$PY" "$script" "${options[@]}" --json "$out/$name.json" || say "$name: exit code $?"
done
"$PY" benchmarks/python/common/collect.py "$out" benchmarks/results
