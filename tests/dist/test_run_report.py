"""The section ``report``: the page is there when the run ends, in whichever way; what is refused."""

import gc
import json
import os
import subprocess
import sys

import pytest

from deepspeed import DeepSpeedConfigError
from deepspeed.config import DeepSpeedConfig
from engine_models import loss_on, net_engine
from harness import on_ranks
from logs import logged
from places import PYTHON
from refusals import refused
from runs import take_step

LINES = [{"kind": "run", "world_size": 2}, {"kind": "step", "step": 1, "loss": 3.5, "wall": 0.25}]


def sections(folder, page="pages/run.html"):
    return {"step_log": {"file": f"{folder}/run.jsonl"}, "report": {"path": f"{folder}/{page}"}}


@pytest.mark.parametrize("end", ["destroy", "drop"])
@on_ranks(2)
def test_the_page_is_there_when_the_run_ends(rank, world, end, folder):
    engine = net_engine(world, 1, **sections(folder))
    if rank == 0:
        assert os.path.getsize(f"{folder}/pages/run.html") == 0
        with open(f"{folder}/run.jsonl", "a") as file:  # beside the lines of the engine's own
            file.writelines(json.dumps(line) + "\n" for line in LINES)
    take_step(engine, loss_on(engine, 0, rank=rank, world=world))
    if end == "destroy":
        engine.destroy()
    del engine
    gc.collect()
    if rank == 0:
        with open(f"{folder}/pages/run.html") as file:
            text = file.read()
        assert text.startswith("<!DOCTYPE html>") and "<h2>Loss</h2>" in text and "<td>1 (1 to 1)</td>" in text


PROGRAM = """
import torch, deepspeed
config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "step_log": {"file": "run.jsonl"},
          "report": {"path": "run.html"}}
engine = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)[0]
open("run.jsonl", "a").write('{"kind": "step", "step": 1, "wall": 0.25}\\n')
raise RuntimeError("training fails")
"""


@pytest.mark.slow
def test_a_program_that_fails_leaves_a_page(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env={**os.environ, "PYTHONPATH": PYTHON}, capture_output=True
    )
    assert run.returncode == 1 and b"training fails" in run.stderr
    assert "<td>1 (1 to 1)</td>" in (tmp_path / "run.html").read_text()


@on_ranks(2)
def test_a_page_that_cannot_be_written_is_an_error_on_all_ranks(rank, world, folder):
    file = f"{folder}/file"
    with open(file, "w"):
        pass
    words = f"rank 0: report.path: .*(Not a directory|File exists).*{file}.*rank 0 can write to"
    refused(ValueError, words, net_engine, world, 1, **sections(folder, "file/run.html"))


@on_ranks(1)
def test_a_step_log_that_has_gone_is_a_warning(rank, world, folder):
    engine = net_engine(world, 1, **sections(folder))
    with open(f"{folder}/run.jsonl", "a"):
        pass
    os.remove(f"{folder}/run.jsonl")
    with logged() as texts:
        engine.destroy()
    assert any("deepspeed.profiling.report" in text and "No such file" in text for text in texts)


def test_a_page_needs_the_step_log(tmp_path):
    for log in ({}, {"file": "a", "enabled": False}):
        config = {"train_batch_size": 1, "report": {"path": "a.html"}, "step_log": log}
        refused(DeepSpeedConfigError, "report.path is set, and no step log", DeepSpeedConfig, config)
    DeepSpeedConfig({"train_batch_size": 1, "report": {}, "step_log": {}})
