"""Ranks that meet through files: every rank learns what every other has to say, or who did not come."""

import errno
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepspeed.checkpoint.write.owner import Process
from deepspeed.checkpoint.write.ranks import RanksThroughFiles
from processes import running, wait_for
from refusals import refused
from threads import started


def made(rank, size, folder, timeout_s=20, nodes=None, processes=None):
    nodes = nodes or ["n"] * size
    like = SimpleNamespace(rank=rank, size=size, node=nodes[rank], nodes=nodes, leads=rank == 0)
    return RanksThroughFiles(like, str(folder), timeout_s, processes)


def on_threads(size, body):
    futures = [started(body, rank) for rank in range(size)]
    errors = [future.exception(60) for future in futures]
    return [None if error else future.result() for error, future in zip(errors, futures)], errors


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_learns_everything(size, tmp_path):
    folder = tmp_path / ".tag.meeting"

    def body(rank):
        ranks = made(rank, size, folder)
        found = [ranks.gather({"rank": rank, "turn": turn}) for turn in range(4)]
        ranks.agree(None, "nothing")
        ranks.close()
        return found

    results, errors = on_threads(size, body)
    assert errors == [None] * size
    expected = [[{"rank": rank, "turn": turn} for rank in range(size)] for turn in range(4)]
    assert results == [expected] * size
    assert not folder.exists()


def test_all_raise_what_one_has_met(tmp_path):
    def body(rank):
        ranks = made(rank, 3, tmp_path / "m")
        ranks.agree(OSError(errno.ENOSPC, "no space for x.pt") if rank == 1 else None, "not saved")

    _, errors = on_threads(3, body)
    assert [error.errno for error in errors] == [errno.ENOSPC] * 3
    assert {str(error) for error in errors} == {"[Errno 28] not saved: rank 1: no space for x.pt"}


def test_who_does_not_come_is_named_and_nobody_waits_twice(tmp_path):
    def body(rank):
        ranks = made(rank, 3, tmp_path / "m", timeout_s=0.3)
        if rank != 2:
            try:
                ranks.agree(None, "not saved")
            finally:
                refused(TimeoutError, "", ranks.gather, None)

    _, errors = on_threads(3, body)
    assert errors[2] is None
    words = "not saved: rank 2 has not written its part within 0 s"
    assert [(type(error), str(error)) for error in errors[:2]] == [(TimeoutError, words)] * 2


def test_a_process_that_has_ended_is_not_waited_for(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    processes = [Process.here(), Process.here()._replace(pid=child.pid)]
    refused(
        TimeoutError,
        "rank 1 ended before its part was written",
        made(0, 2, tmp_path / "m", timeout_s=60, processes=processes).gather,
        1,
    )
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: not running(zombie.pid))
    processes[1] = Process.here()._replace(pid=zombie.pid, started=0)
    refused(TimeoutError, "rank 1 ended", made(0, 2, tmp_path / "n", timeout_s=60, processes=processes).gather, 1)
    zombie.wait()
    elsewhere = [Process.here(), processes[1]._replace(boot="another machine")]
    refused(TimeoutError, "within 1 s", made(0, 2, tmp_path / "o", timeout_s=1, processes=elsewhere).gather, 1)


def test_a_process_number_of_another_container_of_the_same_name_is_not_asked_for(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    elsewhere = Process.here()._replace(pid=child.pid, pid_space="pid:[4026530000]")
    refused(
        TimeoutError,
        "within 1 s",
        made(0, 2, tmp_path / "m", timeout_s=1, processes=[Process.here(), elsewhere]).gather,
        1,
    )


def test_a_full_disk_under_the_meeting_is_told(tmp_path, monkeypatch):
    folder = tmp_path / "m"
    folder.mkdir()
    dump = json.dump

    def full(value, file):
        if file.name.endswith("0.1.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        dump(value, file)

    monkeypatch.setattr(json, "dump", full)
    _, errors = on_threads(2, lambda rank: made(rank, 2, folder).agree(None, "not saved"))
    assert [error.errno for error in errors] == [errno.ENOSPC] * 2
    assert "rank 1 could not say how far it is" in str(errors[0]) and "not saved" in str(errors[1])


def test_a_disk_for_every_node(tmp_path):
    nodes = ["a", "a", "b"]

    def body(rank):
        return made(rank, 3, tmp_path / nodes[rank], nodes=nodes).gather(rank)

    results, errors = on_threads(3, body)
    assert errors == [None] * 3
    assert results == [[0, 1, None], [0, 1, None], [None, None, 2]]
