"""The time of a pipeline against its plan: layers that sleep, so that more ranks than cores work at once."""

import pathlib

import pytest
import torch
from torch import nn

import pipe_models as models
from deepspeed._native import _C
from deepspeed.pipe import LayerSpec, PipelineModule
from harness import on_ranks
from runs import engine_of, together
from sampling import every_case

PASS = 0.025  # seconds of a forward, of the gradient of an input, of that of a weight


def _memory(what):
    """Bytes of this process: VmRSS, or VmHWM, the most since clear_refs was written."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(what))


@on_ranks(4, init=True, fresh=True)
def test_stages_build_their_own_layers_only(rank, world):
    width, layers = 2048, 8
    model = 4 * layers * width * width
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    module = PipelineModule([LayerSpec(nn.Linear, width, width) for _ in range(layers)], num_stages=world)
    assert len(module.local_layers) == layers // world
    grown = together(_memory("VmHWM") - before)
    assert sum(grown) < 1.1 * model + 4 * (20 << 20), (grown, model)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.skipif(not every_case(), reason="make test-all: seconds are measured")
@on_ranks(init=True, timeout=120)
def test_bubble(rank, ranks, schedule):
    """Within three points; something else on the machine may spoil a try."""
    micro_batches = 8
    chunks = 2 if schedule == "zb-v" else 1
    options = {"virtual_stages": chunks, "placement": "v" if chunks == 2 else "loop"}
    module = PipelineModule(
        [LayerSpec(models.Sleeper, PASS) for _ in range(ranks * chunks)], num_stages=ranks,
        loss_fn=models.loss_of("plain"), partition_method="uniform", **options,
    )  # fmt: skip
    engine = engine_of(module, models.config_of(micro_batches, pipeline={"schedule": schedule}))
    parts = [_C.pipe.Part(forward=PASS, backward_input=PASS, backward_weight=PASS)] * (ranks * chunks)
    planned, found = _C.pipe.schedule(schedule, ranks, chunks, micro_batches).cost(parts).bubble, []
    for _ in range(3):
        engine._measured.begin()
        for _ in range(10):
            # The first stage computes the gradient of its input, too: the plan has it.
            items = [(torch.ones(2, 4, requires_grad=True), torch.zeros(2, 4)) for _ in range(micro_batches)]
            engine.train_batch(iter(items))
        found.append(engine.pipe_plan().measured["bubble"])
        if abs(found[-1] - planned) < 0.02:
            break
    found = together(planned, found)
    for planned, measured in found:
        assert min(abs(one - planned) for one in measured) < 0.03, (planned, measured)


@pytest.mark.slow
@pytest.mark.skipif(not every_case(), reason="make test-all: eight processes")
@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("stages, stage", [(8, 1), (4, 2)])
@on_ranks(8, init=True, timeout=120)
def test_eight_ranks(rank, world, kind, stages, stage):
    engine = models.engine_of(kind, stages, world, 8, stage)
    data = models.batches(kind, 2, 8, engine.grid.get_data_parallel_rank())
    losses = [engine.train_batch(data).item() for _ in range(2)]
    models.compare(
        engine, losses, models.parameters_of(engine), models.plain(kind, 2, 8, world // stages, clip=1.0), 2e-6
    )
