"""Files of frozen weights in the native format: tags share them, and a digest of the weights tells them apart."""

import contextlib
import hashlib
import os
import pathlib

from deepspeed._native import _C
from deepspeed.checkpoint.write import commit
from deepspeed.checkpoint.write.file_writer import PreparedSafetensors, file_crc32


class FrozenFile(PreparedSafetensors):
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
        pathlib.Path(path).unlink(missing_ok=True)  # it may be a link: writing to it would write to the other tag
        sound = (found for found in _same_file_elsewhere(path) if self._is_sound(*found))
        with contextlib.suppress(OSError):  # no hard links here, or no more of them; or that tag has just been removed
            for source, record in sound:
                os.link(source, path)
                return record
        return None

    def _is_sound(self, source, record):
        """Whether the file is what was saved. It is read once in a process: a damaged one must not live on in new tags
        while the right values are in memory."""
        with contextlib.suppress(OSError):
            status = os.stat(source)
            inode = (status.st_dev, status.st_ino)
            if inode in self.sound or status.st_size == record["bytes"] and file_crc32(source) == record["crc32"]:
                self.sound.add(inode)
                return True
        return False


def _same_file_elsewhere(path):
    """``(path, record)`` of the file's namesakes in complete tags beside the one being saved, newest first."""
    staging, name = os.path.split(path)
    found = [entry for entry in os.scandir(os.path.dirname(staging)) if not entry.name.startswith(".")]
    found = [entry for entry in found if os.path.exists(os.path.join(entry.path, name))]
    for folder in sorted(found, key=lambda entry: (entry.stat().st_mtime, entry.path), reverse=True):
        facts = commit.whole_manifest(folder.path)
        if facts is not None and name in facts["files"]:
            yield os.path.join(folder.path, name), facts["files"][name]


class Digest:
    """SHA-256 of named tensors, which is computed again only when their CRC-32, names, shapes or dtypes change.

    The checksum is always computed: version counters do not see changes through ``param.data``.
    """

    def __init__(self):
        self._known = (None, None)

    def of(self, tensors, salt=""):
        """Hexadecimal. ``salt``: text that makes others' equal tensors different."""
        stored = {name: _C.prepared.tensor_source(tensors[name], row_major=True) for name in sorted(tensors)}
        about = [salt, *((name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in stored)]
        seen = [about, [source.crc32() for source in stored.values()]]
        if self._known[0] != seen:
            made = hashlib.sha256(repr(about).encode())
            for source in stored.values():
                source.crc32(made)
            self._known = (seen, made.hexdigest())
        return self._known[1]
