"""Worker processes of a data loader: they end at once when the iterator of the loader is freed.

[Note: iterators in reference cycles] torch's iterator ends its workers in ``__del__``: it puts None into their queues
and joins them. Iterators of an engine are mostly freed by the garbage collector, for an engine and its module refer to
each other, and the collector runs weakref callbacks before ``__del__``. multiprocessing closes queues, and the pipes
that tell of a process's end, by such callbacks: None would not arrive, and the program would wait 5 s for each worker
before it kills it, while other ranks wait in a collective for this one. Therefore a finalizer of the iterator refers to
queues and processes: they are reachable until the iterator itself is freed. They refer to no sample, no data set and
no collate function, so the finalizer keeps nothing else alive.

[Note: iterators in forked children] A child that is forked inherits iterators, garbage among them, and would end the
workers of its parent when it frees them ("can only test a child process"). They are marked as shut down there.
"""

import hashlib
import os
import random
import signal
import weakref

import numpy
import torch

_iterators = weakref.WeakSet()


class SeededBatches:
    """The ``collate_fn`` of a loader with workers, whose ``worker_init_fn`` is ``begin``. The random numbers that a
    data set draws for a batch depend on the seed and on the number of the batch alone, so a loader that goes on in the
    middle of an epoch draws those of a loader that was never left. torch hands batches to the workers in turn."""

    def __init__(self, collate_fn, workers):
        self.collate_fn, self.workers = collate_fn, workers
        self.seed, self.number = "", 0

    def start(self, seed, number):
        """In the program, before workers are made: ``number`` is that of their first batch."""
        self.seed, self.number = seed, number

    def begin(self, worker):
        """In a worker, once."""
        self.number += worker
        self._draw_from_batch()

    def __call__(self, samples):
        batch = self.collate_fn(samples)
        self.number += self.workers
        self._draw_from_batch()
        return batch

    def _draw_from_batch(self):
        digest = hashlib.sha256(f"{self.seed} {self.number}".encode()).digest()
        random.seed(digest)
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        numpy.random.seed(numpy.frombuffer(digest, numpy.uint32))


def end_with(iterator):
    """Ends the workers of ``iterator``, of a torch ``DataLoader``, when it is freed. Returns ``iterator``."""
    workers = getattr(iterator, "_workers", None)
    if workers is not None:  # with num_workers 0 there are none
        kept = weakref.finalize(iterator, _let_go, workers, iterator._index_queues, iterator._worker_result_queue)
        kept.atexit = False
        _iterators.add(iterator)
    return iterator


def next_of(iterator):
    """The next batch. RuntimeError says how each worker has ended, with its exit code or signal, where some have."""
    try:
        return next(iterator)
    except (RuntimeError, ConnectionError) as error:
        ends = _ends_of_workers(iterator)
        if not ends:
            raise
        raise RuntimeError(f"{error}. Worker processes of the data loader have ended: {ends}") from error


def _ends_of_workers(iterator):
    codes = [(one.pid, one.exitcode) for one in getattr(iterator, "_workers", ())]
    return ", ".join(
        f"process {pid} by signal {signal.Signals(-code).name}" if code < 0 else f"process {pid} with exit code {code}"
        for pid, code in codes
        if code is not None
    )


def _let_go(*kept):
    """The iterator still refers to them: its ``__del__``, which is next, finds them as they were."""


def _in_a_forked_child():
    for iterator in list(_iterators):
        iterator._shutdown = True
    _iterators.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)
