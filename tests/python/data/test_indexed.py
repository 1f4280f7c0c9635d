"""Files of documents: written and read back, files of Megatron, damaged ones."""

import pickle
import struct

import numpy
import pytest
import torch

from deepspeed.data import analysis_parts
from deepspeed.data.indexed import (
    DamagedIndex,
    MMapIndexedDatasetBuilder,
    data_file_path,
    find_fit_int_dtype,
    index_file_path,
)
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
from processes import open_files
from refusals import refused

ROWS = [[3, 1, 4, 1, 5], [], [9, 2], [6]]


def written(path, rows=ROWS, dtype=numpy.int32, ends=()):
    with MMapIndexedDatasetBuilder(data_file_path(path), dtype) as builder:
        for i, row in enumerate(rows):
            builder.add_item(torch.tensor(row, dtype=torch.int64))
            if i in ends:
                builder.end_document()
        builder.finalize(index_file_path(path))
    return str(path)


def megatron(path, code, dtype, rows=ROWS):
    """The bytes that Megatron writes for these rows."""
    sizes = [len(row) for row in rows]
    pointers = numpy.cumsum([0, *sizes[:-1]]) * numpy.dtype(dtype).itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(rows), 1)
    index += numpy.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes() + bytes(8)
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(b"".join(numpy.array(row, dtype).tobytes() for row in rows))
    return str(path)


@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.int8, numpy.int16, numpy.int64, numpy.uint16, numpy.uint64])
def test_what_is_written_is_read(tmp_path, dtype):
    data = MMapIndexedDataset(written(tmp_path / "a", dtype=dtype, ends=(1, 3)))
    assert len(data) == 4 and data.dtype == dtype and not data.supports_prefetch
    assert [row.tolist() for row in data] == ROWS == [row.tolist() for row in data[:]]
    assert [row.tolist() for row in data[1:3]] == ROWS[1:3] and data[-1].tolist() == [6] and data[0].dtype == dtype
    assert data.get(0, offset=1).tolist() == [1, 4, 1, 5] and data.get(0, 2, 2).tolist() == [4, 1]
    assert data.sizes.tolist() == [5, 0, 2, 1] and data.size(2) == 2 and data.whole().tolist() == sum(ROWS, [])
    assert data.get_doc_idx().tolist() == data.doc_idx.tolist() == [0, 2, 4]
    data.set_doc_idx(data.get_doc_idx()[:2])
    assert data.doc_idx.tolist() == [0, 2]
    assert pickle.loads(pickle.dumps(data))[2].tolist() == [9, 2]


def test_which_files_there_are(tmp_path):
    path = written(tmp_path / "a", rows=[])
    assert MMapIndexedDataset.exists(path) and not MMapIndexedDataset.exists(str(tmp_path / "b"))
    assert len(MMapIndexedDataset(path)) == 0
    (tmp_path / "a.bin").unlink()
    refused(FileNotFoundError, "a.bin is missing: an indexed data set is a pair", MMapIndexedDataset, path)


def test_data_sets_are_joined(tmp_path):
    first, second = written(tmp_path / "a", ends=(3,)), written(tmp_path / "b", rows=[[7], [8, 8]], ends=(1,))
    with MMapIndexedDatasetBuilder(tmp_path / "c.bin", numpy.int32) as builder:
        builder.merge_file_(first)
        builder.merge_file_(second)
        builder.finalize(tmp_path / "c.idx")
    data = MMapIndexedDataset(str(tmp_path / "c"))
    assert [row.tolist() for row in data] == ROWS + [[7], [8, 8]] and data.doc_idx.tolist() == [0, 4, 6]
    with MMapIndexedDatasetBuilder(tmp_path / "d.bin", numpy.int16) as other:
        refused(ValueError, "elements of int32, .*d.bin has elements of int16", other.merge_file_, first)


def test_an_error_closes_the_files(tmp_path):
    def cut():
        yield numpy.array([1, 2], numpy.uint8), [2]
        yield numpy.array([300], numpy.int32), [1]

    builder = MMapIndexedDatasetBuilder(tmp_path / "b.bin", numpy.uint8)
    assert open_files(tmp_path) == {str(tmp_path / "b.bin")}
    with pytest.raises(KeyError), builder:
        raise KeyError
    refused(ValueError, "values do not fit", analysis_parts.write_documents, tmp_path / "a", numpy.uint8, cut())
    with pytest.raises(KeyError), analysis_parts.PartFile(tmp_path / "p", numpy.int64) as part:
        part.append(numpy.array([7]))
        raise KeyError
    assert open_files(tmp_path) == set() and (tmp_path / "p").stat().st_size == 8


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(1, "u1"), (4, "<i4"), (6, "<f8"), (7, "<f8"), (8, "<u2"), (6, "<u2"), (7, "<u4"), (8, "<u8")],
)
def test_files_of_megatron(tmp_path, code, dtype):
    data = MMapIndexedDataset(megatron(tmp_path / "m", code, dtype))
    assert [row.tolist() for row in data] == ROWS and data.dtype == numpy.dtype(dtype)


def test_the_older_format(tmp_path):
    sizes = numpy.array([len(row) for row in ROWS], "<i8")
    index = b"TNTIDX\0\0" + struct.pack("<QQQQQQ", 1, 4, 4, 4, 4, 1)
    index += numpy.arange(5, dtype="<i8").tobytes() + numpy.concatenate([[0], sizes.cumsum()]).astype("<i8").tobytes()
    (tmp_path / "o.idx").write_bytes(index + sizes.tobytes() + bytes(8))
    (tmp_path / "o.bin").write_bytes(numpy.array(sum(ROWS, []), "<i4").tobytes())
    data = MMapIndexedDataset(str(tmp_path / "o"))
    assert [row.tolist() for row in data] == ROWS and data.whole().tolist() == sum(ROWS, [])


def test_damaged_files(tmp_path):
    path = written(tmp_path / "a")
    whole, values = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.idx").write_bytes(whole[:60])
    refused(DamagedIndex, r"a\.idx, offset 50: 4 pointers of 8 bytes are expected.*cut", MMapIndexedDataset, path)
    (tmp_path / "a.idx").write_bytes(whole)
    (tmp_path / "a.bin").write_bytes(values[:-1])
    refused(ValueError, "document 3 of 1 elements at 28 is not within the 31 bytes", MMapIndexedDataset, path)
    refused(DamagedIndex, "no type of the code 8", MMapIndexedDataset, megatron(tmp_path / "m", 8, "<f4"))


def test_wrong_uses(tmp_path):
    data = MMapIndexedDataset(written(tmp_path / "a"))
    refused(IndexError, "", data.get, 4)
    refused(ValueError, "5 elements: it has no 3 elements from 4 on", data.get, 0, 4, 3)
    refused(ValueError, "have step 1, not 2", data.__getitem__, slice(0, 4, 2))
    refused(ValueError, "no code for float32", MMapIndexedDatasetBuilder, tmp_path / "b.bin", numpy.float32)
    with MMapIndexedDatasetBuilder(tmp_path / "b.bin", numpy.uint8) as builder:
        refused(ValueError, "values do not fit into elements of uint8", builder.add_item, torch.tensor([256]))


def test_the_smallest_type():
    kinds = [find_fit_int_dtype(*pair) for pair in [(0, 255), (0, 256), (-1, 127), (-1, 128), (0, 2**32)]]
    assert kinds == [numpy.uint8, numpy.uint16, numpy.int8, numpy.int16, numpy.uint64]
    refused(ValueError, "no type of whole numbers", find_fit_int_dtype, -1, 2**63)
