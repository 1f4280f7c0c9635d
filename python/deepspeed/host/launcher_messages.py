"""Messages from a rank to the launcher that started it, over a datagram socket. Without a launcher none is sent."""

import contextlib
import json
import os
import socket

SOCKET_VARIABLE = "DS_LAUNCHER_SOCKET"
SAVE_LIMIT_S = 600.0  # that ranks which save after SIGTERM get before SIGKILL


def tell_launcher(**message):
    """Sends ``message``; True when a launcher has it.

    ``saved``: this folder is a whole checkpoint, which ``latest`` names, or a whole snapshot in memory. ``worlds``: the
    numbers of ranks that can share the batch, with ``min_time``, the minutes between two changes. ``saving``: this rank
    has seen SIGTERM, and ends when the step is done and a checkpoint is written.
    """
    name = os.environ.get(SOCKET_VARIABLE, "")
    if not name:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
        way.settimeout(5.0)
        with contextlib.suppress(OSError):  # the launcher has ended, or it is one of another host
            return way.sendto(json.dumps(message).encode(), "\0" + name) > 0
    return False
