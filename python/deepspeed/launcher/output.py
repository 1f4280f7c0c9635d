"""The ranks' output on its way to the terminal or to files, with the end of it remembered."""

import errno
import fcntl
import os
import select
import struct
import termios

_TAIL_BYTES = 32768
_CHUNK = 65536


class Tail:
    """The last bytes that one rank wrote, on whatever stream."""

    def __init__(self):
        self._bytes = bytearray()

    def add(self, data):
        self._bytes += data
        if len(self._bytes) > 2 * _TAIL_BYTES:
            del self._bytes[:-_TAIL_BYTES]

    def lines(self, count):
        """The last ``count`` lines as text; of a line that was redrawn with carriage returns, the last state."""
        text = bytes(self._bytes).decode("utf-8", errors="replace").replace("\r\n", "\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")][-count:]


class Sink:
    """A file descriptor to write to; ``prefix`` (bytes) goes in front of every line."""

    def __init__(self, fd, prefix=b""):
        self.fd = fd
        self.prefix = prefix
        self._partial = b""

    def write(self, data):
        """Writes what can be written: all of it, or whole lines when there is a prefix."""
        if not self.prefix:
            return _write_all(self.fd, data)
        data = self._partial + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, self._partial = data.rpartition(b"\n")
        if newline:
            _write_all(self.fd, b"".join(self.prefix + line + b"\n" for line in whole.split(b"\n")))
        return None

    def flush(self):
        """Writes the started line, if any."""
        if self._partial:
            partial, self._partial = self._partial, b""
            _write_all(self.fd, self.prefix + partial + b"\n")


def _write_all(fd, data):
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # Somebody made our terminal non-blocking; wait for it rather than lose lines.
            select.select([], [fd], [], 1.0)


class Channel:
    """What a rank writes to: a pipe, or a pseudo-terminal where our own stream is a terminal.

    ``write_fd`` is for the rank and is closed here once it has been handed over; ``fd`` is read by the supervisor.
    """

    def __init__(self, sink, tail, terminal_fd=None):
        self.sink = sink
        self.tail = tail
        self.terminal_fd = terminal_fd
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
        """The rank has its end: ours is not needed, and would keep the channel open."""
        os.close(self.write_fd)
        self.write_fd = None

    def pump(self):
        """Passes on what is there; False at the end of the stream."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EIO:  # a pseudo-terminal says EIO when its last writer is gone
                raise
            data = b""
        if not data:
            return False
        self.tail.add(data)
        self.sink.write(data)
        return True

    def close(self):
        if self.fd is not None:
            self.sink.flush()
            os.close(self.fd)
            self.fd = None


def same_file(first_fd, second_fd):
    """True when both descriptors write to the same place, so that one channel keeps the order of lines."""
    first, second = os.fstat(first_fd), os.fstat(second_fd)
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)
