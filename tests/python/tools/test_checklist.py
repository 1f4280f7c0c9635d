"""The list that `make test-gpu` prints: rows of tests that pass, fail and are skipped, on a machine without a GPU."""

import importlib.util
import json
import os
import stat
import subprocess
import sys

import pytest
import standin

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
    code = checklist.main([*wanted, "--", "-k", "test_programs_that_have_failed", "-p", "no:cacheprovider"])
    rows = {row["name"]: row["result"] for row in json.loads(out.read_text())["figures"]["rows"]}
    assert code == 0, capsys.readouterr().out
    assert rows == {
        "machine: accelerator": "ok",
        "training: test_random_programs.test_programs_that_have_failed": "ok",
        "measure: all": "not run",
    }


@pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")
def test_a_part_of_the_list_on_the_stand_in_device(tmp_path):
    """`make test-gpu DEVICE=standin` runs the whole list: engines there equal plain training on the CPU, in order."""
    out = tmp_path / "rows.json"
    wanted = ["--device", "standin", "--only", "machine|training|measure", "--json", str(out)]
    chosen = ["--", "-k", "test_zero_parity", "-p", "no:cacheprovider"]
    command = [sys.executable, os.path.join(TESTS, "device", "checklist.py"), *wanted, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    rows = {row["name"]: row["result"] for row in json.loads(out.read_text())["figures"]["rows"]}
    assert done.returncode == 0, done.stdout[-5000:]
    assert rows == {
        "machine: accelerator": "ok",
        "training: test_zero_parity.test_fp32_equals_plain_training": "ok",
        "training: test_zero_parity.test_ways_to_communicate_are_equal": "ok",
        "training: test_zero_parity.test_sparse_gradients_are_summed": "not run",
        "measure: all": "not run",
    }


def test_each_row_that_settles_a_sentence_names_one_of_the_changelog():
    with open(os.path.join(os.path.dirname(TESTS), "CHANGELOG.md"), encoding="utf-8") as file:
        text = file.read()
    for words in loaded().SETTLES.values():
        assert words in text, words
