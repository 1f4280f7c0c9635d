"""The directory of a zip file, by offsets (PKWARE APPNOTE 6.3, zip64 included).

Python's zipfile module reads records only as streams and believes what they say; here every record's place is checked
against the file and its neighbours, and a stored record is a range of the file that can be read from anywhere.
"""

import os
import struct
import zipfile

from deepspeed.utils.byte_ranges import DeflatedRange, FileRange, file_identity

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_STORED, _DEFLATED = 0, 8
_DEFLATE_LIMIT = 1032  # no deflate stream grows by more (RFC 1951: 258 bytes for 2 bits)


def _bad(path, what):
    return zipfile.BadZipFile(f"{path}: {what}")


class ZipDirectory:
    """The records of the zip file at ``path``: ``names`` in the order of the file, ``range_of(name)`` their bytes.

    Raises zipfile.BadZipFile for a directory that contradicts itself: overlapping, encrypted or repeated records,
    records outside of the file, names that leave the archive.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            self._identity = file_identity(file.fileno())
            self._size = self._identity[2]
            self._entries = self._read_directory(file)
        self.names = list(self._entries)

    def __contains__(self, name):
        return name in self._entries

    def _part(self, file, offset, size, what):
        if offset < 0 or size < 0 or offset + size > self._size:
            raise _bad(self.path, f"{what} lies outside of the file")
        file.seek(offset)
        data = file.read(size)
        if len(data) != size:
            raise _bad(self.path, f"{what} is cut off")
        return data

    def _read_directory(self, file):
        if self._size < _END.size:
            raise _bad(self.path, "too short for a zip file")
        tail_size = min(self._size, _END.size + 65535)
        tail = self._part(file, self._size - tail_size, tail_size, "the end of the directory")
        at = tail.rfind(b"PK\x05\x06", 0, len(tail) - _END.size + 4)
        if at < 0:
            raise _bad(self.path, "no directory at its end: it is cut off or no zip file")
        _, disk, first_disk, _, count, size, offset, _ = _END.unpack_from(tail, at)
        end = self._size - tail_size + at
        if 0xFFFF in (count, disk, first_disk) or 0xFFFFFFFF in (size, offset):
            locator = self._part(file, end - _LOCATOR64.size, _LOCATOR64.size, "the zip64 locator")
            magic, _, end64, _ = _LOCATOR64.unpack(locator)
            if magic != b"PK\x06\x07":
                raise _bad(self.path, "the zip64 locator is missing")
            fields = _END64.unpack(self._part(file, end64, _END64.size, "the zip64 end of the directory"))
            if fields[0] != b"PK\x06\x06" or end64 + _END64.size > end:
                raise _bad(self.path, "the zip64 end of the directory is damaged")
            disk, first_disk, count, size, offset, end = *fields[4:6], *fields[7:10], end64
        if disk or first_disk:
            raise _bad(self.path, "a part of an archive of several files")
        if offset + size > end or count * _CENTRAL.size > size:
            raise _bad(self.path, "the directory lies outside of the file")
        return self._entries_of(self._part(file, offset, size, "the directory"), count, offset)

    def _entries_of(self, directory, count, directory_offset):
        found, at = {}, 0
        for _ in range(count):
            if at + _CENTRAL.size > len(directory):
                raise _bad(self.path, "the directory has fewer records than it says")
            fields = _CENTRAL.unpack_from(directory, at)
            flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
            name_size, extra_size, comment_size, header = *fields[10:13], fields[16]
            at += _CENTRAL.size
            if fields[0] != b"PK\x01\x02" or at + name_size + extra_size + comment_size > len(directory):
                raise _bad(self.path, "the directory is damaged")
            raw_name = directory[at : at + name_size]
            extra = directory[at + name_size : at + name_size + extra_size]
            at += name_size + extra_size + comment_size
            size, packed, header = self._zip64_values(extra, size, packed, header)
            name = self._name(raw_name)
            if name in found:
                raise _bad(self.path, f"the record {name!r} appears twice")
            if flags & 0x41:
                raise _bad(self.path, f"the record {name!r} is encrypted")
            if method not in (_STORED, _DEFLATED):
                raise _bad(self.path, f"the record {name!r} is packed in an unknown way ({method})")
            if method == _STORED and size != packed:
                raise _bad(self.path, f"the record {name!r} has two different sizes, {packed} and {size}")
            if size > packed * _DEFLATE_LIMIT:
                raise _bad(self.path, f"the record {name!r} says {size} bytes, more than {packed} packed ones can hold")
            found[name] = [method, header, packed, size, raw_name, None]
        self._check_places(found, directory_offset)
        return found

    def _zip64_values(self, extra, *values):
        """The 64-bit values that replace those which are full, in their order."""
        values, at = list(values), 0
        if 0xFFFFFFFF not in values:
            return values
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            body, at = extra[at + 4 : at + 4 + length], at + 4 + length
            if kind != 1:
                continue
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    if len(body) < 8:
                        raise _bad(self.path, "a zip64 record is cut off")
                    values[index], body = struct.unpack_from("<Q", body)[0], body[8:]
            return values
        return values  # exactly 0xFFFFFFFF bytes is possible

    def _name(self, raw):
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _bad(self.path, f"the name of a record is no text: {raw!r}") from None
        if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
            raise _bad(self.path, f"the record {name!r} would lie outside of the archive")
        return name

    def _check_places(self, entries, directory_offset):
        last_name, last_end = None, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1][1]):
            _, header, packed, _, raw_name, _ = entry
            if header < last_end:
                raise _bad(self.path, f"the records {last_name!r} and {name!r} overlap")
            last_name, last_end = name, header + _LOCAL.size + len(raw_name) + packed
            if last_end > directory_offset:
                raise _bad(self.path, f"the record {name!r} lies outside of the file")
        following = directory_offset
        for entry in sorted(entries.values(), key=lambda item: -item[1]):
            entry[5], following = following, entry[1]

    def range_of(self, name):
        """The bytes of a record, unpacked: an object with ``bytes`` and ``read_into(tensor, start)``."""
        if name not in self._entries:
            raise _bad(self.path, f"there is no record {name!r}")
        method, header, packed, size, raw_name, limit = self._entries[name]
        if method == _DEFLATED:
            return DeflatedRange(self.path, name, size, self._identity)
        with open(self.path, "rb") as file:
            if file_identity(file.fileno()) != self._identity:
                raise OSError(f"{self.path} has changed since it was opened; load the checkpoint again")
            fields = _LOCAL.unpack(self._part(file, header, _LOCAL.size, f"the record {name!r}"))
            local_name = self._part(file, header + _LOCAL.size, fields[9], f"the record {name!r}")
        if fields[0] != b"PK\x03\x04" or local_name != raw_name:
            raise _bad(self.path, f"the record {name!r} is not where the directory says")
        offset = header + _LOCAL.size + fields[9] + fields[10]
        if offset + packed > limit:
            raise _bad(self.path, f"the record {name!r} runs into the next one")
        return FileRange(self.path, offset, size, self._identity)
