"""States in files on a file system that has no fallocate: a library that is loaded first plays that."""

import os
import shutil
import subprocess
import sys

import pytest

import deepspeed
from processes import succeeded

LIBRARY = """
#include <errno.h>
#include <sys/types.h>
int fallocate(int file, int mode, off_t offset, off_t length) { errno = EOPNOTSUPP; return -1; }
int fallocate64(int file, int mode, off_t offset, off_t length) { errno = EOPNOTSUPP; return -1; }
"""

TRAINING = """
import sys, torch, deepspeed
folder, fast_init = sys.argv[1], sys.argv[2] == "True"
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": folder, "fast_init": fast_init}
    },
}
net = torch.nn.Sequential(torch.nn.Linear(30, 31), torch.nn.Linear(31, 3))
engine = deepspeed.initialize(model=net, config=config)[0]
engine.save_checkpoint(folder + "/saved")  # states that were never written
for _ in range(4):
    engine.backward(engine(torch.ones(2, 30).bfloat16()).pow(2).mean())
    engine.step()
print("weights", [param.float().sum().item() for param in engine.module.parameters()])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the library")
def test_new_files_read_as_zeros(tmp_path):
    (tmp_path / "library.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "library.so", "library.c"], cwd=tmp_path, check=True, timeout=60)
    package = os.path.dirname(os.path.dirname(deepspeed.__file__))
    env = {**os.environ, "LD_PRELOAD": str(tmp_path / "library.so"), "PYTHONPATH": package}

    def weights(fast_init):
        command = [sys.executable, "-c", TRAINING, str(tmp_path / f"files {fast_init}"), str(fast_init)]
        done = succeeded(subprocess.run(command, env=env, capture_output=True, text=True, timeout=240))
        return [line for line in done.stdout.splitlines() if line.startswith("weights")]

    assert weights(True) == weights(False) != []
