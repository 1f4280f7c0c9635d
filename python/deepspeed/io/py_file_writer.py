"""A writer over Python's own files, as ``torch.save`` uses them, with an fsync at the end."""

import os

from deepspeed.io.base_file_writer import BaseFileWriter


class PyFileWriter(BaseFileWriter):
    """Writes ``file_path`` through the page cache; ``close`` syncs it."""

    def __init__(self, file_path):
        super().__init__(file_path)
        self._file = open(file_path, "wb")
        self._bytes = 0

    def write(self, buffer):
        return self._file.write(buffer)

    def flush(self):
        self._file.flush()

    def fileno(self):
        self._file.flush()
        return self._file.fileno()

    def close(self):
        if self._file.closed:
            return
        self._bytes = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._ended()

    def _position(self):
        return self._bytes if self._file.closed else self._file.tell()
