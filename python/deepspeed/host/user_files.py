"""Functions that a user names on a command line by their file."""

import os
import runpy
import sys


def function_in_file(target):
    """The function that ``FILE.py:name`` names. The file runs, and finds its imports beside it. ValueError where there
    is no such file or function."""
    path, _, name = target.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path or target!r}; write FILE.py:function")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    found = runpy.run_path(path)
    if not callable(found.get(name)):
        known = sorted(key for key, value in found.items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return found[name]
