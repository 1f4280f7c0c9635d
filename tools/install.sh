#!/usr/bin/env bash
# tools/install.sh [MODULE...]: builds, then installs editable into the active environment, unless that is done already.
# The modules named (and the few that the package itself imports) are fetched from PyPI where they are missing.
. "$(dirname "$0")/common.sh"
tools/build.sh native
pick_python
bin=$(dirname "$PY")
# An environment that was not made here may lack what its torch did not bring; torch itself is never touched.
need=$("$PY" -c 'import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])' \
  pip setuptools wheel numpy "$@")
if [ -n "$need" ]; then
  say "installing $need into $(dirname "$bin")"
  "$PY" -m pip install -q --disable-pip-version-check $need || die "pip could not install $need into $PY (see above)."
fi
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
