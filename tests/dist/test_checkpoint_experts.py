"""Checkpoints of models whose experts lie on different ranks: every element once, read at any degree and stage."""

import json
import os
import shutil

import pytest
import torch

from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.convert.export import export
from deepspeed.comm import mesh
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.parameters.param_ranks import ParamRanks, SavedNames
from harness import on_ranks, run_ranks
from models import Numbered, waves
from refusals import refused
from runs import (
    NATIVE,
    engine_of,
    go_on,
    load_into,
    load_or_error,
    save_midway,
    settings,
    states_of,
    take_step,
    together,
)

EXPERTS, WIDTH = 4, 6


class Model(torch.nn.Module):
    """Two layers of experts, of which this rank has ``held``, and one tensor of which it has some rows."""

    def __init__(self, held):
        super().__init__()
        torch.manual_seed(100)
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        rows = torch.randn(EXPERTS, WIDTH)
        self.stacked = torch.nn.Parameter(rows[list(held)].clone())
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(Numbered(10 * layer + number, WIDTH) for number in held) for layer in range(2)
        )
        for layer in self.layers:
            layer.ds_expert_numbers = {str(place): number for place, number in enumerate(held)}

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        for layer in self.layers:
            x = sum(expert(x) for expert in layer) / EXPERTS
        return x * self.stacked.sum()


def make(rank, world, degree, stage, checkpoint=None, optimizer="AdamW"):
    """An engine whose experts are shared by ``degree`` ranks."""
    own, each = rank % degree, EXPERTS // degree
    model = Model(range(own * each, (own + 1) * each))
    if degree > 1:
        groups = {
            "edp": mesh.group_over(list(range(own, world, degree))),
            "ep": mesh.group_over([rank - own + other for other in range(degree)]),
        }
        copies = groups["edp"]
        for param in model.layers.parameters():
            param.ds_ranks = ParamRanks("experts", groups, copies)
        model.stacked.ds_ranks = ParamRanks("experts", groups, copies, rows=(own * each, EXPERTS))
    adam = {"type": optimizer, "params": {"lr": 0.05, "weight_decay": 0.1}}
    engine = engine_of(model, settings(stage, 4, optimizer=adam, checkpoint=checkpoint or {}))
    return engine, lambda: take_step(engine, engine(waves(4, WIDTH, 10 * engine.global_steps + rank)).square().mean())


def states(engine):
    return {**states_of(engine), "steps": [int(step) for step in engine.core.steps()]}


def save(rank, world, degree, stage, folder, checkpoint=None):
    return save_midway(*make(rank, world, degree, stage, checkpoint), folder, states)


def load(rank, world, degree, stage, folder, checkpoint=None, tag="t"):
    return go_on(*make(rank, world, degree, stage, checkpoint), folder, states, tag)


def load_damaged(rank, world, degree, stage, folder, **options):
    return load_or_error(make(rank, world, degree, stage, {"verify_on_load": "none"})[0], folder, **options)


def same(loaded, saved):
    """The ranks of ``loaded`` have what the ranks of ``saved`` had, each tensor bit by bit."""
    found, expected = ([states for states, *_ in ranks] for ranks in (loaded, saved))
    known, seen = {}, set()
    for one in expected:
        known.update({name: value for name, value in one.items() if name != "stacked"})
    rows = {}
    for one, held in expected_rows(expected):
        rows.update({row: [kind[place] for kind in one["stacked"]] for place, row in held})
    for one, held in expected_rows(found):
        assert set(one["steps"]) == set(known["steps"])
        for name in one.keys() - {"steps", "stacked"}:
            assert one[name] == known[name], name
        for place, row in held:
            assert [kind[place] for kind in one["stacked"]] == rows[row], f"row {row}"
        seen |= one.keys()
    assert seen == known.keys() | {"stacked"}


def expected_rows(ranks):
    for number, one in enumerate(ranks):
        count = len(one["stacked"][0])
        first = number % (EXPERTS // count) * count
        yield one, [(place, first + place) for place in range(count)]


LAYOUTS = {  # (world, degree) -> those
    "2x2 to 2x1": ((2, 2), (2, 1)),
    "2x2 to 4x2": ((2, 2), (4, 2)),
    "4x4 to 4x2": ((4, 4), (4, 2)),
    "4x2 to 2x2": ((4, 2), (2, 2)),
    "2x1 to 2x2": ((2, 1), (2, 2)),
}


@pytest.mark.sample("values", 5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("format", ["torch", "native"])
def test_states_load_at_any_degree_and_stage(layout, before, after, format, tmp_path):
    (world, degree), (other_world, other_degree) = LAYOUTS[layout]
    checkpoint = NATIVE if format == "native" else None
    saved = run_ranks(world, save, degree, before, str(tmp_path), checkpoint, init=True)
    same(run_ranks(other_world, load, other_degree, after, str(tmp_path), checkpoint, init=True), saved)


def test_experts_that_every_rank_had_load_where_they_are_shared(tmp_path):
    """Without ZeRO the optimizer's states are by place in the group, and experts' shapes in files of their own."""
    saved = run_ranks(2, save, 1, 0, str(tmp_path), init=True)
    same(run_ranks(2, load, 2, 0, str(tmp_path), init=True), saved)


SHARED = {"writer": {"data_parallel": "replica"}}
FORMATS = {"torch": None, "native": NATIVE, "background": {"async": True}, "shared": SHARED}


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_the_same_layout_goes_on_bit_by_bit(stage, format, tmp_path):
    checkpoint = FORMATS[format]
    saved = run_ranks(2, save, 2, stage, str(tmp_path), checkpoint, init=True)
    assert run_ranks(2, load, 2, stage, str(tmp_path), checkpoint, init=True) == saved


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_universal(stage, tmp_path):
    saved = run_ranks(2, save, 2, stage, str(tmp_path), init=True)
    convert = ["--input_folder", str(tmp_path / "t"), "--output_folder", str(tmp_path / "u")]
    ds_to_universal.main(ds_to_universal.parse_arguments(convert))
    same(run_ranks(2, load, 1, 1, str(tmp_path), {"load_universal": True}, "u", init=True), saved)


def whole_weights(saved):
    """name -> fp32 weight of the whole model, of what ``save`` returned on each rank."""
    found = {}
    for one, held in expected_rows([found for found, *_ in saved]):
        for name, value in one.items():
            if name not in ("steps", "stacked"):
                found[name] = torch.tensor(value[0] if isinstance(value[0], list) else value)
        for place, row in held:
            found.setdefault("stacked", torch.zeros(EXPERTS, WIDTH))[row] = torch.tensor(one["stacked"][0][place])
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_fp32_weights_of_the_whole_model(stage, tmp_path):
    expected = whole_weights(run_ranks(2, save, 2, stage, str(tmp_path), init=True))
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "t")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    (path,) = export(str(tmp_path), str(tmp_path / "out"), tag="t", safe_serialization=False)
    found = torch.load(path)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4, init=True)
def test_weights_of_all_experts_in_one_file(rank, world, stage, tmp_path, folder):
    engine, _ = make(rank, world, 2, stage)
    engine._config.zero_config.gather_16bit_weights_on_model_save = True
    engine.save_16bit_model(folder, "model.bin")
    named = SavedNames(engine.module)
    whole = {named(name): safe_get_full_fp32_param(param).tolist() for name, param in engine.module.named_parameters()}
    expected = together(whole)
    found = torch.load(str(tmp_path / "model.bin"))
    for rank, one in enumerate(expected):
        rows = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        for name, value in one.items():
            assert torch.equal(found[name][rows] if name == "stacked" else found[name], torch.tensor(value)), name
    assert found["layers.1.3.number"].tolist() == [13.0]


@pytest.mark.parametrize("stage", [0, 1])
def test_published_files(stage, tmp_path):
    run_ranks(2, save, 2, stage, str(tmp_path), init=True)
    files = set(os.listdir(tmp_path / "t"))
    experts = {f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt" for layer in range(2) for e in range(EXPERTS)}
    assert {name for name in files if "expert_" in name} == experts
    state = torch.load(tmp_path / "t" / "layer_1_expert_3_mp_rank_00_model_states.pt")
    assert set(state) == {"layers.1.3.fc.weight", "layers.1.3.fc.bias", "layers.1.3.number"}
    numbers = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert os.path.getsize(tmp_path / "t" / "layer_1_expert_3_mp_rank_00_model_states.pt") <= numbers + 4096
    own = {name for name in files if name.startswith("expp_rank_")}
    assert own == ({f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)} if stage == 0 else set())
    for name in own:
        assert set(torch.load(tmp_path / "t" / name)) == {"optimizer"}


@pytest.mark.parametrize("stage, name, damaged", [
    (0, "layer_1_expert_3_mp_rank_00_model_states.pt", None),
    (0, "expp_rank_1_mp_rank_00_optim_states.pt", None),
    (1, "zero_pp_rank_1_mp_rank_00_optim_states.pt", None),
    (1, "layer_0_expert_1_mp_rank_00_model_states.pt", b"no archive"),
])  # fmt: skip
def test_a_file_that_is_gone_or_damaged_is_named(stage, name, damaged, tmp_path):
    run_ranks(2, save, 2, stage, str(tmp_path), init=True)
    path = tmp_path / "t" / name
    path.unlink() if damaged is None else path.write_bytes(damaged)
    for text in run_ranks(2, load_damaged, 2, stage, str(tmp_path), init=True):
        assert name in text


def test_other_experts_are_no_fit(tmp_path):
    """Six experts saved, four wanted: nobody reads the other two."""
    saved = run_ranks(2, save, 2, 1, str(tmp_path), init=True)
    folder = tmp_path / "t"
    name = "layer_0_expert_1_mp_rank_00_model_states.pt"
    more = {key.replace(".1.", ".5."): value for key, value in torch.load(folder / name).items()}
    for rank in range(2):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        assert "own_params" in torch.load(path, weights_only=False)["optimizer_state_dict"]
    assert saved and more
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    model["params_by_rank"]["table"]["layers.0.5.fc.weight"] = {"shape": [6, 6], "group": 0, "kinds": [], "ranks": []}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for text in run_ranks(2, load_damaged, 2, 1, str(tmp_path), init=True):
        assert "unexpected ['layers.0.5.fc.weight']" in text


def test_old_names_of_experts_files(tmp_path):
    """One file for an expert of all layers, as older runs wrote them."""
    expected = [found for found, *_ in run_ranks(2, save, 2, 0, str(tmp_path), init=True)]
    folder = tmp_path / "t"
    for expert in range(EXPERTS):
        state = {}
        for layer in range(2):
            path = folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            state.update(torch.load(path, weights_only=False))
            path.unlink()
        torch.save(state, folder / f"expert_{expert}_mp_rank_00_model_states.pt")
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    model["params_by_rank"]["experts"] = []
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    manifest = [name for name in os.listdir(folder) if name.endswith(".json")]
    assert json.loads((folder / manifest[0]).read_text())
    shutil.rmtree(folder / manifest[0], ignore_errors=True)
    for one, known in zip(run_ranks(2, load_weights_only, 2, str(tmp_path), init=True), expected):
        for name, value in one.items():
            assert value == (known[name][0] if isinstance(known[name][0], list) else known[name]), name


def load_weights_only(rank, world, degree, folder):
    engine = load_into(
        make(rank, world, degree, 0, {"verify_on_load": "none"})[0], folder, tag="t", load_module_only=True
    )
    named = SavedNames(engine.module)
    return {named(name): value.tolist() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, init=True)
def test_states_of_the_optimizer_object(rank, world, stage):
    engine, train_one = make(rank, world, 2, stage)
    train_one()
    train_one()
    before, shards = states(engine), together(engine.optimizer.state_dict())
    train_one()
    assert states(engine) != before
    engine.optimizer.load_state_dict(shards, load_from_fp32_weights=True)
    assert states(engine) == before


@on_ranks(2, init=True)
def test_frozen_parameters_with_other_values_on_ranks_need_safetensors(rank, world, folder):
    """Ranks have other tensors under one name, and neither an expert's number nor rows say which."""
    groups = {"edp": [rank], "ep": [0, 1]}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    model[0].weight.ds_ranks = ParamRanks("experts", groups, mesh.group_over([rank]))
    engine = engine_of(model, settings(1))
    refused(ValueError, "'0.weight' has ranks of its own.*nor some rows.*safetensors", engine.save_checkpoint, folder)
