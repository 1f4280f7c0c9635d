#!/usr/bin/env bash
# tools/wheel.sh: builds a wheel for the active environment into dist/ and tries it in a fresh one.
. "$(dirname "$0")/common.sh"
tools/build.sh native
pick_python
say "building the wheel"
rm -f dist/deepspeed-*.whl
"$PY" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist . || die "the wheel did not build (see above)."
wheel=$(ls dist/deepspeed-*.whl)
PYTHON=$PY tools/wheel_smoke.sh "$wheel"
du -h "$wheel"
