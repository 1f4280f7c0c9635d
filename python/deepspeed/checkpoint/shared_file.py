"""One file of torch.save that several ranks write, who have the same in memory: each writes one range of it.

The layout of a zip archive is known before anything is written, so ranks need nothing of each other but that. What
stands behind a tensor is its checksum; where a tensor is cut, the rank that leads puts it there at the end, with the
directory.
"""

import dataclasses
import os

from deepspeed._native import _C
from deepspeed.checkpoint import file_writer
from deepspeed.checkpoint.stored_tensor import StoredSlice

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
        made = _C.io.ZipPart(
            file_writer.files, os.fspath(path), self.cuts.entries, begin, end, *options.arguments()
        )
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
