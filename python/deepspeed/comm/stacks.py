"""Stacks of the threads of this process, for ranks that ask because a collective has failed."""

import sys
import threading
import traceback

_MOST_FRAMES = 14  # innermost ones of a thread
_MOST_CHARACTERS = 9000


def stack_text():
    """The Python stacks of all threads but the caller's, the main thread first, innermost frames last; bounded."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != main and ident not in names:
            continue  # a thread of C++ that is inside Python for a moment
        stack = traceback.StackSummary.extract(_innermost(frames[ident]))
        lines = [f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}' for frame in stack]
        title = [] if ident == main else [f"thread {names[ident]}:"]
        parts.append("\n".join(title + lines))
    return "\n".join(parts)[:_MOST_CHARACTERS]


def _innermost(frame):
    found = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return reversed(found)
