"""Saves that go on while training does: one thread for each engine, its work in order.

[Note: no collectives in the background] The thread meets the threads of other ranks through files
(``RanksThroughFiles``): a collective there would mix with those of the training loop.

[Note: one step for all ranks] A failure is agreed on by the threads, and then told by the training loops, which must
do so at the same step: a rank that goes on alone would wait in a collective for ever. Each thread first makes the
failure visible to its own loop, then tells the others how many steps that loop had finished. The largest of these
numbers plus one is a step that no rank has finished without seeing the failure; there they raise, each after its
step is done, so that a program that catches the error can go on training.
"""

import atexit
import concurrent.futures
import os
import sys
import threading

from deepspeed.checkpoint.write import owner
from deepspeed.checkpoint.write.ranks import failure_of
from deepspeed.comm.agreement import attempt
from deepspeed.log import warning_once

# ---- background ----------------------------------------------------------------------------------------------------

_unsettled = set()  # backgrounds that are at work or have a failure to tell: the end of the program waits for them
_lock = threading.Lock()


def _at_exit():
    drain_all()
    for error, _ in [failure for background in list(_unsettled) for failure in background.failures]:
        print(f"deepspeed: at the end of the program: {error}", file=sys.stderr, flush=True)


_folders = set()  # those that threads of this process write into
_folders_changed = threading.Condition()


def enter(folder):
    """A save into ``folder`` is on its way, until ``leave``."""
    with _folders_changed:
        _folders.add(os.path.abspath(folder))


def leave(folder):
    with _folders_changed:
        _folders.discard(os.path.abspath(folder))
        _folders_changed.notify_all()


def wait_for(folder):
    """Waits until no save into ``folder`` is on its way: two would write into the same hidden folder."""
    with _folders_changed:
        _folders_changed.wait_for(lambda: os.path.abspath(folder) not in _folders)


def drain_all():
    """Waits until no engine of this process writes in the background."""
    for background in list(_unsettled):
        background.drain()


def _in_a_forked_child():
    """No thread comes along, and locks stay as they were: the child starts anew, and its parent does the work."""
    global _lock, _folders_changed
    _lock, _folders_changed = threading.Lock(), threading.Condition()
    _folders.clear()
    for background in _unsettled:
        background.begin_anew()
    _unsettled.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)


class Background:
    """Does jobs, one after the other. The thread is there while there is work."""

    def __init__(self):
        self.steps = 0  # finished ones of the training loop
        self.begin_anew()

    def begin_anew(self):
        """Forgets all work and all failures."""
        self.failures = []  # (error, future of the number of finished steps after which it is told)
        self._thread = self._last = None  # the future of the job that was started last

    # ---- work ------------------------------------------------------------------------------------------------------
    def start(self, job):
        # Registered again each time: what is registered last runs first, and this must come before the end of gloo.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        with _lock:
            _unsettled.add(self)
            if self.idle:  # a thread of its own for each row of jobs: a child that was forked has none
                self._thread = concurrent.futures.ThreadPoolExecutor(1, "deepspeed-checkpoint")
            try:
                self._last = self._thread.submit(self._run, job)
            except RuntimeError:  # the interpreter ends and starts no more threads
                self._last = None
        if self._last is None:
            self._run(job)
            return self._forget_if_settled()
        self._last.add_done_callback(lambda _: self._forget_if_settled())

    def _run(self, job):
        try:
            job()
        except BaseException as error:  # a mistake in this library: told like anything else that goes wrong
            self.fail(error)

    @property
    def idle(self):
        """Whether all jobs are done."""
        return self._last is None or self._last.done()

    def drain(self):
        """Waits until all jobs are done."""
        concurrent.futures.wait([self._last] if self._last is not None else [])
        self._forget_if_settled()

    # ---- failures --------------------------------------------------------------------------------------------------
    def fail(self, error, settle=lambda steps: [steps]):
        """A job has failed. ``settle(steps)`` gives the numbers of finished steps of all ranks that are still there.
        See [Note: one step for all ranks]."""
        due = concurrent.futures.Future()
        self.failures.append((error, due))
        told, _ = attempt(lambda: max(settle(self.steps)) + 1)
        due.set_result(told or 0)  # without other ranks to agree with: at the next step

    def step_done(self):
        """The training loop calls it at the end of a step. Raises what went wrong in the background."""
        self.steps += 1
        if self.failures and self.steps >= self.failures[0][1].result():
            self._tell()

    def wait(self):
        """Waits until all is on the disk. Raises what went wrong."""
        self.drain()
        if self.failures:
            self._tell()

    def _tell(self):
        error, _ = self.failures.pop(0)
        self._forget_if_settled()
        raise error

    def tell_together(self, ranks):
        """Before the next save, on all ranks: all raise if any has something to tell."""
        own = self.failures[0][0] if self.failures else None
        told = [failure for failure in ranks.gather(failure_of(ranks.rank, own)) if failure is not None]
        if told:
            self.wait()  # of the others some may be about to learn of it
            _, number, text = told[0]
            raise OSError(number, text) if number is not None else RuntimeError(text)

    def _forget_if_settled(self):
        with _lock:
            if self.idle and self._thread is not None:
                self._thread.shutdown(wait=False)
            if self.idle and not self.failures:
                _unsettled.discard(self)


# ---- snapshot save -------------------------------------------------------------------------------------------------
# One save whose files are copied now and written later.


def raise_failure(records, error):
    """A ``finish`` of ``SnapshotSave`` that has nothing to do but to raise what went wrong."""
    if error is not None:
        raise error


class SnapshotSave:
    """``writer`` prepares files (``prepare``) and writes them (``write_prepared``) below ``staging``, in the thread
    ``writer.behind``; no other save into ``target`` begins until then. ``snapshot``: the ``Snapshot`` that copies.
    ``finish(records, error)``: called in that thread when all is written: name -> record, and what went wrong."""

    def __init__(self, writer, snapshot, target, staging, finish):
        self.behind, self._writer, self.snapshot = writer.behind, writer, snapshot
        self._target, self._staging, self._finish = target, staging, finish
        self.records, self.error = {}, None
        enter(target)

    # ---- in the calling thread -------------------------------------------------------------------------------------
    def add(self, name, value):
        """Takes the file ``name``: afterwards tensors in ``value`` may change, but for the engine's states. Waits while
        the cache is full; a file that is larger than all of it is written at once."""
        prepared = self._writer.prepare(name, value)
        path = owner.make_way(self._staging, name)
        linked = prepared.link(path) if hasattr(prepared, "link") else None
        if linked is not None:  # it is in another tag: nothing to copy
            self.records[name] = linked
        elif (copies := self.snapshot.add(prepared.sources)) is not None:
            prepared.sources = ()  # what was copied may go
            self.behind.start(lambda: self._write_one(name, prepared, path, copies))
        else:
            gib = self.snapshot.plan(prepared.sources).bytes / 2**30
            warning_once(
                f"{name} has {gib:.3f} GiB, more than all of host_cache_size: it is written at once, and training "
                f"waits. Set host_cache_size to at least {gib + 0.001:.3f} GiB"
            )
            self.records[name] = self._writer.write_prepared(prepared, path)

    def drop(self):
        """Gives up all files that are not written yet; nothing is written any more when this returns."""
        self.error = self.error or RuntimeError("given up")
        self.snapshot.drop()
        self.behind.drain()
        leave(self._target)

    def end(self):
        """All files are taken: the rest happens in the background. Only now, when nothing can go wrong any more in the
        calling thread, the engine's states are held."""
        self.snapshot.start_late_copies()
        self.behind.start(self._end)

    # ---- in the background -----------------------------------------------------------------------------------------
    def _write_one(self, name, prepared, path, copies):
        try:
            copies.wait()
            if self.error is None:
                prepared.sources = copies.sources
                self.records[name] = self._writer.write_prepared(prepared, path)
        except BaseException as caught:
            self.error = caught
        finally:
            prepared.sources = ()
            copies.give_back()

    def _end(self):
        try:
            self._finish(self.records, self.error)
        finally:
            leave(self._target)
