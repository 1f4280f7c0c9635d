"""``deepspeed --check``: what it finds on hosts that a stand-in for ssh pretends to reach."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from deepspeed.launcher import probe
from places import PYTHON
from processes import succeeded, taken_port, write_program

pytestmark = pytest.mark.dist

SSH = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do case $1 in -o|-p|-l) shift 2;; *) shift;; esac; done
host=$1; shift
case $host in gone) echo "Permission denied (publickey)" >&2; exit 255;; esac
# This host has another version of things, and a clock of its own.
[ $host = odd ] && export PYTHONSTARTUP= LATE="import sys,time;t=time.time;time.time=lambda:t()-100;"
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
exec sh -c "${*/import os,sys;/import os,sys;$LATE}"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path / "ssh", SSH, "")
    return tmp_path


def check(hosts, *args):
    pathlib.Path("hosts").write_text(hosts)
    env = {**os.environ, "PATH": f"{os.getcwd()}:{os.environ['PATH']}", "PYTHONPATH": PYTHON}
    line = [sys.executable, "-m", "deepspeed.launcher", "-H", "hosts", "--launcher", "ssh", "--check", *map(str, args)]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)


def test_hosts_that_are_fine(folder):
    (folder / "train.py").write_text("")
    done = succeeded(check("ha slots=2\nhb slots=1\n", "train.py"))
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ha: 2 slots, 0 GPUs") and "torch " in lines[0] and "/dev/shm" in lines[0]
    assert re.search(r"^hb: 1 slots.* \d+\.\d\d ms and \d+ MB/s to ha$", lines[1])
    assert lines[2] == "A job of 3 ranks on 2 host(s) can start."


def test_what_is_wrong_is_named_with_what_to_do():
    with taken_port() as port:
        done = check("ha slots=2\ngone slots=1\nodd slots=1\n", "--master_port", port, "nowhere.py")
    assert done.returncode == 1 and "can start" not in done.stdout
    said = done.stderr
    assert "gone: cannot be reached: Permission denied (publickey). Try `ssh gone true`" in said
    assert "gone: not reached" in done.stdout
    assert re.search(r"odd: its clock is 1?\d\d\.\d s behind", said) and "ha: its clock" not in said
    assert "ha: does not see the script nowhere.py" in said and "odd: does not see the script" in said
    assert "ha: the port where ranks meet is in use" in said and "odd: the port" not in said


def test_this_machine_alone(folder):
    env = {**os.environ, "PYTHONPATH": PYTHON, "DS_ACCELERATOR": "cpu"}
    line = [sys.executable, "-m", "deepspeed.launcher", "--check", "--num_gpus", "3"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "localhost: 3 slots" in done.stdout, done.stderr
    (folder / "echo.py").write_text("import sys; print(sys.argv[2:])")
    line[3:] = ["--num_gpus", "1", "echo.py", "--check"]  # behind the script it is the script's
    assert subprocess.run(line, env=env, capture_output=True, text=True, timeout=60).stdout == "['--check']\n"


def test_facts_of_a_host(tmp_path):
    facts = probe.host_facts(str(tmp_path), "no.py", 1)
    assert facts["folder"] and not facts["script"] and facts["cores"] > 0 and facts["disk"] > 0
    assert re.match(r"\d+\.\d+", facts["torch"])
    assert probe.host_facts(str(tmp_path / "none"), "", 1)["folder"] is False
    with contextlib.ExitStack() as until_lost:
        measured = probe.measure("127.0.0.1", probe.answer("echo", 1, until_lost)["echo"])
        assert measured["ms"] > 0 and measured["mb_s"] > 1
    assert "why" in probe.measure("127.0.0.1", 1)
