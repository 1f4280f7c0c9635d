"""Programs on the search path."""

import os
import subprocess


def output_of(*command):
    """The stdout of a program of this machine; "" where it cannot be started or takes more than 30 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_program(name):
    """The path of the executable file ``name`` (here if it holds a slash, else on PATH), or None.

    ``shutil.which`` says the same, but importing shutil costs a tenth of the launcher's start.
    """
    folders = [""] if os.path.dirname(name) else os.get_exec_path()
    paths = (os.path.join(folder, name) for folder in folders)
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)
