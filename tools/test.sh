#!/usr/bin/env bash
# tools/test.sh all|every|second|brief|unit|gpu|cluster [pytest arguments]: builds what is missing, then runs ctest and pytest, both on
# every core. `all` runs a fixed sample of each large matrix of cases (tests/sampling.py), `every` all of them. `second` is
# for another torch on a machine where `all` has passed on this tree with the first: without the tests of rooms that do not
# see torch (cmake/Rooms.cmake, tests/conftest.py), and with a twelfth of the Python tests that do not meet torch
# (tests/sampling.py). `brief` runs a twelfth of the Python tests, for a torch of which only its novelty is of interest. Tests
# that are marked `alone` measure time or the whole machine and run after the others, one at a time.
. "$(dirname "$0")/common.sh"
kind=${1:-all}
shift || true
tools/build.sh native $([ "$kind" = brief ] || echo tests) $([ "$kind" != all ] || echo benchmarks)  # benchmarks that do not compile are found here
pick_python
dir=build/$(env_tag "$PY")
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=  # hundreds of processes import the same files: they are compiled once
case $kind in
  all) marks="not gpu" ;;
  every)
    marks="not gpu"
    export DS_TEST_EVERY_CASE=1
    ;;
  second)
    marks="not gpu"
    export DS_TEST_COVER=values
    ;;
  brief)
    marks="not gpu and not slow"
    export DS_TEST_COVER=brief
    ;;
  unit) marks="not gpu and not slow and not dist" ;;
  gpu)  # a checklist (tests/device/checklist.py); DEVICE=name runs it on the device of another accelerator
    device=${DEVICE:-cuda}
    [ "$device" != cuda ] || "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
      die "make test-gpu needs a GPU and a torch that can use it; $PY sees none."
    exec "$PY" tests/device/checklist.py --device "$device" --programs "$dir/bin" --json "$dir/checklist-$device.json" "$@" ;;
  cluster) marks="not gpu"  # jobs over real ssh, pdsh, Slurm and MPI, between namespaces; needs root, else skipped
    tools/packages.sh cluster
    export DS_TEST_CLUSTER=1
    [ $# -gt 0 ] || set -- tests/cluster ;;
  *) die "tools/test.sh knows all, every, second, brief, unit, gpu and cluster, not '$kind'." ;;
esac
# Threads of OpenMP that wait must not spin: with more processes than cores a test of 0.1 s took 10.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
status=0
started=$SECONDS
# pytest rewrites the asserts of each file once and keeps the code. Here one process does so beside the C++ tests:
# several that begin at the same time with nothing kept would each do it for all files.
keeping=
if [ $# = 0 ] && [ "$JOBS" -gt 1 ]; then
  "$PY" -m pytest --collect-only -q >/dev/null 2>&1 &
  keeping=$!
fi
took=$dir/test-times.tsv  # a line for each test: seconds, a tab, its name
: >"$took"
export DS_TEST_TIMES=$took

if [ "$kind" != cluster ] && [ "$kind" != brief ]; then
  say "C++ tests"
  labels=()
  case $kind in
    unit) labels=(-LE slow); fuzz=5000 ;;
    all) fuzz=20000 ;;
    second) labels=(-L '^torch$'); fuzz=20000 ;;  # cmake/Rooms.cmake gives the label
    *) fuzz=100000 ;;
  esac
  DS_FUZZ_CASES=${DS_FUZZ_CASES:-$fuzz} ctest --test-dir "$dir" -j "$JOBS" --output-on-failure --no-tests=error "${labels[@]}" >"$dir/ctest.log" 2>&1 || {
    status=1
    grep -v ' Passed ' "$dir/ctest.log"
  }
  sed -n '/tests passed/,$p' "$dir/ctest.log" | sed '/^$/d'
  # GoogleTest's own lines: "[       OK ] Suite.Case (12 ms)"
  awk '/^\[ +(OK|FAILED) +\] .* ms\)$/ { sub(/.*\] /, ""); ms = substr($(NF - 1), 2); sub(/,? .*/, "")
    printf "%.3f\tC++ %s\n", ms / 1000, $0 }' "$dir/Testing/Temporary/LastTest.log" >>"$took"
  say "ctest: $((SECONDS - started)) s"
fi

# Several pytest processes, each with rank processes of its own; a file's tests stay together. Twice as many as
# cores, up to eight: many tests wait, for a timeout, a disk, or a process that is to die.
workers=()
if [ "$kind" != cluster ] && [ "$JOBS" -gt 1 ]; then
  if "$PY" -c 'import xdist' 2>/dev/null; then
    # Newer ones start with the files that have most tests, which are not those that take longest (tests/conftest.py).
    ! grep -q -e --no-loadscope-reorder <("$PY" -m pytest --help) || workers=(--no-loadscope-reorder)
    export PYTHONHASHSEED=${PYTHONHASHSEED:-$RANDOM}  # the same in all: the names of tests may hold sets
    workers+=(-n $((JOBS < 4 ? 2 * JOBS : 8)) --dist loadfile)
  else
    say "Python tests run one after the other: $PY -m pip install pytest-xdist uses all $JOBS cores"
  fi
fi
ran=
pytest() {  # pytest ARGUMENTS: nothing to run (5) is an error only if no part runs anything
  local code=0
  "$PY" -m pytest -q "$@" || code=$?
  [ $code = 5 ] && return
  ran=1
  [ $code = 0 ] || status=1
}
say "Python tests"
before=$SECONDS
[ -z "$keeping" ] || wait "$keeping" || true  # what it finds wrong, the tests find
if [ ${#workers[@]} -gt 0 ]; then
  pytest "${workers[@]}" -m "$marks and not alone" "$@"
  if [ "$kind" != brief ]; then
    if [ $# = 0 ]; then  # all files again would take longer to import than these tests
      while IFS= read -r file; do set -- "$@" "$file"; done < <(grep -rl --include='test_*.py' 'mark\.alone' tests | sort)
    fi
    pytest -m "$marks and alone" "$@"
  fi
else
  pytest -m "$marks" "$@"
fi
say "pytest: $((SECONDS - before)) s"
[ -n "$ran" ] || { status=1; say "no Python test was selected"; }
if [ -s "$took" ]; then
  say "the ten slowest tests"
  sort -rn "$took" | head -n 10 | awk -F '\t' '{ printf "%7.1f s  %s\n", $1, $2 }' || true
fi
say "tests: $((SECONDS - started)) s"
[ $status = 0 ] || die "tests failed; their names are above."
