#!/usr/bin/env bash
# tools/wheel_smoke.sh WHEEL: installs it into a fresh virtual environment that sees the active one's torch, with no
# compiler on PATH, and tries it there: import, ds_report, a training step.
. "$(dirname "$0")/common.sh"
wheel=$(cd "$(dirname "${1:?tools/wheel_smoke.sh needs the wheel}")" && pwd)/$(basename "$1")
[ -f "$wheel" ] || die "$wheel is not there."
pick_python
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
say "trying $wheel in a fresh environment"
"$PY" -m venv --without-pip --system-site-packages "$trial/env"
python=$trial/env/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/parent.pth"  # torch, pip
alone() { (cd "$trial" && env -i HOME="$trial" PATH="$trial/env/bin" LANG=C.UTF-8 "$@"); }
# --no-deps: what it depends on is seen through the active environment; an index could bring a second torch.
alone "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --ignore-installed "$wheel" ||
  die "the wheel cannot be installed into a fresh environment (see above)."
cp "$ROOT/tools/wheel_smoke.py" "$trial/"
alone "$python" "$trial/wheel_smoke.py" || die "the wheel does not work in a fresh environment (see above)."
