"""Event files: read back by a reader of this file, and by TensorBoard's own where it is installed."""

import glob
import math
import os
import struct
import sys

import pytest

from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.event_file import ScalarWriter, masked_crc32c
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from logs import logged

EVENTS = [("Train/Samples/lr", 0.001, 8), ("Train/Samples/lr", 1e-9, 2**40), ("a b", -2.5, 16), ("big", 1e300, 16)]


def crc32c(data):
    """Bit by bit, over the polynomial of Castagnoli."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def records(path):
    """The records of a file, whose checksums are right."""
    with open(path, "rb") as file:
        data = file.read()
    found, at = [], 0
    while at < len(data):
        length, head = struct.unpack_from("<QI", data, at)
        record = data[at + 12 : at + 12 + length]
        assert head == masked(data[at : at + 8])
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked(record),)
        found.append(record)
        at += 16 + length
    return found


def fields(message):
    """{field: values} of a message of protobuf."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            size = varint() if size is None else size
            value = message[at : at + size]
            at += size
        found.setdefault(key >> 3, []).append(value)
    return found


def scalars(folder):
    """(name, value, step) of the files of ``folder``, and their other records: version and begun sessions, by step."""
    found, others = [], []
    for path in sorted(glob.glob(f"{folder}/events.out.tfevents.*")):
        for event in map(fields, records(path)):
            step = event.get(2, [0])[0]
            if 5 in event:
                value = fields(fields(event[5][0])[1][0])
                found.append((value[1][0].decode(), struct.unpack("<f", value[2][0])[0], step))
            else:
                others.append((event.get(3) or fields(event[7][0])[1], step))
    return found, others


def rounded(value):
    return struct.unpack("<f", struct.pack("<f", value))[0] if abs(value) < 1e38 else math.inf


WANTED = [(name, rounded(value), step) for name, value, step in EVENTS]


def test_checksums():
    assert crc32c(b"123456789") == 0xE3069283
    for data in (b"", b"123456789", bytes(range(256)) * 3):
        assert masked_crc32c(data) == masked(data)


def test_our_writer(tmp_path):
    writer = ScalarWriter(str(tmp_path))
    for event in EVENTS:
        writer.add_scalar(*event)
    assert scalars(tmp_path) == (WANTED, [([b"brain.Event:2"], 0)])  # without flush() and close()
    writer.close()
    again = ScalarWriter(str(tmp_path), purge_step=17)
    again.add_scalar("a b", 1.0, 17)
    again.close()
    found, others = scalars(tmp_path)
    assert found == [*WANTED, ("a b", 1.0, 17)] and others[1:] == [([b"brain.Event:2"], 17), ([1], 17)]


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    writer = ScalarWriter(str(tmp_path))
    writer.add_scalar("a", 1.0, 1)

    class Full:
        name, tell, truncate = writer._file.name, writer._file.tell, writer._file.truncate

        @staticmethod
        def write(data):
            return file.write(data[:9])

    file, writer._file = writer._file, Full
    with pytest.raises(OSError, match="9 of .* bytes could be written"):
        writer.add_scalar("a", 2.0, 2)
    writer._file = file
    writer.add_scalar("a", 3.0, 3)
    assert scalars(tmp_path)[0] == [("a", 1.0, 1), ("a", 3.0, 3)]


@pytest.fixture(params=["with the package tensorboard", "without"])
def config(request, tmp_path, monkeypatch):
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    else:
        pytest.importorskip("torch.utils.tensorboard", reason="packages/torch2.txt installs it for the second torch")
    keys = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "job"}
    return DeepSpeedMonitorConfig(tensorboard=keys)


def test_the_monitor(config, tmp_path):
    made = TensorBoardMonitor(config.tensorboard)
    folder = tmp_path / "logs" / "job"
    assert made.enabled and made.log_dir == str(folder) and made.get_summary_writer() is made.summary_writer
    made.write_events(EVENTS, flush=False)
    made.flush()
    assert scalars(folder)[0] == WANTED
    made.close()
    assert scalars(folder)[0] == WANTED


def test_a_resume_voids_later_steps(config, tmp_path):
    """By TensorBoard's own reader where it is there: the events that it shows."""
    made = MonitorMaster(config)
    for step in range(8, 81, 8):
        made.write_events([("loss", float(step), step)])
    made.resume(40)
    for step in range(48, 65, 8):
        made.write_events([("loss", step + 0.5, step)])
    made.flush()
    made.close()
    folder = tmp_path / "logs" / "job"
    assert len(os.listdir(folder)) == 2 and scalars(folder)[1].count(([1], 41)) == 1
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = reader.EventAccumulator(str(folder)).Reload().Scalars("loss")
    wanted = [(step, float(step)) for step in range(8, 41, 8)] + [(step, step + 0.5) for step in range(48, 65, 8)]
    assert [(one.step, one.value) for one in shown] == wanted


def test_the_missing_package_is_one_line_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with logged() as texts:
        made = MonitorMaster(DeepSpeedMonitorConfig(tensorboard={"enabled": True, "output_path": str(tmp_path)}))
        made.write_events(EVENTS)
        made.flush()
    assert len(texts) == 1 and "without the package tensorboard" in texts[0]
    assert scalars(tmp_path / "DeepSpeedJobName")[0] == WANTED


def test_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = TensorBoardMonitor(DeepSpeedMonitorConfig(tensorboard={"job_name": "j"}).tensorboard)
    made.write_events(EVENTS)
    made.flush()
    made.resume(1)
    made.close()
    assert (made.enabled, made.job_name, made.output_path, made.summary_writer) == (False, "j", "", None)
    assert os.listdir(tmp_path) == []
