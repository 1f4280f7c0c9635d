"""The head of a job on several hosts: it connects to the hosts, sends each its share, and ends the job on all of them.

Only the command that starts the agents goes through a shell and is visible in the list of processes; shares and the
environment are sent over the links. Ranks start when every host is ready. The job ends on all hosts when a rank fails
or when a host sends nothing for too long.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

from deepspeed.host.launcher_messages import SAVE_LIMIT_S
from deepspeed.launcher import linux
from deepspeed.launcher.arrivals import Arrivals
from deepspeed.launcher.control import ERRORS, LOOK_S, MESSAGE, OUTPUT
from deepspeed.launcher.host_link import HostLink
from deepspeed.launcher.launch import FORWARDED
from deepspeed.launcher.typed_input import pass_on_input
from deepspeed.launcher.writer import MOST_WAITING, Writer
from deepspeed.version import __version__

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LATE_S = 4.0  # beyond the grace of the ranks, for an agent to say that it is done


class Head:
    """Runs a ``ClusterJob`` to its end; ``run`` returns the exit code of the job."""

    _waits_for_more = False  # wait for other hosts after all hosts were lost

    def __init__(self, job):
        self._job = job
        self._hosts = [HostLink(name, node, slots) for node, (name, slots) in enumerate(job.hosts.items())]
        self._selector, self._writer, self._ways, self._arrivals = linux.Selector(), Writer(), [], None
        self._code = None  # of the job, once something decided it
        self._end_at = None  # time at which hosts that are not done are given up
        self._killed = self._failed = False  # they were told to kill; a failure decided the code, not the user
        self._save_until = 0.0  # until then ranks may save before they end
        self._why = "the user ended it"
        self._started = time.monotonic()
        self._join_at = self._started + job.join_timeout

    # ---- the whole -----------------------------------------------------------------------------------------------
    def run(self):
        """Returns when every host is done or given up."""
        self._wake = linux.signal_socket()
        self._selector.watch(self._wake[0], self._on_wake)
        with linux.handling(linux.not_ignored((*FORWARDED, signal.SIGTSTP)), lambda *_: None):
            try:
                self._reach()
                while not all(host.over for host in self._hosts) or (self._waits_for_more and self._code is None):
                    self._turn()
            finally:
                self._close()
        return self._code_now()

    def _code_now(self):
        return self._code if self._code is not None else max(host.code or 0 for host in self._hosts)

    def _reach(self):
        for way in self._job.start_ways(self._hosts):
            self._hear(way)
        for host in self._hosts:
            if host.link is not None:
                self._listen(host)
        if self._job.meeting is not None:
            self._arrivals = Arrivals(self._job, self._hosts, self._selector, self._listen, self._fail, self._say)

    def _close(self):
        self._writer.finish()
        signal.set_wakeup_fd(-1)
        for host in self._hosts:
            if host.link is not None:
                host.link.close()
        for way in self._ways:
            way.end()
        if self._arrivals is not None:
            self._arrivals.close()
        self._selector.close()
        for one in self._wake:
            one.close()

    def _turn(self):
        started = time.monotonic()
        readable = self._selector.select(LOOK_S if self._writer.backlog < MOST_WAITING else 0.02)
        held = self._writer.backlog >= MOST_WAITING
        for key, _ in readable:
            if not held or key.data == self._on_wake:
                key.data()
        now = time.monotonic()
        for host in self._hosts:
            self._read(host)
            if host.link is not None:
                host.link.flush()
                host.link.beat(0.0 if held else now - started)
                if host.link.lost and not host.link.frames:
                    self._on_lost(host)
        if self._arrivals is not None:
            self._arrivals.turn()
        self._check_time(now)
        if self._writer.broken and self._code is None:
            self._stop(128 + signal.SIGPIPE, signal.SIGTERM)

    # ---- hosts come ----------------------------------------------------------------------------------------------
    def _listen(self, host):
        self._selector.watch(host.link.read_fd, host.link.receive)

    def _hear(self, way):
        self._ways.append(way)
        for fd in way.streams:
            self._selector.watch(fd, lambda fd=fd: self._on_words(way, fd))

    def _on_hello(self, host, facts):
        host.state, host.facts = "here", facts
        why = next(differences(host), "")
        if why:
            return self._fail(f"host {host.name} {why}")
        if all(one.state == "here" for one in self._hosts):
            self._share()

    def _has_port(self, first):
        if self._job.port_of(first) is None:
            self._fail(
                f"port {self._job.master_port} of host {first.name} is in use by another process: choose a free one "
                f"with --master_port PORT, or leave it out and one is chosen"
            )
        return self._code is None

    def _share(self):
        if self._arrivals is not None:  # all hosts have joined, and rank 0 may listen at this port
            self._arrivals.close()
            self._arrivals = None
        if self._has_port(self._hosts[0]):
            for host, share in zip(self._hosts, self._job.shares(self._hosts)):
                host.link.send({"share": share})

    def _on_ready(self, host, notes):
        host.state, host.facts["notes"] = "ready", notes
        if all(one.state == "ready" for one in self._hosts) and self._code is None:
            self._say(notes_of(self._hosts), self._job.verbose)
            start_ranks(self._hosts)
            pass_on_input(self._selector, self._hosts[0])

    # ---- what hosts say ------------------------------------------------------------------------------------------
    def _read(self, host):
        while host.link is not None and host.link.frames:
            kind, message = host.link.frames.popleft()
            if kind == OUTPUT or kind == ERRORS:
                self._writer.write(1 if kind == OUTPUT else 2, message)
            elif kind == MESSAGE:
                self._on_message(host, message)

    def _on_message(self, host, message):
        if "hello" in message:
            self._on_hello(host, message["hello"])
        elif "ready" in message:
            self._on_ready(host, message["ready"])
        elif "error" in message:
            self._fail(f"host {host.name}: {message['error'].rstrip('.')}")
            self._finish(host, 1)
        elif "failed" in message:
            if self._code is None:
                self._job.first_failing = host
                self._stop(message["code"], signal.SIGTERM, but=host, failed=True)
        elif "report" in message:
            if self._code is None:  # its supervisor was killed
                self._stop(1, signal.SIGTERM, but=host, failed=True)
                self._job.first_failing = host
            if self._job.first_failing is host:
                self._say(message["report"])
        elif "done" in message:
            self._finish(host, message["done"])
        elif "saving" in message and not self._failed:
            self._save_until = time.monotonic() + SAVE_LIMIT_S + _LATE_S
            self._end_at = None if self._end_at is None else self._save_until

    def _finish(self, host, code):
        host.code, host.state = code, "done"
        if code and self._code is None:
            self._say(f"deepspeed: host {host.name} ended with exit code {code}; the job is ended.\n")
            self._stop(code, signal.SIGTERM, failed=True)
        if not self._job.hosts_come_alone:
            self._bye(host)
        elif all(one.over for one in self._hosts):  # hosts that were started by hand learn how the job ended
            self._bye(*self._hosts)

    def _bye(self, *hosts):
        for host in hosts:
            if host.link is not None and not host.link.lost:
                host.link.send({"bye": self._code_now()})
                self._selector.drop(host.link.read_fd)

    def _on_words(self, way, fd):
        data = way.read(fd)
        if data == b"":
            self._selector.unregister(fd)
            way.streams.remove(fd)
            if not way.streams and way.link is None and any(host.link is None for host in self._hosts):
                way.process.wait()
                away = ", ".join(host.name for host in self._hosts if host.link is None)
                self._fail(f"{way.program} ended before these hosts came: {away}. It says: {way.last_words()}")
        elif data and any(host.state == "running" for host in self._hosts):
            self._writer.write(2, data)

    def _on_lost(self, host):
        self._selector.drop(host.link.read_fd)
        if host.over:
            return
        was, words = host.state, ""
        host.state, host.code = "done", 1
        if self._code is not None:
            return
        if host.way is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.way.process.wait(0.5)  # its last words are behind its end
            for fd in list(host.way.streams):
                host.way.read(fd)
            words = host.way.last_words()
            host.way.process.kill()  # one that is silent would not end by itself
        if was in ("away", "here"):
            how = f"{host.way.program} says: {words}" if words else host.link.lost
            self._fail(f"host {host.name} could not be reached or could not start the launcher: {how}")
        else:
            after = time.monotonic() - self._started
            self._fail(
                f"host {host.name} was lost {after:.1f} s after the start: {host.link.lost}"
                + (f" ({words})" if words else "")
                + ". Its ranks end by themselves"
            )

    # ---- the end -------------------------------------------------------------------------------------------------
    def _say(self, text, wanted=True):
        if wanted and text:
            self._writer.write(2, text.encode("utf-8", "replace"))

    def _fail(self, text):
        if self._code is None:
            self._why = text
            self._say(f"deepspeed: error: {text}.\n")
            self._stop(1, signal.SIGTERM, failed=True)

    def _stop(self, code, sig, but=None, failed=False):
        self._code, self._failed = code, failed
        end = time.monotonic() + self._job.grace_s + _LATE_S
        self._end_at = end if failed else max(end, self._save_until)
        self._signal_all(sig, but, failed)

    def _signal(self, host, sig, failed=False):
        if host.over:
            return
        if host.state == "running":
            host.link.send({"signal": int(sig), **({"failed": 1} if failed else {})})
        elif sig in _STOPPING:
            if host.link is not None and not host.link.lost:
                host.link.send({"stop": self._why, "bye": self._code})
            host.state, host.code = "done", 1

    def _check_time(self, now):
        if self._code is None and now > self._join_at and any(host.state == "away" for host in self._hosts):
            away = ", ".join(f"{host.node} ({host.name})" for host in self._hosts if host.state == "away")
            self._fail(
                f"these hosts did not come within {self._job.join_timeout:.0f} s (--join_timeout): {away}. Here are "
                f"{sum(host.state != 'away' for host in self._hosts)} of {len(self._hosts)}"
            )
        if self._end_at is not None and now > self._end_at:
            for host in (one for one in self._hosts if not one.over):
                if self._killed:
                    self._say(f"deepspeed: host {host.name} did not say that its ranks have ended.\n")
                    host.state, host.code = "done", 1
                else:
                    host.link.send({"kill": 1})
            if not self._killed:
                self._killed, self._end_at = True, time.monotonic() + _LATE_S

    # ---- signals -------------------------------------------------------------------------------------------
    def _on_wake(self):
        for sig in map(signal.Signals, linux.read_now(self._wake[0].fileno()) or b""):
            if sig in _STOPPING and self._code is None:
                self._stop(128 + sig, sig)
                continue
            self._signal_all(sig)
            if sig == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
                self._signal_all(signal.SIGCONT)

    def _signal_all(self, sig, but=None, failed=False):
        for host in self._hosts:
            if host is not but:
                self._signal(host, sig, failed)


def start_ranks(hosts):
    """The ranks of ``hosts``, which are ready, may begin."""
    for host in hosts:
        host.state = "running"
        host.link.send({"go": 1})


def notes_of(hosts):
    """The notes of the launchers of ``hosts`` on their plans as lines, each note once."""
    notes = dict.fromkeys(note for host in hosts for note in host.facts["notes"])
    return "".join(f"deepspeed: {note}\n" for note in notes)


def differences(host):
    """A text for each difference between what ``host`` and this host have installed."""
    for name, mine in {"deepspeed": __version__, "python": list(sys.version_info[:2])}.items():
        if host.facts[name] != mine:
            theirs, ours = version_text(host.facts[name]), version_text(mine)
            yield f"has {name} {theirs}, and this one {ours}: install the same on all hosts"


def version_text(value):
    """A version that a host has told, as text."""
    return ".".join(map(str, value)) if isinstance(value, list) else value
