"""The protocol between the hosts of a job: frames of messages and output over a pipe or a socket, with heartbeats.

A frame is a kind (one byte), a length (four bytes) and the payload: JSON for messages, else input or output of a rank.
Texts of a message keep their bytes, whatever encoding either host uses.
"""

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections import deque

from deepspeed.host.variables import number
from deepspeed.launcher import linux

MESSAGE, OUTPUT, ERRORS, INPUT = b"J", b"O", b"E", b"I"
_HEAD = struct.Struct(">cI")
_LARGEST = 1 << 28
_CHUNK = 1 << 16
BEAT_S = 1.0
LOST_S = 5.0
# One look counts as at most this much silence: a machine that was suspended for seconds could not receive anything.
LOOK_S = 0.25


class LinkLost(RuntimeError):
    """The other end has closed the connection, or has sent bytes that are not a frame."""


def to_wire(value):
    """``value`` with every text as its bytes, one character each, which JSON can carry."""
    return _mapped(value, lambda text: os.fsencode(text).decode("latin-1"))


def from_wire(value):
    """The inverse of ``to_wire``."""
    return _mapped(value, lambda text: os.fsdecode(text.encode("latin-1")))


def _mapped(value, change):
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def encode_frame(kind, payload):
    """The bytes of a frame."""
    return _HEAD.pack(kind, len(payload)) + payload


class Link:
    """One end of a connection to another host; both descriptors become non-blocking.

    ``frames``: received frames, messages decoded. ``lost``: the reason why the link has ended, or an empty text.
    ``paused``: the other end is not expected to send anything. ``mark``: bytes that precede the first frame; bytes
    before them (output of a login shell) are ``noise``.
    """

    def __init__(self, read_fd, write_fd, mark=b"", lost_s=None, largest=_LARGEST):
        self.read_fd, self.write_fd = read_fd, write_fd
        self.frames = deque()
        self.lost = ""
        self.paused = False
        self.noise = b""
        self._mark = mark
        self._lost_s = lost_s if lost_s is not None else link_timeout()
        self._largest = largest
        self._in, self._out = bytearray(), bytearray()
        self._silent_s = self._beat_at = 0.0
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    @classmethod
    def over(cls, connection, **more):
        """The link over a TCP connection, which it takes."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = connection.detach()
        return cls(fd, fd, **more)

    @property
    def backlog(self):
        """The number of bytes that are not sent yet."""
        return len(self._out)

    def send(self, message):
        """Sends a dict."""
        self.send_bytes(MESSAGE, json.dumps(to_wire(message)).encode("ascii"))

    def send_bytes(self, kind, data):
        """Sends ``data`` unchanged; ``flush`` sends the rest if the connection does not take all of it now."""
        if not self.lost:
            self._out += encode_frame(kind, data)
            self.flush()

    def flush(self):
        """Writes as much as the connection takes now."""
        try:
            while self._out and not self.lost:
                del self._out[: os.write(self.write_fd, memoryview(self._out)[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(f"the connection broke ({error.strerror})")

    def receive(self):
        """Reads received bytes into ``frames``. The end of the stream sets ``lost``."""
        try:
            data = linux.read_now(self.read_fd, _CHUNK)
        except OSError as error:
            return self._end(f"the connection broke ({error.strerror})")
        if data is None:
            return None
        if not data:
            return self._end("the connection was closed")
        self._silent_s = 0.0
        self.paused = False
        if self._mark:
            self.noise, mark, data = (self.noise + data).partition(self._mark)
            self._mark = b"" if mark else self._mark
        self._in += data
        try:
            while frame := self._next_frame():
                self.frames.append(frame)
        except ValueError as error:
            self._end(str(error))

    def _next_frame(self):
        # The first received frame as ``(kind, message or bytes)``, None if it is incomplete.
        if len(self._in) < _HEAD.size:
            return None
        kind, size = _HEAD.unpack_from(self._in)
        if kind not in (MESSAGE, OUTPUT, ERRORS, INPUT) or size > self._largest:
            raise ValueError("what came over the link is not a message of a launcher")
        end = _HEAD.size + size
        if len(self._in) < end:
            return None
        body = bytes(self._in[_HEAD.size : end])
        del self._in[:end]
        return kind, from_wire(json.loads(body)) if kind == MESSAGE else body

    def wait_for(self, name, limit_s=None):
        """The value of ``name`` in the next message that has it; see ``wait_for_any``."""
        return self.wait_for_any((name,), limit_s)[1]

    def wait_for_any(self, names, limit_s=None):
        """``(name, value)`` of the next message that has one of ``names``; earlier messages are dropped.

        LinkLost if the other end closes the link, sends ``stop``, or takes longer than ``limit_s``.
        """
        while True:
            while self.frames:
                kind, message = self.frames.popleft()
                name = next((name for name in names if kind == MESSAGE and name in message), None)
                if name is not None:
                    return name, message[name]
                if kind == MESSAGE and "stop" in message:
                    raise LinkLost(message["stop"])
            if self.lost:
                raise LinkLost(self.lost)
            waited_s = self.turn()
            if limit_s is not None:
                limit_s -= waited_s
                if limit_s < 0:
                    raise LinkLost("the other end did not answer in time")

    def turn(self):
        """Waits for a short time, reads and writes. Returns the seconds that passed."""
        started = time.monotonic()
        readable, _, _ = select.select([self.read_fd], [self.write_fd] if self._out else [], [], LOOK_S)
        self.flush()
        if readable:
            self.receive()
        waited_s = time.monotonic() - started
        self.beat(waited_s)
        return waited_s

    def beat(self, waited_s):
        """Sends a heartbeat, and sets ``lost`` if the other end sends none. Call it a few times per second."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S and not self._out:
            self._beat_at = now
            self.send({"beat": 1})
        if not self.paused:
            self._silent_s += min(waited_s, LOOK_S)
        if self._silent_s > self._lost_s:
            self._end(f"nothing was heard for {self._lost_s:.0f} s")

    def _end(self, why):
        self.lost = self.lost or why
        self._out.clear()

    def trust(self):
        """Lifts the limit on the size of frames, once the other end has proved that it knows the key."""
        self._largest = _LARGEST

    def close(self):
        """Closes both descriptors."""
        for fd in {self.read_fd, self.write_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._end("closed")


def link_timeout():
    """Seconds of silence after which the other end counts as lost: ``DS_LAUNCHER_LINK_S``, or 5."""
    return max(2.0, number("DS_LAUNCHER_LINK_S", LOST_S, "in seconds"))
