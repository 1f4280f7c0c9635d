#!/usr/bin/env bash
# tools/test_cpu.sh NAME [sample]: the tests as they run on a processor that this machine may not have.
#   Haswell, SandyBridge, EPYC or another name that `qemu-x86_64 -cpu help` lists: the C++ tests, and Python tests of
#     kernels and of matrix products, under qemu-user, which is 10 to 30 times slower than the processor.
#   aarch64: the kernels and their tests, cross-compiled, under qemu-user.
#   avx2: the whole suite (tools/test.sh all) on this processor, where torch, oneDNN, OpenBLAS and our kernels are told
#     not to use AVX-512, and libcpuinfo reports none (tests/cpp/without_avx512.cpp).
# With `sample` a fixed part of the C++ tests runs, which takes .ci/run under 5 minutes; the end says what was left out.
. "$(dirname "$0")/common.sh"
name=${1:-}
part=${2:-whole}
known="Haswell, SandyBridge, EPYC (emulated), aarch64 (its kernels, emulated), avx2 (this processor without AVX-512)"
[ -n "$name" ] || die "make test-cpu needs the name of a processor: make test-cpu CPU=Haswell. Known: $known."
case $part in whole|sample) ;; *) die "tools/test_cpu.sh takes a processor and 'sample', not '$part'." ;; esac
# ATEN_CPU_CAPABILITY is for torch's own loops, the others for oneDNN, OpenBLAS and our kernels.
without_avx512=(ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell DS_FORCE_ISA=avx2)
if [ "$name" = avx2 ]; then
  flags=$(grep -m 1 '^flags' /proc/cpuinfo || true)
  [[ " $flags " == *" avx2 "* ]] || die "this processor has no AVX2; an emulated one has: make test-cpu CPU=Haswell."
  tools/packages.sh build cpu
  mkdir -p build
  g++ -O1 -shared -fPIC -std=c++17 -o build/without_avx512.so tests/cpp/without_avx512.cpp
  without_avx512+=(LD_PRELOAD="$ROOT/build/without_avx512.so${LD_PRELOAD:+:$LD_PRELOAD}")
  say "without AVX-512: ${without_avx512[*]}"
  exec env "${without_avx512[@]}" tools/test.sh all
fi
tools/packages.sh build test cpu

# What runs: lines "room processes filter", the kernels first. Cases are divided among `processes` processes. qemu makes up
# /proc/self/stat, which Process.LivesEndsAndIsGone reads.
base="base 1 *-Process.LivesEndsAndIsGone"
if [ "$name" = aarch64 ]; then
  run=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
  dir=build/aarch64
  # These tests start their program again, and the kernel of this machine cannot.
  whole="kernels 8 *-TableTest.*:CudaTableTest.*
$base
optim 4 *"
  sample=$whole
  if ! [ -f "$dir/build.ninja" ]; then
    say "configuring $dir"
    cmake -G Ninja -S . -B "$dir" -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/aarch64.cmake" -DDS_ONLY_KERNELS=ON \
      -DDS_LIB_DIR="$ROOT/$dir/lib" >/dev/null || die "CMake failed (see above)."
  fi
  say "building the kernels and their tests for aarch64"
  ninja -C "$dir" -j "$JOBS" tests >/dev/null || die "the build failed: ninja -C $dir tests shows why."
else
  [ "$(uname -m)" = x86_64 ] || die "$name is emulated for programs of x86-64, and this machine builds for $(uname -m)."
  grep -qwF -- "$name" <(qemu-x86_64 -cpu help) || die "qemu knows no processor '$name' (qemu-x86_64 -cpu help lists them). Known: $known."
  run=(qemu-x86_64 -cpu "$name")
  # Of comm what computes: its other tests judge how soon ranks notice each other, which an emulator does not answer.
  whole="kernels 8 *
$base
optim 4 *
zero 4 *
comm 2 *Quantized*:*Codec*:*Reduce*
parallel 1 *
storage 4 *
plan 4 *
config 4 *
formats 4 *
io 4 *"
  sample="kernels 8 *
$base
optim 1 *-RulesTest.*
zero 1 NewtonSchulz*"
  tools/build.sh native tests
  pick_python
  dir=build/$(env_tag "$PY")
fi
export DS_FUZZ_CASES=${DS_FUZZ_CASES:-300} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

started=$SECONDS
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# emulated LABEL COMMAND...: runs it, says how it ended and shows the output of a failure. qemu's complaints about
# features that no test uses (TSX, x2APIC) are left out.
emulated() {
  local label=$1 start=$SECONDS code=0 log=$logs/${1//[^a-z0-9]/_}
  shift
  "${run[@]}" "$@" >"$log" 2>&1 || code=$?
  say "$label: exit $code after $((SECONDS - start)) s, $(sed -n -e 's/^\[  PASSED  \] //p' -e '/ passed/p' "$log" | tail -n 1)"
  [ $code = 0 ] && return
  touch "$logs/failed"
  sed '/TCG doesn.t support requested feature/d' "$log" | tail -n 60
}
parallel() {  # parallel COMMAND...: starts it beside the others, JOBS at a time
  while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
  "$@" &
}

if [ "$part" = sample ]; then rows=$sample; else rows=$whole; fi
left=()
while read -r room processes filter; do
  for number in $(seq "$processes"); do
    GTEST_TOTAL_SHARDS=$processes GTEST_SHARD_INDEX=$(($number - 1)) parallel emulated "test_$room $number of $processes" \
      "$dir/bin/test_$room" --gtest_brief=1 --gtest_filter="$filter"
  done
  [ "$filter" = '*' ] || left+=("test_$room outside of --gtest_filter=$filter")
done <<<"$rows"
if [ "$name" != aarch64 ]; then
  # One process: what a test starts itself would run on this machine's own processor.
  python_tests=(tests/python/ops/test_half_products.py tests/python/moe/test_products.py)
  [ "$part" = sample ] || python_tests+=(tests/python/ops/test_muon.py tests/python/ops/test_adam.py tests/python/zero/test_linear.py)
  PYTHONPATH=$ROOT/python parallel emulated "Python tests" "$PY" -m pytest -q -n0 -p no:cacheprovider "${python_tests[@]}"
  left+=("all Python tests but for ${python_tests[*]}")
fi
wait
for room in config plan io formats storage comm parallel zero; do
  [ "$name" = aarch64 ] || grep -q "^$room " <<<"$rows" || left+=("test_$room")
done
say "left out on $name: $(printf '%s; ' "${left[@]}" | sed 's/; $//')"
say "tests on $name: $((SECONDS - started)) s"
! [ -e "$logs/failed" ] || die "tests failed on $name; their names are above."
