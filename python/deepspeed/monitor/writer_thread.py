"""The thread in which monitors write."""

import collections
import queue
import threading

from deepspeed.log import logger, warning_once

# Calls that may wait. A monitor that is slower than training loses what is above it, instead of taking all memory.
LIMIT = 10_000
PATIENCE_S = 30.0  # for which the end of a program waits

Call = collections.namedtuple("Call", "method given done", defaults=(None,))


class WriterThread:
    """Calls methods of ``monitors`` (by name) in the order of ``put``, in one thread for all of them, which is started
    by the first call. An error of a monitor is one warning; the others get their calls all the same."""

    def __init__(self, monitors):
        self._monitors, self._failed = monitors, set()
        self._lock, self._calls, self._thread = threading.Lock(), queue.SimpleQueue(), None

    def put(self, method, *given):
        """Returns at once: the method of each monitor is called later."""
        if self._calls.qsize() < LIMIT:
            self._put(Call(method, given))
        else:
            warning_once(
                f"The monitors {', '.join(self._monitors)} are slower than training: {LIMIT} calls of write_events "
                "wait, and further events are lost until there are fewer. Write fewer of them, or less often.",
                key=f"slow monitors {id(self)}",
            )

    def _put(self, call):
        with self._lock:
            # A process that was forked has no such thread, and leaves what waits to the one that has.
            if self._thread is None or not self._thread.is_alive():
                self._calls = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._calls,), name="DeepSpeed monitors", daemon=True
                )
                self._thread.start()
            self._calls.put(call)
        return call

    def wait(self):
        """Returns when everything is written, or with a warning after a while."""
        if self._thread is not None and self._thread.is_alive():
            self._finish(self._put(Call("flush", (), threading.Event())).done.wait)

    def close(self):
        """Writes what is left and closes the monitors."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        self._put(Call("close", ()))
        self._calls.put(None)
        if thread is not threading.current_thread():  # in which the garbage collector may run
            self._finish(lambda seconds: thread.join(seconds) or not thread.is_alive())

    def _finish(self, wait):
        waiting = self._calls.qsize()
        if not wait(PATIENCE_S):
            logger.warning(
                "The monitors %s have not written %d calls of write_events within %.0f s; they may be lost.",
                ", ".join(self._monitors),
                waiting,
                PATIENCE_S,
            )

    def _run(self, calls):
        while (call := calls.get()) is not None:
            for name, monitor in self._monitors.items():
                try:
                    getattr(monitor, call.method)(*call.given)
                except Exception as error:  # whatever a package raises; training goes on
                    self._tell(name, error)
            if call.done is not None:
                call.done.set()

    def _tell(self, name, error):
        if name not in self._failed:
            self._failed.add(name)
            logger.warning(
                "The monitor %s has failed: %s: %s. Its events are lost as long as that is so; training continues. "
                "This is said once.",
                name,
                type(error).__name__,
                error,
            )
