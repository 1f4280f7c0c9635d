"""A writer past the page cache: one half of a page-locked tensor is filled while the other is written.

The work is ``csrc/storage/buffered_writer.cpp``.
"""

from dataclasses import dataclass

import torch

from deepspeed._native import _C
from deepspeed.io.base_file_writer import BaseFileWriter


@dataclass
class FastFileWriterConfig:
    """The settings of a ``FastFileWriter``.

    dnvme_handle: an ``aio_handle``; its ``wait()`` does not count the writer's requests.
    pinned_tensor: memory for the bytes on their way, page-locked for best speed; nothing else may use it meanwhile.
    double_buffer: fill one half of it while the other is written.
    num_parallel_writers, writer_rank: several writers write one file together. Each gets the same bytes and writes
    every n-th half of them. global_rank: of the process, for messages only.
    """

    dnvme_handle: object
    pinned_tensor: torch.Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(BaseFileWriter):
    """Writes ``file_path`` by a handle of DeepNVMe. ``close`` sets the size and syncs the file.

    Raises:
        ValueError: the tensor is too small or not on the host, or the rank is out of range.
        OSError: an error of the system, with path, offset and bytes; it may be that of an earlier ``write``.
    """

    def __init__(self, file_path, config):
        super().__init__(file_path)
        self._config = config
        self._writer = _C.aio.BufferedWriter(
            config.dnvme_handle, file_path, config.pinned_tensor, config.double_buffer, config.num_parallel_writers,
            config.writer_rank,
        )  # fmt: skip

    def write(self, buffer):
        return self._writer.write(buffer)

    def flush(self):
        self._writer.flush()

    def fileno(self):
        return self._writer.fileno()

    def close(self):
        if not self._writer.closed:
            self._writer.close()
            self._ended()

    def split_index_list(self, storage_obj_list, num_splits):
        """``num_splits`` + 1 indices that cut the list of torch storages into shares of about as many bytes each."""
        if num_splits < 1:
            raise ValueError(f"num_splits is at least 1, got {num_splits}")
        ends, total = [], 0
        for storage in storage_obj_list:
            total += storage.nbytes()
            ends.append(total)
        cuts = [sum(end <= total * share // num_splits for end in ends) for share in range(1, num_splits)]
        return [0, *cuts, len(ends)]

    def stats(self):
        """Also: bytes that this writer wrote itself, seconds it waited for the disk."""
        own = {"bytes_written": self._writer.written, "seconds_waited": self._writer.seconds_waited}
        return {**super().stats(), **own, "global_rank": self._config.global_rank}

    def _position(self):
        return self._writer.position

    def _write_tensor(self, tensor):
        self._writer.write_tensor(tensor)
