"""A pipeline needs the memory that it plans to need: bytes of the process's allocator while a batch runs."""

import pytest
import torch
from torch import nn

import pipe_models as models
from allocated_memory import HAS_COUNT, Peak, allocated
from deepspeed.pipe import LayerSpec, PipelineModule
from harness import on_ranks
from runs import engine_of, together

ROWS, WIDTH, MICRO_BATCHES = 1024, 32, 5  # weights take little beside activations


class Deep(nn.Module):
    """Keeps one input and 24 results, each as large as what passes between stages."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        for _ in range(24):
            x = torch.tanh(x)
        return x


def _items():
    for _ in range(MICRO_BATCHES):
        yield torch.randn(ROWS, WIDTH), torch.zeros(1)


@pytest.mark.skipif(not HAS_COUNT, reason="this libc has no mallinfo2")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.sample("values")
@on_ranks(3, init=True)
def test_peak_is_planned(rank, world, schedule, interval):
    chunks = 2 if schedule == "zb-v" else 1
    module = PipelineModule(
        [LayerSpec(Deep) for _ in range(4 * world)], num_stages=world, loss_fn=lambda out, labels: out.mean(),
        partition_method="uniform", activation_checkpoint_interval=interval, virtual_stages=chunks,
        placement="v" if chunks == 2 else "loop",
    )  # fmt: skip
    engine = engine_of(module, models.config_of(MICRO_BATCHES, pipeline={"schedule": schedule}))
    before, peak = allocated(), Peak()
    with peak:
        engine.train_batch(_items())
    stages = together(peak.bytes - before, engine.pipe_plan().stages[rank].peak_activation_bytes)
    assert all(abs(found - planned) < 0.1 * planned for found, planned in stages), (stages, [a / b for a, b in stages])
