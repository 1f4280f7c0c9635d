"""Event files of TensorBoard that hold scalars, written without the package tensorboard.

A file is a row of records, as TensorFlow has them: length (8 bytes), its checksum, data, its checksum. The data is a
message ``Event`` of protobuf.
"""

import ctypes
import os
import socket
import struct
import time


def _table():
    rows = range(256)
    for _ in range(8):
        rows = [row >> 1 ^ (0x82F63B78 if row & 1 else 0) for row in rows]
    return list(rows)


_CRC = _table()


def masked_crc32c(data):
    """CRC-32C, rotated and shifted by a constant, as the format wants it: data may hold checksums of other data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number):
    number &= 2**64 - 1  # of a negative one its two's complement
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _text(field, data):
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


class ScalarWriter:
    """The methods of torch's ``SummaryWriter`` that TensorBoardMonitor calls. Each scalar is written at once.

    purge_step: what earlier files of the folder have of this step and later ones is void.
    """

    def __init__(self, log_dir, purge_step=None):
        seconds, rest = divmod(time.time_ns(), 10**9)  # TensorBoard reads the files of a folder in the order of names
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
        self._file = open(os.path.join(log_dir, name), "ab", buffering=0)
        self._write(_text(3, b"brain.Event:2"), 0 if purge_step is None else purge_step)
        if purge_step is not None:
            self._write(_text(7, b"\x08\x01"), purge_step)  # SessionLog, status START

    def add_scalar(self, tag, scalar_value, global_step):
        value = _text(1, tag.encode()) + b"\x15" + struct.pack("<f", ctypes.c_float(scalar_value).value)
        self._write(_text(5, _text(1, value)), global_step)

    def _write(self, what, step):
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(event))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, event)]
        size, record = self._file.tell(), length + sums[0] + event + sums[1]
        written = 0
        try:
            written = self._file.write(record)
        finally:
            if written < len(record):  # the disk is full: no reader goes past half a record
                self._file.truncate(size)
        if written < len(record):
            raise OSError(f"{self._file.name}: {written} of {len(record)} bytes could be written")

    def flush(self):
        """Nothing waits here."""

    def close(self):
        self._file.close()
