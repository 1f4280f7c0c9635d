"""Ranks that do not meet in collectives of ``deepspeed.comm``, over gloo and through the memory beside it: the others
are told who, where and why."""

import functools
import pathlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed import comm
from harness import RankError, on_ranks, run_ranks
from other_call import other_call
from refusals import refused

PATIENCE_S = 5.0
GLOO = {"DS_SHM_COLLECTIVES": "0"}


def faulty(rank, world, fault, folder):
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=PATIENCE_S), verbose=False)
    device = deepspeed.get_accelerator().current_device_name()
    comm.all_reduce(torch.ones(10, device=device))
    began, text = time.monotonic(), "fine"
    try:
        other_call(comm, rank, fault, 2.5 if fault == "slow" else PATIENCE_S + 4, device)
    except RuntimeError as error:
        text = str(error)
        refused(RuntimeError, "has failed before", comm.barrier)
    pathlib.Path(folder, str(rank)).write_text(f"{time.monotonic() - began:.3f} {text}", encoding="utf-8")
    time.sleep(0.5)  # the others want to know where this rank is


def told(folder, ranks=(0, 1, 2)):
    texts = [(folder / str(rank)).read_text(encoding="utf-8").split(" ", 1) for rank in ranks]
    return [(float(seconds), text) for seconds, text in texts]


@pytest.mark.any_device
@pytest.mark.parametrize("fault", ["skip", "order"])
def test_a_mismatch_is_found_within_seconds(fault, tmp_path):
    run_ranks(3, faulty, fault, str(tmp_path), env=GLOO)
    call = {"skip": "rank 1 barrier()", "order": "rank 1 broadcast(10 x float32, root 0)"}[fault]
    for seconds, text in told(tmp_path):
        assert "the ranks of a group call different collectives:" in text and call in text
        assert "all_reduce(10 x float32, sum), number 2, for" in text and "in other_call: dist." in text
        assert seconds < 5


@pytest.mark.any_device
@pytest.mark.alone
@pytest.mark.parametrize("fault", ["shape", "dtype"])
def test_strict_comparison_finds_what_ends_gloo(fault, tmp_path):
    run_ranks(3, faulty, fault, str(tmp_path), env=GLOO | {"DS_COMM_FINGERPRINTS": "strict"})
    call = {"shape": "rank 1 all_reduce(11 x float32, sum)", "dtype": "rank 1 all_reduce(10 x float64, sum)"}[fault]
    for seconds, text in told(tmp_path):
        assert call in text and "rank 0 all_reduce(10 x float32, sum)" in text and seconds < 3


@pytest.mark.any_device
def test_a_killed_rank_is_named(tmp_path):
    refused(RankError, "SIGKILL", run_ranks, 3, faulty, "killed", str(tmp_path), grace=15, env=GLOO)
    for seconds, text in told(tmp_path, (0, 2)):
        assert "rank 1: has ended" in text and "in all_reduce(10 x float32, sum), number 2" in text
        assert seconds < 5


@pytest.mark.any_device
def test_a_rank_that_does_not_come_is_shown_where_it_is(tmp_path):
    run_ranks(3, faulty, "endless", str(tmp_path), env=GLOO)
    for seconds, text in told(tmp_path, (0, 2)):
        assert "rank 1 (process" in text and "outside of collectives; all_reduce(10 x float32, sum), number 1" in text
        assert "in other_call: time.sleep(seconds)" in text
        assert PATIENCE_S <= seconds < PATIENCE_S + 5


@pytest.mark.any_device
@pytest.mark.alone
@pytest.mark.parametrize("strict", ["1", "strict"])
def test_a_slow_rank_is_waited_for(strict, tmp_path):
    run_ranks(3, faulty, "slow", str(tmp_path), env=GLOO | {"DS_COMM_FINGERPRINTS": strict})
    assert [text for _, text in told(tmp_path)] == ["fine"] * 3


@pytest.mark.any_device
@on_ranks(2, init=True, env=GLOO)
def test_the_flight_record_has_them(rank, world):
    calls = ["all_reduce(3 x float32, sum)", "all_gather(3 x bfloat16)", "broadcast(2 x float32, root 1)"]
    expected = [(call, "done") for call in [*calls, "all_reduce(4 x float32, sum)"]]
    sub = dist.new_group([0, 1])
    ones = functools.partial(torch.ones, device=deepspeed.get_accelerator().current_device_name())
    comm.all_reduce(ones(3))
    comm.all_gather_into_tensor(ones(6, dtype=torch.bfloat16), ones(3, dtype=torch.bfloat16), group=sub)
    comm.broadcast(ones(2), src=1)
    comm.all_reduce(ones(4), async_op=True).wait()
    flights = comm.flight_record()[-4:]
    assert len({f["group"] for f in flights}) == 2
    assert [(f["call"], f["state"]) for f in flights] == expected


# ---- the memory beside gloo: every call is compared, without asking for it ------------------------------------------
@pytest.mark.parametrize("fault", ["skip", "order", "shape", "dtype"])
def test_in_memory_a_mismatch_is_found_at_once(fault, tmp_path):
    run_ranks(3, faulty, fault, str(tmp_path))
    call = {
        "skip": "rank 1 barrier()", "order": "rank 1 broadcast(10 x float32, root 0)",
        "shape": "rank 1 all_reduce(11 x float32, sum)", "dtype": "rank 1 all_reduce(10 x float64, sum)",
    }[fault]  # fmt: skip
    for seconds, text in told(tmp_path):
        assert "call different collectives" in text and call in text and "in other_call: dist." in text
        assert seconds < 5


def test_in_memory_a_killed_rank_is_named(tmp_path):
    refused(RankError, "SIGKILL", run_ranks, 3, faulty, "killed", str(tmp_path), grace=15)
    for seconds, text in told(tmp_path, (0, 2)):
        assert "rank 1 (process" in text and "has ended" in text and seconds < 5


def test_in_memory_a_rank_that_does_not_come_is_shown_where_it_is(tmp_path):
    run_ranks(3, faulty, "endless", str(tmp_path))
    for seconds, text in told(tmp_path, (0, 2)):
        assert "has not come for 5 s" in text and "in other_call: time.sleep(seconds)" in text
        assert PATIENCE_S <= seconds < PATIENCE_S + 5


@on_ranks(3, init=True)
def test_groups_of_deepspeed_comm_have_memory_beside_them(rank, world):
    gathered, sent = ("all_gather", 3, "done"), ("broadcast", 2, "done")
    sub = comm.new_group([0, 1])
    assert comm.new_group([2]) is not sub
    if rank < 2:
        comm.all_gather_into_tensor(torch.empty(6, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), sub)
    comm.broadcast(torch.ones(2), src=1)
    x = torch.full((5,), float(rank))
    dist.all_reduce(x)  # torch's own, on the same group: gloo
    assert dist.get_backend() == comm.get_backend() == "gloo" and x.tolist() == [3.0] * 5
    flights = comm.flight_record()
    comm.destroy_process_group(sub if rank < 2 else None)
    assert [(f["op"], f["numel"], f["state"]) for f in flights] == ([gathered, sent], [gathered, sent], [sent])[rank]
