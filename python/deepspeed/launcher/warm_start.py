"""Restarts the ranks of an elastic job from a process that has already imported torch and deepspeed.

The agent starts that process when the first ranks have run for some seconds. When ranks are to start again, it forks
the supervisor, which becomes a child of the agent and forks the ranks. A round starts without this process if its ranks
are not Python scripts, if their variables (other than rank numbers) have changed, or if ``DS_ELASTIC_WARM_S`` is
negative.
"""

import functools
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time

from deepspeed.host.launcher_messages import SOCKET_VARIABLE
from deepspeed.host.variables import number
from deepspeed.launcher import linux
from deepspeed.launcher.control import from_wire, to_wire
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.forked_script import is_script
from deepspeed.launcher.launch import FORWARDED, supervise
from deepspeed.launcher.plan import NodePlan
from deepspeed.registry import load_target

_VARIABLE = "DS_ELASTIC_WARM_S"
_DELAY_S = 5.0  # seconds after the start of the ranks, which use the cores first
_ANSWER_S = 10.0
_SIZE = struct.Struct(">Q")
# Variables that may differ between rounds, because importing modules does not read them.
_VARIES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", SOCKET_VARIABLE,
}  # fmt: skip


def _common(environment):
    return {name: value for name, value in environment.items() if name not in _VARIES}


class WarmStart:
    """The agent's side. ``pid``: the id of the process, 0 if there is none."""

    def __init__(self):
        self._process = self._connection = self._variables = self._due = None
        self._ready = False

    @property
    def pid(self):
        return 0 if self._process is None else self._process.pid

    def expect(self, plan):
        """Called before a round starts."""
        if self._process is None and all(map(is_script, plan.commands)):
            delay = number(_VARIABLE, _DELAY_S, error=LaunchError, variables=plan.environments[0])
            self._due = None if delay < 0 else time.monotonic() + delay

    def turn(self, plan):
        """Called again and again while ranks run."""
        if self._due is None or time.monotonic() < self._due:
            return
        self._due, self._variables = None, _common(plan.environments[0])
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-m", "deepspeed.launcher.warm_start", str(theirs.fileno())]
        quiet = subprocess.DEVNULL
        self._process = linux.child(
            command, env=self._variables, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(theirs.fileno(),)
        )
        theirs.close()

    def fits(self, plan):
        """Whether the process exists and fits the ranks of ``plan``. A process that does not fit is ended."""
        if self._process is None:
            return False
        same = all(_common(environment) == self._variables for environment in plan.environments)
        try:
            self._connection.setblocking(False)
            self._ready = self._ready or self._connection.recv(1) == b"1"
        except BlockingIOError:
            if same:  # it is still importing
                return False
        fits = self._ready and same and all(map(is_script, plan.commands))
        if not fits:
            self.close()
        return fits

    def fork_supervisor(self, plan, streams):
        """The process that runs ``plan``, a child of this one; None when that was not possible. ``streams``: its stdin,
        stdout, stderr."""
        data = json.dumps(to_wire({"plan": vars(plan), "agent": os.getpid()})).encode("ascii")
        try:
            self._connection.settimeout(_ANSWER_S)
            socket.send_fds(self._connection, [_SIZE.pack(len(data))], [*streams, plan.report_fd])
            self._connection.sendall(data)
            return _SIZE.unpack(_exactly(self._connection, _SIZE.size))[0]
        except OSError:
            self.close()
            return None

    def close(self):
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self.__init__()


def _exactly(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


# ---- in the process ------------------------------------------------------------------------------------------------
def main():
    """Imports what a training script needs, then forks a supervisor for each plan that comes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    load_target("deepspeed.engine.initialize:initialize")
    kept = linux.open_fds() - {connection.fileno()}
    gc.collect()
    gc.freeze()  # keeps the pages that all ranks share unwritten
    connection.sendall(b"1")
    while True:
        size, fds, _, _ = socket.recv_fds(connection, _SIZE.size, 4)
        if not size:
            return
        told = from_wire(json.loads(_exactly(connection, _SIZE.unpack(size)[0])))
        plan, agent = NodePlan([], [], []), told["agent"]
        vars(plan).update(told["plan"])
        # The process between the two ends at once, so that the supervisor becomes a child of the agent, which adopts
        # orphans.
        supervisor = functools.partial(_supervise, connection, plan, agent, fds, kept)
        between = linux.fork(lambda work=supervisor: linux.fork(work) and 0)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _supervise(connection, plan, agent, fds, kept):
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until the supervisor is ready for them
    limit = time.monotonic() + _ANSWER_S
    while os.getppid() != agent:
        if time.monotonic() > limit:  # it has ended
            return 1
        time.sleep(0.0005)
    linux.take_streams(fds[:3], {*kept, fds[3], connection.fileno()})
    plan.report_fd, plan.forks, plan.kept_fds = fds[3], True, kept
    connection.sendall(_SIZE.pack(os.getpid()))
    connection.close()
    return supervise(plan, agent)


if __name__ == "__main__":
    main()
