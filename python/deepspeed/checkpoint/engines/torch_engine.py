"""Files as ``torch.save`` writes them, one after the other."""

import os
import zlib

import torch

from deepspeed import _compat
from deepspeed.checkpoint import storage
from deepspeed.checkpoint.engines.own import OwnCheckpointEngine
from deepspeed.checkpoint.file_record import FileRecord
from deepspeed.log import logger


class _Summed:
    """A file with the size and CRC-32 of what was written to it."""

    def __init__(self, file):
        self._file = file
        self.bytes = self.crc32 = 0

    def write(self, data):
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self):
        self._file.flush()


class TorchCheckpointEngine(OwnCheckpointEngine):
    """A file is there, whole, when ``save`` returns. Whether it outlives a power cut is for the system to say."""

    syncs = False

    def create(self, info):
        logger.info(f"[Torch] checkpoint {getattr(info, 'tag', info)} begins")

    def write_file(self, name, value, path):
        if not name.endswith(".pt"):
            return self.prepare(name, value).write(path).to_dict()
        value = storage.compact(value)
        try:
            with open(path, "wb") as file:
                summed = _Summed(file)
                torch.save(value, summed, _use_new_zipfile_serialization=self.archives)
                file.flush()
                if self.syncs:
                    os.fsync(file.fileno())
        except OSError as error:
            text = f"cannot write the checkpoint file {path}: {error.strerror}. Check space and permissions."
            raise OSError(error.errno, text) from error
        return FileRecord(os.path.basename(path), summed.bytes, summed.crc32).to_dict()

    def save(self, state_dict, path):
        """Through a temporary file beside ``path``: a crash leaves no half file under that name."""
        storage.write(state_dict, path)

    def load(self, path, map_location=None):
        """As ``torch.load`` of any object: it runs what the file asks for, so only load what you trust."""
        return _compat.load(path, map_location=map_location)

    def commit(self, info):
        logger.info(f"[Torch] checkpoint {getattr(info, 'tag', info)} is ready")
        return True


class PythonCheckpointEngine(TorchCheckpointEngine):
    """The same, and every file of a checkpoint is on the disk before the next one (``writer.type`` PYTHON)."""

    syncs = True
