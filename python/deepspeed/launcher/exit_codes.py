"""Exit codes of processes, and words for them. Codes are those of ``os.waitstatus_to_exitcode``: signals negative."""

import signal
import socket

_HINTS = {
    signal.SIGKILL: " (often the system's out-of-memory killer: see `dmesg`)",
    signal.SIGSEGV: " (a crash in native code: PYTHONFAULTHANDLER=1 shows where)",
    signal.SIGBUS: " (often /dev/shm or a disk that is full: see `df -h /dev/shm`)",
}


def shell_code(code):
    """The exit code as a shell gives it: 128 + the number of a signal."""
    return code if code >= 0 else 128 - code


def report(name, pid, host, code, after_s):
    """``"deepspeed: rank 0 of 2 (pid 7, host a) failed with exit code 3 1.0 s after the start"``, with the usual cause
    of a signal."""
    how = f"failed with exit code {code}"
    if code < 0:
        sig = signal.Signals(-code)
        how = f"was killed by {sig.name}{_HINTS.get(sig, '')}"
    return f"deepspeed: {name} (pid {pid}, host {host or socket.gethostname()}) {how} {after_s:.1f} s after the start"
