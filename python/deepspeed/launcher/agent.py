"""The agent: the program on each host of a job. It starts that host's ranks, sends their output to the head, and ends
them when the head or the connection to it is lost. ssh, pdsh, srun or a user starts it; see ``head``."""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time

from deepspeed.host.job_key import KEY_VARIABLE, NO_KEY, is_from_here, proof, proves
from deepspeed.host.ports import claim_any_port, claim_port
from deepspeed.launcher import linux
from deepspeed.launcher.control import ERRORS, INPUT, LOOK_S, MESSAGE, OUTPUT, Link, LinkLost
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.exit_codes import shell_code
from deepspeed.launcher.launch import FORWARDED, kill_descendants, supervise
from deepspeed.launcher.memory_keeper import MemoryKeeper
from deepspeed.launcher.options import add_options, switch
from deepspeed.launcher.plan import DEFAULT_PORT, Share
from deepspeed.launcher.supervisor import END_NOW
from deepspeed.launcher.warm_start import WarmStart
from deepspeed.registry import load_target
from deepspeed.version import __version__

MARK = b"\0deepspeed-agent\n"
KEY_MARK = "deepspeed-agent-key"  # precedes the key that an agent prints; command lines are visible to all
_MOST_WAITING = 1 << 20
_CHUNK = 1 << 16
_TERM_S = 1.0  # after the link is lost: SIGTERM, then SIGKILL


def facts(port=None):
    """``(facts about this host for the head, claim of the port)``. The agent holds the claim as long as it runs.

    ``port``: the port that rank 0 should listen on, 0 for any; None if rank 0 runs on another host.
    """
    found = {"host": socket.gethostname(), "python": list(sys.version_info[:2]), "deepspeed": __version__}
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        found["address"] = connection[2]
    if port is None:
        return found, None
    number, claim = (port, claim_port(port)) if port else claim_any_port(DEFAULT_PORT)
    return {**found, "port": 0 if claim is None else number}, claim


class HostJob:
    """A running share: passes messages and output between the link to the head and the supervisor of the ranks.

    ``forward``: output is sent to the head, else it is written here. ``warm``: the ``WarmStart`` of an elastic job.
    ``spared``: processes of the agent that are not ranks.
    """

    def __init__(self, link, plan, forward=True, warm=None, spared=()):
        self._link, self._plan, self._forward = link, plan, forward
        self._warm, self._spared = warm, spared
        self._selector = linux.Selector()
        self._streams = {}  # fd -> (kind of frame, incomplete line)
        self._stdin, self._input, self._input_ended = None, bytearray(), False
        self._kill_at = None
        self._orphaned = self.leaving = False  # the head is gone; this host was asked to leave the job
        self._reports, self._running = b"", True

    def run(self):
        """Starts the ranks. Returns the exit code of this host's share after all its processes have ended."""
        linux.become_subreaper()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._supervisor = self._fork()
        with linux.handling(FORWARDED, self._pass_on):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            self._selector.watch(self._link.read_fd, self._link.receive)
            self._handle_frames()
            while self._running:
                self._turn()
            _, status = os.waitpid(self._supervisor, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            kill_descendants((*self._spared, self._warm.pid) if self._warm is not None else self._spared)
            text = f"deepspeed: the supervisor of host {self._plan.host} was killed by signal {-code}.\n"
            self._link.send({"report": text})
        self._drain()
        if self._stdin is not None:
            os.close(self._stdin)
        self._selector.close()
        return shell_code(code)

    def _pass_on(self, number, frame):
        self.leaving = self.leaving or number == signal.SIGTERM
        linux.kill(self._supervisor, number)

    def _fork(self):
        reports, self._plan.report_fd = os.pipe()
        pipes = [os.pipe() for _ in range(3)] if self._forward else []  # stdin, stdout, stderr
        streams = (pipes[0][0], pipes[1][1], pipes[2][1]) if pipes else (0, 1, 2)
        front, pid = os.getpid(), None
        if self._warm is not None:
            if self._warm.fits(self._plan):
                pid = self._warm.fork_supervisor(self._plan, streams)
                if pid is None:  # a late supervisor must not start ranks beside those of the next round
                    kill_descendants(self._spared)
            self._warm.expect(self._plan)
        if pid is None:

            def work():
                linux.take_streams(streams, {self._plan.report_fd})
                return supervise(self._plan, front)

            pid = linux.fork(work)
        os.close(self._plan.report_fd)
        self._selector.watch(reports, lambda: self._on_report(reports))
        if pipes:
            self._stdin = pipes[0][1]
            os.set_blocking(self._stdin, False)
            for fd in streams:
                os.close(fd)
            for (read, _), kind in zip(pipes[1:], (OUTPUT, ERRORS)):
                os.set_blocking(read, False)
                self._streams[read] = (kind, b"")
        return pid

    # ---- one turn of the loop ------------------------------------------------------------------------------------
    def _turn(self):
        started = time.monotonic()
        self._watch_output(self._link.backlog < _MOST_WAITING)
        for key, _ in self._selector.select(LOOK_S):
            key.data()
        self._link.flush()
        self._handle_frames()
        self._pass_input()
        if self._warm is not None:
            self._warm.turn(self._plan)
        now = time.monotonic()
        self._link.beat(now - started)
        if self._link.lost and not self._orphaned:
            self._on_lost()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + _TERM_S
            linux.kill(self._supervisor, END_NOW)

    def _watch_output(self, wanted):
        for fd in self._streams:
            if wanted:
                self._selector.watch(fd, lambda fd=fd: self._on_output(fd))
            else:
                self._selector.drop(fd)

    def _on_lost(self):
        self._orphaned = True
        self._selector.drop(self._link.read_fd)
        self._end_ranks()

    def _end_ranks(self):
        self._kill_at = time.monotonic() + _TERM_S
        linux.kill(self._supervisor, signal.SIGTERM)

    def _handle_frames(self):
        while self._link.frames:
            kind, message = self._link.frames.popleft()
            if kind == INPUT:
                self._input += message
                self._input_ended = self._input_ended or not message
            elif kind == MESSAGE:
                self._on_message(message)

    def _on_message(self, message):
        if "signal" in message:
            linux.kill(self._supervisor, message["signal"])
            if "failed" in message:  # saving needs all ranks, and some have ended
                self._kill_at = time.monotonic() + self._plan.failure_grace_s
            self._link.paused = message["signal"] == signal.SIGTSTP
        if "kill" in message:
            self._end_ranks()

    def _pass_input(self):
        if self._stdin is None:
            return
        try:
            while self._input:
                del self._input[: os.write(self._stdin, memoryview(self._input)[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # the reader has closed it
            self._input_ended = True
        if self._input_ended:
            os.close(self._stdin)
            self._stdin = None

    def _on_output(self, fd):
        data = linux.read_now(fd, _CHUNK)
        if data is None:
            return
        kind, waiting = self._streams[fd]
        whole, newline, rest = (waiting + data).rpartition(b"\n") if data else (waiting, b"", b"")
        if not self._plan.prefix or len(rest) > _MOST_WAITING:
            whole, newline, rest = waiting + data, b"", b""
        if whole or newline:
            self._link.send_bytes(kind, whole + newline)
        self._streams[fd] = (kind, rest)
        if not data:
            self._selector.drop(fd)
            os.close(fd)
            del self._streams[fd]

    def _on_report(self, fd):
        data = os.read(fd, _CHUNK)
        self._reports += data
        *lines, self._reports = self._reports.split(b"\n")
        for message in map(json.loads, lines):
            if "report" in message and not self._forward:
                print(message["report"], end="", file=sys.stderr, flush=True)
            self._link.send(message)
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
            self._running = False

    def _drain(self):
        limit = time.monotonic() + 5.0
        while self._streams and time.monotonic() < limit and not self._link.lost:
            if self._link.backlog < _MOST_WAITING:
                self._on_output(next(iter(self._streams)))
            self._link.flush()


_QUESTIONS = ("check", "clock", "echo", "measure")


def answer(link, asked, told):
    """Answers the head's questions about this host until the head closes the link."""
    with contextlib.suppress(LinkLost), contextlib.ExitStack() as until_lost:
        while True:
            link.send(load_target("deepspeed.launcher.probe:answer")(asked, told, until_lost))
            asked, told = link.wait_for_any(_QUESTIONS)
    return 0


class Agent:
    """Runs the shares that heads send. ``own``: the ``Share`` of a host whose agent a user started (--no_ssh); it keeps
    its options, variables and folder. Another head may be served after the link to the first was lost."""

    def __init__(self, own=None):
        self._own = own
        self._keeper = None  # keeps memory beyond the end of the ranks of an elastic job
        self._warm = WarmStart()  # for its ranks

    def serve(self, link, node, found, port):
        """Runs the shares that the head sends over ``link``: one, or several in an elastic job. Returns the exit code.
        node: number of this host. found: ``facts``, of ``port``."""
        said, claim = found
        link.send({"hello": {**said, "node": node}})
        plan, code, asks = None, None, ("share", "go", "over", *_QUESTIONS)
        while True:
            try:
                asked, told = link.wait_for_any(asks)
            except LinkLost as lost:
                return _said(f"the job was not started: {lost}.") if code is None else code
            if asked in ("bye", "over"):
                return told
            if asked in _QUESTIONS:
                return answer(link, asked, told)
            if asked == "share":
                plan = self._planned(link, told)
                asks = asks if plan is not None else (*asks, "bye")
                continue
            kept = () if self._keeper is None else (self._keeper.pid,)
            job = HostJob(link, plan, self._own is None, self._warm if kept else None, kept)
            code, asks = job.run(), (*asks, "bye")
            if link.lost:
                failed = _said(f"the head of the job is gone: {link.lost}.")
                return code or failed
            if claim is not None:
                claim.close()
            said, claim = facts(port)
            link.send({"done": code, "leaving": job.leaving, "port": said.get("port")})

    def _planned(self, link, told):
        # The ``NodePlan``, or None after telling the head why not.
        try:
            plan = self._share(told).plan(dict(os.environ))
            if plan.log_dir:
                os.makedirs(plan.log_dir, exist_ok=True)
            if told["elastic"] is not None:
                self._keeper = self._keeper or MemoryKeeper()
                plan.environments = [{**env, **self._keeper.variables} for env in plan.environments]
        except (LaunchError, ValueError, OSError) as error:
            link.send({"error": str(error)})
            return None
        link.send({"ready": plan.notes})
        return plan

    def _share(self, told):
        if self._own is None:
            return Share(**told)
        names = ("counts", "slots", "node", "master_addr", "master_port", "host", "elastic")
        mine = Share(**{**vars(self._own), **{name: told[name] for name in names}})
        mine.device_ids = mine.device_ids and mine.device_ids[: len(mine.slots)]
        return mine

    def close(self):
        """Frees what was kept between rounds."""
        self._warm.close()
        if self._keeper is not None:
            self._keeper.close()


def connect(addresses, port, key, hello, limit_s, insecure=False):
    """A link to the head at one of ``addresses``; LaunchError when none answers within ``limit_s``, and for a head on
    another host when there is no key and ``insecure`` is not set."""
    deadline, why = time.monotonic() + limit_s, ""
    while True:
        for address in addresses:
            try:
                connection = socket.create_connection((address, port), timeout=5.0)
            except OSError as error:
                why = f"{address} port {port}: {error}"
                continue
            if not (key or insecure or is_from_here(connection)):
                connection.close()
                raise LaunchError(f"{address} port {port} is another host, and {NO_KEY}.")
            link = Link.over(connection)
            try:
                nonce = link.wait_for("nonce", 10.0)
                mine = os.urandom(16).hex()
                link.send({"join": {**hello, "proof": proof(key, nonce, "agent"), "nonce": mine}})
                if proves(link.wait_for("welcome", 10.0), key, mine, "head"):
                    return link
                why = f"{address} port {port} does not know the key of this job"
            except LinkLost as lost:
                why = f"{address} port {port}: {lost}"
                if str(lost).startswith("refused"):
                    raise LaunchError(str(lost)) from None
            link.close()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the head of the job was not reached within {limit_s:.0f} s ({why}). Check --master_addr, firewalls, "
                f"and that the job was started there."
            )
        time.sleep(0.2)


def _over_pipe():
    # Output of other code in this process must not mix with the frames.
    read, write = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.write(write, MARK)
    return Link(read, write)


def _said(error):
    # The exit code of a host after an error.
    print(f"deepspeed: error: {socket.gethostname()}: {error}", file=sys.stderr)
    return 1


def _served(link, options, found):
    with contextlib.closing(Agent()) as agent:
        return agent.serve(link, options.node, found, options.port)


_OPTIONS = {
    "--node": {"type": int, "default": -1, "help": "number of this host; -1: the name says it"},
    "--name": {"default": "", "help": "what the head calls this host"},
    "--port": {"type": int, "help": "rank 0 may meet the others here: look for a port"},
    "--connect": {"default": "", "metavar": "ADDRESS,...:PORT", "help": "of the head; else stdin, stdout"},
    "--tell-key": switch("make a key, and say it on stdout: that way is safe"),
    "--wait": {"type": float, "default": 60.0, "help": "seconds in which the head must answer"},
}


def main(args=None):
    """Returns the exit code of this host."""
    parser = argparse.ArgumentParser(description="Runs one host's share of a job; started by the program deepspeed.")
    options = add_options(parser, _OPTIONS).parse_args(args)
    found = facts(options.port)
    if not options.connect:
        return _served(_over_pipe(), options, found)
    addresses, _, port = options.connect.rpartition(":")
    key, name = os.environ.pop(KEY_VARIABLE, ""), options.name or os.environ.get("SLURMD_NODENAME", "")
    if options.tell_key:
        key = os.urandom(16).hex()
        os.write(1, f"{KEY_MARK} {name} {key}\n".encode())  # one write, because other processes write to this pipe, too
    try:
        link = connect(addresses.split(","), int(port), key, {"name": name, "node": options.node}, options.wait)
    except LaunchError as error:
        return _said(error)
    return _served(link, options, found)


if __name__ == "__main__":
    sys.exit(main())
