"""One file of torch.save that several ranks write, who have the same in memory: each writes one range of it.

The layout of a zip archive is known before anything is written, so ranks need nothing of each other but that. What
stands behind a tensor is its checksum; where a tensor is cut, the rank that leads puts it there at the end, with the
directory.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import os

from deepspeed._native import _C
from deepspeed.checkpoint.read import verify
from deepspeed.checkpoint.write import file_writer
from deepspeed.checkpoint.write.torch_pickler import Staging, StoredSlice, StoredTensor

# ---- shared file ---------------------------------------------------------------------------------------------------

_BLOCK = 4096  # what a part begins at a multiple of


@dataclasses.dataclass
class PartRecord:
    """What a rank has written: ``runs`` [(entry, offset in it, bytes, CRC-32)]."""

    bytes: int
    runs: list

    def to_dict(self):
        return {"part": self.runs}


class Cuts:
    """Where ``count`` writers part the file with ``entries`` [(name, bytes)]. The first ``texts`` of those are no
    tensors but the first writer's, and the last two are left to the end."""

    def __init__(self, entries, texts, count):
        self.entries = [tuple(entry) for entry in entries]
        self.texts = texts
        self.layout = _C.io.ZipLayout(self.entries)
        self.tail = len(self.entries) - 2
        end = self.layout.header_offset(self.tail)
        first = min(_round_up(self.layout.header_offset(texts)), end)
        inner = [max(first, end * i // count // _BLOCK * _BLOCK) for i in range(1, count)]
        self.places = [0, *inner, end]

    def part(self, index):
        """(begin, end) of a writer's range of the file; equal where it has nothing to write."""
        return self.places[index], self.places[index + 1]

    def runs(self, index):
        """[(entry, begin, end)] of the bytes of tensors in it."""
        begin, end = self.part(index)
        found = []
        for entry in range(self.texts, self.tail):
            data = self.layout.data_offset(entry)
            first, last = max(begin, data), min(end, data + self.entries[entry][1])
            if first < last:
                found.append((entry, first - data, last - data))
        return found

    def is_in_one_part(self, entry):
        """Whether one writer has all of its bytes and the checksum behind them."""
        data = self.layout.data_offset(entry)
        end = data + self.entries[entry][1] + len(self.layout.descriptor(entry, 0))
        return any(begin <= data and end <= last for begin, last in zip(self.places, self.places[1:]))


def _round_up(value):
    return -(-value // _BLOCK) * _BLOCK


class SharedTorch:
    """One writer's part of the file ``prepared`` (``PreparedTorch``); ``sources`` and ``write`` as there."""

    def __init__(self, prepared, cuts, index):
        self.cuts, self.index = cuts, index
        self._texts = prepared.texts if index == 0 else []
        self.sources = [
            StoredSlice(prepared.sources[entry - cuts.texts], begin, end) for entry, begin, end in cuts.runs(index)
        ]

    def write(self, path, options=None):
        options = options or file_writer.WriterOptions()
        begin, end = self.cuts.part(self.index)
        if begin == end:
            return PartRecord(0, [])
        made = _C.io.ZipPart(file_writer.files, os.fspath(path), self.cuts.entries, begin, end, *options.arguments())
        with file_writer.whole(made) as part:
            for text in self._texts:
                part.write(text)
            file_writer.write_tensors(part, self.sources, options)
            part.finish()
            return PartRecord(end - begin, [[*run, crc32] for run, crc32 in zip(part.runs, part.crc32)])


def complete(path, prepared, cuts, parts):
    """Ends the file when all have written theirs. ``parts``: the runs of every writer. Returns its ``FileRecord``.
    Raises OSError."""
    sums, lengths = [0] * len(cuts.entries), [0] * len(cuts.entries)
    for entry, offset, bytes, crc32 in sorted(tuple(run) for runs in parts for run in runs):
        if offset != lengths[entry]:
            raise RuntimeError(f"bytes {lengths[entry]} to {offset} of {cuts.entries[entry][0]} in {path} are missing")
        sums[entry] = _C.io.crc32_joined(sums[entry], crc32, bytes) if offset else crc32
        lengths[entry] += bytes
    wanted = [size for _, size in cuts.entries[: cuts.tail]]
    if lengths[: cuts.tail] != wanted:
        entry = next(i for i, size in enumerate(wanted) if lengths[i] != size)
        raise RuntimeError(f"{cuts.entries[entry][0]} in {path} has {lengths[entry]} of {wanted[entry]} bytes")
    sums[cuts.tail] = _C.io.crc32(file_writer.VERSION)
    last = file_writer.serialization_id(cuts.entries, sums[:-1])
    sums[-1] = _C.io.crc32(last)
    tail = b"".join(
        cuts.layout.local_header(entry) + text + cuts.layout.descriptor(entry, sums[entry])
        for entry, text in ((cuts.tail, file_writer.VERSION), (cuts.tail + 1, last))
    ) + cuts.layout.directory(sums)  # fmt: skip
    _patch(path, cuts, sums, tail)
    places = [(cuts.layout.data_offset(i), wanted[i], sums[i]) for i in range(cuts.texts, cuts.tail)]
    return prepared.record(path, cuts.layout.file_bytes, _sum_of_file(cuts, sums, tail), places)


def _patch(path, cuts, sums, tail):
    file = os.open(path, os.O_WRONLY)
    try:
        for entry in range(cuts.tail):
            if not cuts.is_in_one_part(entry):
                text = cuts.layout.descriptor(entry, sums[entry])
                os.pwrite(file, text, cuts.layout.data_offset(entry) + cuts.entries[entry][1])
        os.pwrite(file, tail, cuts.layout.header_offset(cuts.tail))
        os.ftruncate(file, cuts.layout.file_bytes)
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, f"write of {path} failed: {error.strerror}. Check space and permissions.") from error
    finally:
        os.close(file)


def _sum_of_file(cuts, sums, tail):
    total = 0
    for entry in range(cuts.tail):
        size = cuts.entries[entry][1]
        for crc32, bytes in (
            _summed(cuts.layout.local_header(entry)),
            (sums[entry], size),
            _summed(cuts.layout.descriptor(entry, sums[entry])),
        ):
            total = _C.io.crc32_joined(total, crc32, bytes) if bytes else total
    return _C.io.crc32_joined(total, *_summed(tail))


def _summed(text):
    return _C.io.crc32(text), len(text)


# ---- native files --------------------------------------------------------------------------------------------------
# Files of frozen weights, which tags share, and what they are known by.

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
                if status.st_size != record.bytes or file_writer.file_crc32(source) != record.crc32:
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
