"""The program ``ds_plan``."""

import json
import os
import sys

import pytest
import torch

from deepspeed.planner import Machine
from deepspeed.planner.cli import main
from deepspeed.planner.search import Search

MODEL = """
import torch

def make():
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])

def sample(batch):
    return torch.zeros(batch, 1024)

def wide(batch):
    return torch.zeros(batch, 7)

def stages(num_stages=2):
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    return PipelineModule(layers, num_stages=num_stages, loss_fn=torch.nn.functional.mse_loss)

def pair(batch):
    return torch.zeros(batch, 1024), torch.zeros(batch, 1024)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}
MACHINE = {
    "version": 1, "name": "of the test", "flops": {"float32": 1e12}, "memory": 1e11, "operator_ns": 1000,
    "inside": [1000, 1e10], "between": [9000, 1e9], "host": 2e10, "file": 1e9, "host_step": 1e10, "ranks_of_host": 0,
}  # fmt: skip


@pytest.fixture
def ds_plan(tmp_path, capsys):
    """Runs the program with files of its own; returns the exit code and what it prints."""
    for name, text in (("model.py", MODEL), ("config.json", json.dumps(CONFIG)), ("machine.json", json.dumps(MACHINE))):
        (tmp_path / name).write_text(text)

    def run(*words, model="make", sample="sample", config="config.json"):
        given = [str(tmp_path / config), "--model", f"{tmp_path}/model.py:{model}"]
        given += ["--sample", f"{tmp_path}/model.py:{sample}", "--machine", str(tmp_path / "machine.json")]
        code = main([*given, *words])
        told = capsys.readouterr()
        return code, told.out if code < 2 else told.err

    return run


def test_a_job_that_fits(ds_plan):
    code, told = ds_plan("--world", "4", "--memory", "1GB")
    assert code == 0 and "fits: rank 0 peaks" in told and "all_reduce" in told and "of the test" in told


def test_a_job_that_does_not_and_the_cheapest_change(ds_plan):
    code, told = ds_plan("--world", "4", "--memory", "55MB")
    assert code == 1 and "needs more than" in told
    assert "cheapest change that fits: zero_optimization.stage" in told


def test_a_job_that_nothing_makes_fit(ds_plan):
    code, told = ds_plan("--world", "1", "--memory", "1MB")
    assert code == 1 and "no change makes it fit" in told


@pytest.mark.slow
def test_a_combination_where_no_single_change_is_enough():
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": CONFIG["optimizer"]}

    def search(memory):
        def model(recompute):
            return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))

        machine = Machine(**{key: value for key, value in MACHINE.items() if key != "version"})
        return Search(model, config, 2, memory, lambda rows: torch.zeros(rows, 1024, 512), machine, False)

    every = search(None)
    singles = [every.planned(one) for one in every.single_changes() if one]
    room = int(0.95 * min(one.plan.peak_bytes for one in singles if one.plan))
    change = search(room).cheapest_change()
    assert change.plan.peak_bytes <= room and change.words not in {one.words for one in singles}
    assert change.micro_batch == 1 and change.config["gradient_accumulation_steps"] == 2


def test_wishes_about_experts_and_times(ds_plan):
    code, told = ds_plan("--imbalance", "0.5")
    assert code == 2 and "imbalance is 0.5: the busiest rank receives 1 or more times the rows of the mean" in told
    assert ds_plan("--imbalance", "2", "--measure")[0] == 0


def test_json_with_a_search(ds_plan):
    code, told = ds_plan("--world", "2", "--memory", "90MB", "--json", "--search")
    made = json.loads(told[told.index("{") :])
    assert code == (0 if made["fits"] else 1) and made["world"] == 2
    assert 0 < len(made["search"]) <= 10
    assert all(row["peak_bytes"] <= 90e6 for row in made["search"])
    assert all(row["config"]["optimizer"] == CONFIG["optimizer"] for row in made["search"])


def test_a_search_chooses_the_number_of_stages(ds_plan):
    code, told = ds_plan("--world", "2", "--json", "--search", model="stages", sample="pair")
    made = json.loads(told[told.index("{") :])
    assert code == 0 and [row["rank"] for row in made["ranks"]] == [0, 1] and "bubble" in made["ranks"][0]["seconds"]
    settings = [row["settings"] for row in made["search"]]
    assert any("2 pipeline stages" in one for one in settings) and any("1 pipeline stages" in one for one in settings)
    for row in made["search"]:  # the samples of a step are at least those of the configuration
        copies, config = 1 if "2 pipeline stages" in row["settings"] else 2, row["config"]
        samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * copies
        assert samples >= 2 * 2 * CONFIG["train_micro_batch_size_per_gpu"]


def test_a_plan_beside_a_step_log(ds_plan, tmp_path):
    phases = {"forward": 0.25, "backward": 0.5, "optimizer": 0.125, "communication": 0.0, "gathers": 0.0625}
    lines = [{"kind": "step", "step": step, "wall": 1.0, "phases": phases} for step in range(1, 21)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, told = ds_plan("--against", str(tmp_path / "run.jsonl"))
    assert code == 0 and "forward" in told and "measured     250.00 ms" in told and "measured      62.50 ms" in told
    assert "whole step" in told and "measured    1000.00 ms" in told
    (tmp_path / "run.jsonl").write_text("")
    assert "there is no step in this file" in ds_plan("--against", str(tmp_path / "run.jsonl"))[1]


@pytest.mark.parametrize(
    "words, given, told",
    [
        (["--memory", "80"], {}, "write a number and a unit, such as 80GB"),
        (["--world", "5", "--nodes", "2"], {}, "cannot be spread evenly over --nodes 2"),
        ([], {"model": "other"}, "has no function 'other'; it has make, pair, sample, stages, wide"),
        ([], {"sample": "wide"}, "RuntimeError"),
        ([], {"config": "missing.json"}, "missing.json"),
    ],
)
def test_wrong_arguments_are_one_sentence(ds_plan, words, given, told):
    code, text = ds_plan(*words, **given)
    assert code == 2 and told in text


def test_a_machine_file_of_another_version(ds_plan, tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps({**MACHINE, "version": 2}))
    code, told = ds_plan()
    assert code == 2 and "of version 2" in told and "ds_plan --profile-machine" in told


def test_a_folder_without_a_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path / "config.json"), "--model", "/nowhere"]) == 2
    assert "neither FILE.py:function nor a folder" in capsys.readouterr().err


TRANSFORMERS = """
import os, sys, types

class AutoConfig:
    @classmethod
    def from_pretrained(cls, folder):
        return cls()

class Mapping(dict):
    def __contains__(self, kind):
        return kind is AutoConfig

    def __getitem__(self, kind):
        import modeling_toy
        return modeling_toy.Toy

class AutoModelForCausalLM:
    _model_mapping = Mapping()

    @classmethod
    def from_config(cls, config):
        return cls._model_mapping[type(config)]()
"""
MODELING = """
import os
import torch

def note(word):
    with open(os.path.join(os.path.dirname(__file__), word), "a") as file:
        file.write(f"{os.getpid()}\\n")

note("imported")

class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        note("made")
        self.embed = torch.nn.Embedding(8, 4)

    def forward(self, input_ids, labels, use_cache):
        return self.embed(input_ids).sum()
"""


def test_a_model_of_transformers_is_imported_once_and_made_by_each_planned_rank(tmp_path, monkeypatch):
    """The program imports it, and its processes find it there."""
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    (tmp_path / "modeling_toy.py").write_text(MODELING)
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("transformers", "modeling_toy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    given = [str(tmp_path / "config.json"), "--model", str(tmp_path), "--machine", str(tmp_path / "machine.json")]
    try:
        assert main([*given, "--world", "4", "--memory", "1GB"]) == 0
    finally:
        for name in ("transformers", "modeling_toy"):
            sys.modules.pop(name, None)
    imported, made = ((tmp_path / name).read_text().split() for name in ("imported", "made"))
    assert imported == [str(os.getpid())] and len(made) == 2 and imported[0] not in made
