"""Processes that a test has started, or that they have."""

import os
import subprocess
import sys
import textwrap
import time


def launched(script, folder, *arguments, ranks=2, timeout=60, **env):
    """Runs the text of a script with the launcher, on ranks of this machine and in ``folder``: a CompletedProcess.
    ``env``: more variables."""
    path = os.path.join(folder, "script.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(textwrap.dedent(script))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place), **env}
    command = [sys.executable, "-m", "deepspeed.launcher", "--num_accelerators", str(ranks), path, *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)


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
    """Looks until ``condition()`` is true, for so many ``seconds``. A look that comes late counts as 0.1 s at most:
    while the machine stands still nobody else gets on either."""
    passed, last = 0.0, time.monotonic()
    while not condition() and passed < seconds:
        time.sleep(0.02)
        now = time.monotonic()
        passed, last = passed + min(now - last, 0.1), now
    assert condition()
