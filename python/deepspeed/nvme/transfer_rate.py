"""Measures the rate at which a handle with one setting moves a tensor to or from a file."""

import os
import re
import time
from dataclasses import asdict, dataclass

import torch

from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def bytes_of(text):
    """``400M`` as a number of bytes: a whole number with K, M, G, T (powers of 1024) or nothing behind it."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:I?B)?", str(text).strip().upper())
    if match is None or int(match.group(1)) == 0:
        raise ValueError(
            f"{text!r} is not a size: write a whole number above 0, with K, M, G or T behind it, like 400M"
        )
    return int(match.group(1)) * _UNITS[match.group(2)]


@dataclass(frozen=True)
class Setting:
    """The arguments of ``aio_handle``."""

    block_size: int = 1 << 20
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1

    def section(self, use_gds=False):
        """The section ``aio`` of a DeepSpeed configuration that chooses this setting."""
        return {**asdict(self), **({"use_gds": True} if use_gds else {})}


class Bench:
    """Files in ``folder`` and tensors of ``io_size`` bytes on ``device``, for many settings one after the other.

    use_gds: by ``gds_handle``. bounce: tensors of a device pass through a page-locked tensor in Python.
    unlocked: tensors of the host are not page-locked. As a context it removes its files.
    """

    def __init__(self, folder, io_size, device="cpu", use_gds=False, bounce=False, unlocked=False):
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder} is not a folder: make it on the drive that is to be measured")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{folder} cannot be written by this user: choose another folder or change its rights"
            )
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < io_size:
            raise OSError(
                f"the drive of {folder} has {free.f_bavail * free.f_frsize} bytes free, and a file of {io_size} is to "
                f"be written: free some, or lower --io_size"
            )
        self.io_size, self.device, self.use_gds, self.bounce, self.unlocked = io_size, device, use_gds, bounce, unlocked
        self.path = os.path.join(folder, f".ds_io_{os.getpid()}_{time.monotonic_ns()}.tensor")

    def rates(self, setting, read, loops, validate=False, single=True):
        """GB/s (of 1e9 bytes) of each of ``loops`` transfers. single: by the blocking calls, else ``async_`` and
        ``wait``. Before a read the file is written with known bytes."""
        builder = GDSBuilder if self.use_gds else AsyncIOBuilder
        handle = getattr(builder().load(), "gds_handle" if self.use_gds else "aio_handle")(**asdict(setting))
        tensor, release = self._tensor(handle)
        try:
            if read and not os.path.exists(self.path):
                self._move(handle, tensor, False, validate, single)
            return [self._move(handle, tensor, read, validate, single) for _ in range(loops)]
        finally:
            release()

    def _tensor(self, handle):
        example = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device == "cpu" and not self.unlocked:
            tensor = handle.new_cpu_locked_tensor(self.io_size, example)
            return tensor, lambda: handle.free_cpu_locked_tensor(tensor)
        if self.use_gds:
            tensor = handle.new_pinned_device_tensor(self.io_size, example)
            return tensor, lambda: handle.free_pinned_device_tensor(tensor)
        return torch.zeros(self.io_size, dtype=torch.uint8, device=self.device), lambda: None

    def _move(self, handle, tensor, read, validate, single):
        """One transfer; returns its GB/s."""
        start, staged = time.perf_counter(), tensor
        if self.bounce and tensor.device.type != "cpu":
            staged = handle.new_cpu_locked_tensor(self.io_size, torch.empty(0, dtype=torch.uint8))
            if not read:
                staged.copy_(tensor)
        call = handle.pread if read else handle.pwrite
        call(staged, self.path, validate, not single)
        if not single:
            handle.wait()
        if staged is not tensor:
            if read:
                tensor.copy_(staged)
            handle.free_cpu_locked_tensor(staged)
        return self.io_size / (time.perf_counter() - start) / 1e9

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if os.path.exists(self.path):
            os.unlink(self.path)
