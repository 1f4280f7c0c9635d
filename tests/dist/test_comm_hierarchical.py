"""Ranks on several hosts (they only believe so): shared memory inside each, gloo between their leaders."""

import os
import pathlib
import signal
import time

import pytest
import torch

from deepspeed import comm as dist
from engine_models import after_steps, net_engine, train_engine
from harness import RankError, on_ranks, run_ranks
from moe_models import batch, moe_net
from refusals import refused
from runs import DTYPES, raised, together, weight_list

HOSTS = "abab"


def trained(rank, world, stage, dtype, hosts=HOSTS):
    os.environ["DS_HOST_ID"] = hosts[rank]
    engine = net_engine(world, stage, **DTYPES[dtype])
    losses, _ = train_engine(engine, 5, rank, world)
    values = [weight.float().flatten() for weight in weight_list(engine)]
    return engine.core.communicator, losses, torch.cat(values)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_that_over_gloo(stage):
    tree = run_ranks(4, trained, stage, "fp32", init=True)
    plain = run_ranks(4, trained, stage, "fp32", init=True, env={"DS_SHM_COLLECTIVES": "0"})
    assert {name for name, _, _ in tree} == {"hierarchical"} and "hierarchical" not in {name for name, _, _ in plain}
    for (_, ours, mine), (_, theirs, other) in zip(tree, plain):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert torch.equal(mine, tree[0][2]) and torch.allclose(mine, other, atol=1e-5)


def test_three_hosts_with_different_numbers_of_ranks_in_bf16():
    tree = run_ranks(4, trained, 2, "bf16", "abac", init=True)
    again = run_ranks(4, trained, 2, "bf16", "abac", init=True)
    for (name, losses, values), (_, _, repeated) in zip(tree, again):
        assert name == "hierarchical" and len(losses) == 5
        assert torch.equal(values, tree[0][2]) and torch.equal(values, repeated)  # the same bits everywhere, every time


@on_ranks(4)
def test_calls_of_a_script_go_over_gloo_between_hosts_and_through_memory_inside(rank, world):
    os.environ["DS_HOST_ID"] = HOSTS[rank]
    dist.init_distributed(dist_backend="gloo", verbose=False)
    neighbours = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    values = [torch.full((5,), rank + 1.0, dtype=torch.bfloat16) for _ in range(2)]
    dist.all_reduce(values[0])
    dist.all_reduce(values[1], group=neighbours)
    found = together([v[0].item() for v in values], [flight["transport"] for flight in dist.flight_record()])
    assert [values for values, _ in found] == [[10.0, 4.0], [10.0, 6.0]] * 2
    assert [transports for _, transports in found] == [["gloo", "shm"]] * 4


def experts_over(hosts, rank, drop, memory="1"):
    """One forward and backward of a layer whose four ranks are on these hosts: what comes of it, and what has carried
    its exchanges."""
    os.environ.update(DS_HOST_ID=hosts[rank], DS_SHM_COLLECTIVES=memory)
    earlier = {flight["group"] for flight in dist.flight_record()}
    group = dist.new_group(range(4))
    net = moe_net(rank, 8, 4, 2, drop, True)
    net.layer.deepspeed_moe.overlap_chunks = 2
    net.layer.deepspeed_moe._set_ep_group(group)
    x = batch(1, rank, 3 + 5 * rank).requires_grad_()
    out, _, _ = net.layer(x)
    out.square().sum().backward()
    mine = [f for f in dist.flight_record() if f["group"] not in earlier and f["op"] == "all_to_all"]
    carried = [sum(f["transport"] == name for f in mine) for name in ("gloo", "shm")]
    dist.destroy_process_group(group)
    return [out.detach(), x.grad, *(p.grad for p in net.layer.deepspeed_moe.experts.parameters())], carried


@on_ranks(4, init=True)
def test_rows_of_experts_go_by_hosts_with_the_same_bits(rank, world):
    for drop in (False, True):
        wanted, (_, calls) = experts_over("aaaa", rank, drop)
        for hosts, memory in (("aabb", "1"), ("abab", "1"), ("abca", "1"), ("abcd", "1"), ("abab", "0")):
            got, (gloo, shm) = experts_over(hosts, rank, drop, memory)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), hosts
            # By hosts: on each the counts, what goes to its leader, what stays, and what comes from the leader.
            by_hosts = hosts != "abcd" and memory == "1"
            assert (gloo, shm) == (calls, 4 * calls if by_hosts else 0), (hosts, calls)
    # of the last, with dropping
    assert calls == 8  # two parts of rows, to and fro, and their gradients


def a_rank_of_another_host_dies(rank, world, folder):
    os.environ.update(DS_HOST_ID=HOSTS[rank], DS_COMM_TIMEOUT_S="10", DS_COMM_TRACE_DIR=folder)
    engine = after_steps(net_engine(world, 2), 2, rank, world)
    began = time.monotonic()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    _, text = raised(train_engine, engine, 2, rank, world)
    pathlib.Path(folder, str(rank)).write_text(f"{time.monotonic() - began:.3f} {text}", encoding="utf-8")
    os._exit(0)  # as a script that ends with the error: its connections close


def test_a_death_on_one_host_ends_the_others(tmp_path):
    refused(RankError, None, run_ranks, 4, a_rank_of_another_host_dies, str(tmp_path), init=True, grace=15)
    texts = {rank: (tmp_path / str(rank)).read_text(encoding="utf-8").split(" ", 1) for rank in (0, 1, 2)}
    assert "rank 1 (rank 3 of the job, process" in texts[1][1] and "has ended" in texts[1][1]
    for rank in (0, 2):
        assert "the leader of this host could not finish with those of the other hosts" in texts[rank][1]
    assert all(float(seconds) < 5 for seconds, _ in texts.values())


def an_exchange_without_rank_3(rank, world, folder, what):
    os.environ.update(DS_HOST_ID="aabb"[rank], DS_COMM_TIMEOUT_S="20", DS_COMM_TRACE_DIR=folder)
    dist.init_distributed(dist_backend="gloo", verbose=False)
    mine, theirs = torch.arange(4.0) + rank, torch.zeros(4)
    dist.all_to_all_single(theirs, mine)
    assert theirs.tolist() == [rank + other for other in range(4)]
    if rank == 3 and what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)

    def exchange():
        dist.all_to_all_single(theirs, mine, async_op=True).wait()

    _, text = raised(dist.all_reduce, mine) if rank == 3 else raised(exchange)
    pathlib.Path(folder, str(rank)).write_text(text, encoding="utf-8")
    others = [other for other in range(1, world) if other != 3 or what != "dies"]
    until = time.monotonic() + 20
    while rank == 0 and time.monotonic() < until:  # the job's store, by which the others hear, ends with this process
        if all(os.path.exists(os.path.join(folder, str(other))) for other in others):
            break
        time.sleep(0.05)
    os._exit(0)


@pytest.mark.parametrize("what", ["dies", "does something else"])
def test_a_rank_that_does_not_come_to_an_exchange_between_hosts_is_named(tmp_path, what):
    refused(RankError, None, run_ranks, 4, an_exchange_without_rank_3, str(tmp_path), what)
    wanted = "rank 3 of the job, process" if what == "dies" else "rank 3 all_reduce(4 x float32, sum)"
    for rank in range(3):
        text = (tmp_path / str(rank)).read_text(encoding="utf-8")
        assert wanted in text and "all_to_all(4 x float32)" in text, text
