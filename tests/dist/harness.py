"""Tests on several ranks: one pool of processes for a whole pytest process (`make test` starts several).

    from harness import run_ranks

    def body(rank, world_size, scale):          # a module-level function: the ranks import it by name
        t = torch.ones(3) * rank
        torch.distributed.all_reduce(t)
        return (t * scale).tolist()

    def test_sum():
        assert run_ranks(2, body, 10.0, init=True) == [[10.0] * 3] * 2

    @on_ranks(2, init=True)                     # a test that needs nothing from the ranks but that they succeed
    def test_of_each_rank(rank, world):
        assert comm.get_rank() == rank

A server process imports torch once (see rank_worker.py) and forks a worker where one is missing; workers are kept, so a
two-rank test costs hundredths of a second. Every run gets a fresh MASTER_PORT, the environment and the working folder
of the test, and ends with the process groups destroyed and the log of collectives off. A run that fails in any way, or
leaves something that holds a process group, costs its workers: the next run gets new ones.
"""

import atexit
import errno
import functools
import inspect
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection

import pytest

import devices
from process_view import view_of

HERE = os.path.dirname(os.path.abspath(__file__))
WORKER_SCRIPT = os.path.join(HERE, "rank_worker.py")
GRACE_AFTER_FAILURE_S = 2.0  # the other ranks may be about to report the more telling error
LONG_S = 100  # runs that may take so long have collectives that end before


class RankError(RuntimeError):
    """The errors of each rank, with the ranks' tracebacks. The cause of what run_ranks raises, or raised itself when a
    rank died or its exception cannot be pickled."""


class RankTimeout(TimeoutError):
    """Some rank did not return in time; the message holds the Python stacks of all ranks."""


class _Worker:
    """The parent's end of one rank process."""

    def __init__(self, pid, conn, stacks):
        self.pid = pid
        self.conn = conn
        self.used_up = False
        self.stacks = stacks  # the worker's faulthandler writes here

    def stack_text(self):
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace").strip()


def _ports_of_this_process():
    """Below the range from which the kernel hands out ports. Processes of one pytest-xdist run share none: between the
    look at a port and the rank that binds it another could do the same."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(worker[2:]) if worker[2:].isdigit() else 0
    span = 20000 // max(count, 1)
    return range(12000 + index * span, 12000 + (index + 1) * span)


class _Pool:
    def __init__(self):
        self.server = None
        self.channel = None
        self.idle = []
        self.ports = _ports_of_this_process()
        self.next_port = self.ports[os.getpid() % len(self.ports)]

    # ---- the fork server --------------------------------------------------------------------------------------
    def _start_server(self):
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self.server = subprocess.Popen(
            [sys.executable, WORKER_SCRIPT, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def _ask(self, request, fds=()):
        socket.send_fds(self.channel, [pickle.dumps(request)], list(fds))
        reply = self.channel.recv(1 << 16)
        if not reply:
            raise RankError(f"the server that forks rank processes ended with code {self.server.wait()}; see stderr")
        return pickle.loads(reply)

    def _fork_worker(self):
        if self.server is None or self.server.poll() is not None:
            self._start_server()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stacks = tempfile.TemporaryFile()
        pid = self._ask(("fork",), [theirs.fileno(), stacks.fileno()])
        theirs.close()
        return _Worker(pid, Connection(ours.detach()), stacks)

    # ---- workers ------------------------------------------------------------------------------------------------
    def acquire(self, count):
        taken, self.idle = self.idle[:count], self.idle[count:]
        while len(taken) < count:
            taken.append(self._fork_worker())
        return taken

    def release(self, workers):
        self.idle[:0] = workers  # the same processes again: their imports are warm

    def end(self, worker, kill=True):
        """Ends the worker and says how it ended, in words."""
        if kill:
            try:
                os.kill(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        worker.conn.close()
        status = self._ask(("wait", worker.pid))
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"killed by signal {number} ({signal.Signals(number).name})"
        return f"ended with exit code {os.WEXITSTATUS(status)}"

    def free_port(self):
        """A port that nothing is bound to, below the range from which the kernel hands out ports by itself."""
        for _ in self.ports:
            self.next_port = self.ports[(self.next_port + 1 - self.ports[0]) % len(self.ports)]
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", self.next_port))
                    return self.next_port
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
        raise RankError(f"no free TCP port between {self.ports[0]} and {self.ports[-1]} on 127.0.0.1")

    def shutdown(self):
        if self.server is None:
            return
        for worker in self.idle:
            worker.conn.close()
        self.idle = []
        self.channel.close()  # the server ends, and the kernel ends its workers with it
        try:
            self.server.wait(5)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.server = None


_pool = _Pool()
atexit.register(_pool.shutdown)


def shutdown():
    """Ends all rank processes; a later run_ranks starts new ones."""
    _pool.shutdown()


def _reference(fn):
    """The place where the ranks find `fn`: (module name, file, qualified name)."""
    qualname = fn.__qualname__
    if "<locals>" in qualname or "<lambda>" in qualname:
        raise TypeError(
            f"run_ranks needs a module-level function, got {qualname!r}: the ranks are other processes and import it "
            f"by name. Move it to the top level of {fn.__code__.co_filename} and pass what it closes over as arguments."
        )
    return fn.__module__, os.path.abspath(fn.__code__.co_filename), qualname


def run_ranks(world_size, fn, *args, timeout=60, init=False, env=None, fresh=False, grace=GRACE_AFTER_FAILURE_S):
    """Runs ``fn(rank, world_size, *args)`` on every rank, each in its own process, and returns the list of results.

    world_size: number of ranks, >= 1.
    fn:         module-level function; the ranks import its file. Arguments and results travel by pickle.
    timeout:    seconds for the whole run; then RankTimeout with the stacks of all ranks, and the workers are replaced.
                From LONG_S on a collective that waits ends before that, and names the rank that it waits for.
    init:       False: nothing is initialised. True: ``deepspeed.init_distributed(dist_backend="gloo")``.
                A string: ``torch.distributed.init_process_group`` with that backend, without deepspeed.
    env:        additional environment variables for the ranks; a value of None removes the variable.
    fresh:      use new processes and end them afterwards (for tests that leave a process dirty).
    grace:      seconds that the other ranks get after the first has failed.

    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT are set, torch is seeded
    with 1234 and uses one thread. What a rank raises is raised here with its own type, caused by a RankError that holds
    the rank and the tracebacks; the first failure in time wins. A pytest.skip on a rank skips the test.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    module, path, qualname = _reference(fn)
    payload = pickle.dumps(args)
    port = _pool.free_port()
    workers = _fresh_workers(world_size) if fresh else _pool.acquire(world_size)
    started, outcome = time.monotonic(), None
    try:
        for rank, worker in enumerate(workers):
            variables = dict(
                os.environ,
                RANK=str(rank),
                LOCAL_RANK=str(devices.local_rank(rank)),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                LOCAL_SIZE=str(world_size),
                CROSS_RANK="0",
                CROSS_SIZE="1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
                GLOO_SOCKET_IFNAME="lo",
            )
            if timeout >= LONG_S:
                variables.setdefault("DS_COMM_TIMEOUT_S", str(0.75 * timeout))
            for name, value in (env or {}).items():
                variables.pop(name, None)
                if value is not None:
                    variables[name] = str(value)
            task = {
                "module": module,
                "path": path,
                "qualname": qualname,
                "sys_path": list(sys.path),
                "cwd": os.getcwd(),
                "env": variables,
                "rank": rank,
                "world_size": world_size,
                "init": init,
            }
            try:
                worker.conn.send_bytes(pickle.dumps(task))
                worker.conn.send_bytes(payload)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it died since the last run: collecting finds the end of the connection
        outcome = _collect(workers, started + timeout, grace)
        return outcome.results(fn, timeout)
    finally:
        kept = []
        if outcome is not None and outcome.clean and not fresh:
            kept = [worker for worker in workers if not worker.used_up]
        _pool.release(kept)
        gone = outcome.ended if outcome is not None else []
        for worker in workers:
            if worker not in kept and worker not in gone:
                _pool.end(worker)


def on_ranks(world_size=None, given=(), **options):
    """Makes the function below it a test that every rank runs. Its first two parameters are the rank and the number of
    ranks, which pytest gives where ``world_size`` is None; pytest gives the others, too. ``options`` are those of
    run_ranks; ``given`` names the ones that parameters of the test give. A value that a rank returns is not looked at.
    """

    def decorate(fn):
        _, world, *rest = inspect.signature(fn).parameters
        chosen = [world] if world_size is None else []

        @functools.wraps(fn)
        def test(**values):
            more = {name: values[name] for name in given}
            run_ranks(world_size or values[world], fn, *(values[name] for name in rest), **options, **more)

        names = dict.fromkeys([*chosen, *rest, *given])
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        test.on_ranks = fn
        return test

    return decorate


def _fresh_workers(count):
    return [_pool._fork_worker() for _ in range(count)]


class _Outcome:
    """The reports of the ranks: per rank ("ok", value), ("error", exception or None, text), ("skip", reason), ("died",
    text) or nothing."""

    def __init__(self, world_size):
        self.reports = [None] * world_size
        self.order = []  # ranks that failed, the first first
        self.ended = []  # workers that are gone already
        self.stacks = {}
        self.views = {}  # of ranks that were still running

    @property
    def clean(self):
        return all(report is not None and report[0] == "ok" for report in self.reports)

    def results(self, fn, timeout):
        if self.clean:
            return [report[1] for report in self.reports]
        if self.order:
            # Nobody is killed because others fail: they fail because it was, and may be heard of first.
            killed = [r for r in self.order if self.reports[r][0] == "died" and "SIGKILL" in self.reports[r][1]]
            self.order = killed + [r for r in self.order if r not in killed]
            story = RankError(self._story(fn))
            kind, *rest = self.reports[self.order[0]]
            if kind == "skip":
                pytest.skip(rest[0])
            if kind == "error" and rest[0] is not None:
                raise rest[0] from story
            raise story
        raise RankTimeout(
            f"{fn.__module__}.{fn.__qualname__} did not return on rank(s) "
            f"{', '.join(str(r) for r, report in enumerate(self.reports) if report is None)} of {len(self.reports)} "
            f"within {timeout} s.\n{self._story(fn)}"
        )

    def _story(self, fn):
        parts = []
        if self.order:
            parts.append(
                f"{fn.__module__}.{fn.__qualname__} failed first on rank {self.order[0]} of {len(self.reports)}"
            )
        for rank, view in self.views.items():
            parts.append(f"--- rank {rank} was still running:\n{view}")
        for rank, report in enumerate(self.reports):
            if report is None:
                parts.append(f"--- rank {rank}: still running, stacks:\n{self.stacks.get(rank) or '(none)'}")
            elif report[0] == "ok":
                parts.append(f"--- rank {rank}: returned")
            else:
                parts.append(f"--- rank {rank}:\n{report[-1]}")
        return "\n".join(parts)


def _collect(workers, deadline, grace):
    outcome = _Outcome(len(workers))
    pending = {worker.conn: rank for rank, worker in enumerate(workers)}
    while pending:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        for conn in multiprocessing.connection.wait(list(pending), left):
            rank = pending.pop(conn)
            try:
                report = pickle.loads(conn.recv_bytes())
                workers[rank].used_up = conn.recv_bytes() != b""
                outcome.reports[rank] = report
            except (EOFError, ConnectionResetError):
                ending = _pool.end(workers[rank], kill=False)
                outcome.ended.append(workers[rank])
                outcome.reports[rank] = ("died", f"the process {ending}\n{workers[rank].stack_text()}")
            if outcome.reports[rank][0] != "ok":
                if not outcome.order:
                    deadline = min(deadline, time.monotonic() + grace)
                outcome.order.append(rank)
    for rank in pending.values():
        outcome.views[rank] = view_of(workers[rank].pid)
        try:
            os.kill(workers[rank].pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    limit = time.monotonic() + 2
    for rank in pending.values():
        while not outcome.stacks.get(rank) and time.monotonic() < limit:
            time.sleep(0.02)
            outcome.stacks[rank] = workers[rank].stack_text()
    return outcome
