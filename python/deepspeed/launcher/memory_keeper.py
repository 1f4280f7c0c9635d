"""A process beside an agent that holds the memory which outlives the ranks: see ``deepspeed.host.kept_memory``.

The folder is removed when the agent ends, also if it is killed: by this process, or, if both were killed, by the next
keeper of this host, which sees that no process holds the lock.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time

from deepspeed.host.job_key import proves
from deepspeed.host.kept_memory import FOLDER_VARIABLE, KEEPER_VARIABLE, SILENT_S, read_line
from deepspeed.host.recorded_names import path_below
from deepspeed.launcher import linux

_BASE = "/dev/shm"
_LOCK = ".lock"
_CHUNK = 1 << 20


class MemoryKeeper:
    """Starts the process. ``variables``: for the environment of the ranks. Raises OSError without /dev/shm."""

    def __init__(self, base=_BASE):
        prefix = f"deepspeed-memory-{os.getuid()}-"
        remove_left(base, prefix)
        self.folder, self._lock = claim(base, prefix)
        self._key = os.urandom(16).hex()
        several = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if several else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=several, backlog=64)
        self.variables = {
            FOLDER_VARIABLE: self.folder,
            KEEPER_VARIABLE: f"{listener.getsockname()[1]}:{self._key}",
        }
        agent = os.getpid()
        self.pid = linux.fork(lambda: self._serve(listener, agent))
        listener.close()

    def close(self):
        """Ends the process, which removes the folder."""
        remove(self.folder)  # first: if the agent is killed now, the process continues the removal
        linux.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._lock)

    # ---- in the process --------------------------------------------------------------------------------------------
    def _serve(self, listener, agent):
        os.setsid()  # Ctrl-C must reach only the agent
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            linux.die_with_parent(agent, signal.SIGTERM)
            null = os.open(os.devnull, os.O_RDWR)
            linux.take_streams([null] * 3, {listener.fileno(), self._lock})  # links and ports end with the agent
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._take, args=(connection,), daemon=True).start()
        finally:
            remove(self.folder)

    def _take(self, connection):
        with connection:
            connection.settimeout(SILENT_S)
            # OSError: the peer has closed it. The other errors: it is not a rank.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                nonce = os.urandom(16).hex()
                connection.sendall(nonce.encode() + b"\n")
                told = json.loads(read_line(connection))
                if proves(told["proof"], self._key, nonce, "rank"):
                    connection.sendall(self._receive(connection, told).encode() + b"\n")

    def _receive(self, connection, told):
        # Returns the error as one line, or "".
        try:
            folder = path_below(self.folder, told["folder"], "a rank of another host")
            files = [(path_below(folder, name, "a rank of another host"), size) for name, size in told["files"]]
        except ValueError as error:
            return str(error).replace("\n", " ")
        try:
            make_below(self.folder, told["folder"])
            for path, size in files:
                _fill(connection, path + ".coming", size)
                os.rename(path + ".coming", path)
        except OSError as error:
            return f"{error.strerror or error} ({socket.gethostname()}:{self.folder})"
        return ""


def make_below(base, path):
    """Makes the folder ``path`` below ``base``. ``base`` must exist: a removed folder is not made again."""
    for part in path.split("/"):
        base = os.path.join(base, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(base, 0o700)


def _fill(connection, path, size):
    buffer = memoryview(bytearray(min(_CHUNK, max(size, 1))))
    with open(path, "wb", buffering=0) as file:
        while size > 0:
            count = connection.recv_into(buffer[: min(len(buffer), size)])
            if count == 0:
                raise ConnectionError("the connection was closed")
            file.write(buffer[:count])
            size -= count


def remove(folder):
    """Removes ``folder``. It is renamed first, because ending ranks may still write into it."""
    gone = f"{folder}.removed"
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
    for _ in range(100):
        shutil.rmtree(gone, ignore_errors=True)
        if not os.path.lexists(gone):
            return
        time.sleep(0.02)


def claim(base, prefix):
    """``(folder, lock)``: a new folder below ``base``, and the descriptor that protects it from ``remove_left``. If
    another keeper of this host removes the folder before it is locked, another folder is made."""
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=base)
        path = os.path.join(folder, _LOCK)
        lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the end of an earlier removal
        if os.path.exists(path):
            return folder, lock
        os.close(lock)


def remove_left(base, prefix):
    """Removes folders of keepers of this user that were killed together with their agents."""
    for name in os.listdir(base):
        if name.startswith(prefix):
            folder = os.path.join(base, name)
            # OSError: another removes it, or its keeper or agent is alive and holds the lock.
            with contextlib.suppress(OSError), open(os.path.join(folder, _LOCK), "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
