"""Processes that a test has started, or that they have."""

import time


def running(pid):
    """Whether it is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids():
    """The lines of the file ``pids`` here, into which scripts write their numbers."""
    try:
        with open("pids") as file:
            return [int(line) for line in file]
    except FileNotFoundError:
        return []


def wait_for(condition, seconds=10):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    assert condition()
