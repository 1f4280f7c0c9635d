"""Functions that a user names on a command line by their file."""

import os
import runpy
import sys


def function_in_file(target):
    """The function that ``FILE.py:name`` names. The file runs, and finds its imports beside it. ValueError where there
    is no such file or function, and where the file raises an error."""
    path, _, name = target.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path or target!r}; write FILE.py:function")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        found = runpy.run_path(path)
    except SystemExit as error:
        raise ValueError(
            f"{path} ends the program (exit code {error.code!r}) when it is read: put what it does into functions, or "
            f"below `if __name__ == \"__main__\":`"
        ) from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not callable(found.get(name)):
        known = sorted(key for key, value in found.items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return found[name]
