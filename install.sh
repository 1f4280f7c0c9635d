#!/usr/bin/env bash
# Builds one wheel and installs it here, or on every host of a hostfile. `./install.sh --help` lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'EOF'
./install.sh [options]: builds deepspeed as a wheel, once, and installs it with pip.

Without a hostfile it is installed on this machine. With one (--hostfile, else /job/hostfile if that is there) the wheel is
copied to each of its hosts and installed there; all hosts need the same Python and torch.

  -H, --hostfile FILE      one "name slots=N" per line, as for the launcher
  -l, --local_only         this machine only, whatever hostfile there is
  -k, --skip_requirements  install deepspeed alone; without it pip also installs what it depends on
  -s, --pip_sudo           run pip as root, through sudo
  -u, --user_install       install for this user (pip --user)
  -r, --allow_sudo         allow this script to be run as root through sudo
  -m, --pip_mirror URL     the package index that pip asks
  -n, --no_clean           keep what earlier builds left in build/ and dist/
  -v, --verbose            show every command and pip's whole output
  -h, --help               this text

PYTHON names the Python (default: python3 on PATH; on the other hosts the same path). The build reads DS_BUILD_OPS,
DS_BUILD_<OP>, TORCH_CUDA_ARCH_LIST, MAX_JOBS, CFLAGS, LDFLAGS, DS_SKIP_CUDA_CHECK and DS_BUILD_STRING.
EOF
}
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
say() { printf '==> %s\n' "$*" >&2; }

hostfile= local_only= requirements=1 pip_sudo= user= allow_sudo= mirror= clean=1 verbose=
value() { [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value. ./install.sh --help lists the options."; printf %s "$2"; }
while [ $# -gt 0 ]; do
  case $1 in
    --hostfile=* | --pip_mirror=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    -H | --hostfile) hostfile=$(value "$@"); shift ;;
    -m | --pip_mirror) mirror=$(value "$@"); shift ;;
    -l | --local_only) local_only=1 ;;
    -k | --skip_requirements) requirements= ;;
    -s | --pip_sudo) pip_sudo=1 ;;
    -u | --user_install) user=1 ;;
    -r | --allow_sudo) allow_sudo=1 ;;
    -n | --no_clean) clean= ;;
    -v | --verbose) verbose=1 ;;
    -h | --help) usage; exit 0 ;;
    *) die "install.sh does not know $1. ./install.sh --help lists the options." ;;
  esac
  shift
done
[ -z "$verbose" ] || set -x
if [ -n "${SUDO_USER:-}" ] && [ "$(id -u)" = 0 ] && [ -z "$allow_sudo" ]; then
  die "this runs as root through sudo, and would build with root's Python. Run it as yourself (--pip_sudo lets pip alone be root), or pass --allow_sudo."
fi
[ -z "$pip_sudo" ] || [ -z "$user" ] || die "--pip_sudo installs for everybody and --user_install for one user: choose one of them."

python=${PYTHON:-python3}
python=$(command -v "$python") || die "$python is not a program: set PYTHON to the Python that has torch."
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
  die "$python has no torch, and deepspeed is compiled against it: install torch there first, or set PYTHON."

hosts=()
if [ -z "$local_only" ]; then
  [ -z "$hostfile" ] || [ -f "$hostfile" ] || die "the hostfile $hostfile is not there. Without --hostfile it is installed on this machine."
  [ -n "$hostfile" ] || [ ! -f /job/hostfile ] || hostfile=/job/hostfile
  if [ -n "$hostfile" ]; then
    number=0
    while read -r line || [ -n "$line" ]; do
      number=$((number + 1))
      line=${line%%#*}
      [ -n "${line//[[:space:]]/}" ] || continue
      [[ $line =~ ^[[:space:]]*([A-Za-z0-9._@-]+)[[:space:]]+slots=[0-9]+[[:space:]]*$ ]] ||
        die "line $number of $hostfile is '$line'; it must be like 'worker-1 slots=8'."
      case " ${hosts[*]-} " in *" ${BASH_REMATCH[1]} "*) die "$hostfile names the host ${BASH_REMATCH[1]} twice." ;; esac
      hosts+=("${BASH_REMATCH[1]}")
    done <"$hostfile"
    [ ${#hosts[@]} -gt 0 ] || die "$hostfile names no host."
  fi
fi

quiet=(-q)
[ -z "$verbose" ] || quiet=(-v)
index=()
[ -z "$mirror" ] || index=(--index-url "$mirror")
[ -z "$clean" ] || rm -rf dist build/lib.* build/bdist.*  # not build/<tag>: CMake knows what changed there
say "building the wheel with $python"
"$python" -m pip wheel "${quiet[@]}" --disable-pip-version-check --no-build-isolation --no-deps -w dist . ||
  die "the wheel did not build (see above)."
wheel=$(ls -t dist/deepspeed-*.whl | head -n 1)

pip=("$python" -m pip install "${quiet[@]}" --disable-pip-version-check --force-reinstall)
[ -z "$pip_sudo" ] || pip=(sudo -H "${pip[@]}")
[ -z "$user" ] || pip+=(--user)
# --force-reinstall replaces a build of the same version; it must not fetch the dependencies anew.
deepspeed=("${pip[@]}" --no-deps)
dependencies=("${pip[@]/--force-reinstall/--upgrade-strategy=only-if-needed}" "${index[@]}")

if [ ${#hosts[@]} -eq 0 ]; then
  say "installing $wheel"
  "${deepspeed[@]}" "$wheel" || die "pip could not install $wheel (see above)."
  [ -z "$requirements" ] || "${dependencies[@]}" "$wheel" || die "pip could not install what deepspeed depends on (see above)."
else
  shell=(ssh -o BatchMode=yes)
  list=$(IFS=,; echo "${hosts[*]}")
  folder=/tmp/deepspeed-install-$$
  everywhere() {  # the same command on all hosts; pdsh does them at once
    local line
    printf -v line '%q ' "$@"
    if command -v pdsh >/dev/null; then
      PDSH_RCMD_TYPE=ssh pdsh -S -w "$list" "$line"
    else
      local host status=0
      for host in "${hosts[@]}"; do "${shell[@]}" "$host" "$line" || status=$?; done
      return $status
    fi
  }
  say "copying $wheel to $list"
  everywhere mkdir -p "$folder" || die "not every host of $hostfile can be reached (see above): ssh must work without a password."
  for host in "${hosts[@]}"; do
    scp -q -o BatchMode=yes "$wheel" "$host:$folder/" || die "the wheel could not be copied to $host (see above)."
  done
  say "installing on $list"
  target=$folder/$(basename "$wheel")
  status=0
  everywhere "${deepspeed[@]}" "$target" || status=1
  [ $status != 0 ] || [ -z "$requirements" ] || everywhere "${dependencies[@]}" "$target" || status=1
  everywhere rm -rf "$folder" || true
  [ $status = 0 ] || die "pip failed on a host (see above). The same Python must be at $python on all hosts."
fi
say "done: $(basename "$wheel"). ds_report shows what it can do."
