"""System calls and /proc reads by which no process outlives the launcher."""

import contextlib
import ctypes
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import termios
import traceback

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


# The number of the system call set_mempolicy; the C library has no function for it.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "riscv64": 237}.get(platform.machine())
_PREFERRED, _BIND = 1, 2


def take_memory_from(nodes, wish=False):
    """Makes this process take memory from the memory nodes ``nodes``; with ``wish`` from the first one, as long as it
    has any. Returns False if the system does not allow that."""
    if not nodes or _SET_MEMPOLICY is None:
        return False
    chosen = nodes[:1] if wish else nodes
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (max(chosen) // word + 1))()
    for node in chosen:
        mask[node // word] |= 1 << node % word
    policy = _PREFERRED if wish else _BIND
    # The kernel reads one bit less than it is told.
    return _libc.syscall(_SET_MEMPOLICY, policy, ctypes.byref(mask), ctypes.c_ulong(len(mask) * word + 1)) == 0


def unread(pipe):
    """The number of unread bytes in a pipe, of which ``pipe`` is either end."""
    count = ctypes.c_int(0)
    _libc.ioctl(pipe, termios.FIONREAD, ctypes.byref(count))
    return count.value


def become_subreaper(wanted=True):
    """Makes orphans among our descendants our children, so that we can end them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def die_with_parent(parent_pid, sig=signal.SIGKILL):
    """Asks for ``sig`` to this process when its parent ends; at once if the parent has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


def ended_children():
    """``(pid, wait status)`` of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _parents():
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended meanwhile
            # The name in parentheses may contain anything: the fields start behind the last one.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                found[int(name)] = int(parent)
    return found


def descendants(pid):
    """Processes below ``pid``, zombies left out."""
    children = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill(pid, sig, group=False):
    """Sends ``sig`` to a process that may have ended; ``group``: to the process group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, sig)


def kill_all(pids, sig=signal.SIGKILL):
    """Sends ``sig`` to each of ``pids``."""
    for pid in pids:
        kill(pid, sig)


def flush():
    """Writes what stdout and stderr of this process hold."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def fork(work):
    """Forks a process that calls ``work()`` and ends with the exit code that this returns (None: 0), or with 1 after an
    error, which it says. Returns its id."""
    flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work() or 0
        except OSError as error:
            print(f"deepspeed: error: {error}", file=sys.stderr)
        except Exception:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                flush()
            os._exit(code)
    return pid


def not_ignored(signals):
    """Those of ``signals`` that were not ignored at the start (by nohup, or in a background job of a script)."""
    return [sig for sig in signals if signal.getsignal(sig) != signal.SIG_IGN]


@contextlib.contextmanager
def handling(signals, handler):
    """A context in which ``handler`` handles ``signals``."""
    before = {sig: signal.signal(sig, handler) for sig in signals}
    try:
        yield
    finally:
        for sig, own in before.items():
            signal.signal(sig, own)


def signal_socket():
    """``(read, write)``: a socket that tells the numbers of the signals which this process handles. Both ends must be
    kept until ``signal.set_wakeup_fd(-1)``."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
    return ends


def open_fds():
    """All descriptors of this process."""
    # That of the listing is closed when the listing is there.
    return {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}


def take_streams(streams, kept):
    """Makes ``streams`` the stdin, stdout and stderr of this process, a forked one. Of other descriptors it has those
    ``kept`` then."""
    for number, fd in enumerate([os.dup(fd) for fd in streams]):
        os.dup2(fd, number)
    for fd in open_fds().difference((0, 1, 2), kept):
        os.close(fd)


def child(command, signal_at_end=signal.SIGKILL, **options):
    """A process in a session of its own, so that Ctrl-C reaches this process alone. It gets ``signal_at_end`` when this
    process ends. ``options``: of ``subprocess.Popen``."""
    parent = os.getpid()
    return subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: die_with_parent(parent, signal_at_end), **options
    )


def read_now(fd, size=1 << 16):
    """The bytes that a non-blocking descriptor has now: None if there are none yet, empty at the end."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None


class Selector(selectors.DefaultSelector):
    """A selector for reading, whose entries may be added and removed twice."""

    def watch(self, fd, data):
        """Adds ``fd`` with its ``data``."""
        if fd not in self.get_map():
            self.register(fd, selectors.EVENT_READ, data)

    def drop(self, *fds):
        """Removes ``fds``."""
        for fd in fds:
            if fd in self.get_map():
                self.unregister(fd)
