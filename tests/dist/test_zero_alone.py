"""Stage 3 on one rank: parameters are their slices, and nothing is gathered."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.zero.parameters.sharded_parameter import ReleasedParameter, ZeroParamStatus
from harness import on_ranks
from models import seeded
from runs import engine_of, settings, take_step, value_of, weights
from zero_training import Deep, loss_on, start


@on_ranks(1, init=True)
def test_parameters_are_views_of_their_slices_while_the_model_runs(rank, world):
    engine = start(seeded(Deep), 3, world)
    layer, seen = engine.module.layers[1], []

    def look(*_):
        seen.append((layer.weight.ds_status, layer.weight.data_ptr() == layer.weight.ds_tensor.data_ptr()))

    layer.register_forward_pre_hook(look)
    layer.weight.register_hook(lambda grad: look())
    take_step(engine, loss_on(engine, 0, rank))
    assert seen == [(ZeroParamStatus.AVAILABLE, True)] * 2, "in forward and in backward"
    assert layer.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and layer.weight.numel() == 0
    assert isinstance(layer.weight, ReleasedParameter)
    gatherer = engine.core.gatherer
    assert (gatherer.source, gatherer.gathered_elements, gatherer.collectives, gatherer.exchanges) == (
        "own slices", 0, 0, 0)  # fmt: skip
    with torch.no_grad():
        engine(torch.ones(2, 6))
    assert layer.weight.numel() == 0, "an evaluation leaves nothing behind"


@on_ranks(1, init=True)
def test_a_module_can_be_called_outside_of_the_model(rank, world):
    engine = start(seeded(Deep), 3, world)
    layer, x = engine.module.layers[1], torch.ones(2, 6)
    values = value_of(layer.weight)
    found = layer(x)
    assert torch.equal(found, torch.nn.functional.linear(x, values, value_of(layer.bias)))
    found.sum().backward()
    assert layer.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE


class Seen(TorchDispatchMode):
    """A mode of Python that sees every operator, as profilers have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True)
def test_a_mode_of_python_changes_no_gather(rank, world):
    engine, fetches = start(seeded(Deep), 3, world), []
    for step in range(4):
        before = engine.core.gatherer.fetches
        with Seen() if step == 3 else contextlib.nullcontext():
            take_step(engine, loss_on(engine, step, rank))
        fetches.append(engine.core.gatherer.fetches - before)
    assert fetches[3] == fetches[2]


WRITES = {
    "in place": lambda param: param.mul_(2.0),
    "through data": lambda param: param.data.mul_(2.0),
    "other data": lambda param: setattr(param, "data", param.data * 2.0),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(1, init=True)
def test_writes_of_the_user_reach_the_masters(rank, world, dtype, how):
    """A write between two steps counts as one in place does at stage 2, where nothing is gathered either."""
    found = []
    for stage in (2, 3):
        engine = engine_of(seeded(Deep), settings(stage, dtype=dtype))
        for step in range(3):
            if step == 1:
                with torch.no_grad(), deepspeed.zero.GatheredParameters([engine.module.layers[1].weight]):
                    WRITES["in place" if stage == 2 else how](engine.module.layers[1].weight)
            take_step(engine, loss_on(engine, step, rank))
        found.append(weights(engine))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
