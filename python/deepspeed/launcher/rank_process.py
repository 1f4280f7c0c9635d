"""One rank: its process, its channels, and how it ended."""

import os
import signal
import subprocess

from deepspeed.launcher import exit_codes, linux
from deepspeed.launcher.forked_script import ForkedScript


class RankProcess:
    """``channels`` is ``(stdout, stderr)``, the same object twice if one channel keeps the order of lines. ``memory``:
    arguments of ``linux.take_memory_from``. ``forks``: it is forked from this process, with the descriptors ``kept``.

    The process leads a session of its own: Ctrl-C reaches the launcher alone, which passes it on exactly once, and
    the rank can still read a terminal as its standard input.
    """

    def __init__(
        self, rank, command, environment, channels, tail, cores=None, memory=((), False), forks=False, kept=()
    ):
        self.rank, self.channels, self.tail = rank, channels, tail
        self.status = None  # as os.waitpid gives it, turned into a shell's exit code
        launcher = os.getpid()

        def in_child():
            linux.die_with_parent(launcher)
            if cores:
                os.sched_setaffinity(0, cores)
            linux.take_memory_from(*memory)

        # Only one process can read what the user types.
        stdin = 0 if rank == 0 else os.open(os.devnull, os.O_RDONLY)
        streams = stdin, channels[0].write_fd, channels[1].write_fd
        if forks:
            self.process = ForkedScript(command, environment, streams, kept, in_child)
        else:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                start_new_session=True,
                preexec_fn=in_child,
            )
        if stdin:
            os.close(stdin)
        self.pid = self.process.pid
        for channel in set(channels):
            channel.handed_over()

    @property
    def alive(self):
        return self.status is None

    def ended(self, wait_status):
        """Notes the status that waitpid returned."""
        code = os.waitstatus_to_exitcode(wait_status)
        self.status = exit_codes.shell_code(code)
        self.process.returncode = code  # Popen must not wait for it again

    def send(self, sig):
        """Ctrl-C goes to the rank and its helpers, as a terminal would send it; other signals to the rank alone."""
        if self.alive:
            linux.kill(self.pid, sig, group=sig == signal.SIGINT)
