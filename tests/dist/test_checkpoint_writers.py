"""The choice of the engine that writes a checkpoint; load_checkpoint reads the files of each."""

import os
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.engines import ENGINES
from deepspeed.checkpoint.engines.base import engine_name, make_engine
from deepspeed.checkpoint.write import verify
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.registry import UnknownNameError
from deepspeed.runtime.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from engine_models import net_engine, saving_engine
from harness import run_ranks
from logs import logged
from refusals import refused
from runs import raised
from test_checkpoint_crash import mark, marks, save_marked


def resolved(**sections):
    return DeepSpeedConfig({"train_batch_size": 1, **sections})


@pytest.mark.parametrize(
    "sections, name",
    [
        ({}, "fast"),
        ({"checkpoint": {"writer": {"type": "FAST"}}}, "fast"),
        ({"checkpoint": {"writer": {"type": "python"}}}, "python"),
        ({"checkpoint": {"writer": {"type": "MOCK"}}}, "mock"),
        ({"checkpoint": {"async": True}}, "async"),
        ({"checkpoint": {"writer": {"decoupled": True}}}, "async"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, "datastates"),
        ({"datastates_ckpt": {}, "checkpoint": {"async": True}}, "datastates"),
        ({"checkpoint": {"engine": "torch", "async": True}}, "torch"),
    ],
)
def test_the_engine_that_a_configuration_asks_for(sections, name):
    made = resolved(**sections)
    assert engine_name(made) == name
    assert type(make_engine(made)) is ENGINES.get(name)


def test_sizes_and_options_arrive():
    made = make_engine(resolved(checkpoint={"async": True, "host_cache_size": 0.5, "writer": {"io_buffer_size": 8192}}))
    assert made.cache.limit_bytes == 1 << 29 and made.options.io_buffer_size == 8192 and made.options.double
    made = make_engine(resolved(checkpoint={"host_cache_size": 3}, datastates_ckpt={}))
    assert made.cache.limit_bytes == 3 << 30
    made = make_engine(resolved(checkpoint={"host_cache_size": 3}, datastates_ckpt={"host_cache_size": 4}))
    assert made.cache.limit_bytes == 4 << 30


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"checkpoint": {"async": True, "writer": {"type": "PYTHON"}}}, "checkpoint.async"),
        ({"checkpoint": {"writer": {"type": "MOCK", "decoupled": True}}}, "checkpoint.writer.decoupled"),
        ({"datastates_ckpt": {}, "checkpoint": {"writer": {"type": "PYTHON"}}}, "datastates_ckpt"),
        ({"checkpoint": {"writer": {"type": "PYTHON", "format": "safetensors"}}}, "torch.save writes no safetensors"),
        ({"checkpoint": {"checkpoint_serialization": False, "writer": {"data_parallel": "SOCKET"}}}, "only zip"),
        ({"checkpoint": {"writer": {"type": "PYTHON", "data_parallel": "SOCKET"}}}, "with one rank"),
        ({"nebula": {"enabled": True}}, "nebula"),
    ],
)
def test_what_does_not_go_together_is_refused(sections, words):
    refused(DeepSpeedConfigError, "(?i)" + words.replace(".", r"\."), resolved, **sections)


def test_an_unknown_engine_lists_the_known_ones():
    refused(
        UnknownNameError,
        "no checkpoint engine named 'fats'.*async.*Did you mean 'fast'",
        make_engine,
        resolved(checkpoint={"engine": "fats"}),
    )


class Incomplete:
    def __init__(self, config_params=None):
        pass

    def save(self, state_dict, path):
        pass


def test_what_is_no_engine_is_refused(monkeypatch):
    monkeypatch.setattr(ENGINES, "get", lambda name: Incomplete)
    refused(TypeError, "has no create, load, commit", make_engine, resolved())


def test_an_entry_point_joins(monkeypatch):
    point = metadata.EntryPoint("someones", f"{__name__}:Someones", "deepspeed.checkpoint_engines")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(ENGINES, "_plugins_read", False)
    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))
    made = make_engine(resolved(checkpoint={"engine": "someones"}))
    assert type(made).__name__ == "Someones" and made.section.keep_last is None


class Someones:
    """The four published methods, and nothing of ours."""

    def __init__(self, config_params=None):
        self.section = config_params
        self.calls, self.waiting = [], {}

    def create(self, info):
        self.calls.append(("create", info.tag))

    def save(self, state_dict, path):
        self.calls.append(("save", os.path.basename(path)))
        self.waiting[path] = state_dict

    def load(self, path, map_location=None):
        return torch.load(path, map_location=map_location)

    def commit(self, info):
        self.calls.append(("commit", info.tag))
        for path, state_dict in self.waiting.items():
            torch.save(state_dict, path)
        self.waiting = {}
        return True


class Lazy(Someones):
    def commit(self, info):
        return True


class Refusing(Someones):
    def commit(self, info):
        super().commit(info)
        return False


def body_assigned(rank, world, folder, kind, stage):
    engine = net_engine(world, stage)
    save_marked(engine, 1, folder, tag="old")
    mark(engine, 2)
    engine.checkpoint_engine = kind()
    error = raised(engine.save_checkpoint, folder, tag="t")
    engine.load_checkpoint(folder)
    return engine.checkpoint_engine.calls, marks(engine), error


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_engine_of_others_takes_part(stage, tmp_path):
    for rank, (calls, value, error) in enumerate(run_ranks(2, body_assigned, str(tmp_path), Someones, stage)):
        assert error is None and value == [2.0]
        assert calls[0] == ("create", "t") and calls[-1] == ("commit", "t")
        assert [name for what, name in calls if what == "save" and f"rank_{rank:05d}" in name]
    assert verify.verify_folder(str(tmp_path / "t")) == []
    views = [name for name in os.listdir(tmp_path / "t") if name.startswith("zero_pp_rank_0") and "optim" in name]
    for name in views:  # no view drags the flat buffer into the file
        assert os.path.getsize(tmp_path / "t" / name) < 60_000


@pytest.mark.parametrize("kind, words", [(Lazy, "has left no file"), (Refusing, "answered False to commit")])
def test_an_engine_that_does_not_keep_its_word(kind, words, tmp_path):
    for _, value, (error, text) in run_ranks(2, body_assigned, str(tmp_path), kind, 1):
        assert error == "RuntimeError"
        assert words in text and kind.__name__ in text and "rank 0" in text and "is not saved" in text
        assert value == [1.0]


def body_writer(rank, world, folder, writer, stage):
    engine = saving_engine(world, stage, writer=writer)
    mark(engine, 5)
    with logged() as lines:
        answer = engine.save_checkpoint(folder, tag="t")
    mark(engine, 6)
    dist.barrier()
    if not os.path.exists(folder):
        return answer, lines, None
    engine.load_checkpoint(folder)
    return answer, lines, marks(engine)


@pytest.mark.parametrize(
    "writer", [{"type": "PYTHON"}, {"type": "FAST", "io_buffer_size": 4096, "io_buffer_double": False}]
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_writers_write_what_loads(writer, stage, tmp_path):
    for answer, _, value in run_ranks(2, body_writer, str(tmp_path / "out"), writer, stage):
        assert answer is True and value == [5.0]
    assert verify.verify_folder(str(tmp_path / "out" / "t")) == []
    for name, record in verify.read(str(tmp_path / "out" / "t"))["files"].items():
        assert (tmp_path / "out" / "t" / name).stat().st_size == record["bytes"]


def test_the_mock_does_everything_but_write(tmp_path):
    results = run_ranks(2, body_writer, str(tmp_path / "out"), {"type": "MOCK"}, 1)
    assert all(answer is True and value is None for answer, _, value in results)
    assert any("writes nothing" in line for line in results[0][1])
    assert os.listdir(tmp_path) == []


def test_statistics_and_the_multiplier(tmp_path):
    (result,) = run_ranks(1, body_writer, str(tmp_path / "out"), {"show_statistics": True, "io_multiplier": 3}, 1)
    lines = [line for line in result[1] if "checkpoint.writer: " in line and "GB/s" in line]
    facts = verify.read(str(tmp_path / "out" / "t"))
    assert len(lines) == len(facts["files"])
    for name, record in facts["files"].items():
        (line,) = (line for line in lines if name in line)
        assert f"{3 * record['bytes'] / 1e9:.3f} GB" in line
    assert verify.verify_folder(str(tmp_path / "out" / "t")) == []


@pytest.mark.parametrize(
    "kind", [TorchCheckpointEngine, FastCheckpointEngine, DecoupledCheckpointEngine, DataStatesCheckpointEngine]
)
def test_the_published_four_methods(kind, tmp_path):
    engine = kind(None)
    assert isinstance(engine, CheckpointEngine)
    engine.makedirs(str(tmp_path / "t"), exist_ok=True)
    engine.create("t")
    state = {"weight": torch.arange(5000.0), "nested": [{"step": 3}]}
    path = str(tmp_path / "t" / "state.pt")
    engine.save(state, path)
    state["weight"].zero_()
    assert engine.commit("t") is True
    for loaded in (engine.load(path), engine.load(path, map_location="cpu"), torch.load(path)):
        assert torch.equal(loaded["weight"], torch.arange(5000.0)) and loaded["nested"] == [{"step": 3}]
    assert engine.is_decoupled() == (kind in (DecoupledCheckpointEngine, DataStatesCheckpointEngine))
    engine.cleanup()


def test_commit_tells_what_went_wrong(tmp_path):
    engine = DecoupledCheckpointEngine()
    engine.create("t")
    engine.save({"x": torch.ones(3)}, str(tmp_path / "no folder" / "x.pt"))
    refused(OSError, "no folder", engine.commit, "t")
    assert engine.commit("t") is True
