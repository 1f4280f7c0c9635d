"""Training on Gaudi: the stand-in device with torch's type hpu and a package habana_frameworks (tests/device/habana)
gives, bit for bit, what it gives under its own name."""

import json
import os
import re
import subprocess
import sys

import pytest
import standin

import gaudi_program
from places import ROOT

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

PROGRAM = os.path.abspath(gaudi_program.__file__)


def trained(world, path, environment):
    """Returns the values that ``gaudi_program`` writes with these variables."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(world), PROGRAM, str(path)]
    env = {**os.environ, "DS_DEVICE_BODY": "any", **environment}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return json.loads(path.read_text(encoding="utf-8"))


def standin_environment():
    folders = [os.path.join(ROOT, "tests", "device", "package"), os.path.join(ROOT, "tests", "device")]
    path = os.pathsep.join([*folders, os.path.join(ROOT, "python"), os.environ.get("PYTHONPATH", "")])
    return {"DS_ACCELERATOR": "standin", "PYTHONPATH": path, "DS_STANDIN_KERNELS": ""}


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_validated_trains_as_on_any_device(world, tmp_path):
    """Stages 0 to 2 in bf16, with and without activation checkpointing."""
    found = trained(world, tmp_path / "hpu.json", standin.hpu_environment())
    expected = trained(world, tmp_path / "standin.json", standin_environment())
    assert (found["device"], found["backend"]) == ("hpu", "hccl")
    assert expected["device"] == "standin" and found["losses"] == expected["losses"]
    for losses in found["losses"]:
        assert len(losses) == 6 and all(one[-1] < one[0] for one in losses)
        assert losses[0] == losses[1] and losses[2] == losses[3], "layers that run again change nothing"


def bert_loss(tmp_path, **more):
    """The loss after three steps of the example program, which two ranks train as its README says."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "ds.py", "--deepspeed"]
    command += ["--deepspeed_config", "ds_config.json", "--max_steps", "3", "--output_dir", str(tmp_path)]
    run = subprocess.run(
        [*command, *(["--use_hpu"] if more else [])],
        cwd=os.path.join(ROOT, "examples", "bert_pretraining"), env={**os.environ, **more},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return float(re.search(r"step 3/3: loss ([\d.]+)", run.stdout)[1])


def test_the_bert_program_runs_there(tmp_path):
    found = bert_loss(tmp_path / "hpu", **standin.hpu_environment(), DS_DEVICE_BODY="any")
    assert abs(found - bert_loss(tmp_path / "cpu")) < 0.05  # the devices draw other masks of dropout


PAGE = """
import os
os.environ['DS_ACCELERATOR'] = 'hpu'

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator
accelerator = get_accelerator()
assert isinstance(accelerator, HPU_Accelerator)

print(f"Device: {accelerator.device_name()}")
print(f"Backend: {accelerator.communication_backend_name()}")
print(f"BF16: {accelerator.is_bf16_supported()}")
print(f"FP16: {accelerator.is_fp16_supported()}")
total = accelerator.total_memory()
kept = torch.ones(1000, device="hpu")
allocated = accelerator.memory_allocated()
assert 4000 <= allocated < total and accelerator.available_memory() == total - allocated
print(f"Device count: {accelerator.device_count()}")
accelerator.set_device(0)
accelerator.synchronize()
assert os.environ["PT_HPU_LAZY_ACC_PAR_MODE"] == "0" and torch.are_deterministic_algorithms_enabled()
"""


def test_the_page_of_the_class():
    env = {**os.environ, **standin.hpu_environment()}
    command = [sys.executable, "-c", PAGE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[:4] == ["Device: hpu", "Backend: hccl", "BF16: True", "FP16: True"]
