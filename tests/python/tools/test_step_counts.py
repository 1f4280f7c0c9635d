"""The benchmarks of a training step that also run without a GPU: their counts are below the bounds in the tree."""

import json
import os
import subprocess
import sys

import pytest

from places import ROOT

FOLDER = os.path.join(ROOT, "benchmarks", "python")


def run(script, *words):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.join(ROOT, "python"), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, os.path.join(FOLDER, script), *words], env=env, capture_output=True, text=True, timeout=300
    )
    return ran.returncode, ran.stdout + ran.stderr


PLANS = ("step_counts.py", "--only", "plans", "--layers", "12")


def test_counts_of_planned_steps_are_below_their_bounds():
    code, told = run(*PLANS, "--check")
    assert code == 0 and "no count is above its bound" in told, told


def test_a_count_above_its_bound(tmp_path):
    with open(os.path.join(FOLDER, "step_counts.json"), encoding="utf-8") as file:
        bounds = json.load(file)
    row = bounds["12 layers"]["plans: stage 2, 8 ranks"]
    most, row["kernels"], row["collectives"] = row["kernels"], 0, row["collectives"] + 7
    (tmp_path / "bounds.json").write_text(json.dumps(bounds))
    given = (*PLANS, "--ranks", "8", "--bounds", str(tmp_path / "bounds.json"))
    code, told = run(*given, "--check")
    assert code == 1, told
    lines = [line for line in told.splitlines() if "and the bound is" in line]
    assert len(lines) == 1 and "stage 2, 8 ranks: " in lines[0] and lines[0].endswith("kernels, and the bound is 0")
    assert run(*given, "--lower")[0] == 0
    lowered = json.loads((tmp_path / "bounds.json").read_text())["12 layers"]["plans: stage 2, 8 ranks"]
    assert lowered["kernels"] == 0, "a bound does not rise"
    assert lowered["collectives"] < row["collectives"] and most > 0
    assert run(*given, "--check")[0] == 1


@pytest.mark.parametrize(
    "words", [("--steps", "1"), ("--steps", "1", "--accumulation", "2", "--rows", "1", "--grad-dtype", "fp32")]
)
def test_contenders_in_turns_in_one_process(words, tmp_path):
    path = tmp_path / "figures.json"
    given = (
        "--together",
        "--models",
        "tiny",
        "--rounds",
        "2",
        "--rows",
        "1",
        "--contenders",
        "masters,fsdp2,0,3,2+cpu",
    )
    code, told = run("train_gpt.py", *given, *words, "--json", str(path))
    assert code == 0, told
    made = json.loads(path.read_text())["figures"]["models"]["tiny"]
    left_out = {"fsdp2"} if made["left_out"] else set()
    assert set(made["contenders"]) == {"masters", "fsdp2", "0", "3", "2+cpu"} - left_out
    for one in made["contenders"].values():
        assert one["step_ms"] > 0 and one["host_ms"] > 0 and one["ratio"] > 0 and one["mfu"] > 0
    assert made["contenders"]["masters"]["ratio"] == 1


def test_rates(tmp_path):
    code, told = run("gpu_rates.py", "--megabytes", "1", "--calls", "20", "--json", str(tmp_path / "rates.json"))
    figures = json.loads((tmp_path / "rates.json").read_text())["figures"]
    assert code == 0 and "NCCL is left out: it needs a GPU" in told
    assert (
        figures["bytes per second"]["copy, read and written"] > 0 and figures["microseconds of the host"]["launch"] > 0
    )
