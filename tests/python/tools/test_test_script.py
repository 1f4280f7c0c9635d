"""tools/test.sh with stand-ins for the build, ctest and Python: what it runs, how it ends, what it says."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from deepspeed import _native
from places import ROOT
from processes import write_program

PYTHON = """#!/bin/bash
if [ "$1" = - ]; then echo tag; exit; fi
if [ "$1" = -c ]; then [[ "$2" != *xdist* ]] || exit {no_xdist}; exit 0; fi
if [[ "$*" == *--help* ]]; then echo "{options}"; exit; fi
if [[ "$*" == *--collect-only* ]]; then touch kept; exit 1; fi
echo "pytest: ${{*:4}} / every=${{DS_TEST_EVERY_CASE:-}}"
echo "cover=${{DS_TEST_COVER:-}}"
if [[ "$*" == *"not alone"* ]]; then
  printf '30.5\\ttests/a.py::test_slow\\n0.001\\ttests/a.py::test_fast\\n' >>"$DS_TEST_TIMES"
  echo "OpenMP: $OMP_WAIT_POLICY"
  exit {first}
fi
exit {second}
"""
CTEST = """#!/bin/bash
mkdir -p build/tag/Testing/Temporary
printf '[       OK ] Suite.Case/3 (1500 ms)\\n[  FAILED  ] Other.Case, where GetParam() = 3 (2500 ms)\\n' \
  >build/tag/Testing/Temporary/LastTest.log
echo " 7/9 Test #1: room.Other ....***Failed  2.50 sec"
echo "88% tests passed, 1 tests failed out of 9; fuzz=$DS_FUZZ_CASES; chosen: ${{*: -2}}"
exit {ctest}
"""


def run(tmp_path, kind="all", jobs=2, **codes):
    codes = {"first": 0, "second": 0, "no_xdist": 0, "ctest": 0, "options": "", **codes}
    root = tmp_path / "checkout"
    shutil.copytree(os.path.join(ROOT, "tools"), root / "tools")
    (root / "build" / "tag").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "tests" / "test_b.py").write_text("@pytest.mark.alone\n")
    (root / "tests" / "test_a.py").write_text("@pytest.mark.slow\n")
    programs = {
        root / "tools" / "build.sh": "#!/bin/sh\n",
        tmp_path / "bin" / "python": PYTHON.format(**codes),
        tmp_path / "bin" / "ctest": CTEST.format(**codes),
    }
    for path, text in programs.items():
        write_program(path, text, "")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "OMP_"))}
    env.update(PATH=f"{tmp_path / 'bin'}:{env['PATH']}", PYTHON=str(tmp_path / "bin" / "python"), JOBS=str(jobs))
    out = subprocess.run(["bash", "tools/test.sh", kind], cwd=root, env=env, capture_output=True, text=True, timeout=60)
    return out.returncode, re.findall(r"^pytest: (.*) / every=(.*)$", out.stdout, re.M), out.stdout, out.stderr


def test_all_cores_then_those_that_run_alone(tmp_path):
    code, runs, out, err = run(tmp_path)
    assert code == 0, out + err
    assert runs == [("-n 4 --dist loadfile -m not gpu and not alone", ""), ("-m not gpu and alone tests/test_b.py", "")]
    assert "fuzz=20000" in out and "OpenMP: PASSIVE" in out
    slowest = [line.split() for line in out.splitlines() if re.match(r" +[\d.]+ s  ", line)]
    assert slowest == [
        ["30.5", "s", "tests/a.py::test_slow"], ["2.5", "s", "C++", "Other.Case"],
        ["1.5", "s", "C++", "Suite.Case/3"], ["0.0", "s", "tests/a.py::test_fast"],
    ]  # fmt: skip
    assert re.findall(r"==> (\w+): \d+ s", err) == ["ctest", "pytest", "tests"]
    assert (tmp_path / "checkout" / "kept").exists()  # the code of rewritten asserts


def test_a_newer_xdist_keeps_the_order_of_files(tmp_path):
    _, runs, _, _ = run(tmp_path, options="  --no-loadscope-reorder   Pass if you would like to disable reordering")
    assert runs[0][0] == "--no-loadscope-reorder -n 4 --dist loadfile -m not gpu and not alone"


def test_every_case(tmp_path):
    code, runs, out, _ = run(tmp_path, "every")
    assert code == 0 and [every for _, every in runs] == ["1", "1"] and "fuzz=100000" in out


def test_another_torch(tmp_path):
    """Tests of rooms that see no torch have passed with the first torch."""
    code, runs, out, _ = run(tmp_path, "second")
    assert code == 0 and len(runs) == 2 and "cover=values" in out and "chosen: -L ^torch$" in out
    _, _, out, _ = run(tmp_path / "first")
    assert "cover=values" not in out and "^torch$" not in out


def test_rooms_that_see_torch_have_its_label():
    """The choice of `tools/test.sh second`: every test of each room that links torch, and no other."""
    folder = os.path.join(ROOT, "build", os.path.basename(os.path.dirname(_native._C.__file__)))
    if not os.path.exists(os.path.join(folder, "CTestTestfile.cmake")):
        pytest.skip(f"the C++ tests are not built in {folder}")
    listed = subprocess.run(
        ["ctest", "--test-dir", folder, "-N", "-L", "^torch$"], capture_output=True, text=True, check=True
    ).stdout
    rooms = set(re.findall(r"ds_room\((\w+) .*LIBS ds_torch ", pathlib.Path(ROOT, "CMakeLists.txt").read_text()))
    assert len(rooms) == 4
    shards = [f"{room}.{number}of4" for room in rooms for number in range(1, 5)]
    on_standin = [f"{room}.standin" for room in rooms]
    assert sorted(re.findall(r"Test +#\d+: (\S+)", listed)) == sorted(shards + on_standin)


def test_the_fast_part_runs_on_all_cores_too(tmp_path):
    _, runs, out, _ = run(tmp_path, "unit", jobs=16)
    assert runs[0][0] == "-n 8 --dist loadfile -m not gpu and not slow and not dist and not alone"
    assert "fuzz=5000" in out


@pytest.mark.parametrize("how", [{"jobs": 1}, {"no_xdist": 1}], ids=["one core", "no xdist"])
def test_one_after_the_other(how, tmp_path):
    code, runs, _, err = run(tmp_path, **how)
    assert code == 0 and [arguments for arguments, _ in runs] == ["-m not gpu"]
    assert how != {"jobs": 1} or not (tmp_path / "checkout" / "kept").exists()
    assert ("pip install pytest-xdist" in err) == ("no_xdist" in how)


@pytest.mark.parametrize(
    "codes, expected",
    [
        ({"first": 1}, 1), ({"second": 1}, 1), ({"ctest": 8}, 1), ({"first": 3}, 1),
        ({"first": 5}, 0), ({"second": 5}, 0), ({"first": 5, "second": 5}, 1), ({"first": 5, "second": 2}, 1),
    ],
)  # fmt: skip
def test_any_part_that_fails_is_the_end_of_it(codes, expected, tmp_path):
    code, runs, out, err = run(tmp_path, **codes)
    assert code == expected, out + err
    assert len(runs) == 2  # the rest runs all the same
    assert ("***Failed" in out) == ("ctest" in codes)
    assert ("error: tests failed" in err) == bool(expected)
