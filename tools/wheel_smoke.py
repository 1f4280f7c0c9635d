"""Run by tools/wheel_smoke.sh in the environment that got the wheel: no compiler on PATH, no source tree."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

import torch

import deepspeed
from deepspeed import _native, git_version_info
from deepspeed.ops.op_builder import CPUAdamBuilder

found = [name for name in ("c++", "g++", "gcc", "cc", "clang++", "nvcc", "ninja", "cmake") if shutil.which(name)]
assert not found, f"this environment must not have compilers on PATH, it has {found}"
assert deepspeed.__file__.startswith(sys.prefix), deepspeed.__file__
built = [name for name in os.listdir(_native.LIB_DIR) if name.startswith("cp")]
assert built == [_native.tag()], f"the wheel holds modules of other environments: {built}"
version = importlib.metadata.version("deepspeed")
assert git_version_info.version == version, (git_version_info.version, version)
assert git_version_info.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])

report = subprocess.run([os.path.join(sys.prefix, "bin", "ds_report")], capture_output=True, text=True, check=True)
assert "cpu_adam ............... [YES] ...... [OKAY]" in report.stdout, report.stdout
assert version in report.stdout, report.stdout
CPUAdamBuilder().load()

torch.manual_seed(0)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
model = torch.nn.Linear(8, 1)
adam = {"type": "Adam", "params": {"lr": 0.1}}
config = {"train_batch_size": 4, "optimizer": adam, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, config=config)
losses = []
for _ in range(2):
    loss = (engine(torch.ones(4, 8)) - 1).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[1] < losses[0], losses
print(f"deepspeed {version} works from the wheel ({_native.tag()}, loss {losses[0]:.3f} -> {losses[1]:.3f})")
