"""Snapshots of a run in the memory of its hosts that outlives the ranks (``deepspeed.host.kept_memory``).

A snapshot is a folder of the files of a checkpoint: those of a rank are in the memory of its host, and, copied behind
that, in that of the next host. A rank whose files are all there says so in one more file, the last of them. A snapshot
of which all ranks have said so is whole, wherever their files are; no rank waits for the writing of another. The last
whole one stays until the next is whole, so there are at most two.
"""

import collections
import contextlib
import fcntl
import functools
import gc
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import socket

from deepspeed.checkpoint.engines.built_in import FastCheckpointEngine
from deepspeed.checkpoint.layouts.memory_names import SAID_BY, SNAPSHOT, parsed
from deepspeed.checkpoint.save.contents import HeldStates
from deepspeed.checkpoint.save.save import checked_client_state, expected_bytes, facts_of, files_of
from deepspeed.checkpoint.write.background import Background, SnapshotSave, raise_failure
from deepspeed.checkpoint.write.file_writer import WriterOptions
from deepspeed.checkpoint.write.ranks import take_each
from deepspeed.checkpoint.write.snapshot import HeldSnapshot, HostCache
from deepspeed.comm.agreement import attempt
from deepspeed.formats.weight_files import write_text, write_whole
from deepspeed.host.cpu import memory_bytes
from deepspeed.host.kept_memory import FOLDER_VARIABLE, KEEPER_VARIABLE, hand_over, own_address
from deepspeed.host.launcher_messages import tell_launcher
from deepspeed.log import logger

# ---- memory --------------------------------------------------------------------------------------------------------


# The memory of this rank's host. ``ranks``: ``Ranks`` with a disk for every node. ``next_keeper``: of the next host,
# None on one host alone.
HostMemory = collections.namedtuple("HostMemory", "ranks base next_keeper")


def host_memory(run, ranks):
    """The ``HostMemory``, or None where no agent holds memory. Every rank calls it. RuntimeError on all ranks where a
    host has not enough memory for two snapshots."""
    base, keeper = os.environ.get(FOLDER_VARIABLE), os.environ.get(KEEPER_VARIABLE, "")
    port, _, key = keeper.partition(":")
    own = [base and own_address(), int(port or 0), key]
    told = ranks.gather([own, sum(expected_bytes(run))])
    if any(not fact[0][0] for fact in told):
        return None
    nodes = list(dict.fromkeys(ranks.nodes))
    at = nodes.index(ranks.node)
    before, behind = nodes[at - 1], nodes[(at + 1) % len(nodes)]

    def bytes_on(*hosts):
        return sum(size for (_, size), node in zip(told, ranks.nodes) if node in hosts)

    ranks.lead(
        lambda: _check_room(base, 2 * bytes_on(ranks.node, before), bytes_on(ranks.node)), "elasticity.memory_copies"
    )
    return HostMemory(ranks, base, told[ranks.nodes.index(behind)][0] if len(nodes) > 1 else None)


def _check_room(base, needed, copied):
    # ``needed``: bytes of files; ``copied``: of tensors on their way into files, which are in no folder.
    room = os.statvfs(base)
    held = sum(os.path.getsize(os.path.join(root, name)) for root, _, files in os.walk(base) for name in files)
    for where, want, free, fix in (
        (base, needed, room.f_bavail * room.f_frsize + held, "a larger /dev/shm (docker run --shm-size)"),
        ("main memory", needed + copied, memory_bytes()[1] + held, "more memory"),
    ):
        if want > free:
            raise RuntimeError(
                f"two snapshots of the ranks of host {socket.gethostname()} and of the host before it need {want} "
                f"bytes in {where}, and {free} bytes are free: give it {fix}, or set elasticity.memory_copies to 0"
            )


# ---- snapshots -----------------------------------------------------------------------------------------------------


class Snapshots:
    """The snapshots of the run that is saved in ``directory``. Every rank makes it, and calls ``take``. ``before``:
    what ``leave`` returned, if it was saved elsewhere until now. The states of the run go from where they are into the
    files, in one pass: see ``HeldSnapshot``.

    RuntimeError where another run of this process takes those of the same directory.
    """

    def __init__(self, config, memory, directory, before=None):
        self.ranks = ranks = memory.ranks  # by hosts
        own = hashlib.sha256(os.path.realpath(directory).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._next_keeper, self.key, self._before = memory.next_keeper, ranks.gather(own)[0], before
        self.folder = os.path.join(memory.base, self.key)
        self.began = 0  # see ``parsed``
        self.whole = None  # the last whole one that this run knows of
        self._coming = None
        self._writer, self._cache = FastCheckpointEngine(config.checkpoint_config), HostCache()
        self._writer.behind = self._behind = Background()
        self._writer.times, self._writer.shows = 1, False
        # One core: training has the others.
        self._writer.options = WriterOptions(threads=1, direct=False, sync=False, mapped=True)
        pathlib.Path(self.folder).mkdir(0o700, exist_ok=True)  # not what is above: what the agent has removed stays so
        self._lock = open(os.path.join(self.folder, f".rank_{ranks.rank}.lock"), "w")
        if not (
            self._is_ours() or (gc.collect() and self._is_ours())
        ):  # an unreferenced one may be in a reference cycle
            raise RuntimeError(
                f"elasticity.memory_copies: two engines of this process take snapshots of the run in {directory}. Save "
                "each into a directory of its own, or set memory_copies to 0 for one of them"
            )

    def _is_ours(self):
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def look(self, all_of):
        """Behind a step without a snapshot: whether the last one is whole by now. ``all_of(ok)``: whether it is true on
        all ranks."""
        if self._coming is not None and all_of(self._behind.idle):
            self._settle(all_of)

    def _settle(self, all_of):
        if all_of(self._ended_well()):
            self.whole = self._coming
            if self.ranks.rank == 0:
                tell_launcher(saved=f"memory {self.whole}")
            if self._before not in (None, self.folder) and self.ranks.leads:
                shutil.rmtree(self._before, ignore_errors=True)
            self._before = None
        self._coming = None

    def take(self, run, all_of):
        """Behind a step. ``all_of``: see ``look``."""
        if self._coming is not None:
            self._settle(all_of)
        name = SNAPSHOT(step=run.counters.global_steps, began=self.began, world=run.ranks.world_size)
        reused = self._outdated(name)[-1:]
        self._clear(name, *reused)
        target = os.path.join(self.folder, name)
        facts = {**facts_of(run, name), "rank": run.ranks.rank}
        held = HeldSnapshot(self._cache, HeldStates(run))
        save = SnapshotSave(self._writer, held, target, target, functools.partial(self._written, held, target, facts))
        self._coming = name
        try:
            files, error = attempt(lambda: files_of(run, checked_client_state(run)))
            if error is None:
                _, error = attempt(lambda: self._begin(target, reused, files))
            error = take_each(files or {}, save.add, error)
        except BaseException:
            save.drop()
            raise
        if error is None:
            save.end()
        else:
            save.drop()
            self._behind.fail(error)

    def _begin(self, target, reused, files):
        """Makes the folder of a snapshot. It gets the files of one that is not needed any more, and writes over them:
        their pages are there already. The file in which this rank says that all of its files are there goes first."""
        pathlib.Path(target).mkdir(0o700, exist_ok=True)
        for old, name in itertools.product(reused, (SAID_BY(rank=self.ranks.rank), *files)):
            path = os.path.join(self.folder, old, name)
            with contextlib.suppress(OSError):  # it had no such file, or all of it is removed just now
                if name not in files or os.stat(path).st_nlink > 1:
                    os.unlink(path)
                else:
                    os.rename(path, os.path.join(target, name))

    def _ended_well(self):
        _, error = attempt(self._behind.wait)
        if error is not None:
            logger.warning(f"elasticity.memory_copies: the snapshot {self._coming} is not whole: {error}")
        return error is None

    def _outdated(self, coming):
        """Snapshots of as many ranks as ``coming`` that are not needed, older ones first."""
        known = [name for name in os.listdir(self.folder) if parsed(name) and name not in (self.whole, coming)]
        return sorted((name for name in known if parsed(name)[2] == parsed(coming)[2]), key=parsed)

    def _clear(self, *kept):
        """Removes all but the last whole one and those ``kept``, on the rank that leads its host."""
        for name in os.listdir(self.folder) if self.ranks.leads else ():
            if parsed(name) and name != self.whole and name not in kept:
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def _written(self, held, folder, facts, records, error):
        """In the background, when this rank's files are in the ``folder`` of a snapshot: it says so, in one more."""
        held.written()
        raise_failure(records, error)
        said, name = SAID_BY.path(folder, rank=facts["rank"]), os.path.basename(folder)
        write_whole(said, write_text, json.dumps({**facts, "files": records}))
        self._clear(name)  # of what was reused the rest, which others have left there
        files, target = [*records, os.path.basename(said)], f"{self.key}/{name}"
        if self._next_keeper is not None:
            _, error = attempt(lambda: hand_over(self._next_keeper, folder, target, files), OSError)
            if error is not None:
                logger.warning(f"elasticity.memory_copies: {target} has no copy on the next host: {error}")

    def stop(self):
        """Waits for what is on its way."""
        self._behind.drain()
        self._cache.release()
        self._lock.close()

    def leave(self):
        """The run is saved elsewhere from now on. Returns the folder of its last whole snapshot, which stays until the
        next is whole."""
        self.stop()
        self._clear()
        return self.folder if self.whole is not None else self._before
