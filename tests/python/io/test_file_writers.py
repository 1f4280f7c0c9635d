"""Writers under ``torch.save``: what they write, torch.load reads."""

import errno
import io
import os

import pytest
import torch

from deepspeed._native import _C
from deepspeed.io import BaseFileWriter, FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter
from deepspeed.ops.op_builder import AsyncIOBuilder
from refusals import refused


@pytest.fixture
def handle():
    return AsyncIOBuilder().load().aio_handle(65536, 8, False, False, 2)


def config(handle, bytes=1 << 20, **more):
    pinned = handle.new_cpu_locked_tensor(bytes, torch.empty(0, dtype=torch.uint8))
    return FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned, **more)


@pytest.fixture
def state():
    torch.manual_seed(1)
    tied = torch.randn(1000, 33)
    return {"a": tied, "b": tied.t(), "c": torch.arange(7), "d": [torch.randn(300_001).half(), "text"], "e": {}}


def check(path, state):
    found = torch.load(path)
    assert torch.equal(found["a"], state["a"]) and torch.equal(found["b"], state["b"])
    assert torch.equal(found["d"][0], state["d"][0]) and found["d"][1] == "text" and torch.equal(found["c"], state["c"])
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("buffer", [64 << 10, 1 << 20, 16 << 20])
def test_fast_writer(handle, state, tmp_path, archive, double, buffer):
    path = str(tmp_path / "x.pt")
    writer = FastFileWriter(path, config(handle, buffer, double_buffer=double))
    torch.save(state, writer, _use_new_zipfile_serialization=archive)
    writer.close()
    writer.close()
    check(path, state)
    torch.save(state, str(tmp_path / "y.pt"), _use_new_zipfile_serialization=archive)
    if not archive:
        assert open(path, "rb").read() == open(tmp_path / "y.pt", "rb").read()
    stats = writer.stats()
    assert stats["bytes"] == stats["bytes_written"] + (0 if archive else stats["bytes"] - stats["bytes_written"])
    assert stats["bytes"] == os.path.getsize(path) and stats["gb_per_s"] > 0
    assert handle.wait() == 0


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "stream"])
def test_plain_and_mock_writers(state, tmp_path, archive):
    path = str(tmp_path / "x.pt")
    with PyFileWriter(path) as writer:
        torch.save(state, writer, _use_new_zipfile_serialization=archive)
    check(path, state)
    assert writer.stats()["bytes"] == os.path.getsize(path)
    with MockFileWriter(str(tmp_path / "none.pt")) as mock:
        torch.save(state, mock, _use_new_zipfile_serialization=archive)
    assert mock.stats()["bytes"] == os.path.getsize(path) and not os.path.exists(tmp_path / "none.pt")
    assert isinstance(writer, BaseFileWriter) and isinstance(mock, BaseFileWriter)
    refused(io.UnsupportedOperation, "", mock.fileno)


def test_parallel_writers_make_one_file(handle, state, tmp_path):
    alone, together = str(tmp_path / "alone.pt"), str(tmp_path / "together.pt")
    with FastFileWriter(alone, config(handle, 64 << 10)) as writer:
        torch.save(state, writer)
    shares = []
    for rank in range(3):
        share = config(handle, 64 << 10, num_parallel_writers=3, writer_rank=rank, global_rank=rank + 4)
        with FastFileWriter(together, share) as writer:
            torch.save(state, writer)
        shares.append(writer.stats()["bytes_written"])
        assert writer.stats()["global_rank"] == rank + 4
    check(together, state)
    assert sum(shares) == os.path.getsize(together) and max(shares) < sum(shares) / 2


def test_lists_of_storages(handle, tmp_path):
    tensors = [torch.randn(1000), torch.arange(7), torch.randn(50_000).half()]
    storages = [tensor.storage() for tensor in tensors]
    wanted = b"".join(
        len(storage).to_bytes(8, "little") + tensor.numpy().tobytes() for storage, tensor in zip(storages, tensors)
    )
    for number, make in enumerate((lambda path: FastFileWriter(path, config(handle)), PyFileWriter)):
        path = str(tmp_path / str(number))
        with make(path) as writer:
            assert writer.save_torch_storage_object_list(storages, True) == len(wanted)
            assert writer.save_torch_storage_object_list(storages, False) == len(wanted) - 24
        assert open(path, "rb").read()[: len(wanted)] == wanted
    with MockFileWriter("none") as mock:
        assert mock.save_torch_storage_object_list(storages, True) == len(wanted)
    with FastFileWriter(str(tmp_path / "z"), config(handle)) as writer:
        assert writer.split_index_list(storages, 1) == [0, 3] and writer.split_index_list(storages, 2) == [0, 2, 3]
        assert writer.split_index_list([], 2) == [0, 0, 0]
        refused(ValueError, "num_splits", writer.split_index_list, storages, 0)


def test_others_write_through_the_descriptor(handle, tmp_path):
    path = str(tmp_path / "x")
    with FastFileWriter(path, config(handle, 64 << 10)) as writer:
        writer.write(b"a" * 5000)
        os.write(writer.fileno(), b"b" * 7000)
        assert writer.write(memoryview(b"c" * 100_000)) == 100_000
        writer.flush()
        assert os.path.getsize(path) >= 112_000
    assert open(path, "rb").read() == b"a" * 5000 + b"b" * 7000 + b"c" * 100_000
    refused(ValueError, "closed already", writer.write, b"d")


def test_errors_name_the_file_and_what_to_do(handle, tmp_path):
    refused(
        ValueError,
        "pinned_tensor.*at least 12288 bytes",
        FastFileWriter,
        str(tmp_path / "x"),
        FastFileWriterConfig(handle, torch.empty(100)),
    )
    refused(
        ValueError,
        "writer_rank",
        FastFileWriter,
        str(tmp_path / "x"),
        config(handle, num_parallel_writers=2, writer_rank=2),
    )
    refused(FileNotFoundError, "", FastFileWriter, str(tmp_path / "none" / "x"), config(handle))
    _C.aio.inject("write:2:enospc")
    try:
        with pytest.raises(OSError) as error, FastFileWriter(str(tmp_path / "x"), config(handle, 64 << 10)) as writer:
            writer.write(bytes(1 << 20))
        assert error.value.errno == errno.ENOSPC and error.value.path == str(tmp_path / "x")
    finally:
        _C.aio.inject("")
