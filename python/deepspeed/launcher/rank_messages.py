"""Messages from the ranks of a host to its launcher. The side of the ranks is ``deepspeed.host.launcher_messages``."""

import json
import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of the sender, from the kernel
_LARGEST = 1 << 18


class RankMessages:
    """A datagram socket without a file; ``name`` is its name for the environment of the ranks."""

    def __init__(self):
        self.name = f"deepspeed-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.name)
        self.fd = self._socket.fileno()

    def read(self):
        """The messages that have come from processes of this user, as dicts."""
        found = []
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_LARGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return found
            senders = [_CREDENTIALS.unpack(value)[1] for _, _, value in ancillary if len(value) == _CREDENTIALS.size]
            try:
                message = json.loads(data)
            except ValueError:
                continue
            if senders == [os.getuid()] and isinstance(message, dict):
                found.append(message)
