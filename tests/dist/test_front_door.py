"""The commands of the README's section "What is different here" show what the section says."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from processes import succeeded

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = {"deepspeed": "deepspeed.launcher.runner", "ds_ckpt": "deepspeed.checkpoint.read.cli"}
SMALL = " --layers 1 --heads 2 --width 64"
pytestmark = [pytest.mark.slow, pytest.mark.dist]


def readme():
    return pathlib.Path(ROOT, "README.md").read_text(encoding="utf-8")


def commands():
    """The commands of the table, in its order."""
    section = readme().split("\n## What is different here\n")[1].split("\n## ")[0]
    return re.findall(r"^\| \*\*.+ \| `(.+)` \|$", section, re.M)


AUDIT, RESUME, CRASH, HANG, COMPILER = commands()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the programs, the examples with a short schedule and a small corpus, and first.py, of two epochs
    instead of five, after a run without a compiler."""
    folder = tmp_path_factory.mktemp("front")
    (folder / "bin").mkdir()
    for name, module in PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    ours = shutil.ignore_patterns("out", "cache", "__pycache__")
    shutil.copytree(os.path.join(ROOT, "examples"), folder / "examples", ignore=ours)
    path = folder / "examples" / "quickstart" / "ds_config.json"
    config = json.loads(path.read_text())
    config["scheduler"]["params"].update(total_num_steps=4, warmup_num_steps=2)
    path.write_text(json.dumps(config))
    small_corpus(folder / "examples" / "quickstart")
    text = re.search(r"^```python launch=2\n(.*?)^```", readme(), re.M | re.S)[1]
    assert "for epoch in range(5):" in text
    (folder / "first.py").write_text(text.replace("for epoch in range(5):", "for epoch in range(2):"))
    code, text = shell(folder, COMPILER)
    assert code == 0 and "epoch 1: loss" in text, text
    return folder


def small_corpus(folder):
    """Puts a part of the corpus where train.py looks for the whole, which test_quickstart.py has built by train.py."""
    code = (
        "import data; path = data.cache_folder('cache'); found = data.corpus_files(); "
        "data.corpus_files = lambda: (found[0], found[1][::4]); data.SAMPLE_BYTES = 400_000; "
        "data.build(path, print)"
    )
    succeeded(subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True))


def shell(folder, command):
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.path.join(ROOT, "python"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    return run.returncode, run.stdout


def test_no_compiler_runs(folder):
    assert COMPILER.startswith("CC=false CXX=false ") and (folder / "checkpoints" / "latest").exists()


def test_gradients_are_proven_equal(folder):
    code, text = shell(folder, AUDIT)
    assert code == 0 and "audit: 5 steps agree with a plain process" in text, text


@pytest.mark.every("two trainings; test_quickstart.py goes on at three ranks")
def test_a_run_resumes_at_any_number_of_ranks(folder):
    first = RESUME.replace("--num_accelerators 3", "--num_accelerators 2").replace(" --resume --more 5", "")
    code, text = shell(folder, first + SMALL)
    assert code == 0, text
    code, text = shell(folder, RESUME + SMALL)
    assert code == 0 and "resumed at step 4, on to 9" in text and "3 processes" in text, text


def test_a_save_survives_a_crash(folder):
    killed, check = CRASH.split("; ")
    code, text = shell(folder, killed)
    assert code != 0 and "SIGKILL" in text, text
    code, text = shell(folder, check)
    assert code == 0 and "global_step64" in text, text


def test_a_hang_is_named(folder):
    code, text = shell(folder, HANG)
    assert code != 0 and re.search(r"rank 1 \(process \d+\) has not come for \d", text), text
    assert re.search(r'hang\.py", line \d+, in <module>: time\.sleep\(10\)', text), text
