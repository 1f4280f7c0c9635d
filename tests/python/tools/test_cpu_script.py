"""tools/test_cpu.sh with stand-ins for the builds, qemu and Python: what it runs, how it ends, what it leaves out."""

import os
import re
import shutil
import subprocess

import pytest

from places import ROOT
from processes import write_program

LOG = 'printf "%s\\n" "{name} $* | $GTEST_SHARD_INDEX of $GTEST_TOTAL_SHARDS" >>"$CALLS"\n'
QEMU = """#!/bin/bash
if [ "$2" = help ]; then printf 'x86 Haswell  (alias)\\nx86 EPYC  (alias)\\n'; exit; fi
{log}echo "qemu: warning: TCG doesn't support requested feature: CPUID" >&2
case "$*" in *"{broken}"*) echo "what failed"; exit 3 ;; esac
echo "[  PASSED  ] 5 tests."
"""
PYTHON = """#!/bin/bash
if [ "$1" = - ]; then echo tag; fi
"""


def run(tmp_path, *arguments, broken="nothing", flags="avx avx2", jobs=2):
    root, programs = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(os.path.join(ROOT, "tools"), root / "tools")
    (root / "build" / "tag").mkdir(parents=True)
    scripts = {root / "tools" / f"{name}.sh": "#!/bin/bash\n" + LOG.format(name=name) for name in ("build", "packages")}
    scripts[root / "tools" / "test.sh"] = (
        "#!/bin/bash\n"
        + LOG.format(name="suite")
        + ('echo "$ATEN_CPU_CAPABILITY $DNNL_MAX_CPU_ISA $OPENBLAS_CORETYPE $DS_FORCE_ISA ${LD_PRELOAD##*/}"\n')
    )
    for name in ("qemu-x86_64", "qemu-aarch64"):
        scripts[programs / name] = QEMU.format(log=LOG.format(name=name), broken=broken)
    scripts[programs / "python"] = PYTHON
    scripts[programs / "uname"] = "#!/bin/sh\necho x86_64\n"
    # The one question of /proc/cpuinfo; other words of grep are grep's.
    scripts[programs / "grep"] = (
        f'#!/bin/bash\nif [ "${{@: -1}}" = /proc/cpuinfo ]; then echo "flags : {flags} fma"; exit; fi\n'
        f'exec {shutil.which("grep")} "$@"\n'
    )
    for name in ("cmake", "ninja", "g++"):
        scripts[programs / name] = "#!/bin/bash\n" + LOG.format(name=name)
    for path, text in scripts.items():
        write_program(path, text, "")
    calls = tmp_path / "calls"
    calls.write_text("")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "GTEST_"))}
    env.update(PATH=f"{programs}:{env['PATH']}", PYTHON=str(programs / "python"), JOBS=str(jobs), CALLS=str(calls))
    out = subprocess.run(
        ["bash", "tools/test_cpu.sh", *arguments], cwd=root, env=env, capture_output=True, text=True, timeout=60
    )
    return out.returncode, re.findall(r"^(.*) \| (.*)$", calls.read_text(), re.M), out.stdout + out.stderr


def rooms(ran):
    """The runs in an emulator: {room: (shares, filters)}."""
    found = {}
    for what, share in ran:
        program = re.search(r"/bin/test_(\w+) --gtest_brief=1 --gtest_filter=(.*)$", what)
        if program:
            shares, filters = found.setdefault(program[1], (set(), set()))
            shares.add(share)
            filters.add(program[2])
    return found


def test_a_processor_under_qemu_runs_every_room_and_some_python(tmp_path):
    code, ran, said = run(tmp_path, "Haswell")
    assert code == 0, said
    names = [what.split()[0] for what, _ in ran]
    assert names[:2] == ["packages", "build"] and set(names[2:]) == {"qemu-x86_64"}
    found = rooms(ran)
    assert list(found)[0] == "kernels"
    there = {name for name in os.listdir(os.path.join(ROOT, "tests", "cpp")) if "." not in name}
    assert set(found) == there, "a room of the C++ tests is not in tools/test_cpu.sh"
    for shares, _ in found.values():  # each case in exactly one process
        total = len(shares)
        assert shares == {f"{number} of {total}" for number in range(total)}
    assert {name for name, (_, filters) in found.items() if filters != {"*"}} == {"base", "comm"}
    emulated = [what for what, _ in ran if "-m pytest" in what]
    assert len(emulated) == 1 and emulated[0].startswith("qemu-x86_64 -cpu Haswell ")
    assert all(os.path.exists(os.path.join(ROOT, path)) for path in re.findall(r"tests/python/\S+", emulated[0]))
    left = re.search(r"left out on Haswell: (.*)", said)[1]
    assert "test_comm outside of --gtest_filter=" in left and "all Python tests but for" in left
    assert "TCG doesn't support" not in said and "5 tests" in said


def test_the_sample_names_what_it_leaves_out(tmp_path):
    code, ran, said = run(tmp_path, "EPYC", "sample")
    found = rooms(ran)
    assert code == 0 and list(found)[0] == "kernels" and found["kernels"][1] == {"*"}
    assert found["zero"][1] == {"NewtonSchulz*"}
    left = re.search(r"left out on EPYC: (.*)", said)[1]
    folders = {folder.name for folder in os.scandir(os.path.join(ROOT, "tests", "cpp")) if folder.is_dir()}
    assert all(f"test_{room}" in left for room in folders - set(found)), left
    assert "test_zero outside of --gtest_filter=NewtonSchulz*" in left


def test_kernels_for_another_architecture(tmp_path):
    code, ran, said = run(tmp_path, "aarch64")
    assert code == 0, said
    assert [what.split()[0] for what, _ in ran][:3] == ["packages", "cmake", "ninja"]
    assert "-DDS_ONLY_KERNELS=ON" in ran[1][0] and "cmake/aarch64.cmake" in ran[1][0]
    assert set(rooms(ran)) == {"kernels", "base", "optim"}
    assert all(what.startswith("qemu-aarch64 -L ") for what, _ in ran[3:])


def test_one_failure_is_the_end_of_it_and_is_shown(tmp_path):
    code, ran, said = run(tmp_path, "Haswell", "sample", broken="test_base")
    assert code == 1 and "what failed" in said and "error: tests failed on Haswell" in said
    assert set(rooms(ran)) >= {"kernels", "base", "zero"}  # the rest runs all the same


def test_this_processor_without_avx512(tmp_path):
    code, ran, said = run(tmp_path, "avx2")
    assert code == 0 and [what.split()[0] for what, _ in ran] == ["packages", "g++", "suite"]
    assert ran[-1][0] == "suite all" and "tests/cpp/without_avx512.cpp" in ran[1][0]
    assert "avx2 AVX2 Haswell avx2 without_avx512.so" in said


@pytest.mark.parametrize(
    "arguments, flags, message",
    [
        ([], "avx2", "make test-cpu CPU=Haswell. Known: Haswell, SandyBridge, EPYC"),
        (["Haswel"], "avx2", "qemu knows no processor 'Haswel'"),
        (["Haswell", "all"], "avx2", "not 'all'"),
        (["avx2"], "avx", "this processor has no AVX2"),
    ],
)
def test_what_cannot_be_run_is_an_error_with_the_fix(arguments, flags, message, tmp_path):
    code, ran, said = run(tmp_path, *arguments, flags=flags)
    assert code == 1 and message in said and not rooms(ran)
