"""Every engine has one mesh with the axes pp, dp, sp and tp, and experts are a fold of it."""

import os
import time
from datetime import timedelta

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import gloo, mesh
from deepspeed.comm.mesh_views import Purpose
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.topology import ProcessTopology
from deepspeed.utils import groups
from deepspeed.zero.parameters.param_ranks import ParamRanks
from harness import on_ranks
from mpu import two_by_two
from refusals import refused
from runs import together

AXES = ("pp", "dp", "sp", "tp")
COMPARED = {"DS_SHM_COLLECTIVES": "0", "DS_COMM_FINGERPRINTS": "strict"}
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}


def start(model, mpu=None, **keys):
    deepspeed.log.logger.setLevel("WARNING")
    return deepspeed.initialize(model=model, config={**CONFIG, **keys}, mpu=mpu)[0]


def lists(engine):
    native = engine.parallel.mesh
    return {axis: native.ranks([axis]) for axis in AXES}


def pipeline(*axes):
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    return PipelineModule(layers=layers, topology=ProcessTopology(axes, [2] * len(axes)), loss_fn=nn.MSELoss())


@on_ranks(4, init="gloo", timeout=60)
def test_every_engine_has_four_axes(rank, world):
    pair, across, alone = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2], [rank]
    assert lists(start(nn.Linear(4, 4))) == {"pp": alone, "dp": [0, 1, 2, 3], "sp": alone, "tp": alone}
    engine = start(nn.Linear(4, 4), sequence_parallel_size=2)
    assert lists(engine) == {"pp": alone, "dp": across, "sp": pair, "tp": alone}
    assert engine.parallel.mesh.ranks(["dp", "sp"]) == [0, 1, 2, 3]
    groups.clear()
    assert lists(start(nn.Linear(4, 4), two_by_two(rank))) == {"pp": alone, "dp": across, "sp": alone, "tp": pair}
    engine = start(pipeline("data", "pipe"), gradient_accumulation_steps=2)
    assert lists(engine) == {"pp": pair, "dp": across, "sp": alone, "tp": alone}
    engine = start(pipeline("sequence", "pipe"), gradient_accumulation_steps=2)
    assert lists(engine) == {"pp": pair, "dp": alone, "sp": across, "tp": alone}


# ---- experts ---------------------------------------------------------------------------------------------------------
def with_experts(copies, kinds, dense=1):
    """The layers from number ``dense`` on are experts."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ranks = {"edp": copies, "ep": kinds}
    for param in model[dense:].parameters():
        param.ds_ranks = ParamRanks("experts", ranks, mesh.group_over(copies))
    return start(model)


class SlowStore(torch.distributed.Store):
    """The job's store, whose answers take a while."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        time.sleep(0.2)
        return self.inner.get(key)

    def wait(self, keys, timeout=timedelta(seconds=30)):
        self.inner.wait(keys, timeout)


@on_ranks(4, init="gloo", timeout=60)
def test_a_group_that_is_dropped_at_once_is_complete_on_every_rank(rank, world):
    store = torch.distributed.PrefixStore("dropped", torch.distributed.distributed_c10d._get_default_store())
    size = gloo.meet(SlowStore(store) if rank == 3 else store, rank, world, timedelta(seconds=30))[1].size()
    assert size == world  # of a group that nothing holds any more


@on_ranks(4, init="gloo", timeout=60)
def test_experts_are_folds(rank, world):
    pair, across = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
    for copies, kinds in ((across, pair), (pair, across)):
        native = with_experts(copies, kinds).parallel.mesh
        assert native.ranks(["experts.edp"]) == copies and native.ranks(["experts.ep"]) == kinds
    refused(
        ValueError,
        r"do not form a grid over the data-parallel ranks \[0, 1, 2, 3\]",
        with_experts,
        [rank, 3 - rank] if rank < 2 else [3 - rank, rank],
        pair,
    )
    refused(ValueError, "is not the 4 data-parallel ranks there are", with_experts, [rank], pair)


@on_ranks(4, init="gloo", env=COMPARED, timeout=120)
def test_a_mismatch_between_experts_is_named(rank, world, folder):
    os.environ["DS_COMM_TRACE_DIR"] = folder
    engine = with_experts([rank % 2, rank % 2 + 2], [rank - rank % 2, rank - rank % 2 + 1], dense=0)
    own = engine.parallel.mesh.communicator(["experts.edp"], Purpose.EXPERTS)

    def step():
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()

    if rank == 3:
        error = refused(RuntimeError, None, own.run, "all_reduce", output=torch.ones(7), tag="planted")
    elif rank == 1:
        error = refused(RuntimeError, None, step)
    dist.barrier()
    _, one, _, three = together(str(error) if rank % 2 else "")
    for text in (one, three):  # rank 3 of the job is rank 1 of its group
        assert "call different collectives: rank 0 all_reduce(" in text, text
        assert 'rank 1 all_reduce(7 x float32, sum) of "planted". (Number 1 of this group.)' in text
