"""The program ``ds_plan``."""

import json
import os
import sys
import types

import pytest
import torch

import toy_transformers
from deepspeed.planner import Machine
from deepspeed.planner.cli import _Job, main
from deepspeed.planner.search import Search, Split

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

class Experts(torch.nn.Module):
    def __init__(self, ep_size):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = torch.nn.Linear(1024, 64)
        self.experts = MoE(64, torch.nn.Linear(64, 64), num_experts=4, ep_size=ep_size)

    def forward(self, x):
        return self.experts(self.first(x))[0].sum()

def experts(ep_size=1):
    return Experts(ep_size)
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
    made = json.loads(ds_plan("--world", "4", "--json")[1])
    flops = 2 * 3 * 4 * 1024**2 * 8 * 2  # of 4 layers and 2 micro-batches; the first layer's input has no gradient
    assert made["mfu"] == pytest.approx(made["ranks"][0]["flops"] / made["seconds"] / 1e12)
    assert made["ranks"][0]["flops"] == pytest.approx(flops * 11 / 12, rel=0.01)
    assert f"  {made['mfu']:.1%} of the peak flops of the devices (MFU)" in told


def test_a_job_that_does_not_and_the_cheapest_change(ds_plan):
    code, told = ds_plan("--world", "4", "--memory", "55MB")
    assert code == 1 and "needs more than" in told
    assert "cheapest change that fits: zero_optimization.stage" in told


def test_a_job_that_nothing_makes_fit(ds_plan):
    code, told = ds_plan("--world", "1", "--memory", "1MB")
    assert code == 1 and "no change makes it fit" in told


def search_of(model, config, world, sample, memory=None):
    machine = Machine(**{key: value for key, value in MACHINE.items() if key != "version"})
    return Search(model, config, world, memory, sample, machine, False)


def test_ranks_that_share_sequences():
    """The step keeps its number of samples, and each rank has half of each sequence."""
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 2, "sequence_parallel": {"chunk": 0}}

    def inputs(rows):
        ids = torch.zeros(rows, 64, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    with toy_transformers.installed():
        search = search_of(lambda recompute: toy_transformers.ToyForCausalLM(), config, 4, inputs)
        whole, half, third = (search.planned(search.candidate(split=Split(sequence=size))) for size in (None, 2, 3))
    verbs = [{verb for verb, _ in one.plan.fullest.calls} for one in (half, whole)]
    assert "all_to_all" in verbs[0] - verbs[1]
    assert half.words == "zero_optimization.stage 0, micro-batch 2 x 4, 2 ranks of a sequence" and third.plan is None
    assert half.config["sequence_parallel"] == {"chunk": 0, "size": 2} and "cut into 3 equal parts" in third.why
    for one in (half, whole):
        assert one.samples_per_second * one.plan.seconds == pytest.approx(2 * 2 * 4)
    assert half.plan.peak_bytes < whole.plan.peak_bytes


def test_what_a_search_can_split(ds_plan, tmp_path):
    def splits(model, config, world=12, **machine):
        given = types.SimpleNamespace(
            model=f"{tmp_path}/model.py:{model}", sample=f"{tmp_path}/model.py:sample", world=world
        )
        rates = {**{key: value for key, value in MACHINE.items() if key != "version"}, **machine}
        return _Job(given, Machine(**rates)).splits(config)

    assert splits("make", CONFIG) == [Split()]
    assert splits("stages", CONFIG) == [Split(num_stages=size) for size in (1, 2, 3, 4, 6, 12)]
    assert splits("experts", CONFIG, ranks_of_host=4) == [Split(ep_size=size) for size in (1, 2, 3, 4)]
    unchanged = {**CONFIG, "expert_parallel": {"enabled": True}, "sequence_parallel_size": 2}
    found = splits("make", unchanged, 4)
    assert found == [Split(autoep_size=of, sequence=size) for of in (1, 2, 4) for size in (1, None, 4)]


def test_a_search_chooses_the_ranks_of_experts(ds_plan):
    code, told = ds_plan("--world", "2", "--json", "--search", model="experts")
    made = json.loads(told[told.index("{") :])
    settings = [row["settings"] for row in made["search"]]
    assert code == 0 and any("2 ranks of the experts" in one for one in settings)


@pytest.mark.slow
def test_a_combination_where_no_single_change_is_enough():
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": CONFIG["optimizer"]}

    def search(memory):
        def model(recompute):
            return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))

        return search_of(model, config, 2, lambda rows: torch.zeros(rows, 1024, 512), memory)

    every = search(None)
    singles = every.single_changes
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


def test_the_timeline_of_a_step(ds_plan, tmp_path):
    """Its rows add up to the times of the plan, and each call has the time for which the step waited for it."""
    zero = {"stage": 2, "reduce_bucket_size": 1 << 20}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    code, told = ds_plan("--world", "4", "--json", "--timeline", str(tmp_path / "step.json"))
    made, rank = json.loads((tmp_path / "step.json").read_text()), json.loads(told)["ranks"][0]
    assert code == 0 and "timeline" not in rank
    names, rows = {}, {}
    for event in made["traceEvents"]:
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            rows.setdefault((event["pid"], names[event["pid"], event["tid"]]), []).append(event)
    assert {pid for pid, _ in rows} == {0, 3}
    rows = {lane: found for (pid, lane), found in rows.items() if pid == 0}
    calls = [row for lane, found in rows.items() if lane.startswith("calls: ") for row in found]
    assert sum(row["args"]["exposed_us"] for row in calls) == pytest.approx(1e6 * rank["seconds"]["communication"])
    assert any(row["name"].startswith("reduce_scatter of ") and row["args"]["phase"] == "backward" for row in calls)
    numbers = [row for row in rows["host"] if row["name"] == "exchange of numbers"]
    collectives = sum(counts["collectives"] for counts in rank["counts"].values())
    assert numbers and len(calls) == collectives - 2, "hosts exchange numbers twice"
    ends = [row["ts"] + row["dur"] for row in rows["compute"]]
    assert all(end <= row["ts"] + 1e-3 for end, row in zip(ends, rows["compute"][1:])), "one after the other"
    assert {"aten::addmm", "move_all"} <= {row["name"] for row in rows["compute"]}
    assert any(row["name"] == "norm" and row["args"]["phase"] == "step" for row in rows["host"])
    assert ds_plan("--timeline", str(tmp_path / "missing" / "step.json"))[0] == 2


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
        ([], {"model": "other"}, "has no function 'other'; it has Experts, experts, make, pair, sample, stages, wide"),
        ([], {"sample": "wide"}, "with the sample torch.float32[8, 7] the forward of the model raises RuntimeError: "),
        ([], {"config": "missing.json"}, "missing.json"),
    ],
)
def test_wrong_arguments_are_one_sentence(ds_plan, words, given, told):
    code, text = ds_plan(*words, **given)
    assert code == 2 and told in text and len(text.splitlines()) == 1


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

    def forward(self, input_ids, labels, position_ids, use_cache):
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


def test_a_profile_measures_the_drive_of_the_configuration(tmp_path, capsys, monkeypatch):
    """Through the launcher, on two ranks of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "states")}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    path = tmp_path / "machine.json"
    assert main([str(tmp_path / "config.json"), "--profile-machine", "--machine", str(path)]) == 0
    found = Machine.read(path)
    assert capsys.readouterr().out.startswith(str(path)) and found.name.endswith("of 2 ranks")
    assert min(found.flops["float32"], found.memory, found.inside[1], found.host_step, found.file) > 1e6
