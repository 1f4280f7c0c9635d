"""Pipelines of layers that are sliced over ranks: 3D parallelism against one plain process."""

import pytest
import torch
from torch import nn

import deepspeed
import pipe_models as models
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from harness import on_ranks, run_ranks
from models import seeded
from runs import engine_of
from sliced_layers import MICRO_BATCHES, Sliced, Whole, batch


def loss_of(out, labels):
    return (out - labels).square().mean()


def reference(copies, batches):
    layers = nn.Sequential(*(seeded(Whole, seed=models.SEED + number) for number in range(4)))
    data = [[one for copy in range(copies) for one in batch(number, copy)] for number in range(batches)]
    return models.plain_run(layers, data, loss_of, 0.05)


def _trains(rank, world, copies, stage, partitioned):
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=copies)
    Sliced.grid = PipelineParallelGrid(topology)
    module = PipelineModule(
        [LayerSpec(Sliced) for _ in range(4)], topology=topology, loss_fn=loss_of, seed_layers=True,
        base_seed=models.SEED, partition_method="uniform",
    )  # fmt: skip
    config = models.config_of(
        MICRO_BATCHES, stage, gradient_clipping=0.05,
        pipeline={"pipe_partitioned": partitioned, "grad_partitioned": partitioned},
    )  # fmt: skip
    engine = engine_of(module, config)
    assert engine.is_model_parallel and (engine._links.slices is not None) == partitioned
    copy = engine.grid.get_data_parallel_rank()
    losses = [engine.train_batch(iter(batch(number, copy))).item() for number in range(2)]
    if partitioned:
        assert engine._links.slices.equal and all(engine._links.slices.equal.values())
    wanted = reference(copies, 2)
    states = [layer.state_dict() for layer in wanted.model]
    assert losses == pytest.approx(wanted.means, rel=1e-5)
    place = engine.grid.get_slice_parallel_rank()
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        for number, layer in zip(module.local_layers, module._modules_by_position):
            own = {"up": states[number]["up"].chunk(2, 0)[place], "down": states[number]["down"].chunk(2, 1)[place]}
            for name, value in {**own, "bias": states[number]["bias"]}.items():
                assert torch.allclose(getattr(layer, name), value, atol=2e-5), (number, name)
    return engine.channel.sent[1]


@pytest.mark.slow
def test_three_dimensions():
    run_ranks(8, _trains, 2, 1, True, init=True, timeout=120)


@on_ranks(4, init=True)
def test_parts_travel(rank, world):
    """Both equal one process."""
    assert _trains(rank, world, 1, 0, True) < 0.55 * _trains(rank, world, 1, 0, False)
