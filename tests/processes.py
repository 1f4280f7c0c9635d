"""Processes that a test has started, or that they have."""

import contextlib
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import tempfile
import textwrap
import time


def launched(script, folder, *arguments, ranks=2, timeout=60, **env):
    """Runs the text of a script with the launcher, on ranks of this machine and in ``folder``: a CompletedProcess.
    ``env``: more variables."""
    path = os.path.join(folder, "script.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(textwrap.dedent(script))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place), **env}
    command = [sys.executable, "-m", "deepspeed.launcher", "--num_accelerators", str(ranks), path, *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)


def succeeded(done):
    """``done``, a CompletedProcess that must have ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def state_and_parent(pid):
    """The letter of its state, and the number of its parent as text."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[:2]


def running(pid):
    """Whether it is there and has not ended."""
    try:
        return state_and_parent(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def pids():
    """The lines of the file ``pids`` here, into which scripts write their numbers."""
    try:
        with open("pids") as file:
            return [int(line) for line in file]
    except FileNotFoundError:
        return []


def wait_for(condition, seconds=10):
    """Looks until ``condition()`` is true, for at most ``seconds``. A look that comes late counts as 0.1 s at most:
    while the machine stands still nobody else gets on either."""
    passed, last = 0.0, time.monotonic()
    while not condition() and passed < seconds:
        time.sleep(0.02)
        now = time.monotonic()
        passed, last = passed + min(now - last, 0.1), now
    assert condition()


def forked(action):
    """The number of a process that runs ``action()`` and ends; its status tells whether that has raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


@contextlib.contextmanager
def forked_until_the_end(action):
    """Runs ``action()`` in another process, which lives on until the end of the ``with`` statement. Its number."""
    ready, go = os.pipe()

    def run():
        os.close(go)
        action()
        os.read(ready, 1)

    pid = forked(run)
    os.close(ready)
    try:
        yield pid
    finally:
        os.close(go)
        os.waitpid(pid, 0)


def run_python(code, *args, **env):
    """Runs ``python -c code args``, with the modules of this process and further variables."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], env=env, capture_output=True, text=True)


_servers = {}  # of torch, by process: one that a test has forked starts its own


def _torch_server():
    """The socket to this process' server of new processes that have torch (torch_server.py)."""
    if os.getpid() not in _servers:
        _servers.clear()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_server.py")
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [sys.executable, script, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=env,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        _servers[os.getpid()] = ours, process
    return _servers[os.getpid()][0]


def run_after_torch(code, *args, **env):
    """As run_python, in a new process in which torch has been imported already, which takes seconds. For code that
    imports torch or deepspeed, and for which no variable matters that torch itself reads when it is imported."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        channel = _torch_server()
        request = pickle.dumps((code, [*map(str, args)], env, os.getcwd()))
        socket.send_fds(channel, [request], [out.fileno(), err.fileno()])
        status = pickle.loads(channel.recv(1 << 10))
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess([sys.executable, "-c", code], status, out.read(), err.read())


@contextlib.contextmanager
def taken_port():
    """A port at which a server of another program listens."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        yield taken.getsockname()[1]


def write_program(path, text, first="#!/bin/sh\n"):
    """Makes the file ``path`` a program, and its folder where there is none. The path as text."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(first + text)
    path.chmod(0o755)
    return str(path)


def open_files(folder):
    """The files below ``folder``, a ``pathlib.Path``, that this process has open."""
    links = [os.path.join("/proc/self/fd", one) for one in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)} & {str(one) for one in folder.rglob("*")}
