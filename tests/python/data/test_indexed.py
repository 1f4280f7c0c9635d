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
    code,
    data_file_path,
    find_fit_int_dtype,
    index_file_path,
)
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
from processes import open_files
from refusals import refused
from sampling import every_case

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


def scattered(path, draws, dtype):
    """Documents that lie in their file in any order, with gaps between them. Returns what the data set has."""
    rows = [draws.integers(-9, 99, draws.integers(0, 6)).tolist() for _ in range(draws.integers(1, 6))]
    kept = draws.permutation(len(rows))[: draws.integers(1, len(rows) + 1)].tolist()
    size, pieces, places, at = numpy.dtype(dtype).itemsize, [], {}, 0
    for number, row in enumerate(rows):
        gap = int(draws.integers(0, 3))
        places[number] = at + gap * size
        pieces += [bytes(gap * size), numpy.array(row, dtype).tobytes()]
        at = places[number] + len(row) * size
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code(dtype), len(kept), len(kept) + 1)
    index += numpy.array([len(rows[i]) for i in kept], "<i4").tobytes()
    index += numpy.array([places[i] for i in kept], "<i8").tobytes() + numpy.arange(len(kept) + 1).tobytes()
    with open(index_file_path(path), "wb") as file:
        file.write(index)
    with open(data_file_path(path), "wb") as file:
        file.write(b"".join(pieces) + bytes(int(draws.integers(0, 3)) * size))
    return [rows[i] for i in kept]


def test_any_data_sets_are_joined(tmp_path):
    """Documents need not fill the file of their values, nor lie in it in order."""
    for seed in range(1000 if every_case() else 40):
        draws = numpy.random.default_rng(seed)
        dtype = draws.choice([numpy.int8, numpy.int16, numpy.int32, numpy.int64])
        parts = [str(tmp_path / f"part{number}") for number in range(draws.integers(1, 4))]
        wanted = sum((scattered(part, draws, dtype) for part in parts), [])
        whole = str(tmp_path / "whole")
        with MMapIndexedDatasetBuilder(data_file_path(whole), dtype) as builder:
            for part in parts:
                builder.merge_file_(part)
            builder.finalize(index_file_path(whole))
        made = MMapIndexedDataset(whole)
        assert [row.tolist() for row in made] == wanted and made.doc_idx.tolist() == list(range(len(wanted) + 1)), seed


def test_sums_do_not_wrap():
    for seed in range(1000 if every_case() else 40):
        draws = numpy.random.default_rng(seed)
        narrow = numpy.int8, numpy.uint8, numpy.int16, numpy.uint16
        kind = draws.choice([*narrow, numpy.int32, numpy.uint32, numpy.int64])
        limits = numpy.iinfo(kind)
        low, high = max(limits.min, -(2**40)), min(limits.max, 2**40)
        arrays = [draws.integers(low, high, 3, endpoint=True).astype(kind) for _ in range(draws.integers(1, 6))]
        total = analysis_parts.exact_sum(arrays)
        assert total.tolist() == [sum(map(int, column)) for column in zip(*arrays)], seed
        assert total.dtype == kind or numpy.iinfo(kind).bits < numpy.iinfo(total.dtype).bits, seed
    most = numpy.array([2**63 - 1])
    refused(OverflowError, "does not fit into 64 bits", analysis_parts.exact_sum, [most, numpy.array([1])])
