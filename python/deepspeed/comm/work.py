"""Handles of collectives that still have something to do on this rank once the data has arrived."""


class DeferredWork:
    """Waits for ``works``, then calls ``finish`` once. What torch's ``Work`` promises, as far as callers use it."""

    def __init__(self, works, finish, wait):
        self._works = [work for work in works if work is not None]
        self._finish = finish
        self._wait = wait

    def wait(self, timeout=None):
        """Blocks until the result is in the caller's tensors; returns True."""
        for work in self._works:
            self._wait(work, timeout)
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self):
        """True once nothing is under way. The result is in place only after ``wait``."""
        return all(work.is_completed() for work in self._works)


def _plain_wait(work, timeout):
    work.wait() if timeout is None else work.wait(timeout)


def complete(works, finish, async_op, wait=_plain_wait):
    """The handle when ``async_op``, else waits and returns None, as torch's collectives do. ``wait(work, timeout)``
    waits for one of the works."""
    deferred = DeferredWork(works, finish, wait)
    if async_op:
        return deferred
    deferred.wait()
    return None
