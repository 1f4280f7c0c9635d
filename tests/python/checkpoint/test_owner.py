"""The owner of a hidden folder: facts of processes that nobody can have at will."""

import json
import os
import pathlib
import time

import pytest

from deepspeed._native import _C
from deepspeed.checkpoint.write import owner
from deepspeed.checkpoint.write.owner import Process
from processes import forked_until_the_end, wait_for

HERE = Process.here()


def written(folder, locked=False, **facts):
    """A folder with the mark of a process that differs from this one by ``facts``."""
    os.makedirs(folder, exist_ok=True)
    pathlib.Path(owner.path_in(folder)).write_text(json.dumps({**HERE._asdict(), **facts, "locked": locked}))
    return str(folder)


def test_the_facts_of_this_process():
    assert HERE.pid == os.getpid() and HERE.boot and HERE.pid_space.startswith("pid:[") and HERE.started > 0
    assert _C.process_began(os.getpid()) == HERE.started and _C.process_began(2**22 + 1) == 0


@pytest.mark.parametrize(
    "facts, gone",
    [
        ({}, False),
        ({"started": HERE.started + 7}, True),  # its number has been given again
        ({"pid": 2**22 + 1}, True),
        # Two containers of one name, in which the program is process 7 each time:
        ({"pid": 2**22 + 1, "pid_space": "pid:[1]"}, None),
        ({"started": 1, "pid_space": "pid:[1]"}, None),
        ({"pid": 2**22 + 1, "boot": "another machine, or this one before"}, None),
        ({"started": 1, "boot": ""}, None),
        ({"started": 1, "pid_space": ""}, None),
        ({"host": "renamed", "started": 1}, True),
    ],
)
def test_who_is_gone(facts, gone, tmp_path):
    assert owner.is_gone(written(tmp_path, **facts), HERE) is gone


def test_of_an_unknown_process_only_time_can_tell(tmp_path):
    folder = written(tmp_path / "a", pid_space="pid:[1]", pid=2**22 + 1)
    (tmp_path / "a" / "file").write_text("x")
    now = time.time()
    assert not owner.is_abandoned(folder, now) and owner.is_abandoned(folder, now + owner.LEASE_S + 1)
    os.utime(folder, (0, 0))
    os.utime(owner.path_in(folder), (0, 0))
    assert not owner.is_abandoned(folder, now)  # the file is new
    old = written(tmp_path / "b")
    earlier = {"host": HERE.host, "pid": 2**22 + 1}  # as earlier versions wrote it
    pathlib.Path(owner.path_in(old)).write_text(json.dumps(earlier))
    assert owner.is_gone(old) is None and not owner.is_abandoned(old, now)
    os.makedirs(tmp_path / "c")  # nobody's
    assert not owner.is_abandoned(str(tmp_path / "c"), now + 10 * owner.LEASE_S)


def test_the_lock_says_it_across_containers(tmp_path):
    folder = str(tmp_path / "a")
    os.makedirs(folder)
    elsewhere = Process(HERE.host, HERE.boot, "pid:[1]", HERE.pid, HERE.started)  # who asks is in another container
    with forked_until_the_end(lambda: owner.claim(folder)):
        wait_for(lambda: (owner.facts_of(folder) or {}).get("locked"))
        wait_for(lambda: owner.is_gone(folder, elsewhere) is False)
        assert owner.is_alive(folder) and not owner.is_own(folder)
    assert owner.is_gone(folder, elsewhere) is True
    # Another kernel may not see the lock (Lustre with localflock): a free one proves nothing there.
    foreign = Process("other", "another machine", "pid:[1]", 7, 7)
    assert owner.is_gone(folder, foreign) is None and not owner.is_abandoned(folder, time.time(), foreign)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    owner.claim(str(tmp_path))
    with forked_until_the_end(lambda: None) as pid:
        assert owner.is_own(str(tmp_path)) and owner._is_free(owner.path_in(tmp_path)) is False
        owner.let_go(str(tmp_path))
        while owner._is_free(owner.path_in(tmp_path)) is not True:  # until the child has run its handler
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    owner.disown(str(tmp_path))
    assert os.listdir(tmp_path) == []
