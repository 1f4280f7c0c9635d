"""The cases that `make test` leaves to `make test-all`; no case is left to neither."""

import itertools
import os
import pathlib
import subprocess
import sys

import pytest

import sampling
from processes import succeeded
from refusals import refused

MATRIX = list(itertools.product(range(4), range(3), ["fp32", "bf16"], [True, False]))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """These tests run on the second torch, too, where samples are smaller."""
    monkeypatch.delenv(sampling.COVER, raising=False)


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_pairs_are_all_there_in_few_cases():
    chosen = [MATRIX[index] for index in sampling.sample(MATRIX)]
    assert pairs(chosen) == pairs(MATRIX) and 12 <= len(chosen) <= 16 < len(MATRIX)


def test_values_are_all_there_in_fewer():
    chosen = [MATRIX[index] for index in sampling.sample(MATRIX, "values")]
    assert len(chosen) == 4
    assert all({case[axis] for case in chosen} == {case[axis] for case in MATRIX} for axis in range(4))
    more = sampling.sample(MATRIX, "values", 9)
    assert len(more) == 9 and pairs(chosen) < pairs(MATRIX[index] for index in more)


def test_samples_of_the_second_torch_hold_each_value_once(monkeypatch):
    values = sampling.sample(MATRIX, "values")
    monkeypatch.setenv(sampling.COVER, "values")
    assert sampling.sample(MATRIX) == sampling.sample(MATRIX, "pairs", 9) == values
    refused(ValueError, "triples", sampling.sample, MATRIX, "triples")


def test_a_matrix_with_holes_keeps_the_pairs_it_has():
    cases = [case for case in MATRIX if not (case[0] == 3 and case[2] == "bf16")]
    assert pairs(cases[index] for index in sampling.sample(cases)) == pairs(cases)


def test_the_same_sample_every_time_and_another_one_for_another_name():
    matrix = "list(itertools.product('abcd', 'efg', [1.5, None]))"
    code = f"import sampling, itertools; print(sampling.sample({matrix}, seed='x'))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(sampling.__file__)},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1
    assert sampling.sample(MATRIX, seed="x") != sampling.sample(MATRIX, seed="y")


@pytest.mark.parametrize("cases, expected", [([], []), ([("a",)], [0]), ([("a",), ("b",)], [0, 1])])
def test_small_matrices_stay_whole(cases, expected):
    assert sampling.sample(cases) == expected


def test_an_unknown_cover_is_refused():
    refused(ValueError, "'pairs' or 'values', not 'triples'", sampling.sample, MATRIX, "triples")


MODULE = """
import pytest
@pytest.mark.sample("values")
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b, c", [(1, 2), (3, 4), (5, 6)])
def test_many(a, b, c): pass
for_devices = getattr(pytest.mark, "any_device")  # the list of devices looks for files with the mark
@for_devices
@pytest.mark.parametrize("a", [1, 2])
def test_two(a): pass
@for_devices
@pytest.mark.skipif(True, reason="of this device")
def test_skipped(): pass
"""


def run(folder, *arguments, **environment):
    """The number of cases that ran, in a session of pytest with this tree's conftest.py."""
    (folder / "test_many.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    conftest = pathlib.Path(sampling.__file__).with_name("conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(conftest.replace("__file__", repr(sampling.__file__)))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DS_TEST_", "PYTEST_XDIST"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, env={**clean, **environment},
    )  # fmt: skip
    return succeeded(done).stdout.splitlines()[-1]


def test_sampled_whole_or_named(tmp_path):
    assert run(tmp_path).startswith("5 passed, 1 skipped, 3 deselected")
    assert run(tmp_path, DS_TEST_EVERY_CASE="1").startswith("8 passed, 1 skipped")
    assert run(tmp_path, DS_TEST_COVER=sampling.ONE_OF_A_FILE).startswith("1 passed, 8 deselected")
    every = [f"test_many.py::test_many[{name}]" for name in ("1-2-1", "3-4-1", "5-6-1", "1-2-2", "3-4-2", "5-6-2")]
    named = every if sampling.every_case() else every[1:3]  # one that is in the sample, and one that is not
    assert all(run(tmp_path, name).startswith("1 passed") for name in named)
    times = tmp_path / "times"
    run(tmp_path, DS_TEST_TIMES=str(times))
    assert sorted(line.split("::")[1] for line in times.read_text().splitlines())[-3:] == [
        "test_skipped",
        "test_two[1]",
        "test_two[2]",
    ]
