"""The state of a process that does not answer: each thread as the kernel sees it, and the calls of its first thread."""

import os
import pathlib
import subprocess
import time

STACK_OF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "stack_of.sh")


def _read(path):
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _ticks(task):
    """CPU time of a thread, in ticks, and its state."""
    fields = _read(task / "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12]), fields[0]) if len(fields) > 12 else (0, "gone")


def threads_of(pid, seconds=0.1):
    """A line for each thread: name, state, where in the kernel it waits, and the CPU time of the next ``seconds``."""
    tasks = sorted(pathlib.Path(f"/proc/{pid}/task").glob("*"), key=lambda one: int(one.name))
    before = {task: _ticks(task)[0] for task in tasks}
    time.sleep(seconds)
    lines = []
    for task in tasks:
        ticks, state = _ticks(task)
        waits = _read(task / "wchan") or "?"
        lines.append(f"{_read(task / 'comm')} {state} in {waits}, {ticks - before[task]} ticks in {seconds} s")
    return lines


def calls_of(pid, most=24):
    """The calls of the first thread, the innermost first; empty where they cannot be read."""
    try:
        shown = subprocess.run([STACK_OF, str(pid)], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return ["(its calls take longer than 20 s to read)"]
    return [line for line in shown.stdout.splitlines() if line.startswith("#")][:most]


def view_of(pid):
    """Both, as text."""
    return "\n".join([*threads_of(pid), *calls_of(pid)])
