# Sourced by the other scripts of this folder. Sets ROOT and gives: say, die, live, as_root, pick_python, env_tag.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
JOBS=${JOBS:-${MAX_JOBS:-$(nproc)}}
export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1  # another checkout of the same files finds them in the cache, too

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
[ -t 2 ] || say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# live WHAT [SECONDS]: reads lines "@DONE TOTAL now" (TOTAL may be %) and shows one line that says what, how far and how long, on a terminal
# rewritten in place, elsewhere a new one every SECONDS (20). Other lines (errors) pass through. The end is one line, too.
live() {
  local what=$1 every=${2:-20} start=$SECONDS shown=$SECONDS line done total now far= text
  time_of() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }
  while IFS= read -r line; do
    if [[ $line != @* ]]; then
      [ ! -t 2 ] || printf '\r\033[K' >&2
      printf '%s\n' "$line" >&2
      continue
    fi
    read -r done total now <<<"${line#@}"
    far="$done of $total"
    [ "$total" != % ] || far="$done %"
    text="$what: $far, $(time_of $((SECONDS - start))), $now"
    if [ -t 2 ]; then printf '\r\033[K%s' "${text:0:$((${COLUMNS:-80} - 1))}" >&2
    elif [ $((SECONDS - shown)) -ge "$every" ]; then shown=$SECONDS; say "$text"
    fi
  done
  [ ! -t 2 ] || printf '\r\033[K' >&2
  [ -z "$far" ] || say "$what: $far in $(time_of $((SECONDS - start)))"
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "'$*' needs root and there is no sudo here. Run it as root, then repeat this command."
  fi
}

# Whether this machine has a GPU of NVIDIA, as its driver says it, and a compiler for it.
sees_gpu() { [ -e /dev/nvidiactl ] || [ -e /proc/driver/nvidia/version ] || [ -e /dev/dxg ]; }
has_nvcc() { command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; }

has_torch() { [ -x "$1" ] && "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; }

# The Python this checkout is built for, in PY: the active virtual environment, else .venv, else python3 on PATH, each
# if it has torch; else .venv made from Debian's python3 with Debian's torch. PYTHON=... overrides.
pick_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    PY=$(command -v "$PYTHON") || die "PYTHON=$PYTHON is not a program."
    PY=$(cd "$(dirname "$PY")" && pwd)/$(basename "$PY")  # absolute, but not resolved: a link is what makes it a venv
    has_torch "$PY" || die "$PY (from PYTHON=) has no torch. Install it there: $PY -m pip install torch"
    return
  fi
  for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$ROOT/.venv/bin/python" "$(command -v python3 || true)"; do
    if [ -n "$candidate" ] && has_torch "$candidate"; then
      # Debian's own python3 cannot be installed into (PEP 668): it is used through .venv.
      case "$candidate" in /usr/bin/*|/bin/*) continue ;; esac
      PY=$candidate
      return
    fi
  done
  if [ -n "${VIRTUAL_ENV:-}" ]; then
    say "the active environment $VIRTUAL_ENV has no torch: using Debian's in .venv (pip install torch there to use yours)"
  fi
  tools/packages.sh torch
  if ! [ -x .venv/bin/python ]; then
    say "making .venv (Debian's python3 with its packages)"
    /usr/bin/python3 -m venv --system-site-packages .venv ||
      die "could not make .venv. Remove it (rm -rf .venv), check the disk space, and repeat this command."
  fi
  PY=$ROOT/.venv/bin/python
  has_torch "$PY" || die ".venv has no torch although python3-torch is installed: it was made from another Python. Remove it (rm -rf .venv) and repeat this command."
}

# The name of the (Python, torch) pair of $1, as python/deepspeed/_native.py and CMake spell it. Reads torch's version
# file instead of importing torch, which takes over a second.
env_tag() {
  "$1" - <<'EOF'
import importlib.util, os, runpy, sys
folder = importlib.util.find_spec("torch").submodule_search_locations[0]
version = str(runpy.run_path(os.path.join(folder, "version.py"))["__version__"]).split("+")[0]
print(f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{version}")
EOF
}
