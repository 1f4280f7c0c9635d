"""A plain ``pytest`` runs every test file: its defaults skip folders with certain names, ``dist`` among them.

Several processes share the tests by name (`make test`), so each of them must find the same names.
"""

import os
import pathlib
import re
import subprocess
import sys

from places import PYTHON, ROOT


def names():
    """What a plain ``pytest`` collects, asked for where this run is of some files alone."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON},
        capture_output=True,
        text=True,
    ).stdout
    return [line for line in listed.splitlines() if "::" in line]


def test_every_test_file_is_collected(collected):
    listed = names() if collected is None else collected
    moving = [line for line in listed if re.search(r" at 0x[0-9a-f]{6,}", line)]
    assert not moving, f"names with addresses in them differ from process to process; give these ids: {moving}"
    found = {line.split("::")[0] for line in listed}
    written = {str(path.relative_to(ROOT)) for path in pathlib.Path(ROOT, "tests").rglob("test_*.py")}
    assert len(written) > 30
    assert written - found == set(), "pytest does not collect these: look at testpaths and norecursedirs"
