"""Files of frozen weights in the native format: tags share them, and a digest of the weights tells them apart."""

import contextlib
import hashlib
import os

from deepspeed._native import _C
from deepspeed.checkpoint.read import verify
from deepspeed.checkpoint.write.file_writer import FileRecord, PreparedSafetensors, file_crc32


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
                if status.st_size != record.bytes or file_crc32(source) != record.crc32:
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
            facts = verify.read(folder)
        except (verify.DamagedManifest, OSError):
            continue
        if facts is not None and name in facts["files"]:
            yield os.path.join(folder, name), FileRecord.from_dict(facts["files"][name])


class Digest:
    """SHA-256 of named tensors, which is computed again only when their CRC-32, names, shapes or dtypes change.

    The checksum is always computed: version counters do not see changes through ``param.data``.
    """

    def __init__(self):
        self._known = (None, None)

    def of(self, tensors, salt=""):
        """Hexadecimal. ``salt``: text that makes others' equal tensors different."""
        stored = {name: _C.prepared.tensor_source(tensors[name], row_major=True) for name in sorted(tensors)}
        seen = [salt]
        for name, source in stored.items():
            seen.append((name, str(tensors[name].dtype), tuple(tensors[name].shape), source.crc32()))
        if self._known[0] != seen:
            made = hashlib.sha256(repr([salt] + [entry[:3] for entry in seen[1:]]).encode())
            for source in stored.values():
                source.crc32(made)
            self._known = (seen, made.hexdigest())
        return self._known[1]
