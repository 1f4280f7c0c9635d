"""Checkpoints of ``PipelineEngine``: any number of stages, copies and ZeRO stage reads them, moments and data position
included."""

import os

import pytest
import torch

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from harness import run_ranks
from models import Numbered, waves
from runs import NATIVE, engine_of, go_on, same_states, save_midway, settings

LAYERS, WIDTH, MICRO, BATCH = 6, 5, 2, 8  # samples of a step, whatever the copies
TIED = 50


def make(rank, world, stages, stage, checkpoint=None):
    layers = [
        TiedLayerSpec("words", Numbered, TIED, WIDTH, False, tied_weight_attr="weight"),
        *(LayerSpec(Numbered, number, WIDTH) for number in range(1, LAYERS - 2)),
        LayerSpec(torch.nn.Tanh),  # nothing to save
        TiedLayerSpec(
            "words",
            Numbered,
            TIED,
            WIDTH,
            False,
            forward_fn=lambda module, x: x @ module.weight,
            tied_weight_attr="weight",
        ),
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    data = waves(64, WIDTH)
    config = settings(stage, MICRO, None, rate=0.02, checkpoint=checkpoint or {}, train_batch_size=BATCH)
    engine = engine_of(model, config, training_data=torch.utils.data.TensorDataset(data, data.flip(1)))
    return engine, lambda: engine.train_batch().item()


def save(rank, world, stages, stage, folder, checkpoint=None):
    return save_midway(*make(rank, world, stages, stage, checkpoint), folder, after=2)


def load(rank, world, stages, stage, folder, checkpoint=None):
    engine, train_one = make(rank, world, stages, stage, checkpoint)
    found = go_on(engine, train_one, folder, after=2)
    assert engine.global_steps == 4
    return found


@pytest.mark.sample("values")
@pytest.mark.parametrize("world, stages", [(1, 1), (2, 1), (3, 3), (4, 4), (4, 2)])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("format", ["torch", "native"])
def test_any_number_of_stages_reads_it(world, stages, before, after, format, tmp_path):
    checkpoint = NATIVE if format == "native" else None
    saved = run_ranks(4, save, 2, before, str(tmp_path), checkpoint, init=True)
    loaded = run_ranks(world, load, stages, after, str(tmp_path), checkpoint, init=True)
    same_states(loaded, saved)
    copies = world // stages
    if copies <= 2:  # the same samples in other hands
        assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_same_layout_goes_on_bit_by_bit(stage, tmp_path):
    saved = run_ranks(4, save, 2, stage, str(tmp_path), init=True)
    assert run_ranks(4, load, 2, stage, str(tmp_path), init=True) == saved
    if stage < 3:
        names = {name for name in os.listdir(tmp_path / "t") if name.startswith("layer_")}
        assert names == {f"layer_{number:02d}-model_states.pt" for number in range(LAYERS - 2)}  # the last one is tied
        assert set(torch.load(tmp_path / "t" / "layer_03-model_states.pt")) == {"fc.weight", "fc.bias", "number"}
