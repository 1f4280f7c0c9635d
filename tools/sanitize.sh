#!/usr/bin/env bash
# tools/sanitize.sh address,undefined|thread: the C++ tests under sanitizers. torch itself is not instrumented.
. "$(dirname "$0")/common.sh"
sanitizers=$1
rooms=${ROOMS:-base config plan kernels io formats storage optim comm zero}
tools/packages.sh build test
pick_python
dir=build/$(echo "$sanitizers" | tr , -)-$(env_tag "$PY")
if ! [ -f "$dir/build.ninja" ]; then
  say "configuring $dir"
  cmake -G Ninja -S . -B "$dir" -DPython_EXECUTABLE="$PY" -DDS_BUILD_TESTS=ON -DDS_BUILD_CUDA=OFF \
    -DDS_SANITIZE="$sanitizers" -DDS_LIB_DIR="$ROOT/$dir/lib" >/dev/null || die "CMake failed (see above)."
fi
targets=()
for room in $rooms; do
  ! compgen -G "tests/cpp/$room/*.cpp" >/dev/null || targets+=("test_$room")
done
[ ${#targets[@]} -gt 0 ] || die "no C++ tests for the rooms: $rooms"
say "building ${targets[*]} with -fsanitize=$sanitizers"
ninja -C "$dir" -j "$JOBS" "${targets[@]}" >&2 || die "the build failed: the first error above names the file."
export ASAN_OPTIONS=detect_leaks=1:halt_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 TSAN_OPTIONS=halt_on_error=1
export DS_FUZZ_CASES=${DS_FUZZ_CASES:-10000}
# Each test program runs as one process: a sanitized start costs more than most cases.
for target in "${targets[@]}"; do
  say "$target"
  "$dir/bin/$target" --gtest_brief=1 || die "$target failed under -fsanitize=$sanitizers."
  case $target in
    test_kernels|test_optim)  # the CUDA kernels, which the same compiler makes for the CPU
      say "$target, CUDA kernels on the CPU"
      DS_CUDA_KERNELS=$ROOT/$dir/bin/libds_kernels_cuda_on_cpu.so "$dir/bin/$target" --gtest_brief=1 --gtest_filter='Cuda*' ||
        die "the CUDA kernels failed under -fsanitize=$sanitizers." ;;
    test_storage|test_comm|test_zero)  # what takes any device; the thread sanitizer puts off page faults, which it needs
      [[ $sanitizers == address* && -f $dir/bin/libstandin.so ]] || continue
      say "$target, on the stand-in device"
      ctest --test-dir "$dir" -R "^${target#test_}.standin$" --no-tests=error --output-on-failure >"$dir/standin.log" 2>&1 ||
        { cat "$dir/standin.log" >&2; die "$target failed on the stand-in device under -fsanitize=$sanitizers."; } ;;
  esac
done
