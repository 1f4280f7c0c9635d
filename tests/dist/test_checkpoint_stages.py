"""Checkpoints of a model cut into stages, which have files by layer: any number of stages reads them."""

import os

import pytest
import torch

from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.convert.export import export
from deepspeed.comm import mesh
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.parameters.param_ranks import SavedLayers, SavedNames
from harness import on_ranks, run_ranks
from models import Numbered, waves
from mpu import Mpu
from runs import (
    NATIVE,
    dtype_of,
    engine_of,
    go_on,
    load_or_error,
    same_states,
    save_midway,
    settings,
    take_step,
    together,
)

LAYERS, WIDTH = 6, 5


class Layer(Numbered):
    def __init__(self, number):
        super().__init__(number, WIDTH)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2) for _ in range(2))
        self.experts.ds_expert_numbers = {"0": 1, "1": 0}

    def forward(self, x):
        x = super().forward(x)
        return self.experts[0](x) + self.experts[1](x).tanh()


class Stage(torch.nn.Module):
    """Layers of one stage; the first and the last stage have the same tied weight, of layers 0 and 5."""

    def __init__(self, stage, stages):
        super().__init__()
        held = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        for number in held:
            self.add_module(str(number), Layer(number))
        self.tied = torch.nn.ModuleDict()
        layers = {str(number): number for number in held}
        if stage in (0, stages - 1):
            self.tied["words"] = Layer(50)
            layers["tied.words"] = 0
        layers.pop("0", None)  # the tied module is layer 0
        writes = set(layers.values()) - ({0} if stage else set())
        if stage == 0:
            del self._modules["0"]
        self.ds_saved_layers = SavedLayers(stage, stages, layers, writes, {0: "tied.words"})

    def forward(self, x):
        for layer in (*self.tied.values(), *(one for name, one in self.named_children() if name != "tied")):
            yield layer(x)


def make(rank, stages, copies, stage, checkpoint=None, dtype=None):
    number, copy = divmod(rank, copies)
    data = mesh.group_over([number * copies + other for other in range(copies)])
    mpu = Mpu(data, mesh.group_over([other * copies + copy for other in range(stages)]))
    mpu.get_pipe_parallel_world_size = lambda: stages
    mpu.get_slice_parallel_world_size = lambda: 1
    config = settings(stage, 4, dtype=dtype or "fp32", rate=0.05, checkpoint=checkpoint or {})
    engine = engine_of(Stage(number, stages), config, mpu=mpu)

    def train_one():
        outputs = engine(waves(4, WIDTH, 10 * engine.global_steps + copy).to(dtype_of(engine)))
        return take_step(engine, sum(out.float().square().mean() for out in outputs))

    return engine, train_one


def save(rank, world, stages, copies, stage, folder, checkpoint=None, dtype=None):
    return save_midway(*make(rank, stages, copies, stage, checkpoint, dtype), folder)


def load(rank, world, stages, copies, stage, folder, checkpoint=None, dtype=None, tag="t"):
    engine, train_one = make(rank, stages, copies, stage, checkpoint, dtype)
    found = go_on(engine, train_one, folder, tag=tag)
    assert engine.global_steps == 3
    return found


def load_damaged(rank, world, stages, copies, stage, folder):
    return load_or_error(make(rank, stages, copies, stage, {"verify_on_load": "none"})[0], folder)


OTHERS = {"1x1": (1, 1), "1x2": (1, 2), "2x2": (2, 2), "3x1": (3, 1), "4x1": (4, 1)}  # stages x copies


@pytest.mark.any_device("list")
@pytest.mark.sample("values")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("format", ["torch", "native", "bf16"])
def test_any_number_of_stages_reads_it(other, before, after, format, tmp_path):
    options = (NATIVE if format == "native" else None, "bf16" if format == "bf16" else None)
    saved = run_ranks(4, save, 2, 2, before, str(tmp_path), *options, init=True)
    stages, copies = OTHERS[other]
    same_states(run_ranks(stages * copies, load, stages, copies, after, str(tmp_path), *options, init=True), saved)


@pytest.mark.any_device("list")
@pytest.mark.sample("values", 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("format", ["torch", "native"])
def test_the_same_stages_go_on_bit_by_bit(stage, format, tmp_path):
    checkpoint = NATIVE if format == "native" else None
    saved = run_ranks(4, save, 2, 2, stage, str(tmp_path), checkpoint, init=True)
    assert run_ranks(4, load, 2, 2, stage, str(tmp_path), checkpoint, init=True) == saved


@pytest.mark.parametrize("stage", [0, 1])
def test_files_are_those_of_the_layers(stage, tmp_path):
    run_ranks(2, save, 2, 1, stage, str(tmp_path), init=True)
    folder = tmp_path / "t"
    names = {name for name in os.listdir(folder) if name.startswith("layer_") and "expert" not in name}
    assert names == {f"layer_{number:02d}-model_states.pt" for number in range(LAYERS)}
    # The first stage has layers 1, 2 and the tied one, the second 3, 4 and 5, and a copy of that, which is not saved.
    experts = [name for name in os.listdir(folder) if "_expert_" in name]
    assert {name.partition("_expert")[0] for name in experts} == {f"layer_{number}" for number in range(LAYERS)}
    assert set(torch.load(folder / "layer_03-model_states.pt")) == {"fc.weight", "fc.bias", "number"}
    assert torch.load(folder / "mp_rank_01_model_states.pt")["module"] is None


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("format", ["torch", "native"])
def test_universal_and_whole_weights(stage, format, tmp_path):
    checkpoint = NATIVE if format == "native" else None
    saved = run_ranks(2, save, 2, 1, stage, str(tmp_path), checkpoint, init=True)
    (path,) = export(str(tmp_path), str(tmp_path / "out"), tag="t", safe_serialization=False)
    found = torch.load(path)
    for one, *_ in saved:
        for name, value in one.items():
            assert torch.equal(found[name], torch.tensor(value[0] if isinstance(value[0], list) else value)), name
    if format == "torch":
        by_script = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "t")
        assert by_script.keys() == found.keys() and all(torch.equal(by_script[name], found[name]) for name in found)
    convert = ["--input_folder", str(tmp_path / "t"), "--output_folder", str(tmp_path / "u")]
    ds_to_universal.main(ds_to_universal.parse_arguments(convert))
    same_states(run_ranks(3, load, 3, 1, 1, str(tmp_path), {"load_universal": True}, None, "u", init=True), saved)


@pytest.mark.parametrize("lost", ["layer_04-model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"])
def test_a_file_that_is_gone_is_named(lost, tmp_path):
    run_ranks(2, save, 2, 1, 1, str(tmp_path), init=True)
    os.unlink(tmp_path / "t" / lost)
    for text in run_ranks(1, load_damaged, 1, 1, 1, str(tmp_path), init=True):
        assert lost in text


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4, init=True)
def test_weights_of_all_stages_in_one_file(rank, world, stage, tmp_path, folder):
    engine, _ = make(rank, 2, 2, stage)
    engine._config.zero_config.gather_16bit_weights_on_model_save = True
    engine.save_16bit_model(folder, "model.bin")
    named = SavedNames(engine.module)
    expected = together(
        {named(name): safe_get_full_fp32_param(param).tolist() for name, param in engine.module.named_parameters()}
    )
    found = torch.load(str(tmp_path / "model.bin"))
    assert all(torch.equal(found[name], torch.tensor(value)) for one in expected for name, value in one.items())
    assert found["4.number"].tolist() == [4.0]
