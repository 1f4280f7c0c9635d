"""The harness itself: results, environment, failures of every kind, hangs, and that processes are kept and replaced."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import harness
from harness import RankError, RankTimeout, on_ranks, run_ranks


class Payload:
    def __init__(self, value):
        self.value = value


def _rank_and_args(rank, world_size, a, b):
    return rank, world_size, a, b.value


def test_results_in_rank_order():
    assert run_ranks(3, _rank_and_args, "a", Payload(7)) == [(r, 3, "a", 7) for r in range(3)]


@pytest.mark.parametrize("world, env", [(1, {"OF_A_TEST": "one"}), (2, {"OF_A_TEST": "two"})])
@on_ranks(init=True, given=["env"])
def test_a_test_that_every_rank_runs(rank, world, env, folder, tmp_path):
    assert (dist.get_rank(), dist.get_world_size(), folder) == (rank, world, str(tmp_path))
    assert os.environ["OF_A_TEST"] == env["OF_A_TEST"]


def _pid(rank, world_size):
    return os.getpid()


def test_processes_are_kept_and_each_rank_has_its_own():
    first, second = run_ranks(2, _pid), run_ranks(2, _pid)
    assert len(set(first)) == 2 and os.getpid() not in first
    assert set(first) == set(second)
    assert not set(run_ranks(2, _pid, fresh=True)) & set(first)


def _environment(rank, world_size):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT FROM_TEST FROM_CALL".split()
    return {name: os.environ.get(name) for name in names}, os.getcwd(), torch.get_num_threads()


def test_environment_follows_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_TEST", "1")
    monkeypatch.chdir(tmp_path)
    first = run_ranks(2, _environment, env={"FROM_CALL": 2})
    monkeypatch.delenv("FROM_TEST")
    second = run_ranks(2, _environment)
    for rank, (variables, cwd, threads) in enumerate(first):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_SIZE"] == "2"
        assert (variables["FROM_TEST"], variables["FROM_CALL"]) == ("1", "2")
        assert cwd == str(tmp_path) and threads == 1
    assert second[0][0]["FROM_TEST"] is None and second[0][0]["FROM_CALL"] is None
    assert second[0][0]["MASTER_PORT"] != first[0][0]["MASTER_PORT"]


def _sum_of_ranks(rank, world_size):
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return total.item()


def _group_exists(rank, world_size):
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_process_group_comes_and_goes(world_size):
    for _ in range(2):
        assert run_ranks(world_size, _sum_of_ranks, init="gloo") == [world_size * (world_size + 1) / 2] * world_size
    assert run_ranks(world_size, _group_exists) == [False] * world_size


def _random(rank, world_size):
    return torch.rand(3)


def test_tensors_return_and_every_run_starts_from_the_same_seed():
    first, second = run_ranks(2, _random), run_ranks(2, _random)
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], first[1])


def _fails(rank, world_size, which):
    if rank == which:
        raise ValueError(f"bad value on {rank}")
    return "fine"


def test_exception_has_its_type_the_rank_and_the_traceback():
    before = run_ranks(2, _pid)
    with pytest.raises(ValueError, match="bad value on 1") as caught:
        run_ranks(2, _fails, 1)
    story = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RankError)
    assert "failed first on rank 1 of 2" in story and "in _fails" in story and "rank 0: returned" in story
    assert not set(run_ranks(2, _pid)) & set(before), "workers of a failed run must be replaced"


def _fails_while_others_wait(rank, world_size):
    if rank == 1:
        raise KeyError("gone")
    dist.barrier()


def test_ranks_that_wait_for_a_failed_one_do_not_hang():
    started = time.monotonic()
    with pytest.raises((KeyError, RuntimeError)) as caught:
        run_ranks(2, _fails_while_others_wait, init="gloo")
    assert time.monotonic() - started < 20
    assert "gone" in str(caught.value.__cause__)


def _asserts(rank, world_size):
    left = 40 + rank
    assert left == 42


def test_assert_shows_its_values():
    with pytest.raises(AssertionError, match="assert 40 == 42|assert 41 == 42"):
        run_ranks(2, _asserts)


def _unpicklable(rank, world_size):
    class Local(Exception):
        pass

    raise Local("cannot travel")


def test_exception_that_cannot_travel():
    with pytest.raises(RankError, match="cannot travel"):
        run_ranks(1, _unpicklable)


def _exits(rank, world_size, code):
    raise SystemExit(code)


def test_system_exit_is_seen():
    with pytest.raises(SystemExit) as caught:
        run_ranks(1, _exits, 3)
    assert caught.value.code == 3


def _skips(rank, world_size):
    pytest.skip("not here")


def test_skip_travels():
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(2, _skips)


def _dies(rank, world_size, number):
    if rank == 1:
        os.kill(os.getpid(), number)
    time.sleep(0.2)


def test_death_by_signal_is_named():
    with pytest.raises(RankError, match=r"rank 1:\nthe process killed by signal 9 \(SIGKILL\)"):
        run_ranks(2, _dies, int(signal.SIGKILL))
    with pytest.raises(RankError, match="(?s)SIGSEGV.*in _dies"):
        run_ranks(2, _dies, int(signal.SIGSEGV))


def _hangs(rank, world_size):
    if rank == 1:
        _sleeping_place()


def _sleeping_place():
    time.sleep(1000)


def test_hang_ends_with_the_stacks_and_new_workers():
    before = run_ranks(2, _pid)
    started = time.monotonic()
    text = "(?s)did not return on rank.s. 1 of 2 within 0.5 s.*rank 1 was still running:.* S in .*in _sleeping_place"
    with pytest.raises(RankTimeout, match=text):
        run_ranks(2, _hangs, timeout=0.5)
    assert time.monotonic() - started < 10
    after = run_ranks(2, _pid)
    assert not set(after) & set(before)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _loaded(rank, world_size):
    return [name for name in ("deepspeed.engine", "deepspeed.checkpoint.write.file_writer") if name in sys.modules]


def test_a_new_process_has_what_engines_import():
    """Importing it takes a core 0.3 s, more than most tests."""
    assert run_ranks(1, _loaded, fresh=True) == [["deepspeed.engine", "deepspeed.checkpoint.write.file_writer"]]


def _first_write(rank, world_size, path):
    from deepspeed.checkpoint.write import file_writer

    file_writer.PreparedBytes(b"x").write(path)
    return os.path.exists(path)


def test_a_fault_of_the_environment_is_for_one_run(tmp_path):
    path = str(tmp_path / "x")
    with pytest.raises(OSError, match="No space left"):
        run_ranks(1, _first_write, path, env={"DS_IO_FAULT": "write:1:enospc"})
    assert run_ranks(1, _first_write, path, env={"DS_IO_FAULT": "write:2:enospc"}) == [True]
    assert run_ranks(1, _first_write, path) == [True]


def test_processes_of_one_pytest_run_share_no_port(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    seen = []
    for worker in ("gw0", "gw1", "gw2"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        seen += harness._ports_of_this_process()
    assert len(seen) == len(set(seen)) > 19000 and min(seen) >= 12000 and max(seen) < 32000
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT")
    assert len(harness._ports_of_this_process()) == 20000


def test_local_function_is_refused():
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(1, lambda rank, world_size: None)
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(0, _pid)


def test_cost_of_a_run():
    run_ranks(2, _sum_of_ranks, init="gloo")
    times = []
    for _ in range(5):
        started = time.monotonic()
        run_ranks(2, _sum_of_ranks, init="gloo")
        times.append(time.monotonic() - started)
    assert min(times) < 1.0, f"2-rank run takes {times} s; it should take hundredths of a second"
