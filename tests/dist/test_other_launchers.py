"""Scripts that call deepspeed.init_distributed, started by our launcher, by torchrun, by mpirun and by hand."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PYTHON_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python")
SCRIPT = """
import os, sys, torch
from deepspeed import comm as dist
dist.init_distributed()
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
dist.all_reduce(x)
assert x.tolist() == [world * (world + 1) / 2] * 3
with open("rank%d_of_%d_local%d" % (rank, world, dist.get_local_rank()), "w") as file:
    file.write(os.environ["MASTER_PORT"])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(*line, **more):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env.update({"PYTHONPATH": PYTHON_DIR, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **more})
    job = subprocess.Popen(
        [str(part) for part in line], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # a launcher that is killed alone leaves its ranks behind
        raise
    assert job.returncode == 0, text


def found(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("rank"))


TWO = ["rank0_of_2_local0", "rank1_of_2_local1"]


def test_our_launcher(folder):
    run(sys.executable, "-m", "deepspeed.launcher", "--num_accelerators", 2, "--no_local_rank", "train.py")
    assert found(folder) == TWO


def test_by_hand(folder):
    run(sys.executable, "train.py")
    assert found(folder) == ["rank0_of_1_local0"]


@pytest.mark.skipif(int(torch.__version__.split(".")[0]) < 2, reason="torchrun of Debian's torch 1.13 is broken")
def test_torchrun(folder):
    run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "train.py")
    assert found(folder) == TWO


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")


def mpirun(*more, **env):
    line = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none"]
    return run(*line, "-np", 2, *more, sys.executable, "train.py", **env)


@needs_mpirun
def test_mpirun(folder):
    # Without mpi4py, which finds a port, all jobs of a machine meet at the same one.
    mpirun(*(() if importlib.util.find_spec("mpi4py") else ("-x", "MASTER_PORT=29744")))
    assert found(folder) == TWO


@needs_mpirun
def test_mpirun_without_mpi4py(folder):
    (folder / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'mpi4py' else find(name, *rest)\n"
    )
    mpirun("-x", "MASTER_PORT=29743", PYTHONPATH=f"{folder}{os.pathsep}{PYTHON_DIR}")
    assert found(folder) == TWO
    assert (folder / TWO[0]).read_text() == "29743"
