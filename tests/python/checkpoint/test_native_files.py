"""Names and files of the native format, without an engine."""

import json
import os
from unittest import mock

import pytest
import torch

from deepspeed._native import _C
from deepspeed.checkpoint.layouts import names, saved_native
from deepspeed.checkpoint.layouts.saved_native import NativeState
from deepspeed.checkpoint.layouts.saved_state import Range, SavedState
from deepspeed.checkpoint.save.frozen_files import Digest, FrozenFile
from deepspeed.checkpoint.write import verify
from deepspeed.checkpoint.write.file_writer import PreparedSafetensors
from refusals import refused


@pytest.mark.parametrize(
    "kind, name, offset, key",
    [
        ("fp32", "a.weight", None, "fp32/a.weight"),
        ("exp_avg", "a.weight", 128, "exp_avg/a.weight@128"),
        ("fp32", "a@5", None, "fp32/a@5@0"),
        ("fp32", "a@5", 7, "fp32/a@5@7"),
        ("fp32", "a/b", 7, "fp32/a/b@7"),
        ("values", "client_state.me@home", None, "values/client_state.me@home"),
    ],
)
def test_keys_come_back(kind, name, offset, key):
    assert names.key_of(kind, name, offset) == key
    assert names.parsed(key) == (kind, name, 0 if key.endswith("@0") else offset)


@pytest.mark.parametrize("name", ["checkpoint.json", "checkpoint_mp_rank_01.json", "rank_00012.json",
                                  "rank_00000.safetensors", "frozen_0a1b.safetensors"])  # fmt: skip
def test_files_of_the_format(name):
    assert names.is_native_file(name)
    assert not names.is_native_file(f"my_{name}") and not names.is_native_file(f"{name}.bak")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_share_by_bytes(count):
    sizes = [7, 100, 3, 50, 50, 0, 90, 1, 1, 1, 80, 20, 60, 33]
    taken = _C.writers_of(sizes, count)
    assert taken == sorted(taken) and set(taken) <= set(range(count))
    loads = [sum(size for size, rank in zip(sizes, taken) if rank == n) for n in range(count)]
    assert sum(loads) == sum(sizes) and max(loads) <= sum(sizes) / count + max(sizes)
    assert _C.writers_of([], count) == [] and _C.writers_of([0, 0], count) == [0, 0]


def test_a_digest_sees_every_change_and_hashes_once(monkeypatch):
    value = torch.arange(6.0).reshape(2, 3)
    digest, tensors = Digest(), {"module/a": value, "module/b": torch.ones(2)}
    first = digest.of(tensors)
    hashed = []
    monkeypatch.setattr("hashlib.sha256", lambda *_: hashed.append(1))
    assert digest.of({"module/b": torch.ones(2), "module/a": value.clone()}) == first
    assert digest.of({"module/a": value.t().contiguous().t(), "module/b": torch.ones(2)}) == first  # other strides
    assert not hashed
    monkeypatch.undo()
    before = value._version
    value.data[1, 2] += 1  # no version counter shows it
    assert value._version == before
    changed = digest.of(tensors)
    others = [Digest().of(tensors, "other"), Digest().of({"module/c": value, "module/b": torch.ones(2)}),
              Digest().of({"module/a": value.reshape(3, 2), "module/b": torch.ones(2)})]  # fmt: skip
    assert len({first, changed, *others}) == 5


def tag_with(parent, tag, tensors, name):
    folder = parent / tag
    folder.mkdir()
    record = PreparedSafetensors(tensors, {}).write(folder / name)
    (folder / verify.NAME).write_text(verify.text_of({"saved_at": 1.0}, {name: record}))
    return folder / name


def test_a_frozen_file_is_linked_or_written(tmp_path, monkeypatch):
    tensors, name = {"module/a": torch.arange(2048.0)}, "frozen_00.safetensors"
    old = tag_with(tmp_path, "old", tensors, name)
    staging = tmp_path / ".new.saving"
    staging.mkdir()
    path, sound = staging / name, set()

    record = FrozenFile(tensors, {}, sound).write(path)
    again = PreparedSafetensors(tensors, {}).write(tmp_path / "x")
    assert os.path.samefile(path, old) and record["crc32"] == again["crc32"]
    assert len(sound) == 1
    FrozenFile(tensors, {}, sound).write(path)  # once more: the link goes, it is not written through
    assert os.path.samefile(path, old)

    with monkeypatch.context() as patch:  # a file system without hard links
        patch.setattr(os, "link", mock.Mock(side_effect=OSError(1, "not permitted")))
        before = old.read_bytes()
        assert FrozenFile(tensors, {}, sound).write(path) == record
        assert not os.path.samefile(path, old) and old.read_bytes() == before == path.read_bytes()

    damaged = bytearray(old.read_bytes())
    damaged[-1] ^= 1
    old.write_bytes(bytes(damaged))
    FrozenFile(tensors, {}, set()).write(path)
    assert not os.path.samefile(path, old) and path.read_bytes() != old.read_bytes()


def test_damaged_and_newer_json_is_named(tmp_path):
    path = tmp_path / "checkpoint.json"
    refused(FileNotFoundError, "checkpoint.json.*incomplete", saved_native.read_json, str(path))
    for text, words in (
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": "x", "version": 1}', "of no checkpoint of this format"),
        ('{"format": "deepspeed-native", "version": 99}', "version 99.*update"),
        ("[" * 100000, "is damaged"),
    ):
        path.write_text(text)
        refused(RuntimeError, words, saved_native.read_json, str(path))


def small_folder(folder, about_rank=None, tensors=None):
    """A checkpoint of one parameter, written by hand."""
    common = {"format": "deepspeed-native", "version": 1}
    about = {
        "zero_stage": 1, "mp_rank": 0, "ranks": [0],
        "parameters": {"w": {"shape": [2, 3], "dtype": "float32", "trained": True, "step": 4}},
        "tied": {}, "groups": [{"names": ["w"], "options": {"lr": 0.5, "betas": {"$tuple": [0.9, 0.95]}}}],
        "optimizer": {"overflow": False}, "module": {"keys": ["w"], "buffers": [], "values": {}, "metadata": {}},
        "engine": {"global_steps": 4, "dp_world_size": 1}, "ds_config": {}, "client_state": {},
    }  # fmt: skip
    rank = {"run": {}, "scalars": {}, "strides": {}, "files": ["rank_00000.safetensors"], **(about_rank or {})}
    (folder / "checkpoint.json").write_text(json.dumps({**common, **about}))
    (folder / "rank_00000.json").write_text(json.dumps({**common, **rank}))
    values = torch.arange(6.0)
    pieces = tensors or {"fp32/w@0": values[:4], "fp32/w@4": values[4:], "exp_avg/w": values.reshape(2, 3) + 1}
    PreparedSafetensors(pieces, {}).write(folder / "rank_00000.safetensors")
    return NativeState(str(folder))


def whole(saved, kind):
    return torch.cat([piece.read_range(0, numel) for _, numel, piece in saved.pieces("w", kind)])


def test_pieces_and_hyperparameters(tmp_path):
    saved = small_folder(tmp_path)
    assert saved.shapes == {"w": torch.Size([2, 3])} and saved.state_names() == ["exp_avg"]
    assert whole(saved, "fp32").tolist() == list(range(6))
    assert whole(saved, "exp_avg").tolist() == [n + 1 for n in range(6)]
    assert saved.param_groups == [{"lr": 0.5, "betas": (0.9, 0.95), "names": ["w"]}] and saved.step("w") == 4


def test_pieces_in_the_order_of_memory(tmp_path):
    flat = torch.arange(6.0)  # a parameter whose columns lie one after the other
    saved = small_folder(tmp_path, {"strides": {"w": [1, 2]}}, {"fp32/w@0": flat[:4], "fp32/w@4": flat[4:]})
    assert whole(saved, "fp32").tolist() == flat.as_strided((2, 3), (1, 2)).reshape(-1).tolist()


def test_a_name_of_a_file_does_not_leave_the_folder(tmp_path):
    (tmp_path / "t").mkdir()
    PreparedSafetensors({"fp32/w": torch.zeros(2, 3)}, {}).write(tmp_path / "elsewhere.safetensors")
    refused(
        ValueError,
        r"rank_00000\.json has the name '\.\./elsewhere\.safetensors'",
        small_folder(tmp_path / "t", {"files": ["../elsewhere.safetensors"]}).pieces,
        "w",
        "fp32",
    )


def test_the_safetensors_package_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    small_folder(tmp_path)
    with safetensors.safe_open(str(tmp_path / "rank_00000.safetensors"), framework="pt") as file:
        assert sorted(file.keys()) == ["exp_avg/w", "fp32/w@0", "fp32/w@4"]
        assert file.get_tensor("exp_avg/w").tolist() == [[1, 2, 3], [4, 5, 6]]


def test_elements_that_are_not_there_are_counted():
    saved, pieces = SavedState(), [(0, 2, Range(torch.ones(3), 1)), (3, 2, Range(torch.ones(1)))]
    target = torch.zeros(2)
    saved.read_into(target, pieces, 0, "'w'")
    assert target.tolist() == [1, 1]
    words = "the saved optimizer: 'w' has 2 of the 3 elements from 0 on; files are missing"
    for wanted in (3, torch.zeros(3)):  # a number: nothing is read
        refused(ValueError, words, saved.read_into, wanted, pieces, 0, "'w'")
    refused(IndexError, "of a tensor of 1 elements", saved.read_into, 2, pieces, 3, "'w'")
