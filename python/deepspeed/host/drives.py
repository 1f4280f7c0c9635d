"""On which drive a folder is."""

import os

from deepspeed.host.texts import read_text


def drive_of(path):
    """``(device, type of its file system, where it is mounted)``; texts, "" where the system does not say."""
    real, found = os.path.realpath(path), ("", "", "")
    for row in map(str.split, read_text("/proc/self/mountinfo").splitlines()):
        mounted, after = _plain(row[4]), row.index("-") + 1
        inside = real == mounted or real.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= len(found[2]):  # of several at one path the last one is seen
            found = (_plain(row[after + 1]), row[after], mounted)
    return found


def _plain(word):
    # The kernel writes spaces and the like as \\040.
    return word.encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")
