"""Sends this process's stdin (a terminal or a file) to rank 0 on another host."""

import os
import selectors

from deepspeed.launcher.control import INPUT
from deepspeed.launcher.writer import MOST_WAITING

_CHUNK = 1 << 16


def pass_on_input(selector, host):
    """Passes on stdin to ``host``, unless this process is in the background of a terminal."""

    def passed():
        try:
            data = os.read(0, _CHUNK)
        except OSError:
            data = b""
        host.link.send_bytes(INPUT, data)
        return data

    def on_input():
        if host.over or (host.link.backlog < MOST_WAITING and not passed()):
            selector.unregister(0)

    try:
        if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
            selector.register(0, selectors.EVENT_READ, on_input)
    except (OSError, ValueError):  # closed, or a plain file, which selectors do not watch
        while passed():
            pass
