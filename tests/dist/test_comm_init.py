"""Joining a job in every way, and who is in it."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import deepspeed.comm.comm as comm_module
from deepspeed import comm as dist
from deepspeed.comm import timeouts
from deepspeed.utils import groups
from harness import on_ranks
from mpu import two_by_two
from processes import launched
from refusals import refused
from sampling import every_case

pytestmark = pytest.mark.dist


@on_ranks(3)
def test_by_environment(rank, world):
    assert not dist.is_initialized()
    refused(RuntimeError, "no process group yet", dist.get_rank)
    dist.init_distributed(verbose=False)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (rank, world, rank)
    assert torch.distributed.get_backend() == "gloo"
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == world
    dist.init_distributed(dist_backend="gloo")  # again: nothing happens
    dist.destroy_process_group()
    assert not dist.is_initialized() and comm_module.cdb is None


@on_ranks(2)
def test_the_timeout_of_a_configuration_ends_with_the_job(rank, world):
    dist.init_distributed(config={"comm": {"timeout": 3}}, verbose=False)
    assert timeouts.default_timeout() == timedelta(seconds=3)
    dist.destroy_process_group()
    assert timeouts.default_timeout() > timedelta(seconds=60)


@on_ranks(2, env=dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")))
def test_by_file_and_again(rank, world, folder):
    for turn in range(2):
        dist.init_distributed(
            init_method=f"file://{folder}/meet{turn}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        dist.barrier()
        dist.destroy_process_group()


@on_ranks(2, env={"RANK": None, "WORLD_SIZE": None})
def test_rank_and_size_may_be_arguments(rank, world):
    dist.init_distributed(rank=rank, world_size=world, verbose=False)
    assert dist.get_rank() == rank


@on_ranks(2, init="gloo")
def test_a_group_that_exists_is_used(rank, world):
    dist.init_distributed(dist_init_required=False)
    assert dist.get_rank() == rank
    half = torch.ones(2, dtype=torch.bfloat16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG)
    assert half.tolist() == [1.0, 1.0]


@on_ranks(2, init="gloo")
def test_a_group_that_exists_is_used_even_without_init(rank, world):
    assert dist.is_initialized() and dist.get_world_size() == world


@on_ranks(3, init="gloo")
def test_subgroups(rank, world):
    pair = dist.new_group([0, 2])
    single = dist.new_group([1])
    mine = pair if rank in (0, 2) else single
    assert dist.get_all_ranks_from_group(mine) == ([0, 2] if rank in (0, 2) else [1])
    assert dist.get_world_size(mine) == len(dist.get_all_ranks_from_group(mine))
    assert dist.get_rank(mine) == (1 if rank == 2 else 0)
    assert dist.get_rank(pair) == {0: 0, 1: -1, 2: 1}[rank]
    assert dist.get_global_rank(mine, dist.get_rank(mine)) == rank
    assert dist.get_global_rank(None, 2) == dist.get_global_rank(dist.get_world_group(), 2) == 2
    assert dist.get_all_ranks_from_group() == [0, 1, 2]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((2,), rank + 1.0, dtype=dtype)
        dist.all_reduce(x, group=mine)
        assert x.tolist() == ([4.0, 4.0] if rank != 1 else [2.0, 2.0])
        y = torch.full((2,), float(rank), dtype=dtype)
        if rank != 1:
            dist.broadcast(y, 2, group=pair)
            assert y.tolist() == [2.0, 2.0]
        out = torch.empty(1, dtype=dtype)
        dist.reduce_scatter_tensor(
            out, torch.full((len(dist.get_all_ranks_from_group(mine)),), 2.0, dtype=dtype), group=mine
        )
        assert out.item() == 2.0 * dist.get_world_size(mine)
    # Not a member: nothing happens to the tensor.
    x = torch.ones(2)
    if rank == 1:
        assert dist.all_reduce(x, group=pair) is None
        assert x.tolist() == [1.0, 1.0]


# ---- deepspeed.utils.groups ---------------------------------------------------------------------------------------
@on_ranks(4, init="gloo")
def test_groups_with_and_without_mpu(rank, world):
    groups.clear()
    assert groups.get_data_parallel_world_size() == world and groups.get_data_parallel_rank() == rank
    assert groups._get_data_parallel_group() is dist.get_world_group()
    assert groups.get_model_parallel_world_size() == 1 and groups.get_model_parallel_rank() == 0
    assert dist.get_all_ranks_from_group(groups.get_model_parallel_group()) == [rank]
    assert groups.get_tensor_model_parallel_src_rank() == rank
    assert groups._get_sequence_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0

    groups.initialize(mpu=two_by_two(rank))
    assert dist.get_all_ranks_from_group(groups.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
    assert groups.get_data_parallel_rank() == rank // 2 and groups.get_data_parallel_world_size() == 2
    assert groups.get_tensor_model_parallel_world_size() == 2 and groups.get_tensor_model_parallel_rank() == rank % 2
    assert groups.get_tensor_model_parallel_src_rank() == rank - rank % 2
    groups.set_tensor_model_parallel_world_size(8)
    groups.set_tensor_model_parallel_rank(5)
    assert (groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (8, 5)
    refused(RuntimeError, "_create_expert_and_data_parallel", groups._get_expert_parallel_group, "ep_size_2")
    groups.clear()
    assert groups.mpu is None


@on_ranks(2, init="gloo")
def test_device_mesh(rank, world):
    axes = (2, 1), ("data_parallel", "sequence_parallel")
    if hasattr(torch.distributed, "init_device_mesh"):
        mesh = dist.initialize_mesh_device(*axes)
        assert [dist.get_world_size(mesh.get_group(name)) for name in axes[1]] == [2, 1]
    else:
        refused(RuntimeError, "torch 2.2", dist.initialize_mesh_device, *axes)


def _finds_its_port_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        os.environ["MASTER_PORT"] = port = str(taken.getsockname()[1])
        refused(RuntimeError, f"port {port}.*--master_port", dist.init_distributed, verbose=False)


@on_ranks(1)
def test_busy_port_names_the_port_and_the_fix(rank, world):
    _finds_its_port_taken()


@on_ranks(2, timeout=20)
def test_a_rank_whose_first_try_failed_joins_at_the_second(rank, world):
    meeting_point = os.environ["MASTER_PORT"]
    if rank == 0:
        _finds_its_port_taken()
    os.environ["MASTER_PORT"] = meeting_point
    dist.init_distributed(verbose=False)
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 2.0


LEAVING = """
import atexit
import torch.distributed
atexit.register(lambda: print("in a group:", torch.distributed.is_initialized()))  # runs after what comes later
import deepspeed
deepspeed.init_distributed()
assert torch.distributed.is_initialized()
"""


def test_a_script_that_just_ends_leaves_the_group():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", LEAVING], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "in a group: False" in done.stdout, done.stdout + done.stderr


SCRIPT = """
import torch, deepspeed
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
engine = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
engine.backward(engine(torch.randn(2, 8)).sum())
engine.step()
"""


def test_a_script_that_ends_with_a_live_engine_ends_well(tmp_path):
    # torch 2.x: gloo's threads must not run into the end of the process, whoever still holds the group.
    for _ in range(4 if every_case() else 1):
        done = launched(SCRIPT, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]


LATE = """
import os, sys, time, torch
from deepspeed import comm as dist
from deepspeed.comm import mesh
dist.init_distributed(verbose=False)
rank = dist.get_rank()
dist.barrier()
if sys.argv[1] == "destroyed" and rank == 0:
    dist.destroy_process_group()
if rank > 0:
    time.sleep(1.5)  # rank 0, whose process has the job's store, has come to its end
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh.group_over([1, 2]))
    print("made", value.item(), flush=True)
"""


@pytest.mark.parametrize("end", ["destroyed", "just ends"])
def test_ranks_make_groups_after_rank_0_has_come_to_its_end(end, tmp_path):
    done = launched(LATE, tmp_path, end, ranks=3)
    assert done.returncode == 0 and done.stdout.count("made 2.0") == 2, done.stdout + done.stderr[-3000:]
