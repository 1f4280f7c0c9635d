"""The build's front door: which Python is chosen, what is installed, what `make help` tells."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from places import ROOT
from processes import run_python, succeeded, write_program


def bash(code, cwd=ROOT, timeout=120, **env):
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHON", "PYTHONPATH")}
    return subprocess.run(
        ["bash", "-c", code], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=timeout
    )


def make_python(folder, torch):
    """A stand-in interpreter that says whether it has torch."""
    write_program(folder / "python", f"exit {0 if torch else 1}\n")
    (folder / "python3").symlink_to("python")
    return folder / "python"


def stand_ins(folder, **programs):
    """The value of PATH under which these are found first."""
    for name, text in programs.items():
        write_program(folder / name.replace("_", "-"), text + "\n")
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def checkout(tmp_path):
    """A bare checkout: only the scripts."""
    root = tmp_path / "checkout"
    root.mkdir()
    shutil.copytree(os.path.join(ROOT, "tools"), root / "tools")
    shutil.copytree(os.path.join(ROOT, "packages"), root / "packages")
    return root


def chosen(checkout, **env):
    return succeeded(bash('. tools/common.sh; pick_python; echo "$PY"', cwd=checkout, **env)).stdout.strip()


def test_active_environment_comes_first(checkout, tmp_path):
    active = make_python(tmp_path / "env" / "bin", torch=True)
    make_python(checkout / ".venv" / "bin", torch=True)
    assert chosen(checkout, VIRTUAL_ENV=str(tmp_path / "env")) == str(active)


def test_without_torch_the_next_one_is_taken(checkout, tmp_path):
    make_python(tmp_path / "env" / "bin", torch=False)
    own = make_python(checkout / ".venv" / "bin", torch=True)
    assert chosen(checkout, VIRTUAL_ENV=str(tmp_path / "env")) == str(own)


def test_then_python3_on_path(checkout, tmp_path):
    make_python(tmp_path / "bin", torch=True)
    assert chosen(checkout, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}") == str(tmp_path / "bin" / "python3")


def test_python_variable_overrides_and_is_checked(checkout, tmp_path):
    named = make_python(tmp_path / "other", torch=True)
    make_python(checkout / ".venv" / "bin", torch=True)
    assert chosen(checkout, PYTHON=str(named)) == str(named)
    out = bash("tools/build.sh", cwd=checkout, PYTHON=str(make_python(tmp_path / "bare", torch=False)))
    assert out.returncode != 0 and "has no torch" in out.stderr


def test_missing_packages_are_installed_and_only_those(checkout, tmp_path):
    """With stand-ins for dpkg-query and apt-get: one update, one install of what is not there."""
    calls, knows = tmp_path / "calls", "shift 2\nfor p; do {}echo installed $p; done"
    path = stand_ins(
        tmp_path / "bin", dpkg_query=knows.format("[ $p = cmake ] || "), apt_get=f"echo $* >>{calls}", sudo='exec "$@"'
    )
    succeeded(bash("tools/packages.sh build", cwd=checkout, PATH=path))
    lines = calls.read_text().splitlines()
    assert len(lines) == 2 and "update" in lines[0], lines
    assert lines[1].endswith("install --no-install-recommends cmake")
    stand_ins(tmp_path / "bin", dpkg_query=knows.format(""))
    calls.unlink()
    assert bash("tools/packages.sh build torch test", cwd=checkout, PATH=path).returncode == 0
    assert not calls.exists(), "everything was there, yet apt-get was called"


def test_failed_installation_says_what_to_do(checkout, tmp_path):
    fails = {"dpkg_query": "exit 1", "apt_get": "echo 'E: no network'\nexit 100", "sudo": 'exec "$@"'}
    out = bash("tools/packages.sh build", cwd=checkout, PATH=stand_ins(tmp_path / "bin", **fails))
    assert out.returncode == 1 and "E: no network" in out.stderr and "repeat this command" in out.stderr


@pytest.mark.parametrize("breaks, code", [(2, 0), (3, 1)])
def test_a_download_that_breaks_off_is_tried_again(breaks, code, checkout, tmp_path):
    """With a stand-in Python 3.12 whose `pip install` fails the first times."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    lines = [
        'case "$*" in',
        f'  *"-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "{tools}/python3.12" "${{@: -1}}/bin/python" ;;',
        f'  *"pip "*install*) echo >>{calls}; [ $(wc -l <{calls}) -gt {breaks} ] ;;',
        "  -V) echo Python 3.12.0 ;;",
        '  "- "*) exit 1 ;;',
        "esac",
    ]
    write_program(tools / "python3.12", "\n".join(lines) + "\n", "#!/bin/bash\n")
    out = bash("tools/torch2_env.sh", cwd=checkout, PATH=f"{tools}:{os.environ['PATH']}")
    assert out.stdout == ("" if code else ".venv-torch2\n")
    assert out.returncode == code and len(calls.read_text().splitlines()) == 3, out.stderr
    assert ("could not install packages/torch2.txt" in out.stderr) == (code == 1)


def test_package_list_gives_a_reason_for_each():
    text = pathlib.Path(ROOT, "packages", "debian.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) > 15
    form = r"^[a-z0-9.+-]+ +(build|torch|test|cpu|bench|lint|cluster)(,\w+)* +# \S"
    assert [line for line in lines if not re.match(form, line)] == []


def test_env_tag_is_the_one_the_package_looks_for():
    out = bash(f'. tools/common.sh; env_tag "{sys.executable}"')
    assert out.stdout.strip() == run_python("from deepspeed import _native; print(_native.tag())").stdout.strip() != ""


def test_help_lists_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", pathlib.Path(ROOT, "Makefile").read_text(), re.M).group(1).split()
    assert sorted(re.findall(r"^  make (\S+)", bash("make help").stdout, re.M)) == sorted(targets)


def run_ci(tmp_path, torch2=0, room=None, user=0, broken=None, avx512=False):
    """.ci/run with stand-ins for make, the processor, the torch 2 set-up and the clean room: (exit code, what it ran,
    what it said)."""
    root = tmp_path / "work" / "checkout"
    shutil.rmtree(root.parent, ignore_errors=True)
    (root / "tools").mkdir(parents=True)
    shutil.copytree(os.path.join(ROOT, ".ci"), root / ".ci")
    programs = {
        tmp_path / "bin" / "make": f'echo "called: make $*"; [ "$1" != "{broken}" ] || exit 7',
        tmp_path / "bin" / "grep": f"exit {0 if avx512 else 1}",
        tmp_path / "bin" / "id": f"echo {user}",
        root / "tools" / "torch2_env.sh": f"exit {torch2}",
    }
    if room is not None:
        programs[root.parent / "shared" / "tools" / "clean_room.sh"] = f'echo "called: room $*"; exit {room}'
    for path, body in programs.items():
        write_program(path, body + "\n")
    out = bash("bash .ci/run", cwd=root, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return out.returncode, re.findall(r"^called: (.*)$", out.stdout, re.M), out.stdout


EMULATED = "make test-cpu CPU=Haswell SAMPLE=1"
SECOND = "make test-torch2 SECOND=1"
NEWEST = "make test-torch2 TORCH=newest BRIEF=1"
BOTH = ["make test", EMULATED, SECOND, NEWEST]


@pytest.mark.parametrize(
    "how, code, called, said",
    [
        ({}, 0, BOTH, "there is no ../shared/tools/clean_room.sh"),
        ({"room": 0}, 0, [*BOTH, "room make quickstart"], "all of it took 0:0"),
        ({"room": 0, "user": 1000}, 0, BOTH, "that needs root"),
        ({"room": 5}, 5, [*BOTH, "room make quickstart"], "clean_room.sh make quickstart: exit 5 after 0:0"),
        ({"torch2": 3, "room": 0}, 0, ["make test", EMULATED, "room make quickstart"], "make test-torch2 is left out"),
        ({"torch2": 1, "room": 0}, 1, ["make test", EMULATED], "torch2_env.sh: exit 1"),
        ({"avx512": True}, 0, ["make test-cpu CPU=avx2", EMULATED, SECOND, NEWEST], "all of it took 0:0"),
        ({"broken": "test-cpu"}, 7, ["make test", EMULATED], "make test-cpu CPU=Haswell SAMPLE=1: exit 7"),
        ({"broken": "test"}, 7, ["make test"], "make test: exit 7 after 0:0"),
        ({"broken": "test-torch2", "room": 0}, 7, BOTH[:3], "make test-torch2 SECOND=1: exit 7"),
    ],
)
def test_ci_runs_both_suites_and_the_bare_machine(how, code, called, said, tmp_path):
    found, ran, text = run_ci(tmp_path, **how)
    assert (found, ran) == (code, called) and said in text, text


@pytest.mark.slow
def test_wheel_installs_into_a_fresh_environment():
    # It compiles, where nothing is in ccache yet.
    assert "works from the wheel" in succeeded(bash("tools/wheel.sh", PYTHON=sys.executable, timeout=900)).stdout
