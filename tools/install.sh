#!/usr/bin/env bash
# tools/install.sh: builds, then installs editable into the active environment, unless that is done already.
. "$(dirname "$0")/common.sh"
tools/build.sh native
pick_python
bin=$(dirname "$PY")
stamp=build/$(env_tag "$PY")/installed  # newer than what decides the installed metadata: nothing to do
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$PY" ] && [ "$stamp" -nt setup.py ] && [ "$stamp" -nt pyproject.toml ] &&
  [ "$stamp" -nt python/deepspeed/version.py ] && [ -x "$bin/deepspeed" ]; then
  exit 0
fi
say "installing deepspeed (editable) for $PY"
# --no-deps: what is needed came with the environment; asking an index for it could bring a second torch.
"$PY" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e . ||
  die "pip could not install into $PY (see above)."
printf '%s' "$PY" >"$stamp"
