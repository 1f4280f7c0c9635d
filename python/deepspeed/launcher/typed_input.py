"""Sends this process's stdin (a terminal or a file) to rank 0 on another host."""

import os
import selectors

from deepspeed.launcher.control import INPUT
from deepspeed.launcher.writer import MOST_WAITING

_CHUNK = 1 << 16


class TypedInput:
    """Passes on stdin to ``host``, unless this process is in the background of a terminal."""

    def __init__(self, selector, host):
        self._selector = selector
        self._host = host

    def start(self):
        """Starts to pass on input."""
        try:
            if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                self._selector.register(0, selectors.EVENT_READ, self._pass_on)
        except (OSError, ValueError):  # closed, or a plain file, which selectors do not watch
            self._pass_file()

    def _pass_on(self):
        if self._host.over:
            self._selector.unregister(0)
        elif self._host.link.backlog < MOST_WAITING and not self._pass():
            self._selector.unregister(0)

    def _pass_file(self):
        while self._pass():
            pass

    def _pass(self):
        try:
            data = os.read(0, _CHUNK)
        except OSError:
            data = b""
        self._host.link.send_bytes(INPUT, data)
        return data
