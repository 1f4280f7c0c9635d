#!/usr/bin/env bash
# tools/lint.sh: clang-format and clang-tidy on the C++ files that differ from BASE (default: origin/main, else main),
# ruff on all Python. ALL=1: on every C++ file. FIX=1: rewrite what can be rewritten.
. "$(dirname "$0")/common.sh"
tools/packages.sh build lint
pick_python
base=${BASE:-}
for candidate in origin/main main; do
  [ -n "$base" ] || ! git rev-parse -q --verify "$candidate^{commit}" >/dev/null || base=$candidate
done
if [ -n "${ALL:-}" ] || [ -z "$base" ]; then
  changed=$(git ls-files --cached --others --exclude-standard)
else
  changed=$( (git diff --name-only --diff-filter=d "$(git merge-base HEAD "$base")"; git ls-files --others --exclude-standard) | sort -u)
fi
cpp=$(printf '%s\n' "$changed" | grep -E '^(csrc|tests|benchmarks)/.*\.(h|cpp|cu|inl)$' || true)
status=0
if [ -n "$cpp" ]; then
  say "clang-format on $(wc -l <<<"$cpp") files"
  if [ -n "${FIX:-}" ]; then clang-format -i $cpp; else clang-format --dry-run -Werror $cpp || status=1; fi
  # tidy only where the build knows the flags; headers are seen through what includes them
  dir=build/lint-$(env_tag "$PY")  # configured only: each file by itself, as clang-tidy takes them
  tools/packages.sh build test
  cmake -G Ninja -S . -B "$dir" -DPython_EXECUTABLE="$PY" -DDS_UNITY=OFF -DDS_BUILD_TESTS=ON -DDS_BUILD_CUDA=OFF >/dev/null ||
    die "CMake failed (see above)."
  tidy=$(printf '%s\n' $cpp | while read -r file; do
    case $file in *.cpp) grep -qF "\"$ROOT/$file\"" "$dir/compile_commands.json" && printf '%s\n' "$file" || true ;; esac; done)
  if [ -n "$tidy" ]; then
    say "clang-tidy on $(wc -l <<<"$tidy") files"
    printf '%s\n' $tidy | xargs -P "$JOBS" -n 1 clang-tidy -p "$dir" --quiet --warnings-as-errors='*' 2> >(grep -v 'warnings generated' >&2 || true) || status=1
  fi
fi
if ! "$PY" -m ruff --version >/dev/null 2>&1; then
  say "installing ruff into $(dirname "$(dirname "$PY")")"
  "$PY" -m pip install -q --disable-pip-version-check ruff || die "ruff could not be installed from PyPI (see above)."
fi
say "ruff"
"$PY" -m ruff check ${FIX:+--fix} . || status=1
[ $status = 0 ] || die "lint found something (above). FIX=1 make lint rewrites what can be rewritten."
