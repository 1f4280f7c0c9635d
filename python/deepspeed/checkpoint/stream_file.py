"""The stream of pickles and bare storages that torch.save wrote before zip archives, and reads to this day.

``checkpoint.checkpoint_serialization`` false asks for it: a file has no archive around its tensors, so no padding, no
directory at its end and no checksums of its own; the manifest has those.
"""

import os
import pickle

from deepspeed._native import _C
from deepspeed.checkpoint import file_writer, torch_pickler
from deepspeed.checkpoint.file_record import FileRecord, TensorRecord
from deepspeed.checkpoint.stored_tensor import Staging

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
SYSTEM = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


class PreparedStream:
    """A file of ``torch.save(value, path, _use_new_zipfile_serialization=False)`` before it is written; ``sources`` as
    in ``file_writer.PreparedTorch``. Raises what pickle raises."""

    def __init__(self, value):
        pickled, records, tensors, counts = torch_pickler.dump(value, stream=True)
        self.sources = [stored for _, stored in records]
        self._counts = [counts[key] for key, _ in records]
        keys = [key for key, _ in records]
        parts = [pickle.dumps(part, torch_pickler.PROTOCOL) for part in (MAGIC, VERSION, SYSTEM)]
        self._head = b"".join([*parts, pickled, pickle.dumps(keys, torch_pickler.PROTOCOL)])
        index = {id(stored): i for i, stored in enumerate(self.sources)}
        self._tensors = [
            (name, index[id(stored)], file_writer.dtype_name(stored.dtype), list(shape))
            for name, stored, shape in tensors
        ]

    def write(self, path, options=None):
        options = options or file_writer.WriterOptions()
        staging = Staging(min(file_writer.STAGING_BYTES, options.io_buffer_size))
        size = len(self._head) + sum(8 + source.bytes for source in self.sources)
        with file_writer.open_stream(path, size, options) as stream:
            stream.write(self._head)
            places = []
            for source, count in zip(self.sources, self._counts):
                stream.write(count.to_bytes(8, "little"))
                offset, crc32 = stream.position, 0
                for address, part in source.pieces(staging):
                    crc32 = _C.io.crc32_joined(crc32, stream.write_memory(address, part), part)
                places.append((offset, source.bytes, crc32))
            total = stream.finish()
        made = {}
        for name, i, dtype, shape in self._tensors:
            made.setdefault(name, TensorRecord(name, dtype, shape, *places[i]))
        return FileRecord(os.path.basename(path), *total, list(made.values()))
