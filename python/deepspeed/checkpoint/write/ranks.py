"""The ranks that write one checkpoint, and how they agree on what came of it."""

import contextlib
import functools
import json
import os
import shutil
import time

from deepspeed import comm as dist
from deepspeed._native import _C
from deepspeed.checkpoint.write.owner import Process
from deepspeed.checkpoint.write.verify import DamagedManifest
from deepspeed.comm.agreement import attempt

# ---- ranks ---------------------------------------------------------------------------------------------------------


def failure_of(rank, error):
    """An error of a rank in a form that every rank can raise and JSON can carry: (rank, errno, text)."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return [rank, error.errno, str(error.strerror)]
    plain = type(error) is RuntimeError or isinstance(error, DamagedManifest)
    return [rank, None, str(error) if plain else f"{type(error).__name__}: {error}"]


def raise_together(failures, what, own=None):
    """Raises on every rank the same error, which names all ranks that failed; returns when none did.

    ``own``: this rank's exception, the cause of what is raised here.
    """
    failures = [failure for failure in failures if failure is not None]
    if not failures:
        return
    text = f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, _, text in failures)
    numbers = [number for _, number, _ in failures if number is not None]
    raise (OSError(numbers[0], text) if numbers else RuntimeError(text)) from own


def take_each(files, take, error=None):
    """Makes the values of ``files`` (name -> function), and calls ``take(name, value)`` for each one until there is an
    error. Returns the first error, of either, or None."""
    for name, value in files.items():  # some run collectives, so all are made, whatever has failed
        made, failed = attempt(value)
        if error is None and failed is None:
            _, failed = attempt(functools.partial(take, name, made))
        error, made = error or failed, None
    return error


class Ranks:
    """All ranks of a run. ``ranks``: its ``RunRanks``. ``leads``: this rank makes folders and renames them; one of each
    node when every node has a disk of its own (``node_local``), else rank 0."""

    def __init__(self, ranks, node_local):
        self.rank, self.size = ranks.rank, ranks.world_size
        self.node = (os.environ.get("CROSS_RANK") or str(_C.host_id())) if node_local else ""
        self.nodes = self.gather(self.node)
        self.leads = self.nodes.index(self.node) == self.rank

    def gather(self, value):
        """The values (what JSON can carry) of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def agree(self, error, what, value=None, own=False):
        """Every rank says what went wrong (None: nothing), and all raise alike if anything did; with ``own`` a rank
        raises its own ``error`` as it is. Returns the ``value`` (of what JSON can carry) of every rank."""
        told = self.gather([failure_of(self.rank, error), value])
        if own and error is not None:
            raise error
        raise_together([part[0] for part in told if part is not None], what, error)
        return [part and part[1] for part in told]

    def together(self, function, what):
        """The result of ``function()``. Where it raises on any rank, all raise: none is left waiting for others."""
        found, error = attempt(function)
        self.agree(error, what, own=True)
        return found

    def lead(self, function, what, agree=None):
        """Runs ``function`` on the leading ranks; every rank learns of a failure (``agree``, or another function like
        it). Returns what it gave on the leading rank of this rank's node."""
        found, error = attempt(function) if self.leads else (None, None)
        return (agree or self.agree)(error, what, found)[self.nodes.index(self.node)]


# ---- ranks through files -------------------------------------------------------------------------------------------
# Ranks that agree through small files, for threads in the background: collectives belong to the training loop.

_PAUSE_S = 0.2  # the longest sleep between two looks at the folder


class RanksThroughFiles(Ranks):
    """The ranks ``like``, meeting in ``folder``, which those that write into the same directory share.

    With a disk for every node the ranks of one node meet; for the other nodes' ranks ``gather`` gives None. A rank
    that does not come within ``timeout_s`` seconds, or whose process (``processes``: ``owner.Process`` of every rank)
    has ended, is named in a TimeoutError; after that nobody waits any more.
    """

    def __init__(self, like, folder, timeout_s, processes=None):
        vars(self).update(vars(like))
        self.folder, self.timeout_s, self.processes, self.turn = folder, timeout_s, processes, 0
        self.here = [rank for rank in range(self.size) if self.nodes[rank] == self.node]
        self.broken = None  # the exception after which meeting makes no sense

    def _path(self, name):
        return os.path.join(self.folder, name)

    def gather(self, value):
        """As that of ``Ranks``; ``value`` as JSON hands it on. Raises TimeoutError, and OSError when a rank could not
        write its part."""
        if self.broken is not None:
            raise self.broken
        turn, self.turn = self.turn, self.turn + 1
        if self.here == [self.rank]:
            return [value if rank == self.rank else None for rank in range(self.size)]
        try:
            self._post(turn, value)
            found = self._collect(turn)
        except OSError as error:
            self.broken = error
            raise
        return [found.get(rank) for rank in range(self.size)]

    def _post(self, turn, value):
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(self._path(f"{turn}.{self.rank}.json"), "w") as file:
                json.dump([value], file)  # who reads half of it, which is no JSON, reads it again
        except OSError as error:
            # A short link takes no block of the disk: it can be made where a file cannot.
            with contextlib.suppress(OSError):
                os.symlink(str(error.errno), self._path(f"failed.{self.rank}"))
            raise

    def _collect(self, turn):
        found, pause, until, asked = {}, 0.0005, time.monotonic() + self.timeout_s, time.monotonic()
        while True:
            gone = ()
            if self.processes is not None and time.monotonic() > asked + 0.5:
                asked, own = time.monotonic(), Process.here()
                gone = [rank for rank in self.here if rank not in found and self.processes[rank].is_gone(own)]
            for rank in set(self.here) - found.keys():  # after the question who is gone: what those have left counts
                path = self._path(f"{turn}.{rank}.json")
                with contextlib.suppress(FileNotFoundError, ValueError), open(path) as file:
                    found[rank] = json.load(file)[0]
            late = [rank for rank in self.here if rank not in found]
            if not late:
                return found
            for failed, rank in ((self._path(f"failed.{rank}"), rank) for rank in late):
                if os.path.islink(failed):
                    number = int(os.readlink(failed))
                    raise OSError(number, f"rank {rank} could not say how far it is: {os.strerror(number)}")
            dead = ", ".join(str(rank) for rank in late if rank in gone)
            if dead:
                raise TimeoutError(f"rank {dead} ended before its part was written")
            if time.monotonic() > until:
                names = ", ".join(map(str, late))
                raise TimeoutError(f"rank {names} has not written its part within {self.timeout_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)

    def agree(self, error, what, value=None, own=False):
        try:
            return super().agree(error, what, value, own)
        except Exception as caught:
            if caught is not self.broken:
                raise
            number = caught.errno
            text = f"{what}: {caught.strerror if number is not None else caught}"
            raise (OSError(number, text) if number is not None else TimeoutError(text)) from error

    def close(self):
        """After the last ``gather``. The last rank to call it removes the folder: until then others may be reading."""
        with contextlib.suppress(OSError):
            if self.here != [self.rank]:
                open(self._path(f"left.{self.rank}"), "w").close()
                if all(os.path.exists(self._path(f"left.{rank}")) for rank in self.here):
                    shutil.rmtree(self.folder, ignore_errors=True)


# ---- turns ---------------------------------------------------------------------------------------------------------
# Ranks of one machine that do something one after the other: what it takes of memory and disk is taken once.


def in_turn(ranks, function):
    """``function()`` on every rank, while no other rank of this machine is in it. Every rank calls it; ``function``
    must not wait for other ranks. Raises what it raised here, after all had their turn."""
    hosts = ranks.gather(_C.host_id())
    mine = hosts[: ranks.rank].count(hosts[ranks.rank])
    error = None
    for turn in range(max(hosts.count(host) for host in set(hosts))):
        if turn == mine:
            _, error = attempt(function)
        ranks.gather(None)
    if error is not None:
        raise error
