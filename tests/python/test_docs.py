"""Every Python block of the README and the tutorials runs, as the reader would run it.

A block is a script of its own and is started in an empty folder. Words after ```python say more:
``launch=2`` starts it through the launcher on two processes; ``share`` joins it to the ``share`` blocks before it in
the same file, as if they were one script; ``every`` leaves it to `make test-all`; ``hpu`` runs it on the stand-in for
Gaudi, where this torch can have that. `make test` runs the scripts in new
processes that have torch and deepspeed already (tests/dist/harness.py); `make test-all` starts each as the page says.
"""

import glob
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import standin

from deepspeed.host.ports import free_port
from harness import run_ranks
from places import PYTHON, ROOT
from sampling import every_case

WORDS = ("share", "every", "hpu")
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```\s*$", re.M | re.S)


def scripts():
    """(name, number of processes, code) of every block; ``share`` blocks of a file make one script."""
    found = []
    for path in [os.path.join(ROOT, "README.md"), *sorted(glob.glob(os.path.join(ROOT, "docs", "tutorials", "*.md")))]:
        text, shared = pathlib.Path(path).read_text(encoding="utf-8"), None
        for match in BLOCK.finditer(text):
            words = match.group(1).split()
            ranks = next((int(word[7:]) for word in words if word.startswith("launch=")), 0)
            unknown = [word for word in words if word not in WORDS and not word.startswith("launch=")]
            assert not unknown, f"{path}: ```python {match.group(1)}: {unknown} is not known here"
            line = text.count("\n", 0, match.start()) + 1
            if "share" in words and shared is not None:
                shared[2] += "\n" + match.group(2)
                shared[1] = max(shared[1], ranks)
                continue
            if "every" in words and not every_case():
                continue
            entry = [f"{os.path.relpath(path, ROOT)}:{line}{' on hpu' * ('hpu' in words)}", ranks, match.group(2)]
            found.append(entry)
            if "share" in words:
                shared = entry
    return found


def test_the_readme_has_a_script_to_run():
    assert any(name.startswith("README.md") for name, _, _ in scripts())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name, ranks, code", scripts(), ids=[name for name, _, _ in scripts()])
def test_block_runs(name, ranks, code, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    if name.endswith(" on hpu"):
        if not standin.supported():
            pytest.skip("the stand-in device needs torch 2.9 or newer")
        start(name, ranks, script, **standin.hpu_environment())
    elif every_case():
        start(name, ranks, script)
    else:
        monkeypatch.chdir(tmp_path)
        alone = dict.fromkeys(LAUNCHED) if not ranks else {}
        run_ranks(max(ranks, 1), body, str(script), timeout=300, env=alone, fresh=True)


LAUNCHED = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
            "MASTER_ADDR", "MASTER_PORT"]  # fmt: skip


def body(rank, world, script):
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def start(name, ranks, script, **more):
    """As the reader does it, with ``more`` variables."""
    command = [sys.executable, str(script)]
    if ranks:
        command[1:1] = [
            "-m",
            "deepspeed.launcher.runner",
            "--num_accelerators",
            str(ranks),
            "--master_port",
            str(free_port()),
        ]
    env = {**os.environ, "PYTHONPATH": PYTHON, "OMP_NUM_THREADS": "1", **more}
    out = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, f"{name} failed\n{out.stdout[-2000:]}\n{out.stderr[-4000:]}"
