"""Tensors that lie in several pieces are saved as if they were whole."""

import pytest
import torch

from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.write import file_writer
from deepspeed.checkpoint.write.file_writer import prepare
from deepspeed.checkpoint.write.snapshot import HostCache, Snapshot
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces


def made():
    source = torch.randn(100)
    parts = [(0, source[10:40]), (30, source[50:51]), (33, source[90:])]
    expected = torch.zeros(45)
    for at, part in parts:
        expected[at : at + part.numel()] = part
    return source, TensorOfPieces(45, torch.float32, parts), expected


@pytest.mark.parametrize("copied", [False, True])
def test_saved_as_one_tensor(copied, tmp_path):
    source, tensor, expected = made()
    prepared = prepare("x.pt", {"a": [tensor], "same": tensor, "whole": source})
    if copied:
        prepared.sources = Snapshot(HostCache()).add(prepared.sources).sources
        saved = source.clone()
        source.zero_()
        source = saved
    record = prepared.write(tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    assert torch.equal(loaded["a"][0], expected) and torch.equal(loaded["whole"], source)
    assert loaded["same"].data_ptr() == loaded["a"][0].data_ptr()
    assert [(t["name"], t["shape"]) for t in record["tensors"]] == [("a[0]", [45]), ("whole", [100])]


def test_the_bytes_are_those_of_the_whole_tensor(tmp_path):
    _, tensor, expected = made()
    first = file_writer.PreparedTorch({"a": tensor}).write(tmp_path / "a.pt")
    second = file_writer.PreparedTorch({"a": expected}).write(tmp_path / "b.pt")
    assert first["crc32"] == second["crc32"] and first["tensors"] == second["tensors"]


def test_others_get_it_whole():
    _, tensor, expected = made()
    assert torch.equal(storage.compact({"a": [tensor]})["a"][0], expected)
    assert torch.equal(TensorOfPieces(3, torch.float32, []).whole(), torch.zeros(3))
