"""The files of a run besides checkpoints: outputs that share a path, a full disk, secrets, names that are not UTF-8."""

import glob
import json
import os
import pathlib
import random
import sys
import types

import pytest
import torch

from deepspeed import DeepSpeedConfigError
from deepspeed.config import DeepSpeedConfig
from harness import on_ranks
from logs import logged
from refusals import refused
from runs import engine_of, raised, settings, weights
from sampling import every_case

SECRET = "sEcReT0123456789"


def sections(folder, names):
    """Sections that write files: key -> section, with the paths that ``names`` gives."""
    made = {
        "step_log": {"file": names["step_log"]},
        "report": {"path": names["report"]},
        "trace": {"start_step": 1, "steps": 1, "path": names["trace"]},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": names["flops_profiler"]},
    }
    return {key: section for key, section in made.items() if key in names}


def start(seed=0, **more):
    torch.manual_seed(seed)
    return engine_of(torch.nn.Linear(4, 2), settings(0, 2, optimizer="SGD", **more))


def step(engine):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()


def test_two_keys_on_one_path_are_refused(tmp_path, monkeypatch):
    """Whatever way the path is written; devices are written by many."""
    names, draws = ["step_log", "report", "trace", "flops_profiler"], random.Random(5)
    (tmp_path / "a").mkdir()
    os.symlink(tmp_path / "a", tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    ways = ["{a}/x", "{a}/./x", "{link}/x", "{a}/../a/x", "a/x"]

    def tried(one, other, first, second):
        paths = {name: str(tmp_path / name) for name in names}
        paths |= {one: first, other: second}
        return raised(start, **sections(tmp_path, paths))

    for _ in range(200 if every_case() else 12):
        one, other = draws.sample(names, 2)
        first, second = (draws.choice(ways).format(a=tmp_path / "a", link=tmp_path / "link") for _ in range(2))
        kind, text = tried(one, other, first, second)
        assert kind == "DeepSpeedConfigError" and one in text and other in text and "Name another file" in text
    engine = start(**sections(tmp_path, dict.fromkeys(names, "/dev/null")))
    step(engine)
    refused(ValueError, "both write", engine.trace, 1, _existing(tmp_path, engine))
    tables = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    log = {"file": f"{tmp_path}/job/x.csv"}
    refused(DeepSpeedConfigError, "csv_monitor.output_path", start, step_log=log, **tables)


def _existing(folder, engine):
    """A file that the engine's own step log writes."""
    engine._outputs.paths["step_log.file"] = str(folder / "taken")
    return str(folder / "taken")


@on_ranks(2, init=True)
def test_engines_with_one_configuration_write_beside_each_other(rank, world, tmp_path):
    folder = str(tmp_path)
    names = {"step_log": f"{folder}/s.jsonl", "report": f"{folder}/r.html", "trace": f"{folder}/t.json"}
    more = {key: value for key, value in sections(folder, {**names, "flops_profiler": f"{folder}/f"}).items()}
    more["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "j"}
    more["postmortem"] = {"on": ["nonfinite"], "dir": f"{folder}/pm"}
    with logged() as texts:
        one, other = start(**more), start(seed=1, **more)
    assert sum("another engine of this process writes" in text for text in texts) == 6 * (rank == 0)
    for _ in range(3):
        step(one), step(other)
    one.destroy(), other.destroy()
    third = start(**more)  # the paths are free again
    assert third._outputs.paths["step_log.file"] == f"{folder}/s.jsonl"
    third.destroy()
    if rank == 0:
        assert sorted(os.listdir(folder)) == sorted(
            name for stem, end in (("s", ".jsonl"), ("r", ".html"), ("t", ".json"), ("f", ""), ("j", ""), ("pm", ""))
            for name in (f"{stem}{end}", f"{stem}-2{end}")
        )  # fmt: skip
        for log in ("s.jsonl", "s-2.jsonl"):
            rows = [json.loads(line) for line in open(f"{folder}/{log}")]
            assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3]
        for table in glob.glob(f"{folder}/j*/*.csv"):
            steps = [line.split(",")[0] for line in open(table).read().split()[1:]]
            assert steps == ["4", "8", "12"][-len(steps) :]


@pytest.mark.parametrize("tail", ['{"kind": "step", "step": 2, "wa', "", "\n"])
@on_ranks(1, init=True)
def test_a_run_behind_a_killed_one_has_lines_of_its_own(rank, world, tail, tmp_path):
    path = str(tmp_path / "s.jsonl")
    for seed in (0, 1):
        engine = start(seed, step_log={"file": path})
        step(engine)
        engine.destroy()
        with open(path, "a") as file:
            file.write(tail)
    kinds = []
    for line in filter(str.strip, open(path)):
        try:
            kinds.append(json.loads(line)["kind"])
        except ValueError:
            kinds.append(None)
    broken = [None] * tail.startswith("{")
    assert kinds == ["run", "step", *broken, "run", "step", *broken]


OBSERVERS = {
    "step_log": {"step_log": {"file": "/dev/full"}},
    "trace": {"trace": {"start_step": 2, "steps": 2, "path": "/dev/full"}},
    "report": {"step_log": {"file": "{folder}/s"}, "report": {"path": "/dev/full"}},
    "flops": {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "/dev/full"}},
    "csv": {"csv_monitor": {"enabled": True, "output_path": "{folder}", "job_name": "j"}},
    "tensorboard": {"tensorboard": {"enabled": True, "output_path": "{folder}", "job_name": "j"}},
    "postmortem": {"postmortem": {"on": ["nonfinite"], "dir": "{folder}/pm"}},
}


@pytest.mark.parametrize("observer", OBSERVERS)
@on_ranks(1, init=True)
def test_no_observer_ends_the_training_on_a_full_disk(rank, world, observer, tmp_path):
    given = json.loads(json.dumps(OBSERVERS[observer]).replace("{folder}", str(tmp_path)))
    engine, plain = start(**given), start()
    if "{folder}" in json.dumps(OBSERVERS[observer]) and observer != "report":
        _no_room(engine, observer, tmp_path)
    for _ in range(4):
        step(engine), step(plain)
    if observer == "postmortem":
        for one in (engine, plain):
            one.backward(one(torch.full((2, 4), float("inf"))).sum())
            one.step()
    engine.destroy()
    for name, value in weights(plain).items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(weights(engine)[name])), name


def _no_room(engine, observer, folder):
    """The files of an observer are on a disk without room."""

    def full(*given, **named):
        raise OSError(28, "No space left on device")

    if observer == "csv":
        engine.monitor.csv_monitor._append = full
    elif observer == "tensorboard":
        engine.monitor.tb_monitor.summary_writer.add_scalar = full
    else:
        (folder / "pm").rmdir()
        (folder / "pm").write_text("")  # bundles cannot be made there


@on_ranks(1, init=True)
def test_secrets_stand_nowhere(rank, world, tmp_path):
    class Experiment:
        def __getattr__(self, name):
            return lambda *given, **named: None

    keys = []
    sys.modules["comet_ml"] = types.SimpleNamespace(start=lambda **given: keys.append(given["api_key"]) or Experiment())
    try:
        more = {"comet": {"enabled": True, "api_key": SECRET}, "hub_token": SECRET, "dump_state": True}
        more |= {"monitors": {"mine": {"enabled": False, "password": SECRET}}}
        more |= {"step_log": {"file": f"{tmp_path}/s.jsonl"}, "report": {"path": f"{tmp_path}/r.html"}}
        more |= {"postmortem": {"on": ["nonfinite"], "dir": f"{tmp_path}/pm"}}
        with logged() as texts:
            engine = start(**more)
            for form in ("torch", "safetensors"):
                other = start(checkpoint={"writer": {"format": form}}, comet={"api_key": SECRET})
                step(other)
                other.save_checkpoint(tmp_path / form)
            step(engine)
            engine.save_checkpoint(tmp_path / "ck")
            engine.backward(engine(torch.full((2, 4), float("inf"))).sum())
            engine.step()
            engine.destroy()
    finally:
        del sys.modules["comet_ml"]
    assert keys == [SECRET]  # Comet itself gets it
    assert not [text for text in texts if SECRET in text]
    found = [path for path in pathlib.Path(tmp_path).rglob("*") if path.is_file()]
    assert len(found) > 8 and not [path for path in found if SECRET.encode() in path.read_bytes()]
    assert SECRET not in repr(engine._config.monitor_config) and engine.config["comet"]["api_key"] == SECRET
    with logged() as texts:
        _, text = raised(DeepSpeedConfig, {"train_batch_size": 1, "comet": {"api_key": [SECRET]}})
    assert SECRET not in text + "".join(texts) and 'comet.api_key = "***"' in text


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@on_ranks(1, init=True)
def test_a_folder_whose_name_is_not_utf8(rank, world, form, tmp_path):
    folder = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9"))
    os.mkdir(folder)
    engine = start(checkpoint={"writer": {"format": form}})
    step(engine)
    wanted = weights(engine)
    engine.save_checkpoint(folder, tag="t")
    step(engine)
    engine.load_checkpoint(folder, tag="t")
    assert all(torch.equal(value, wanted[name]) for name, value in weights(engine).items())
    assert engine.save_16bit_model(folder)
    words = r"config: step_log.file is '.*caf\\udce9/s', which has bytes that are not UTF-8"
    refused(DeepSpeedConfigError, words, start, step_log={"file": f"{folder}/s"})
