"""The few system calls and /proc reads that make sure no process outlives the launcher."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper(wanted=True):
    """Orphans among our descendants become our children, so that we can still end them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def die_with_parent(parent_pid, sig=signal.SIGKILL):
    """This process gets ``sig`` when its parent ends; at once if the parent has ended already."""
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
