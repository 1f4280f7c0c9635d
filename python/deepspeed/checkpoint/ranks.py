"""The ranks that write one checkpoint, and how they agree on what came of it."""

import os
import socket

from deepspeed import comm as dist
from deepspeed.checkpoint.manifest import DamagedManifest


def failure_of(rank, error):
    """What went wrong on a rank, in a form that every rank can raise and JSON can carry: (rank, errno, text)."""
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


class Ranks:
    """All ranks of an engine. ``leads``: this rank makes folders and renames them; one of each node when every node
    has a disk of its own (``node_local``), else rank 0."""

    def __init__(self, engine, node_local):
        self.rank, self.size = engine.global_rank, engine.world_size
        self.node = (os.environ.get("CROSS_RANK") or socket.gethostname()) if node_local else ""
        self.nodes = self.gather(self.node)
        self.leads = self.nodes.index(self.node) == self.rank

    def gather(self, value):
        """The values (what JSON can carry) of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def agree(self, error, what, value=None):
        """Every rank says what went wrong (None: nothing), and all raise alike if anything did. Returns the ``value``
        (of what JSON can carry) of every rank."""
        told = self.gather([failure_of(self.rank, error), value])
        raise_together([part[0] for part in told if part is not None], what, error)
        return [part and part[1] for part in told]

    def beside(self, values):
        """Of one value for each rank those of the ranks that write into the same folder."""
        return [value for value, node in zip(values, self.nodes) if node == self.node]
