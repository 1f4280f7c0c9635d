"""Reads ranges of a file into tensors, and checks files against their records, in bounded memory."""

import os

from deepspeed._native import _C
from deepspeed.host.cpu import usable_cores

__all__ = ["damaged_tensors", "file_crc32", "range_crc32", "read_ranges"]


def threads_for(asked):
    """``asked`` threads for copying and summing; 0: up to four, by the cores this process may use."""
    return asked or min(4, len(usable_cores()))


def read_ranges(path, ranges, threads=0):
    """Fills tensors from a file. ``ranges``: [(offset, tensor)], contiguous tensors on the CPU whose bytes start at
    ``offset``. Raises OSError, RuntimeError for a file that is too short, ValueError for other tensors."""
    made = []
    for offset, tensor in ranges:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"read_ranges fills contiguous tensors on the CPU, got one on {tensor.device}")
        made.append((offset, tensor.numel() * tensor.element_size(), tensor.data_ptr()))
    _C.io.read_ranges(os.fspath(path), made, threads_for(threads))


def range_crc32(path, ranges, threads=0):
    """The CRC-32 of every (offset, bytes) of ``ranges``, in order. Raises OSError, RuntimeError as ``read_ranges``."""
    return _C.io.sum_ranges(os.fspath(path), list(ranges), threads_for(threads))


def file_crc32(path, threads=0):
    """The CRC-32 of all of a file. Raises OSError."""
    return _C.io.sum_ranges(os.fspath(path), [(0, _C.io.TO_THE_END)], threads_for(threads))[0]


def damaged_tensors(path, record, threads=0):
    """The ``TensorRecord``s of ``record`` (a ``FileRecord``) whose bytes in the file ``path`` have another checksum, or
    are not there. Raises OSError when the file cannot be read."""
    size = os.path.getsize(path)
    inside = [tensor for tensor in record.tensors if tensor.offset + tensor.bytes <= size]
    sums = range_crc32(path, [(tensor.offset, tensor.bytes) for tensor in inside], threads)
    bad = {id(tensor) for tensor, crc32 in zip(inside, sums) if tensor.crc32 != crc32}
    bad.update(id(tensor) for tensor in record.tensors if tensor.offset + tensor.bytes > size)
    return [tensor for tensor in record.tensors if id(tensor) in bad]
