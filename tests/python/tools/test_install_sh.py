"""install.sh, with stand-ins for Python, pip, ssh, scp and pdsh that write down how they are called."""

import os
import shlex
import shutil
import subprocess

import pytest

from places import ROOT
from processes import write_program

WHEEL = "dist/deepspeed-1.0+abc-py3-none-any.whl"
# $LOG gets one line per call; a host called "down" refuses.
STANDINS = {
    "python": 'echo python "$@" >>$LOG\ncase "$*" in -m\\ pip\\ wheel*) mkdir -p dist; touch ' + WHEEL + ";; esac",
    "ssh": 'echo ssh "$@" >>$LOG\ncase "$*" in *down*) echo no route >&2; exit 255;; esac',
    "scp": 'echo scp "$@" >>$LOG',
    "sudo": 'echo sudo "$@" >>$LOG',
}


@pytest.fixture
def install(tmp_path):
    """install(*options, pdsh=False, **environment) -> (exit code, stderr, calls)."""
    tree, tools, log = tmp_path / "tree", tmp_path / "bin", tmp_path / "log"
    tree.mkdir()
    tools.mkdir()
    shutil.copy(os.path.join(ROOT, "install.sh"), tree)
    for name in ("bash", "dirname", "basename", "ls", "head", "rm", "mkdir", "touch", "cat", "id"):
        (tools / name).symlink_to(shutil.which(name))
    for name, text in STANDINS.items():
        add(tools / name, text)

    def run(*options, pdsh=False, **env):
        log.write_text("")
        if pdsh:
            add(tools / "pdsh", 'echo pdsh "$@" >>$LOG')
        done = subprocess.run(
            [str(tree / "install.sh"), *options], cwd=tmp_path, capture_output=True, text=True,
            env={"PATH": str(tools), "LOG": str(log), "PYTHON": "python", "HOME": str(tmp_path), **env},
        )  # fmt: skip
        return done.returncode, done.stderr, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


def add(path, text):
    write_program(path, text + "\n")


def of(calls, *start):
    return [call for call in calls if call[: len(start)] == list(start)]


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two\nworker-1 slots=4\n\n  user@worker-2   slots=8\n")
    return str(path)


def test_here(install):
    code, err, calls = install("--local_only")
    assert code == 0, err
    names = [os.path.basename(call[0]) for call in calls]
    assert set(names) == {"python"} and len(of(calls, "python", "-m", "pip", "wheel")) == 1
    first, second = of(calls, "python", "-m", "pip", "install")
    assert WHEEL in first and "--no-deps" in first and "--force-reinstall" in first
    assert WHEEL in second and "--no-deps" not in second and "--force-reinstall" not in second


def test_options(install):
    _, _, calls = install("-l", "-k", "-m", "http://mirror/simple", "--user_install", "-v")
    (only,) = of(calls, "python", "-m", "pip", "install")
    assert "--user" in only and "-v" in only
    _, _, calls = install("-l", "--pip_mirror=http://mirror/simple")
    assert "http://mirror/simple" in of(calls, "python", "-m", "pip", "install")[1]
    _, _, calls = install("-l", "-s", "-k")
    (call,) = of(calls, "sudo")
    assert "pip" in call and WHEEL in call and of(calls, "python", "-m", "pip", "wheel")


@pytest.mark.parametrize("pdsh", [False, True])
def test_on_the_hosts_of_a_hostfile(install, hosts, pdsh):
    code, err, calls = install("-H", hosts, pdsh=pdsh)
    assert code == 0, err
    assert len(of(calls, "python", "-m", "pip", "wheel")) == 1 and not of(calls, "python", "-m", "pip", "install")
    copied = of(calls, "scp")
    assert [call[-1].split(":")[0] for call in copied] == ["worker-1", "user@worker-2"]
    assert all(WHEEL in call for call in copied)
    folder = copied[0][-1].split(":")[1]
    remote = of(calls, "pdsh" if pdsh else "ssh")
    if pdsh:
        assert all("worker-1,user@worker-2" in call for call in remote) and not of(calls, "ssh")
    lines = [" ".join(call) for call in remote]
    target = folder + os.path.basename(WHEEL)
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == (2 if pdsh else 4) and all(target in line for line in installs)
    assert "mkdir -p" in lines[0] and "rm -rf" in lines[-1] and folder.rstrip("/") in lines[-1]


def test_a_host_that_does_not_answer(install, tmp_path):
    (tmp_path / "hosts").write_text("up slots=1\ndown slots=1\n")
    code, err, calls = install("--hostfile", str(tmp_path / "hosts"))
    assert code == 1 and "no route" in err and "ssh must work without a password" in err
    assert not of(calls, "scp")


@pytest.mark.parametrize(
    "text, message",
    [
        ("worker-1 slots\n", "line 1 of .* is 'worker-1 slots'; it must be like 'worker-1 slots=8'"),
        ("a slots=1\na slots=2\n", "names the host a twice"),
        ("# nobody\n", "names no host"),
        ("$(reboot) slots=1\n", "must be like"),
    ],
)
def test_bad_hostfile(install, tmp_path, text, message):
    (tmp_path / "hosts").write_text(text)
    code, err, calls = install("--hostfile=" + str(tmp_path / "hosts"))
    assert code == 1 and not of(calls, "python", "-m")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)


def test_refusals(install, tmp_path):
    for options, text in (
        (["--hostfil", "x"], "does not know --hostfil"),
        (["-H"], "-H needs a value"),
        (["-H", str(tmp_path / "none")], "is not there"),
        (["-s", "-u"], "choose one of them"),
    ):
        code, err, calls = install(*options)
        assert code == 1 and text in err and not of(calls, "python", "-m"), err
    assert "is not a program" in install("-l", PYTHON="no-such-python")[1]
    add(tmp_path / "bin" / "python", "exit 1")
    assert "has no torch" in install("-l")[1]
    if os.getuid() == 0:
        assert "through sudo" in install("-l", SUDO_USER="me")[1]


def test_help(install):
    code, _, calls = install("--help")
    assert code == 0 and not calls
