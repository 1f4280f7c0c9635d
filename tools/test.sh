#!/usr/bin/env bash
# tools/test.sh all|unit|gpu [pytest arguments]: builds what is missing, then runs ctest and pytest.
. "$(dirname "$0")/common.sh"
kind=${1:-all}
shift || true
tools/build.sh native tests
pick_python
dir=build/$(env_tag "$PY")
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
case $kind in
  all) marks="not gpu" ;;
  unit) marks="not gpu and not slow and not dist" ;;
  gpu) marks="gpu"
    "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
      die "make test-gpu needs a GPU and a torch that can use it; $PY sees none." ;;
  *) die "tools/test.sh knows all, unit and gpu, not '$kind'." ;;
esac
status=0
if [ "$kind" != gpu ]; then
  say "C++ tests"
  labels=()
  if [ "$kind" = unit ]; then
    labels=(-LE slow)
    export DS_FUZZ_CASES=${DS_FUZZ_CASES:-5000}
  fi
  ctest --test-dir "$dir" -j "$JOBS" --output-on-failure --no-tests=error "${labels[@]}" >"$dir/ctest.log" 2>&1 || {
    status=1
    grep -v ' Passed ' "$dir/ctest.log"
  }
  sed -n '/tests passed/,$p' "$dir/ctest.log" | sed '/^$/d'
fi
say "Python tests"
"$PY" -m pytest -q -m "$marks" "$@" || status=1
[ $status = 0 ] || die "tests failed; their names are above."
