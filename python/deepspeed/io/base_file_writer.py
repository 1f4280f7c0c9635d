"""The base class of the writers of this package."""

import time

import torch

from deepspeed import _compat


class BaseFileWriter:
    """A file that is written from its start. A writer is a context: left, it is closed.

    ``stats()``: bytes written, seconds since it was opened (until it was closed), GB/s.
    """

    def __init__(self, file_path):
        self.file_path = file_path
        self._start = time.perf_counter()
        self._seconds = None

    def write(self, buffer):
        """Appends the bytes of ``buffer``; returns how many."""
        raise NotImplementedError

    def flush(self):
        """Returns when all bytes that were written are in the file."""
        raise NotImplementedError

    def fileno(self):
        """A descriptor at the end of what was written. The next ``write`` continues after bytes written through it."""
        raise NotImplementedError

    def close(self):
        """Ends the file. Further calls do nothing."""
        raise NotImplementedError

    def save_torch_storage_object_list(self, storage_obj_list, save_size):
        """Appends the bytes of each torch storage, behind its number of elements in 8 bytes if ``save_size``.

        Returns the number of bytes appended.
        """
        before = self._position()
        for storage in storage_obj_list:
            untyped = _compat.untyped_storage(storage) if hasattr(storage, "dtype") else storage
            if save_size:
                self.write(len(storage).to_bytes(8, "little"))
            self._write_tensor(torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))
        return self._position() - before

    def stats(self):
        seconds = self._seconds if self._seconds is not None else time.perf_counter() - self._start
        return {"bytes": self._position(), "seconds": seconds, "gb_per_s": self._position() / max(seconds, 1e-9) / 1e9}

    def _position(self):
        raise NotImplementedError

    def _write_tensor(self, tensor):
        self.write(tensor.cpu().numpy())

    def _ended(self):
        self._seconds = time.perf_counter() - self._start

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
