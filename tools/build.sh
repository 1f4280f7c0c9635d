#!/usr/bin/env bash
# tools/build.sh [native|tests|benchmarks]...: builds these targets (default: native, what `import deepspeed` needs)
# for the Python of the active environment, in build/<Python and torch>/. Says nothing when there is nothing to do.
. "$(dirname "$0")/common.sh"
[ $# -gt 0 ] || set -- native
groups=build
cuda=()
options=(-DDS_BUILD_CUDA=ON)  # a build by pip, or an earlier one without a GPU, may have left it off in this folder
if [ "${DS_CUDA_WHERE_SEEN:-0}" = 1 ] && ! sees_gpu; then  # `make quickstart`; what a build folder has stays
  options=()
  cuda=(-DDS_BUILD_CUDA=OFF)
fi
options+=(-DDS_UNITY=$([ "${DS_UNITY:-1}" = 0 ] && echo OFF || echo ON))  # 0: every file alone, for who edits one for long
for target in "$@"; do
  case $target in
    native) ;;
    tests) groups+=" test"; options+=(-DDS_BUILD_TESTS=ON) ;;
    benchmarks) groups+=" bench"; options+=(-DDS_BUILD_BENCHMARKS=ON) ;;
    *) die "tools/build.sh knows native, tests and benchmarks, not '$target'." ;;
  esac
done
tools/packages.sh $groups
pick_python
dir=build/$(env_tag "$PY")
configured() {  # true when the build folder is there, belongs to this Python and has every option on already
  [ -f "$dir/build.ninja" ] && grep -qF "Python_EXECUTABLE:UNINITIALIZED=$PY" "$dir/CMakeCache.txt" || return 1
  local option
  for option in "${options[@]}"; do grep -q "^${option#-D}\$" <(sed 's/:BOOL=/=/' "$dir/CMakeCache.txt") || return 1; done
}
if ! configured; then
  if [ ${#cuda[@]} -gt 0 ] && [ ! -f "$dir/CMakeCache.txt" ]; then
    options+=("${cuda[@]}")
    ! has_nvcc || say "no GPU is seen here, so the CUDA kernels are left out: \`make\` adds them"
  fi
  say "configuring $dir for $PY"
  log=$(mktemp)
  before=$SECONDS
  cmake -G Ninja -S . -B "$dir" -DPython_EXECUTABLE="$PY" "${options[@]}" >"$log" 2>&1 || {
    cat "$log" >&2
    die "CMake failed (see above). If the folder is from an older checkout, remove it (rm -rf $dir) and repeat."
  }
  rm -f "$log"
  say "configure: $((SECONDS - before)) s"
fi
# ninja's lines become "@12 58 csrc/zero/engine"; what it says of errors goes through.
NINJA_STATUS='@%f %t ' ninja -C "$dir" -j "$JOBS" "$@" 2>&1 |
  sed -uE -e '/^ninja: |Re-checking globbed|GLOB mismatch/d' -e 's|^(@[0-9]+ [0-9]+ )[A-Z][a-z]+ing .*CMakeFiles/([a-z_0-9]+)\.dir/(.*/)?([^/]+)\.o$|\1\2 \4|' |
  live "building for $(basename "$dir")" || die "the build failed: the first error above names the file."
