"""Documents of numbers in two files, ``<path>.bin`` and its index ``<path>.idx``: read in place, and written.

The format is that of Megatron. The index is checked once, when it is opened (``csrc/formats/indexed_dataset.h``). If it
is damaged or cut, opening raises ``DamagedIndex``, a ValueError with the file and the offset.
"""

import array
import itertools
import os

import numpy
import torch
from torch.utils.data import Dataset

from deepspeed._native import _C

DamagedIndex = _C.samples.DamagedIndex

# The codes of this library. In files of others 6, 7 and 8 may be other types; the reader finds out which.
dtypes = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    6: numpy.uint16,
    7: numpy.uint32,
    8: numpy.uint64,
}
_MAGIC = b"MMIDIDX\0\0"
_PIECE = 1 << 22  # bytes that are copied at once


def code(dtype):
    """The code of a type in an index. ValueError if the type has no code."""
    for found, one in dtypes.items():
        if numpy.dtype(one) == dtype:
            return found
    raise ValueError(f"an indexed data set has no code for {numpy.dtype(dtype)}: its elements must be whole numbers")


def index_file_path(prefix_path):
    return f"{prefix_path}.idx"


def data_file_path(prefix_path):
    return f"{prefix_path}.bin"


def find_fit_int_dtype(min_value, max_value):
    """The smallest type of whole numbers that holds both values. It is unsigned if no value is negative."""
    kinds = (numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64)
    if min_value < 0:
        kinds = (numpy.int8, numpy.int16, numpy.int32, numpy.int64)
    for kind in kinds:
        if numpy.iinfo(kind).min <= min_value and max_value <= numpy.iinfo(kind).max:
            return kind
    raise ValueError(f"no type of whole numbers holds both {min_value} and {max_value}: 64 bits are the most")


class IndexedDataset(Dataset):
    """Documents in a file that is mapped into memory. ``dataset[i]`` is a read-only numpy array over the file, no copy.

    path: that of the two files, without ``.idx`` and ``.bin``. A slice, whose step must be 1, gives a list of arrays.
    """

    def __init__(self, path):
        super().__init__()
        self._open(path)

    def _open(self, path):
        self._path = path
        index, data = index_file_path(path), data_file_path(path)
        for file in (index, data):
            if not os.path.exists(file):
                raise FileNotFoundError(
                    f"{file} is missing: an indexed data set is a pair of files, one with .idx and one with .bin"
                )
        header = _C.samples.indexed_header(index, os.path.getsize(data))
        self._element = numpy.dtype(header["element"]).newbyteorder("<")
        parts = _mapped(index)

        def part(at, entries, kind):
            return numpy.frombuffer(parts, kind, entries, at) if entries else numpy.empty(0, kind)

        documents = header["documents"]
        self._sizes = part(header["sizes_at"], documents, f"<i{header['size_bytes']}")
        self._pointers = part(header["pointers_at"], documents, "<i8")
        if header["pointer_unit"] != 1:
            self._pointers = self._pointers * header["pointer_unit"]
        self._doc_idx = part(header["doc_idx_at"], header["doc_entries"], "<i8")
        self._values = _mapped(data)

    def __getstate__(self):
        return self._path

    def __setstate__(self, path):
        self._open(path)

    def __len__(self):
        return len(self._sizes)

    def __getitem__(self, idx):
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice of an indexed data set must have step 1, not {step}")
            return [self.get(i) for i in range(start, stop)]
        return self.get(idx)

    def get(self, idx, offset=0, length=None):
        """A document, or ``length`` elements of it from ``offset`` on, as a 1-dimensional array of ``dtype``.
        ValueError if the document has fewer elements."""
        size = self._sizes.item(idx)  # IndexError past the end
        if offset or length is not None:
            length = size - offset if length is None else length
            if offset < 0 or length < 0 or offset + length > size:
                raise ValueError(
                    f"document {idx} of {self._path} has {size} elements: it has no {length} elements from {offset} on"
                )
            size = length
        at = self._pointers.item(idx) + offset * self._element.itemsize
        return numpy.frombuffer(self._values, self._element, size, at) if size else numpy.empty(0, self._element)

    def whole(self):
        """The values of all documents as one array, in the order of the documents."""
        lengths = self._sizes.astype(numpy.int64) * self._element.itemsize
        ends = self._pointers + lengths
        if len(self) and (self._pointers[0] != 0 or (ends[:-1] != self._pointers[1:]).any()):
            return numpy.concatenate([self.get(i) for i in range(len(self))])
        total = int(ends[-1]) // self._element.itemsize if len(self) else 0
        return numpy.frombuffer(self._values, self._element, total) if total else numpy.empty(0, self._element)

    def extents(self):
        """``(first byte, end)`` of each stretch of the file that has the values of documents, in their order. Documents
        need not fill the file, and may lie in it in any order."""
        if not len(self):
            return []
        ends = self._pointers + self._sizes.astype(numpy.int64) * self._element.itemsize
        first = numpy.flatnonzero(numpy.append(True, ends[:-1] != self._pointers[1:]))
        last = numpy.append(first[1:], len(self)) - 1
        return list(zip(self._pointers[first].tolist(), ends[last].tolist()))

    def size(self, index):
        """The number of elements of a document."""
        return self._sizes[index]

    @property
    def sizes(self):
        return self._sizes

    @property
    def doc_idx(self):
        """The first part of each document that has several parts. ``dataset[i]`` and ``len`` count the parts."""
        return self._doc_idx

    def get_doc_idx(self):
        return self._doc_idx

    def set_doc_idx(self, doc_idx_):
        self._doc_idx = doc_idx_

    @property
    def supports_prefetch(self):
        return False

    @property
    def dtype(self):
        return self._element.type

    @staticmethod
    def exists(path):
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


def _mapped(path):
    """The bytes of a file, mapped for reading. numpy keeps the map while an array of it exists."""
    return memoryview(numpy.memmap(path, numpy.uint8, "r")) if os.path.getsize(path) else memoryview(b"")


class MMapIndexedDatasetBuilder:
    """Writes the two files. It writes values to ``out_file`` (``<path>.bin``) at once, and the index in ``finalize``.

    dtype: of the elements, a numpy type of whole numbers. ``with MMapIndexedDatasetBuilder(...) as builder`` closes the
    file of the values also where an error comes before ``finalize``.
    """

    def __init__(self, out_file, dtype=numpy.int64):
        self._code, self._dtype = code(dtype), numpy.dtype(dtype)
        self._file = open(out_file, "wb")  # noqa: SIM115 (closed by finalize and __exit__)
        self._sizes, self._doc_idx = array.array("i"), array.array("q", [0])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def add_item(self, tensor):
        """Adds a document. ValueError if a value does not fit into the builder's type."""
        self.add_item_numpy(tensor.numpy() if torch.is_tensor(tensor) else numpy.asarray(tensor))

    def add_item_numpy(self, np_array):
        self.add_items(np_array.reshape(-1), [np_array.size])

    def add_items(self, values, sizes):
        """Adds documents of these sizes. ``values`` has the values of all of them, in order."""
        sizes = numpy.asarray(sizes)
        if sizes.size and sizes.max() > numpy.iinfo(numpy.int32).max:
            raise ValueError(
                f"{self._file.name}: a document has {sizes.max()} elements, and the format allows 2^31 - 1"
            )
        taken = numpy.ascontiguousarray(values, self._dtype)
        if taken.dtype != values.dtype and not numpy.array_equal(taken, values):
            raise ValueError(
                f"{self._file.name}: values do not fit into elements of {self._dtype}: choose a larger type"
            )
        self._file.write(memoryview(taken).cast("B") if taken.size else b"")
        self._sizes.frombytes(numpy.ascontiguousarray(sizes, numpy.int32).tobytes())

    def end_document(self):
        """Marks the documents since the last call as the parts of one document, in ``doc_idx``."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file):
        """Adds all documents of the data set at the path ``another_file``, which must have the same type."""
        other = IndexedDataset(another_file)
        if numpy.dtype(other.dtype) != self._dtype:
            raise ValueError(
                f"{another_file} has elements of {numpy.dtype(other.dtype)}, and {self._file.name} has elements of "
                f"{self._dtype}: both must have the same type"
            )
        before = len(self._sizes)
        with open(data_file_path(another_file), "rb") as values:
            for start, end in other.extents():
                values.seek(start)
                for at in range(start, end, _PIECE):
                    self._file.write(values.read(min(_PIECE, end - at)))
        self._sizes.frombytes(other.sizes.astype(numpy.int32).tobytes())
        self._doc_idx.extend(before + entry for entry in itertools.islice(other.doc_idx.tolist(), 1, None))

    def finalize(self, index_file):
        """Closes the file of the values and writes the index."""
        self._file.close()
        sizes = numpy.frombuffer(self._sizes, numpy.int32) if self._sizes else numpy.empty(0, numpy.int32)
        pointers = numpy.zeros(len(sizes), numpy.int64)
        numpy.cumsum(sizes[:-1], dtype=numpy.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        counts = numpy.array([len(sizes), len(self._doc_idx)], "<u8").tobytes()
        with open(index_file, "wb") as index:
            index.write(_MAGIC + numpy.uint64(1).tobytes() + bytes([self._code]) + counts)
            for part in (sizes, pointers):
                index.write(memoryview(part).cast("B") if part.size else b"")
            index.write(self._doc_idx.tobytes())
