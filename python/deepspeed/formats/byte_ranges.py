"""Parts of files, read on demand: a tensor's bytes go from the file into its memory, and nothing else is read."""

import ctypes
import os
import zipfile
import zlib

import torch

_MOST_PER_READ = 1 << 30  # Linux reads at most 2 GiB in a call
_PACKED_PART = 1 << 20


class FileRange:
    """``bytes`` of the file at ``path`` from ``offset`` on. The file is opened for each read, so that a checkpoint of a
    thousand files needs no thousand descriptors; OSError when it is no longer the file that was opened first."""

    def __init__(self, path, offset, size, identity):
        self.path, self.offset, self.bytes, self.identity = path, offset, size, identity

    def read_into(self, target, start):
        """Fills the uint8 tensor ``target`` with the bytes from ``start`` on."""
        count = target.numel()
        if start < 0 or start + count > self.bytes:
            raise ValueError(f"{self.path}: bytes {start} to {start + count} of a record of {self.bytes} bytes")
        if count == 0:
            return
        memory = memory_of(target)
        with open(self.path, "rb", buffering=0) as file:
            if file_identity(file.fileno()) != self.identity:
                raise OSError(f"{self.path} has changed since it was opened; load the checkpoint again")
            done = 0
            while done < count:
                part = memory[done : done + _MOST_PER_READ]
                got = os.preadv(file.fileno(), [part], self.offset + start + done)
                if got == 0:
                    raise OSError(f"{self.path} ends {count - done} bytes too early; load an older tag")
                done += got


class DeflatedRange:
    """A compressed record of a zip file, read through the zipfile module: sequentially, from its start."""

    def __init__(self, path, name, size, identity):
        self.path, self.name, self.bytes, self.identity = path, name, size, identity

    def read_into(self, target, start):
        """As in FileRange."""
        with open(self.path, "rb") as file:
            if file_identity(file.fileno()) != self.identity:
                raise OSError(f"{self.path} has changed since it was opened; load the checkpoint again")
            try:
                with zipfile.ZipFile(file) as archive, archive.open(self.name) as record:
                    self._unpack(record, target, start)
            except zlib.error as error:
                raise zipfile.BadZipFile(f"{self.path}: the record {self.name!r} is damaged ({error})") from error

    def _unpack(self, record, target, start):
        left, done, count = start, 0, target.numel()
        while left or done < count:
            part = record.read(min(left or count - done, _PACKED_PART))
            if not part:
                raise zipfile.BadZipFile(f"{self.path}: the record {self.name!r} ends too early")
            if left:
                left -= len(part)
            else:
                ctypes.memmove(target.data_ptr() + done, part, len(part))
                done += len(part)


def file_identity(descriptor):
    """The identity of a file, which differs from that of a file that has taken its name."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_bytes(source):
    """All of a range as ``bytes``."""
    data = torch.empty(source.bytes, dtype=torch.uint8)
    source.read_into(data, 0)
    return ctypes.string_at(data.data_ptr(), source.bytes) if source.bytes else b""


def memory_of(flat):
    """A memoryview of a contiguous uint8 tensor's elements; the tensor must outlive it."""
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


def write_tensor(file, flat):
    """Writes the bytes of a contiguous uint8 tensor to an unbuffered file."""
    left = memory_of(flat) if flat.numel() else b""
    while len(left):
        left = left[file.write(left[:_MOST_PER_READ]) :]
