"""The list that `make test-gpu` prints: rows of tests that pass, fail and are skipped, on a machine without a GPU."""

import importlib.util
import json
import os
import pathlib
import re
import stat
import subprocess
import sys

import pytest
import standin

from sampling import every_case

TESTS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = """#!/bin/sh
case "$2" in --gtest_output=json:*) out=${2#--gtest_output=json:} ;; esac
echo '[ RUN      ] CudaTest.Missing'
echo 'some_test.cpp:1: Skipped'
echo 'no usable GPU: none'
echo '{"testsuites": [{"testsuite": [
  {"classname": "CudaTest", "name": "Equal", "time": "0.5s", "result": "COMPLETED"},
  {"classname": "CudaTest", "name": "Wrong", "time": "0.1s", "result": "COMPLETED",
   "failures": [{"failure": "expected 1, found 2"}]},
  {"classname": "CudaTest", "name": "Missing", "time": "0s", "result": "SKIPPED"}]}]}' >"$out"
"""


def loaded():
    spec = importlib.util.spec_from_file_location("checklist", os.path.join(TESTS, "device", "checklist.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_kernels(tmp_path):
    program = tmp_path / "test_kernels"
    program.write_text(PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    rows = {row.name: row for row in loaded().kernel_rows("cuda", str(tmp_path))}
    assert rows["kernels: CudaTest.Equal"].result == "ok"
    assert rows["kernels: CudaTest.Equal"].settles
    wrong = rows["kernels: CudaTest.Wrong"]
    assert (wrong.result, wrong.detail) == ("differs", "expected 1, found 2")
    missing = rows["kernels: CudaTest.Missing"]
    assert (missing.result, missing.detail) == ("not run", "no usable GPU: none")
    assert rows["kernels: test_optim"].result == "not run"


def test_a_part_of_the_list_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "rows.json"
    checklist = loaded()
    wanted = ["--device", "cpu", "--only", "machine|training|measure", "--json", str(out)]
    chosen = "test_programs_that_have_failed or test_nothing_saved_stays"
    code = checklist.main([*wanted, "--", "-k", chosen, "-p", "no:cacheprovider"])
    rows = {row["name"]: row["result"] for row in json.loads(out.read_text())["figures"]["rows"]}
    assert code == 0, capsys.readouterr().out
    assert rows == {
        "machine: accelerator": "ok",
        "training: test_random_programs.test_programs_that_have_failed": "ok",
        "training: test_offload.test_nothing_saved_stays_on_the_device": "not run",  # the host is the device
        "measure: all": "not run",
    }


@pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")
def test_the_list_on_the_stand_in_device(tmp_path):
    """Each file for any device passes there, and its operations have an order. `make test` runs one case of each file,
    `make test-all` what `make test-gpu DEVICE=standin` runs."""
    out = tmp_path / "rows.json"
    wanted = ["--device", "standin", "--only", "machine|training|measure", "--json", str(out)]
    wanted += [] if every_case() else ["--sample"]
    command = [sys.executable, os.path.join(TESTS, "device", "checklist.py"), *wanted, "--", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DS_TEST_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    rows = {row["name"]: row["result"] for row in json.loads(out.read_text())["figures"]["rows"]}
    assert done.returncode == 0, done.stdout[-5000:]
    assert rows.pop("machine: accelerator") == "ok" and rows.pop("measure: all") == "not run"
    passed = {re.match(r"training: (\w+)\.", name).group(1) for name, result in rows.items() if result == "ok"}
    files = pathlib.Path(TESTS).rglob("test_*.py")
    assert passed >= {path.stem for path in files if re.search(r"mark\.any_device$", path.read_text(), re.M)}


def test_each_row_that_settles_a_sentence_names_one_of_the_changelog():
    with open(os.path.join(os.path.dirname(TESTS), "CHANGELOG.md"), encoding="utf-8") as file:
        text = file.read()
    for words in loaded().SETTLES.values():
        assert words in text, words
