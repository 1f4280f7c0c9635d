"""Stages of a pipeline whose ranks share sequences (the axis "sequence" of its topology), against one plain process."""

import functools
import os

import pytest
import torch
from torch import nn

import deepspeed
import pipe_models as models
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.topology import PipelineParallelGrid, ProcessTopology
from deepspeed.sequence.layer import DistributedAttention
from harness import on_ranks
from refusals import refused
from runs import KEEP_GATHERED, engine_of, settings, together
from sequence_models import attend

LAYERS, WIDTH, HEADS, LENGTH, MICRO_BATCHES = 2, 8, 2, 8, 2


class Block(nn.Module):
    def __init__(self, number, group=None):
        super().__init__()
        torch.manual_seed(number)
        self.qkv, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = lambda q, k, v: attend(q, k, v, "causal")
        if group is not None:
            self.attention = functools.partial(DistributedAttention(self.attention, group), batch_dim_idx=0)

    def forward(self, x):
        heads = (one.unflatten(-1, (HEADS, WIDTH // HEADS)) for one in self.qkv(x).chunk(3, -1))
        return x + self.back(self.attention(*(one.contiguous() for one in heads)).flatten(2))


def micro_batch(batch, micro, copy):
    generator = torch.Generator().manual_seed(100 * batch + 10 * micro + copy)
    return tuple(torch.randn(1, LENGTH, WIDTH, generator=generator) for _ in range(2))


def reference(copies):
    layers = nn.Sequential(*(Block(number) for number in range(LAYERS)))
    parts = [(micro, copy) for micro in range(MICRO_BATCHES) for copy in range(copies)]
    data = [[micro_batch(batch, *part) for part in parts] for batch in range(2)]
    return models.plain_run(layers, data, nn.functional.mse_loss, eps=1e-2)


def config_of(stage, **sections):
    adam = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.01}}
    more = {"optimizer": adam, "zero": KEEP_GATHERED, "gradient_clipping": 0.0, **sections}
    return settings(stage, 1, MICRO_BATCHES, **more)


@pytest.mark.parametrize("stages, copies, stage, schedule", [(2, 1, 1, "zb-h1"), (1, 2, 2, "1f1b"), (2, 1, 3, "1f1b")])
@on_ranks(4, init=True)
def test_equals_one_process(rank, world, stages, copies, stage, schedule, folder):
    topology = ProcessTopology(["pipe", "data", "sequence"], [stages, copies, 2])
    grid = PipelineParallelGrid(topology)
    assert grid.get_sequence_parallel_world_size() == 2 and grid.get_data_parallel_world_size() == copies
    assert grid.get_sequence_data_parallel_world_size() == 2 * copies
    assert grid.get_sequence_parallel_rank() == rank % 2
    group = grid.get_sequence_parallel_group()
    module = PipelineModule(
        [LayerSpec(Block, number, group) for number in range(LAYERS)], topology=topology,
        loss_fn=nn.functional.mse_loss, partition_method="uniform",
    )  # fmt: skip
    engine = engine_of(module, config_of(stage, sequence_parallel_size=2, pipeline={"schedule": schedule}))
    assert engine.train_batch_size() == MICRO_BATCHES * copies

    def part(tensor):
        return tensor.chunk(2, 1)[grid.get_sequence_parallel_rank()].contiguous()

    losses = []
    for batch in range(2):
        items = [micro_batch(batch, micro, grid.get_data_parallel_rank()) for micro in range(MICRO_BATCHES)]
        losses.append(engine.train_batch(iter([(part(x), part(y)) for x, y in items])).item())
    wanted = reference(copies)
    state = wanted.model.state_dict()
    assert losses == pytest.approx(wanted.means, rel=1e-5)
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        for name, value in module.state_dict().items():
            assert torch.allclose(value, state[name], atol=2e-5), name
    engine.save_checkpoint(folder, tag="t")
    engine.load_checkpoint(folder, tag="t")
    assert all(other == losses for other in together(losses))
    layers = {name for name in os.listdir(os.path.join(folder, "t")) if name.startswith("layer_")}
    assert layers == ({"layer_00-model_states.pt", "layer_01-model_states.pt"} if stage < 3 else set())


@on_ranks(2, init=True)
def test_what_does_not_fit_is_refused(rank, world):
    module = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    refused(
        deepspeed.DeepSpeedConfigError,
        r"sequence_parallel_size is 2, but the topology of the",
        deepspeed.initialize,
        model=module,
        config=config_of(0, sequence_parallel_size=2),
    )
