"""A file that several writers make is the file of one, whatever is in it and wherever it is cut."""

from types import SimpleNamespace

import pytest
import torch

from deepspeed._native import _C
from deepspeed.checkpoint.save import save
from deepspeed.checkpoint.write import file_writer, verify
from deepspeed.checkpoint.write.file_writer import (
    Cuts,
    PreparedStream,
    PreparedTorch,
    SharedTorch,
    WriterOptions,
    complete,
)
from deepspeed.host import cpu
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces
from refusals import refused


def value():
    torch.manual_seed(0)
    big = torch.randn(300, 1000)
    return {
        "big": big,
        "shared": big[10:20],
        "columns": torch.randn(50, 40)[:, 3:17],
        "pieces": TensorOfPieces(5100, torch.float32, [(3, torch.randn(5000)), (5010, torch.randn(77))]),
        "empty": torch.empty(0, 4),
        "half": torch.arange(999).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "text": "x" * 5000,
    }


@pytest.mark.parametrize("count", [1, 2, 3, 8, 400])
def test_the_parts_make_the_file_of_one_writer(count, tmp_path):
    made = value()
    whole = PreparedTorch(made).write(tmp_path / "one.pt")
    prepared = PreparedTorch(made)
    cuts = Cuts(prepared.native.entries(), len(prepared.native.texts), count)
    path, runs = tmp_path / "of_many.pt", []
    for index in reversed(range(count)):  # in any order
        record = SharedTorch(prepared, cuts, index).write(path, WriterOptions(io_buffer_size=1 << 16))
        runs.append([tuple(run) for run in record["part"]])
    record = complete(str(path), prepared, cuts, runs)
    assert path.read_bytes() == (tmp_path / "one.pt").read_bytes()
    assert (record["bytes"], record["crc32"], record["tensors"]) == (whole["bytes"], whole["crc32"], whole["tensors"])
    if count > 1:
        refused(RuntimeError, r"archive/.* in .*of_many\.pt", complete, str(path), prepared, cuts, runs[1:])


def test_a_slice_has_the_bytes_between():
    memory = torch.randn(40, 9)
    for tensor in (memory, memory[:, 2:5], TensorOfPieces(18, torch.float32, [(0, memory[0]), (9, memory[1])])):
        from_pieces = isinstance(tensor, TensorOfPieces)
        source = file_writer.PreparedTorch([tensor]).sources[0] if from_pieces else _C.prepared.tensor_source(tensor)
        whole = torch.empty(source.bytes, dtype=torch.uint8)
        source.copy_to(whole)
        for begin, end in ((0, source.bytes), (1, 7), (5, source.bytes - 3)):
            part = torch.empty(end - begin, dtype=torch.uint8)
            made = _C.prepared.sliced_source(source, begin, end)
            made.copy_to(part)
            assert torch.equal(part, whole[begin:end]) and made.bytes == end - begin
            assert made.in_place() == source.in_place() and not made.on_device


FACTS = [["a", 0, 0, 0], ["a", 0, 0, 1], ["a", 1, 0, 2], ["b", 0, 0, 3], ["a", 0, 1, 0], ["b", 0, 1, 1]]


@pytest.mark.parametrize(
    "mode, first, second",
    [("REPLICA", [0, 1, 2, 3], [4, 5]), ("SOCKET", [0, 2, 3], [4, 5]), ("MACHINE", [0, 3], [4, 5])],
)
def test_who_writes(mode, first, second):
    for rank in range(6):
        made = save.Sharing(mode, FACTS, SimpleNamespace(rank=rank, nodes=[""] * 6))
        assert made.writers == (first if rank < 4 else second)
        assert made.writes == (rank in made.writers) and made.leads == (rank in (0, 4))
    own_disks = save.Sharing(mode, FACTS, SimpleNamespace(rank=5, nodes=["x", "x", "x", "y", "x", "y"]))
    assert own_disks.writers == [4] and not own_disks.writes


def test_the_socket_of_a_process(monkeypatch):
    monkeypatch.setattr(cpu, "read_text", lambda path: {"cpu0": "0", "cpu1": "0", "cpu2": "1"}[path.split("/")[5]])
    assert [cpu.socket_of({2}, index) for index in range(2)] == [1, 1]
    assert [cpu.socket_of({0, 1, 2}, index) for index in range(4)] == [0, 1, 0, 1]
    monkeypatch.setattr(cpu, "read_text", lambda path: "")
    assert cpu.socket_of({0, 1}, 1) == 0


def test_the_stream_is_what_torch_writes_and_reads(tmp_path):
    made = value()
    made["pieces"] = made["pieces"].whole()
    made["parameter"] = torch.nn.Parameter(torch.randn(3, 4).t())
    made["again"] = made["parameter"]
    record = PreparedStream(made).write(tmp_path / "x.pt", WriterOptions(io_buffer_size=1 << 16))
    assert (tmp_path / "x.pt").stat().st_size == record["bytes"]
    assert verify.crc32_of(tmp_path / "x.pt") == record["crc32"]
    sums = [verify.crc32_of(tmp_path / "x.pt", tensor["offset"], tensor["bytes"]) for tensor in record["tensors"]]
    assert sums == [tensor["crc32"] for tensor in record["tensors"]]
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded.keys() == made.keys() and loaded["text"] == made["text"]
    for name, tensor in made.items():
        if torch.is_tensor(tensor):
            assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
    assert loaded["again"] is loaded["parameter"] and isinstance(loaded["parameter"], torch.nn.Parameter)
