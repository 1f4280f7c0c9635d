#!/usr/bin/env bash
# tools/gpu_minutes.sh [OUT]: the figures of a GPU that decide how a training step should be written, in 8 minutes, after
# the build. Each part has a limit of seconds and writes OUT/<part>.json (default: $OUT, else build/gpu-minutes). A part
# that fails does not end the others; the exit code is then 1. DEVICE=cpu and MODELS=tiny try the script without a GPU.
. "$(dirname "$0")/common.sh"
pick_python
out=${1:-${OUT:-$ROOT/build/gpu-minutes}}
mkdir -p "$out"
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
device=${DEVICE:-cuda}
failed=()
s() {  # SECONDS SCRIPT PART OPTIONS...
  say "$3"
  timeout "$1" "$PY" "benchmarks/python/$2.py" --device "$device" "${@:4}" --json "$out/$3.json" || failed+=("$3")
}
t() { s "$1" train_gpt "$2" --together --models "${MODELS:-$3}" "${@:4}"; }  # SECONDS PART MODEL OPTIONS...
s 35 gpu_rates rates
s 40 step_counts counts --check
t 110 125m 125m --contenders masters,fsdp2,0,1,2,3
t 50 host 125m --rows 1 --contenders masters,fsdp2,0,2,3
t 90 1.3b 1.3b --contenders masters,fsdp2,0,3 --steps 8
t 50 7b 7b4 --contenders masters,fsdp2,0,3 --steps 6
t 70 offload 1.3b --contenders masters,2+cpu,3+cpu --accumulation 8 --steps 2
t 35 compiled 125m --compile --contenders fsdp2,0,3
[ ${#failed[@]} = 0 ] || die "these parts failed or took too long: ${failed[*]}"
