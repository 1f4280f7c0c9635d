"""System calls and /proc reads by which no process outlives the launcher."""

import ctypes
import os
import platform
import signal
import termios

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


def _parents():
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue  # ended meanwhile
        # The name in parentheses may contain anything: the fields start behind the last one.
        state, parent = text[text.rindex(b")") + 2 :].split()[:2]
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


def kill(pid, sig):
    """Sends ``sig``; False when there is no such process any more."""
    return _sent(os.kill, pid, sig)


def kill_group(pid, sig):
    """Sends ``sig`` to the process group that ``pid`` leads; False when there is none any more."""
    return _sent(os.killpg, pid, sig)


def _sent(send, pid, sig):
    try:
        send(pid, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True
