"""Passes the output of ranks to the terminal or to files, and keeps the end of it."""

import errno
import fcntl
import os
import select
import struct
import termios
import time

from deepspeed.launcher import linux

_TAIL_BYTES = 32768
# Seconds after which an incomplete line is shown. A prompt is shown at once. The end of a line that arrives in blocks
# is still in the rank's own buffer, so half of such a line is shown only if the rank writes nothing for a while.
_PROMPT_WAIT_S = 0.05
_BLOCK_WAIT_S = 5.0
_BLOCK_BYTES = 4096
# Waiting counts at most this much per look at the ranks: a machine that stood still for seconds gave the rank no time
# to write the end, either.
LOOK_S = 0.02


class Tail:
    """The last bytes that one rank wrote, on any stream."""

    def __init__(self):
        self._bytes = bytearray()

    def add(self, data):
        self._bytes += data
        if len(self._bytes) > 2 * _TAIL_BYTES:
            del self._bytes[:-_TAIL_BYTES]

    def lines(self, count):
        """The last ``count`` lines as text; for a line that carriage returns have redrawn, its last state."""
        text = bytes(self._bytes).decode("utf-8", errors="replace").replace("\r\n", "\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")][-count:]


class Sink:
    """A file descriptor that one rank's stream goes to.

    With ``whole_lines`` an incomplete line is held back until its end arrives, so that lines of several ranks do not
    mix. After some time ``wait`` writes it (a prompt, a progress bar). ``prefix`` (bytes) precedes every line.
    """

    def __init__(self, fd, prefix=b"", whole_lines=False):
        self.fd, self.prefix = fd, prefix
        self.whole_lines = whole_lines or bool(prefix)
        self.waiting = b""  # the incomplete line
        self._wait_s = 0.0  # the time for which it is still held back
        self._block_at = -_BLOCK_WAIT_S  # the time (time.monotonic) of the last block

    def write(self, data):
        """Writes complete lines; the rest becomes ``waiting``."""
        if not self.whole_lines:
            return write_all(self.fd, data)
        # A block may arrive in pieces, page by page or as the rest of a full pipe.
        now = time.monotonic()
        if len(data) >= _BLOCK_BYTES:
            self._block_at = now
        if self.prefix:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            write_all(self.fd, self._with_prefix(self.waiting + whole) + b"\n")
            self.waiting = b""
        if rest:
            if not self.waiting:
                self._wait_s = _BLOCK_WAIT_S if now - self._block_at < _BLOCK_WAIT_S else _PROMPT_WAIT_S
            self.waiting += rest
        return None

    def wait(self, seconds):
        """Notes that no output arrived for ``seconds``. Writes an incomplete line that was held back for too long."""
        self._wait_s -= min(seconds, LOOK_S)
        if self._wait_s <= 0.0:
            self.flush()

    def _with_prefix(self, text):
        return b"\n".join(self.prefix + line for line in text.split(b"\n")) if self.prefix else text

    def flush(self, end=b""):
        """Writes the incomplete line, if any, and ``end`` after it."""
        if self.waiting:
            text, self.waiting = self.waiting, b""
            write_all(self.fd, self._with_prefix(text) + end)


def write_all(fd, data):
    """Writes all of ``data``; waits if the terminal is in non-blocking mode."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # The terminal is in non-blocking mode; waiting keeps every line.
            select.select([], [fd], [], 1.0)


class Channel:
    """A rank's output stream: a pipe, or a pseudo-terminal if our own stream is a terminal.

    ``write_fd`` is for the rank and is closed here once it has been handed over; ``fd`` is read by the supervisor.
    """

    def __init__(self, sink, tail, terminal_fd=None):
        self.sink, self.tail, self.terminal_fd = sink, tail, terminal_fd
        if terminal_fd is None:
            self.fd, self.write_fd = os.pipe()
        else:
            self.fd, self.write_fd = os.openpty()
            attributes = termios.tcgetattr(self.write_fd)
            attributes[1] &= ~termios.OPOST  # our own terminal turns \n into \r\n; once is enough
            termios.tcsetattr(self.write_fd, termios.TCSANOW, attributes)
            self.copy_size()
        os.set_blocking(self.fd, False)

    def copy_size(self):
        """Gives the pseudo-terminal the size of ours."""
        if self.terminal_fd is not None:
            size = fcntl.ioctl(self.terminal_fd, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)

    def handed_over(self):
        """Closes our copy of the rank's end, which would keep the channel open."""
        os.close(self.write_fd)
        self.write_fd = None

    def pump(self):
        """Passes on available output; False at the end of the stream."""
        try:
            data = linux.read_now(self.fd)
        except OSError as error:
            if error.errno != errno.EIO:  # a pseudo-terminal gives EIO after its last writer has closed it
                raise
            data = b""
        if data:
            self.tail.add(data)
            self.sink.write(data)
        return data != b""

    def close(self):
        if self.fd is not None:
            self.sink.flush(end=b"\n" if self.sink.prefix else b"")
            os.close(self.fd)
            self.fd = None


def log_file(folder, rank):
    """The file, open for appending, that gets the output of ``rank`` instead of the terminal."""
    return open(os.path.join(folder, f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log"), "ab", buffering=0)


def same_file(first_fd, second_fd):
    """True when both descriptors write to the same file, so that one channel keeps the order of lines."""
    first, second = os.fstat(first_fd), os.fstat(second_fd)
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)
