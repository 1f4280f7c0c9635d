"""Watches over the ranks of one node: passes on their output and our signals, and ends all when one fails."""

import contextlib
import json
import os
import signal
import sys
import time

from deepspeed.host.launcher_messages import SAVE_LIMIT_S, SOCKET_VARIABLE
from deepspeed.launcher import exit_codes, linux
from deepspeed.launcher.output import LOOK_S, Channel, Sink, Tail, log_file, same_file
from deepspeed.launcher.rank_messages import RankMessages
from deepspeed.launcher.rank_process import RankProcess

TAIL_LINES = 30
_LEFTOVER_GRACE_S = 1.0
_DRAIN_S = 0.3
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
END_NOW = signal.SIGRTMIN  # the agent asks for SIGKILL to all remaining processes
_CAUGHT = (END_NOW, *_STOPPING, *_PASSED_ON, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCHLD)


class Supervisor:
    """Runs a ``NodePlan`` to its end; ``run`` returns the exit code of the job."""

    def __init__(self, plan, front_pid):
        self._plan, self._front_pid = plan, front_pid
        self._selector = linux.Selector()
        self._ranks = []
        self._files = []
        self._first_failure = None
        self._stop_code = None  # exit code once a signal, not a rank, ends the job
        self._kill_at = None
        self._save_until = 0.0  # until then ranks may save before they end
        self._started = time.monotonic()

    # ---- start ---------------------------------------------------------------------------------------------------
    def run(self):
        """Starts the ranks and returns when no process of the job is left."""
        os.setsid()  # the terminal's signals go to the front process alone, which passes each on once
        linux.become_subreaper()
        linux.die_with_parent(self._front_pid, signal.SIGTERM)
        self._catch_signals()
        self._messages = RankMessages()
        self._selector.watch(self._messages.fd, None)
        try:
            for local in range(len(self._plan.commands)):
                self._ranks.append(self._start(local))
            while self._alive():
                self._turn()
        except BrokenPipeError:
            self._stop_code = 128 + signal.SIGPIPE  # the reader of our output has closed it (`| head`)
        finally:
            self._end_leftovers()
            self._drain()
        return self._exit_code()

    def _start(self, local):
        plan, tail, rank = self._plan, Tail(), self._plan.first_rank + local
        return RankProcess(
            rank, plan.commands[local], {**plan.environments[local], SOCKET_VARIABLE: self._messages.name},
            self._channels(rank, tail), tail, plan.cores[local], plan.memory[local], plan.forks, plan.kept_fds,
        )  # fmt: skip

    def _channels(self, rank, tail):
        prefix = self._plan.line_prefix(rank)
        if self._plan.log_dir:
            file = log_file(self._plan.log_dir, rank)
            self._files.append(file)
            return (self._channel(file.fileno(), prefix, tail, False),) * 2
        if same_file(1, 2):
            return (self._channel(1, prefix, tail),) * 2
        return self._channel(1, prefix, tail), self._channel(2, prefix, tail)

    def _channel(self, fd, prefix, tail, may_be_terminal=True):
        terminal = fd if may_be_terminal and not prefix and os.isatty(fd) else None
        # A single stream into a file cannot mix with lines of others.
        sink = Sink(fd, prefix, whole_lines=may_be_terminal and len(self._plan.commands) > 1)
        channel = Channel(sink, tail, terminal)
        self._selector.watch(channel.fd, channel)
        return channel

    def _catch_signals(self):
        self._wake = linux.signal_socket()
        for sig in _CAUGHT:
            signal.signal(sig, lambda *_: None)  # the number arrives through the socket
        self._selector.watch(self._wake[0], None)
        # The front process blocked them around the fork; the ranks must not inherit a mask.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    # ---- one turn of the loop ------------------------------------------------------------------------------------
    def _alive(self):
        return [rank for rank in self._ranks if rank.alive]

    def _turn(self):
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()
        half = self._half_lines()
        limits = [LOOK_S] * bool(half) + ([] if self._kill_at is None else [max(0.0, self._kill_at - now)])
        self._select(min(limits, default=None))
        # After reading: if this process was late, the end of the line may have arrived meanwhile.
        for sink, waiting in half:
            if sink.waiting.startswith(waiting):
                sink.wait(time.monotonic() - now)
        self._reap()

    def _half_lines(self):
        sinks = [key.data.sink for key in self._selector.get_map().values() if key.data]
        return [(sink, sink.waiting) for sink in sinks if sink.waiting and not sink.prefix]

    def _select(self, timeout):
        # Returns whether there was output.
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if key.fd == self._messages.fd:
                for message in self._messages.read():
                    self._on_message(message)
            elif key.data is None:
                for number in self._wake[0].recv(1024):
                    self._on_signal(signal.Signals(number))
            elif not key.data.pump():
                self._selector.unregister(key.fd)
                key.data.close()
        return bool(ready)

    def _reap(self):
        for pid, status in linux.ended_children():
            for rank in (one for one in self._ranks if one.pid == pid):  # none: an adopted orphan
                rank.ended(status)
                if rank.status != 0 and self._first_failure is None and self._stop_code is None:
                    self._first_failure = (rank, time.monotonic() - self._started)
                    self._say({"failed": rank.rank, "code": rank.status})
                    self._stop(signal.SIGTERM, self._plan.failure_grace_s)

    def _on_message(self, message):
        if "saving" in message and self._first_failure is None:
            self._save_until = time.monotonic() + SAVE_LIMIT_S
            self._kill_at = None if self._kill_at is None else self._save_until
        known = {name: message[name] for name in ("saving", "saved", "worlds", "min_time") if name in message}
        if known:
            self._say(known)

    def _on_signal(self, sig):
        if sig == signal.SIGWINCH:
            for channel in {one for rank in self._ranks for one in rank.channels if one.fd is not None}:
                channel.copy_size()
            self._send(sig)
        elif sig in (signal.SIGTSTP, signal.SIGCONT):
            for rank in self._alive():
                linux.kill(rank.pid, signal.SIGSTOP if sig == signal.SIGTSTP else sig, group=True)
        elif sig in _PASSED_ON:
            self._send(sig)
        elif sig == END_NOW:
            self._kill_all()
        elif sig in _STOPPING:
            self._on_stop_signal(sig)

    def _on_stop_signal(self, sig):
        front_is_gone = os.getppid() != self._front_pid
        again = self._stop_code is not None
        if not again and self._first_failure is None:
            self._stop_code = 128 + sig
        if front_is_gone or (again and sig != signal.SIGTERM):
            self._kill_all()  # the launcher was killed, or the user will not wait
        elif not again:  # Slurm and systemd send SIGTERM to us, to the front process and to the head, which pass it on
            self._stop(sig)

    def _stop(self, sig, grace_s=None):
        end = time.monotonic() + (self._plan.grace_s if grace_s is None else grace_s)
        self._kill_at = self._kill_at or (end if self._first_failure else max(end, self._save_until))
        self._send(sig)

    def _send(self, sig):
        for rank in self._alive():
            rank.send(sig)

    def _kill_all(self):
        self._kill_at = None
        linux.kill_all(linux.descendants(os.getpid()))

    # ---- end -----------------------------------------------------------------------------------------------------
    def _end_leftovers(self):
        # Helpers that ranks left behind have become our children. SIGTERM first, as at a shutdown.
        deadline = time.monotonic() + _LEFTOVER_GRACE_S
        left = linux.descendants(os.getpid())
        linux.kill_all(left, signal.SIGTERM)
        while left:
            time.sleep(0.01)
            self._reap()
            left = linux.descendants(os.getpid())
            if time.monotonic() > deadline:
                linux.kill_all(left)
        self._reap()

    def _drain(self):
        # The writers have ended, so each channel ends after the bytes that it holds. The deadline is for processes
        # outside of the job that hold the other end of a channel.
        deadline = time.monotonic() + _DRAIN_S
        with contextlib.suppress(BrokenPipeError):
            while any(key.data for key in self._selector.get_map().values()):
                left_s = deadline - time.monotonic()
                if not self._select(max(left_s, 0.0)) and left_s <= 0:
                    break
            for message in self._messages.read():
                self._on_message(message)
        for file in self._files:
            file.close()

    def _exit_code(self):
        if self._first_failure is None:
            return self._stop_code or 0
        self._report(*self._first_failure)
        return self._first_failure[0].status

    def _say(self, message):
        if self._plan.report_fd is not None:
            os.write(self._plan.report_fd, json.dumps(message).encode() + b"\n")

    def _report(self, rank, after_s):
        count, lines = self._plan.world, rank.tail.lines(TAIL_LINES)
        others = ("", "; the other one was stopped", f"; the other {count - 1} were stopped")[min(count, 3) - 1]
        name = self._plan.starter or f"rank {rank.rank}"
        title = name if self._plan.starter else f"{name} of {count}"
        text = exit_codes.report(title, rank.pid, self._plan.host, rank.process.returncode, after_s) + f"{others}.\n"
        if any(line.strip() for line in lines):
            text += f"---- last lines of {name} ----\n" + "\n".join(lines) + "\n----\n"
        else:
            text += f"{name.capitalize()} wrote nothing.\n"
        if self._plan.report_fd is not None:
            self._say({"report": text})
        else:
            print(text, end="", file=sys.stderr, flush=True)
