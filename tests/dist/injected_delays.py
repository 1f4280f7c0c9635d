"""A delay on order, for tests and benchmarks that look for its place: of a message between ranks, or of a read.

with LateLink() as link:                    # around the making of an engine over gloo
    engine = deepspeed.initialize(...)[0]
link.late = True                            # the next message that this rank receives takes DELAY longer

with SlowLink() as link:                    # around the first use of a group of layers that are cut over ranks
    ...
link.delay = 0.01                           # each all-reduce ends no earlier than that after its start

LD_PRELOAD=build_late_reads(folder)         # of a process from its start
LateReads().late = 1                        # the next read of a file takes DELAY longer
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
import time
from datetime import timedelta
from unittest import mock

import torch.distributed as dist

from deepspeed.comm import gloo

DELAY = 0.05
_SOURCE = """
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
int late_reads = 0;
ssize_t pread(int file, void* data, size_t bytes, off_t at) {
  const struct timespec delay = {0, DELAY_NS};
  if (__atomic_load_n(&late_reads, __ATOMIC_SEQ_CST) > 0 && __atomic_fetch_sub(&late_reads, 1, __ATOMIC_SEQ_CST) > 0)
    nanosleep(&delay, 0);
  return syscall(SYS_pread64, file, data, bytes, at);
}
ssize_t pread64(int file, void* data, size_t bytes, off_t at) { return pread(file, data, bytes, at); }
"""


def _passed(name):
    return lambda self, *given: getattr(self.inner, name)(*given)


class _LateWork(dist._Work):
    """Is over ``DELAY`` seconds after ``inner``. A delay before it would hide a part of the usual wait for the other
    rank."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def left(self):
        """Seconds that it still takes when ``inner`` is over."""
        return DELAY

    def wait(self, timeout=timedelta(0)):
        done = self.inner.wait()
        time.sleep(self.left())
        return done

    def is_completed(self):
        return False


class _Group(dist.ProcessGroup):
    """torch's group ``inner``, over a link that may be late."""

    def __init__(self, inner, link):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.link, self._works = inner, link, []  # works have to live in Python as long as torch calls them

    def getBackendName(self):
        return "gloo"

    allgather, allreduce, barrier, broadcast, send = map(
        _passed, ("allgather", "allreduce", "barrier", "broadcast", "send")
    )

    def recv(self, *given):
        work = self.inner.recv(*given)
        if not self.link.late:
            return work
        self.link.late = False
        self._works.append(_LateWork(work))
        return self._works[-1]


class _SlowWork(_LateWork):
    """Is over ``link.delay`` seconds after the last rank has come, also if nobody waits."""

    def __init__(self, inner, link):
        super().__init__(inner)
        self.link, self.ends = link, None
        self._thread = threading.Thread(target=self._meet)
        self._thread.start()

    def _meet(self):
        self.inner.wait()
        self.ends = time.perf_counter() + self.link.delay

    def left(self):
        self._thread.join()
        left = max(0.0, self.ends - time.perf_counter())
        self.link.exposed += left
        return left


class _SlowGroup(_Group):
    """torch's group over a link that is slow."""

    def allreduce(self, *given):
        self.link.calls += 1
        self._works = [_SlowWork(self.inner.allreduce(*given), self.link), *self._works[:8]]
        return self._works[0]


class LateLink:
    """A context. Communicators that are opened in it send messages, also on one host, and have the link."""

    late, kind = False, _Group
    _by_messages = {"DS_SHM_COLLECTIVES": "0", "DS_PEER_MEMORY": "0"}

    def __init__(self):
        self._groups = []  # which have to live in Python as long as torch calls them
        self._open = gloo.group_around
        self._patches = contextlib.ExitStack()

    def _made(self, *given):
        self._groups.append(self.kind(self._open(*given), self))
        return self._groups[-1]

    def __enter__(self):
        self._patches.enter_context(mock.patch.object(gloo, "group_around", self._made))
        self._patches.enter_context(mock.patch.dict(os.environ, self._by_messages))
        return self

    def __exit__(self, *_):
        self._patches.close()


class SlowLink(LateLink):
    """The same, with a link that is slow. ``delay``: seconds; as with a real link, what a rank computes meanwhile costs
    nothing more. ``calls``: all-reduces so far; ``exposed``: seconds for which this rank has waited for the delay."""

    delay, calls, exposed, kind = 0.0, 0, 0.0, _SlowGroup


def build_late_reads(folder):
    """The path of a library for LD_PRELOAD; None where there is no C compiler."""
    compiler, path = shutil.which("cc") or shutil.which("gcc"), os.path.join(str(folder), "late_reads.so")
    if compiler is None:
        return None
    options = ["-shared", "-fPIC", f"-DDELAY_NS={int(DELAY * 1e9)}", "-x", "c", "-o", path, "-"]
    subprocess.run([compiler, *options], input=_SOURCE.encode(), check=True)
    return path


class LateReads:
    """``late``: the number of next reads of files that are late."""

    def __init__(self):
        self._count = ctypes.c_int.in_dll(ctypes.CDLL(None), "late_reads")

    @property
    def late(self):
        return self._count.value

    @late.setter
    def late(self, count):
        self._count.value = count
