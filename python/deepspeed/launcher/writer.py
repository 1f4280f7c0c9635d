"""Writes the output of many hosts to the terminal, in a thread: a held terminal (Ctrl-S) must not stop the heartbeats
of the job."""

import threading
from concurrent.futures import ThreadPoolExecutor

from deepspeed.launcher.output import write_all

MOST_WAITING = 4 << 20


class Writer:
    """``backlog``: bytes that are not written yet. ``broken``: the reader has closed the stream."""

    def __init__(self):
        self.backlog = 0
        self.broken = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1)

    def write(self, fd, data):
        """Hands over ``data`` for ``fd``."""
        with self._lock:
            self.backlog += len(data)
        self._thread.submit(self._write, fd, data)

    def finish(self):
        """Waits until all is written."""
        self._thread.shutdown()

    def _write(self, fd, data):
        try:
            if not self.broken:
                write_all(fd, data)
        except OSError:
            self.broken = True
        with self._lock:
            self.backlog -= len(data)
