"""One host as the head sees it: the program that connects to it, the link, and its state."""

import os
import signal
import subprocess

from deepspeed.launcher import linux
from deepspeed.launcher.agent import MARK
from deepspeed.launcher.control import Link

_TAIL_BYTES = 8192


class Way:
    """A program that leads to one host (ssh) or to all (pdsh, srun), and its own output. ``hear`` gets complete lines
    of that output and returns those for the user."""

    def __init__(self, command, environment, with_link, hear=None):
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = linux.child(
            command, signal.SIGTERM, env=environment, stdin=pipe if with_link else null, stdout=pipe, stderr=pipe
        )
        self.program = os.path.basename(command[0])
        self.said = b""  # the last bytes of its stderr, and of its stdout if that is not the link
        self._hear, self._half = hear, {}  # fd -> incomplete line
        self.streams = [self.process.stderr.fileno()]
        self.link = None
        if with_link:
            with self.process.stdin as stdin, self.process.stdout as stdout:
                self.link = Link(os.dup(stdout.fileno()), os.dup(stdin.fileno()), MARK)
        else:
            self.streams.append(self.process.stdout.fileno())
        for fd in self.streams:
            os.set_blocking(fd, False)

    def read(self, fd):
        """The bytes that the program has written to ``fd``: None if there are none now, empty at the end."""
        data = linux.read_now(fd)
        if self._hear is not None and data:
            whole, newline, self._half[fd] = (self._half.get(fd, b"") + data).rpartition(b"\n")
            data = self._hear(whole + newline) or None
        self.said = (self.said + (data or b""))[-_TAIL_BYTES:]
        return data

    def last_words(self):
        """The last lines of the program, for an error message: ssh explains there why it could not connect."""
        lines = [line.strip() for line in self.said.decode("utf-8", "replace").splitlines() if line.strip()]
        return " / ".join(lines[-5:])

    def end(self):
        """Ends the program, which has no more work to do. A program that connects to all hosts may have started others:
        the ssh of pdsh would wait for ever for a lost host. The agent behind a link ends through that link."""
        if self.process.poll() is None:
            below = linux.descendants(self.process.pid) if self.link is None else ()
            self.process.terminate()
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            linux.kill_all(below, signal.SIGTERM)


class HostLink:
    """``state``: "away", "here" (said hello), "ready" (has its share), "running", "done".

    In an elastic job also "told" (a share was sent) and "gone" (will not return). ``pending``: shares without
    an answer. ``tries``: failed tries to reach it. ``again_at``: the time of the next try.
    """

    def __init__(self, name, node, slots):
        self.name, self.node, self.slots = name, node, slots
        self.way = self.link = None
        self.peer = ""  # the address from which it has connected
        self.state = "away"
        self.facts = {}
        self.code = None
        self.pending = self.tries = 0
        self.again_at = 0.0

    @property
    def over(self):
        return self.state in ("done", "gone")
