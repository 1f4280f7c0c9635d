"""Memory that outlives ranks: files come from other hosts, and nothing is left when the agent ends, however it does."""

import fcntl
import os
import pathlib
import signal
import socket

import pytest

from deepspeed.host.kept_memory import KEEPER_VARIABLE, hand_over
from deepspeed.launcher import memory_keeper
from deepspeed.launcher.memory_keeper import remove_left
from memory_hosts import memory_hosts
from processes import running, state_and_parent, wait_for
from refusals import refused

pytestmark = pytest.mark.dist


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a").write_bytes(os.urandom(3 << 20))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "last").write_bytes(b"all")
    return tmp_path


def test_files_come_whole_and_strangers_do_not(source):
    with memory_hosts(1) as [(variables, pid)]:
        port, _, key = variables[KEEPER_VARIABLE].partition(":")
        port, folder = int(port), variables["DS_MEMORY_FOLDER"]
        hand_over(("127.0.0.1", port, key), source, "run/step3", ["a", "empty", "last"])
        for name in ("a", "empty", "last"):
            assert pathlib.Path(folder, "run", "step3", name).read_bytes() == (source / name).read_bytes()
        refused(ConnectionError, "", hand_over, ("127.0.0.1", port, "another key"), source, "run/step4", ["last"])
        refused(
            OSError,
            "a rank of another host has the name",
            hand_over,
            ("127.0.0.1", port, key),
            source,
            "../elsewhere",
            ["last"],
        )
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"[1]\n{}\n")
            assert len(stranger.makefile().readline()) == 33
        hand_over(("127.0.0.1", port, key), source, "run/step4", ["last"])
        assert sorted(os.listdir(os.path.join(folder, "run"))) == ["step3", "step4"]
        assert running(pid)


def test_nothing_is_left_of_an_agent_that_was_killed():
    with memory_hosts(1, code=-signal.SIGKILL) as [(variables, pid)]:
        os.kill(int(state_and_parent(pid)[1]), signal.SIGKILL)
        wait_for(lambda: os.listdir(os.path.dirname(variables["DS_MEMORY_FOLDER"])) == [] and not running(pid), 20)


def test_what_an_agent_and_its_keeper_have_left_goes_with_the_next(tmp_path):
    left = tmp_path / "deepspeed-memory-1-x"
    left.mkdir()
    (left / ".lock").touch()
    (left / "file").touch()
    with open(left / ".lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_left(str(tmp_path), "deepspeed-memory-1-")
        assert left.exists()
    remove_left(str(tmp_path), "deepspeed-memory-1-")
    assert not left.exists()


def test_a_keeper_that_begins_meanwhile_takes_no_folder_that_another_has_removed(tmp_path, monkeypatch):
    real, met = fcntl.flock, []

    def another_first(fd, how):
        if how == fcntl.LOCK_EX and not met:
            met.extend(os.listdir(tmp_path))
            remove_left(str(tmp_path), "kept-")
        return real(fd, how)

    monkeypatch.setattr(memory_keeper.fcntl, "flock", another_first)
    folder, lock = memory_keeper.claim(str(tmp_path), "kept-")
    assert len(met) == 1 and os.listdir(tmp_path) == [os.path.basename(folder)] != met
    remove_left(str(tmp_path), "kept-")
    assert os.listdir(folder) == [".lock"]
    os.close(lock)
