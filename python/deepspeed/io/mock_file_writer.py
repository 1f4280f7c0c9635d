"""A writer that writes nothing, to measure the cost of saving without a disk."""

import io

from deepspeed.io.base_file_writer import BaseFileWriter


class MockFileWriter(BaseFileWriter):
    """Counts bytes and drops them. There is no file: ``fileno`` raises io.UnsupportedOperation."""

    def __init__(self, file_path):
        super().__init__(file_path)
        self._bytes = 0

    def write(self, buffer):
        size = memoryview(buffer).nbytes
        self._bytes += size
        return size

    def flush(self):
        pass

    def fileno(self):
        raise io.UnsupportedOperation("a MockFileWriter has no file")

    def close(self):
        if self._seconds is None:
            self._ended()

    def _position(self):
        return self._bytes

    def _write_tensor(self, tensor):
        self._bytes += tensor.numel()
