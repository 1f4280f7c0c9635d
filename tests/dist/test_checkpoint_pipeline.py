"""Checkpoints of ``PipelineEngine``: any number of stages, copies and ZeRO stage reads them, moments and data position
included."""

import os

import pytest
import torch

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import run_ranks

LAYERS, WIDTH, MICRO, BATCH = 6, 5, 2, 8  # samples of a step, whatever the copies
TIED = 50


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.fc = torch.nn.Linear(WIDTH, WIDTH, bias=number != TIED)
        self.register_buffer("number", torch.tensor([float(number)]))

    @property
    def weight(self):
        return self.fc.weight

    def forward(self, x):
        return torch.tanh(self.fc(x)) * (1 + self.number / 10)


def out_of(module, x):
    return x @ module.weight


def make(rank, world, stages, stage, checkpoint=None):
    layers = [
        TiedLayerSpec("words", Layer, TIED, tied_weight_attr="weight"),
        *(LayerSpec(Layer, number) for number in range(1, LAYERS - 2)),
        LayerSpec(torch.nn.Tanh),  # nothing to save
        TiedLayerSpec("words", Layer, TIED, forward_fn=out_of, tied_weight_attr="weight"),
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    data = torch.sin(torch.arange(64.0 * WIDTH).view(64, WIDTH))
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"checkpoint": checkpoint} if checkpoint else {}),
    }
    dataset = torch.utils.data.TensorDataset(data, data.flip(1))
    return deepspeed.initialize(model=model, config=config, training_data=dataset)[0]


def states(engine):
    found = {}
    for name, param in engine.module.named_parameters():
        kinds = [safe_get_full_fp32_param(param)]
        kinds += [safe_get_full_optimizer_state(param, kind) for kind in ("exp_avg", "exp_avg_sq")]
        found[name] = [kind.tolist() for kind in kinds]
    found.update({name: buffer.tolist() for name, buffer in engine.module.named_buffers()})
    return found


def save(rank, world, stages, stage, folder, checkpoint=None):
    engine = make(rank, world, stages, stage, checkpoint)
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7})
    found = states(engine)
    losses = [engine.train_batch().item() for _ in range(2)]
    return found, losses, states(engine)


def load(rank, world, stages, stage, folder, checkpoint=None):
    engine = make(rank, world, stages, stage, checkpoint)
    for buffer in engine.module.buffers():
        buffer.zero_()
    _, client_state = engine.load_checkpoint(folder, tag="t")
    assert client_state["mine"] == 7 and engine.global_steps == 2
    found = states(engine)
    losses = [engine.train_batch().item() for _ in range(2)]
    return found, losses, states(engine)


def same(found, expected):
    known = {name: value for one, *_ in expected for name, value in one.items()}
    assert {name for one, *_ in found for name in one} == known.keys()
    for one, *_ in found:
        for name, value in one.items():
            assert value == known[name], name


NATIVE = {"writer": {"format": "safetensors"}}


@pytest.mark.sample("values")
@pytest.mark.parametrize("world, stages", [(1, 1), (2, 1), (3, 3), (4, 4), (4, 2)])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("format", ["torch", "native"])
def test_any_number_of_stages_reads_it(world, stages, before, after, format, tmp_path):
    checkpoint = NATIVE if format == "native" else None
    saved = run_ranks(4, save, 2, before, str(tmp_path), checkpoint, init=True)
    loaded = run_ranks(world, load, stages, after, str(tmp_path), checkpoint, init=True)
    same(loaded, saved)
    copies = world // stages
    if copies <= 2:  # the same samples in other hands
        assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_same_layout_goes_on_bit_by_bit(stage, tmp_path):
    saved = run_ranks(4, save, 2, stage, str(tmp_path), init=True)
    assert run_ranks(4, load, 2, stage, str(tmp_path), init=True) == saved
    if stage < 3:
        _check_files(tmp_path)


def _check_files(tmp_path):
    names = {name for name in os.listdir(tmp_path / "t") if name.startswith("layer_")}
    assert names == {f"layer_{number:02d}-model_states.pt" for number in range(LAYERS - 2)}  # the last one is tied
    assert set(torch.load(tmp_path / "t" / "layer_03-model_states.pt")) == {"fc.weight", "fc.bias", "number"}
