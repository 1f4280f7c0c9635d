"""Files of frozen weights, which tags share, and what they are known by."""

import contextlib
import ctypes
import hashlib
import os

from deepspeed._native import _C
from deepspeed.checkpoint import file_reader, file_writer, manifest
from deepspeed.checkpoint.stored_tensor import Staging, StoredTensor

_STAGING_BYTES = 32 << 20


class FrozenFile(file_writer.PreparedSafetensors):
    """Tensors that do not change from one tag to the next. A file of that name in another tag of the directory has the
    same content, so it is linked instead of written again.

    ``sound``: (device, inode) of files whose checksum this process has seen to be right; it grows.
    """

    def __init__(self, tensors, metadata, sound):
        super().__init__(tensors, metadata)
        self.sound = sound

    def write(self, path, options=None):
        """Returns the file's record, as made now or when it was written."""
        return self.link(path) or super().write(path, options)

    def link(self, path):
        """Puts a namesake in another tag at ``path`` as well. Returns its record, or None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # it may be a link itself: writing to it would write to the other tag
        for source, record in _same_file_elsewhere(path):
            if self._is_sound(source, record):
                try:
                    os.link(source, path)
                except OSError:  # no hard links here, or no more of them; or that tag has just been removed
                    return None
                return record
        return None

    def _is_sound(self, source, record):
        """Whether the file is what was saved. It is read once in a process: a damaged one must not live on in new tags
        while the right values are in memory."""
        try:
            status = os.stat(source)
            place = (status.st_dev, status.st_ino)
            if place not in self.sound:
                if status.st_size != record.bytes or file_reader.file_crc32(source) != record.crc32:
                    return False
                self.sound.add(place)
        except OSError:
            return False
        return True


def _same_file_elsewhere(path):
    """``(path, FileRecord)`` of the file's namesakes in complete tags beside the one being saved, newest first."""
    staging, name = os.path.split(path)
    parent, found = os.path.dirname(staging), []
    for entry in os.scandir(parent):
        if not entry.name.startswith(".") and os.path.exists(os.path.join(entry.path, name)):
            found.append((entry.stat().st_mtime, entry.path))
    for _, folder in sorted(found, reverse=True):
        try:
            facts = manifest.read(folder)
        except (manifest.DamagedManifest, OSError):
            continue
        if facts is not None and name in facts["files"]:
            yield os.path.join(folder, name), file_writer.FileRecord.from_dict(facts["files"][name])


class Digest:
    """SHA-256 of named tensors, which is computed again only when their CRC-32, names, shapes or dtypes change.

    The checksum is always computed: version counters do not see changes through ``param.data``.
    """

    def __init__(self):
        self._known = (None, None)

    def of(self, tensors, salt=""):
        """Hexadecimal. ``salt``: text that makes others' equal tensors different."""
        stored = {name: StoredTensor(tensors[name], row_major=True) for name in sorted(tensors)}
        staging = Staging(_STAGING_BYTES)
        seen = [salt] + [(name, str(item.dtype), item.shape, _crc32(item, staging)) for name, item in stored.items()]
        if self._known[0] != seen:
            made = hashlib.sha256(repr([salt] + [entry[:3] for entry in seen[1:]]).encode())
            for item in stored.values():
                for address, size in item.pieces(staging):
                    made.update(_memory(address, size))
            self._known = (seen, made.hexdigest())
        return self._known[1]


def _crc32(stored, staging):
    value = 0
    for address, size in stored.pieces(staging):
        value = _C.io.crc32_joined(value, _C.io.crc32(_memory(address, size)), size)
    return value


def _memory(address, size):
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
