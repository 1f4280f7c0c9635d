#!/usr/bin/env bash
# tools/wheel.sh: builds a wheel for the active environment into dist/, installs it into a fresh virtual environment
# that sees the active one's torch, and imports it there.
. "$(dirname "$0")/common.sh"
tools/build.sh native
pick_python
say "building the wheel"
rm -f dist/deepspeed-*.whl
"$PY" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist . || die "the wheel did not build (see above)."
wheel=$(ls dist/deepspeed-*.whl)
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
say "trying $wheel in a fresh environment"
"$PY" -m venv --system-site-packages "$trial/env"
site=$("$trial/env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/parent.pth"
"$trial/env/bin/python" -m pip install -q --disable-pip-version-check --no-index --no-deps --ignore-installed "$wheel"
(cd "$trial" && env -u PYTHONPATH env/bin/python - <<'EOF'
import importlib.metadata, os, sys
import deepspeed
from deepspeed import _native
assert deepspeed.__file__.startswith(sys.prefix), deepspeed.__file__
built = [name for name in os.listdir(_native.LIB_DIR) if name.startswith("cp")]
assert built == [_native.tag()], f"the wheel holds modules of other environments: {built}"
print(f"deepspeed {importlib.metadata.version('deepspeed')} imports from the wheel ({_native.tag()})")
EOF
) || die "the wheel does not work in a fresh environment (see above)."
du -h "$wheel"
