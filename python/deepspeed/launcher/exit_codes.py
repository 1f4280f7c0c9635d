"""Exit codes of processes, and words for them. Codes are those of ``os.waitstatus_to_exitcode``: signals negative."""

import signal

_HINTS = {
    signal.SIGKILL: " (often the system's out-of-memory killer: see `dmesg`)",
    signal.SIGSEGV: " (a crash in native code: PYTHONFAULTHANDLER=1 shows where)",
    signal.SIGBUS: " (often /dev/shm or a disk that is full: see `df -h /dev/shm`)",
}


def shell_code(code):
    """The exit code as a shell gives it: 128 + the number of a signal."""
    return code if code >= 0 else 128 - code


def how_it_ended(code):
    """``"failed with exit code 3"`` or ``"was killed by SIGKILL"`` with the usual cause."""
    if code >= 0:
        return f"failed with exit code {code}"
    sig = signal.Signals(-code)
    return f"was killed by {sig.name}{_HINTS.get(sig, '')}"
