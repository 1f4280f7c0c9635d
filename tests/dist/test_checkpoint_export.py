"""Weights out of a run: consolidated by the script in the folder, saved in 16 bit, handed over whole."""

import os
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

from claims import batches_of
from deepspeed.formats import weight_files
from deepspeed.formats.safetensors_file import read_safetensors
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engine_models import make_net
from harness import on_ranks, run_ranks
from refusals import refused
from runs import engine_of, moments, together, weights
from test_checkpoint import PRECISIONS, run, trained
from test_zero_checkpoint import make_engine


def masters(engine):
    """fp32 values by name: masters of what is trained, the parameters themselves otherwise."""
    trained = {name: master.clone() for name, (master,) in moments(engine, ()).items()}
    return {**{name: value.float() for name, value in weights(engine).items()}, **trained}


def body_save(rank, world, folder, stage, precision):
    engine = trained(make_engine(world, stage, precision), 2)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, tag="lean", save_latest=False, exclude_frozen_parameters=True)
    return masters(engine)


@pytest.mark.sample("values")
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_script_in_the_folder_gives_the_masters(stage, world, precision, tmp_path):
    expected = run_ranks(world, body_save, str(tmp_path), stage, PRECISIONS[precision])[0]
    expected["tied.weight"] = expected["first.weight"]
    script = tmp_path / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    out = subprocess.run(
        [sys.executable, "-I", str(script), str(tmp_path), str(tmp_path / "out")],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert set(found) == set(make_net().state_dict())
    assert found["tied.weight"] is found["first.weight"]
    assert torch.equal(found["count"], torch.arange(3.0))
    for name, value in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value), name
    make_net().load_state_dict(found, strict=True)
    for tag, exclude in (("lean", False), (None, True)):
        lean = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag, exclude_frozen_parameters=exclude)
        assert set(found) - set(lean) == {"frozen.weight"}
        assert all(torch.equal(value, found[name]) for name, value in lean.items())


def body_16bit(rank, world, folder, stage, precision):
    engine = trained(make_engine(world, stage, precision), 1)
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "model.safetensors", exclude_frozen_parameters=True) is True
    refused(ValueError, "needs a directory", engine.save_16bit_model, "")
    run(engine, batches_of(engine), 1)  # and the run goes on
    return None


def body_weights(rank, world, folder, stage, precision):
    engine = trained(make_engine(world, stage, precision), 1)
    return weights(engine), engine._zero3_consolidated_16bit_state_dict() if stage == 3 else None


@pytest.mark.sample("values")
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16bit_model(stage, precision, tmp_path):
    run_ranks(2, body_16bit, str(tmp_path), stage, PRECISIONS[precision])
    expected = run_ranks(2, body_weights, str(tmp_path), stage, PRECISIONS[precision])[0][0]
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "pytorch_model.bin"]
    found = torch.load(tmp_path / "pytorch_model.bin")
    assert list(found) == list(make_net().state_dict())
    assert found["tied.weight"] is found["first.weight"]
    assert found._metadata == make_net().state_dict()._metadata
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    safe = {name: value.read() for name, value in read_safetensors(tmp_path / "model.safetensors")[0].items()}
    assert set(found) - set(safe) == {"frozen.weight"}
    assert all(value.dtype == found[name].dtype and torch.equal(value, found[name]) for name, value in safe.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_consolidated_state_dict(precision, tmp_path):
    (expected, whole), (_, nothing) = run_ranks(2, body_weights, str(tmp_path), 3, PRECISIONS[precision])
    assert nothing is None and list(whole) == list(make_net().state_dict())
    assert whole["tied.weight"].data_ptr() == whole["first.weight"].data_ptr()
    for name, value in expected.items():
        assert whole[name].dtype == value.dtype and torch.equal(whole[name], value), name


@on_ranks(4)
def test_each_slice_of_mics_comes_from_the_first_group_of_ranks(rank, world, tmp_path, folder):
    engine = trained(make_engine(world, 3, PRECISIONS["bf16"], mics_shard_size=2), 1)
    assert engine.save_16bit_model(folder) is True
    (expected, whole), *others = together(weights(engine), engine._zero3_consolidated_16bit_state_dict())
    assert [state for _, state in others] == [None] * 3
    saved = torch.load(tmp_path / "pytorch_model.bin")
    for name, value in expected.items():
        assert torch.equal(saved[name], value) and torch.equal(whole[name], value), name


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_nothing_to_consolidate(rank, world, stage):
    engine = make_engine(world, stage, {})
    for function in (engine._zero3_consolidated_16bit_state_dict, engine._consolidated_16bit_state_dict):
        refused(ValueError, None, function, exclude_frozen_parameters=True)


@pytest.mark.sample("values")
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_full_disk_on_rank_0_is_everybodys_error(rank, world, stage, after, tmp_path, folder):
    engine = make_engine(world, stage, {})
    written, chunks = [], weight_files.StoredWeight.chunks

    def failing(self):
        if len(written) == after:
            raise OSError(28, "No space left on device")
        written.append(self)
        yield from chunks(self)

    with mock.patch.object(weight_files.StoredWeight, "chunks", failing), pytest.raises(OSError) as raised:
        engine.save_16bit_model(folder)
    run(engine, batches_of(engine), 1)
    assert engine.save_16bit_model(folder, "after.bin") is True
    said = together(str(raised.value))
    assert said[0] == said[1]
    assert "rank 0" in said[0] and "pytorch_model.bin" in said[0] and "No space left" in said[0]
    assert os.listdir(tmp_path) == ["after.bin"]


class Peak:
    """MB of memory of its own that this process has at most in the meantime. Memory that ranks share does not count:
    the kernel takes its pages away and gives them back as it likes."""

    def __enter__(self):
        self.most = self.first = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ends.set()
        self._thread.join()
        self.grown = self.most - self.first

    def _watch(self):
        while not self._ends.wait(0.002):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


class Deep(torch.nn.Module):
    """24 layers of 8 MB."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 1024, bias=False) for _ in range(24)))


def body_memory(rank, world, folder):
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = engine_of(Deep(), {"train_batch_size": 2, "optimizer": sgd, "zero_optimization": zero})
    engine.save_16bit_model(folder)  # torch 2 imports 170 MB of itself when a file is first written
    with Peak() as peak:
        engine.save_16bit_model(folder)
    return peak.grown


@pytest.mark.slow
def test_16bit_model_of_stage_3_is_never_whole_in_memory(tmp_path):
    for grown in run_ranks(2, body_memory, str(tmp_path), fresh=True):
        assert grown < 64, f"{grown} MB for a model of 192 MB"
    assert (tmp_path / "pytorch_model.bin").stat().st_size > 192 << 20
