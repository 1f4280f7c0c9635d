"""A fresh Debian machine gets everything from packages/debian.txt; and nothing here knows one machine's folders."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

import house_packages as packages
from places import ROOT
from sentences import expect_none, read

FOLDERS = packages.build_folders(ROOT)

needs_dpkg = pytest.mark.skipif(
    shutil.which("dpkg-query") is None or shutil.which("ninja") is None, reason="needs Debian's dpkg and ninja"
)


@pytest.fixture(scope="module")
def rows():
    return packages.listed(read(ROOT, "packages", "debian.txt"))


@pytest.fixture(scope="module")
def used():
    """Of all builds in this checkout, the scripts and the imports."""
    found = packages.used_by_scripts(ROOT)[0] | packages.used_by_imports(ROOT)
    for folder in FOLDERS:
        found |= packages.used_by_build(folder, os.path.join(ROOT, "python", "deepspeed", "_lib"))
    return found


@needs_dpkg
@pytest.mark.skipif(not FOLDERS, reason="nothing was built in this checkout")
def test_every_header_library_program_and_module_comes_from_a_listed_package(rows, used):
    assert len(used) > 100, "next to nothing was found in the compiler's dependency files"
    expect_none(packages.check(rows, used))


@needs_dpkg
@pytest.mark.skipif(not FOLDERS, reason="nothing was built in this checkout")
@pytest.mark.skipif(
    not (packages.module_file("torch") or "").startswith("/usr/lib/python3/"),
    reason="needs the Python that has Debian's modules: others find modules that no Debian package owns",
)
def test_a_line_taken_away_is_noticed(rows, used):
    """Unless the lines that stay bring the package by themselves, or belong to what was not built here."""
    installed = packages.installed()[0]
    tested = any("gtest" in what for what, *_ in used)
    debian_python = any(what.startswith("/usr/include/python3") and "torch2" in groups for what, _, groups, _ in used)
    unused = {"bench", "lint", "cluster", "cpu"}
    unused |= (set() if tested else {"test"}) | (set() if debian_python else {"torch2"})
    silent = []
    used = {(owner, groups): (what, owner, groups, user) for what, owner, groups, user in used}.values()  # one use each
    for name, groups in rows.items():
        rest = {other: mine for other, mine in rows.items() if other != name}
        brought = all(name in packages.closure(packages.packages_of(rest, group)) for group in groups - unused)
        if name in installed and not brought and not packages.check(rest, used):
            silent.append(name)
    assert silent == [], f"nothing here uses these packages, or the checks do not see how: {silent}"


@needs_dpkg
def test_every_program_of_the_scripts_is_known(rows):
    # Packages that are listed and not installed here (lint, bench, cpu) are known by their name, or by these.
    of = {"qemu-x86_64": "qemu-user", "qemu-aarch64": "qemu-user"}
    unknown = packages.used_by_scripts(ROOT)[1]
    assert [(script, word) for script, word in unknown if of.get(word, word) not in rows] == []


def test_programs_of_a_script():
    text = """
set -euo pipefail
helper() { sort -u; }  # cat in a comment
cat <<'EOF' | helper
rm in a document
EOF
if ! grep -q "awk $(wc -l <file)" "$x" 2>&1; then nproc; else "$PY" -m pytest; fi
A=1 B=2 env C=3 tr a b | xargs -r -n 1 clang-tidy -p "$dir"
case $x in a|b) head -n 1 ;; esac
awk 'sed { print }' && as_root apt-get update
"""
    assert packages.shell_programs(text) == {
        "sort", "cat", "grep", "wc", "nproc", "tr", "xargs", "clang-tidy", "head", "awk", "apt-get"
    }  # fmt: skip


@needs_dpkg
def test_the_message_names_package_and_include(rows):
    used = {("/usr/include/hwy/highway.h", "libhwy-dev", frozenset({"build"}), "the build of x.o")}
    assert packages.check({"libhwy-dev": {"build"}}, used) == []
    (message,) = packages.check({"g++": {"build"}}, used)
    assert "libhwy-dev" in message and "/usr/include/hwy/highway.h" in message and "packages/debian.txt" in message


# ---- folders of one machine -----------------------------------------------------------------------------------------

# Made-up folders in tests and examples, each with the reason.
MADE_UP = {"/home/somebody": "a user in tests of where caches go", "/home/user": "an example in the documentation"}


def test_no_tracked_file_names_a_folder_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    own = re.escape(os.path.dirname(ROOT)) if len(os.path.dirname(ROOT)) > 4 else "/work"
    pattern = re.compile(rf"(?<![\w.$}}])(?:/(?:home|Users)/\w+|/root/\w|/work/\w|{own}/\w)")
    found = []
    for name in {*listed.stdout.split("\0")} - {"", "tests/house/test_packages.py"}:
        path = pathlib.Path(ROOT, name)
        data = path.read_bytes() if path.is_file() else b""
        lines = data.decode("utf-8", "replace").splitlines() if b"\0" not in data[:4096] else []
        for number, line in enumerate(lines, 1):
            if any(not match[0].startswith(tuple(MADE_UP)) for match in pattern.finditer(line)):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    said = "these name a folder that only one machine has; use a path relative to the file:\n"
    assert found == [], said + "\n".join(sorted(found))
