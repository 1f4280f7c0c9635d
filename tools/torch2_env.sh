#!/usr/bin/env bash
# tools/torch2_env.sh: makes .venv-torch2 with packages/torch2.txt from PyPI, unless it is there and complete, and prints its
# name. TORCH=2.15.0: with that torch instead, in .venv-torch-2.15.0; TORCH=newest: with the newest release on PyPI.
# Exit code 3: the package index cannot be reached (one line says so), which is not a fault of this tree.
. "$(dirname "$0")/common.sh"
pinned=$(sed -n 's/^torch==//p' packages/torch2.txt)
want=${TORCH:-$pinned}
if [ "$want" = newest ]; then
  with=.venv-torch2/bin/python
  [ -x $with ] || with=python3
  want=$($with -m pip --disable-pip-version-check index versions torch 2>/dev/null | sed -nE '1s/^torch \((.*)\)$/\1/p' || true)
  if [ -z "$want" ]; then
    echo 'torch 2.x tests not run: the package index does not say which torch is the newest.' >&2
    exit 3
  fi
fi
env=.venv-torch2
[ "$want" = "$pinned" ] || env=.venv-torch-$want
packages=$(mktemp)
sed "s/^torch==.*/torch==$want/" packages/torch2.txt >"$packages"
trap 'rm -f "$packages"' EXIT
complete() {
  [ -x $env/bin/python ] && $env/bin/python - "$want" 2>/dev/null <<'EOF'
import importlib.metadata as md, pathlib, re, sys
names = [re.split(r"[=<> ]", l)[0] for l in pathlib.Path("packages/torch2.txt").read_text().splitlines() if l and l[0] != "#"]
sys.exit(any(md.version(n) is None for n in names) or md.version("torch") != sys.argv[1])
EOF
}
if complete; then
  echo $env
  exit 0
fi
usable() {  # a Python that runs, can make virtual environments and has its headers
  "$1" -c 'import ensurepip, os, sys, sysconfig, venv
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' >/dev/null 2>&1
}
base=
for candidate in python3.12 "${HOME:-/root}"/.pyenv/versions/3.12*/bin/python3 python3.13 "${HOME:-/root}"/.pyenv/versions/3.13*/bin/python3 \
  python3.11 python3.10 /usr/bin/python3; do
  if command -v "$candidate" >/dev/null 2>&1 && usable "$candidate"; then base=$candidate; break; fi
done
if [ -z "$base" ]; then  # Debian's own
  tools/packages.sh torch2
  base=/usr/bin/python3
  usable "$base" || die "no Python 3.10-3.13 with headers and venv was found for $env."
fi
made=
if ! { [ -x $env/bin/python ] && usable $env/bin/python; }; then
  rm -rf $env
  "$base" -m venv $env || die "could not make $env."
  made=1
fi
pip() { $env/bin/python -m pip --disable-pip-version-check "$@"; }
probe=$(mktemp -d)
trap 'rm -rf "$probe" "$packages"' EXIT
if ! pip download -q --no-deps --no-cache-dir --retries 1 --timeout 20 -d "$probe" wheel >"$probe/log" 2>&1; then
  [ -z "$made" ] || rm -rf $env
  printf 'torch 2.x tests not run: the package index cannot be reached from here (%s).\n' \
    "$(grep -m1 -i error "$probe/log" | cut -c1-160)" >&2
  exit 3
fi
say "filling $env (Python $($env/bin/python -V | cut -d' ' -f2)) with torch $want from PyPI: 2.7 GB to fetch"
filled=
for attempt in 1 2 3; do  # 2.7 GB in thirty files: a connection that breaks costs the file under way, not the others
  pip install -q -r "$packages" >&2 && filled=1 && break
  [ $attempt = 3 ] || say "pip could not fetch everything; once more"
done
[ -n "$filled" ] || die "pip could not install packages/torch2.txt into $env (see above). Check the disk space (5 GB), then repeat this command."
echo $env
