"""A run goes on from the memory of its hosts: at the same and at another number of ranks, with hosts gone; or from
disk."""

import glob
import json
import os
import pathlib
import shutil
from unittest import mock

import pytest
import torch

from deepspeed.checkpoint.save import memory as memory_module
from deepspeed.checkpoint.save.contents import HeldStates
from deepspeed.checkpoint.write import snapshot as snapshot_module
from engine_models import config, loss_on, make_net, plain_net, uses_extra
from harness import on_ranks, run_ranks
from memory_hosts import memory_hosts
from refusals import refused
from runs import engine_of, take_step

LAST = 9


def made(world, stage, **more):
    elasticity = {"memory_copies": 1, "snapshot_steps": 2}
    zero = {"stage": stage, "reduce_bucket_size": 300}
    made = config(world, elasticity=elasticity, zero_optimization=zero, **more)
    return engine_of(make_net(), made)


def enter(rank, world, hosts):
    """This rank's variables as an agent sets them; ranks are spread over ``hosts``."""
    host = rank * len(hosts) // world
    os.environ.update({"CROSS_RANK": str(host), **hosts[host]})


def goes_on(rank, world, hosts, folder, stage, until, save_at=None):
    """Trains from where the run was up to step ``until``; returns where it came from, and the losses by step."""
    enter(rank, world, hosts)
    engine = made(world, stage)
    engine.set_signal_client_state(lambda: {"at": engine.global_steps})
    path, state = engine.load_checkpoint(folder)
    began, losses = engine.global_steps, {}
    while engine.global_steps < until:
        step = engine.global_steps
        loss = loss_on(engine, step, rank=rank, world=world, extra=uses_extra(step))
        take_step(engine, loss)
        if engine.global_steps == save_at:
            engine.save_checkpoint(folder, client_state={"at": -save_at})
        mean = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(mean)
        losses[step] = mean.item() / world
    engine.destroy()
    return path, began, state and state["at"], losses


def found(host, name):
    """Paths of the files called ``name`` in the newest snapshot on a host."""
    steps = glob.glob(os.path.join(host["DS_MEMORY_FOLDER"], "*", "step*"))
    newest = max(steps, key=lambda path: int(os.path.basename(path)[4:].split(".")[0]))
    return sorted(glob.glob(os.path.join(newest, name)))


def forget(host):
    """The agent of the host was started anew: what it held is gone."""
    for path in glob.glob(os.path.join(host["DS_MEMORY_FOLDER"], "*")):
        shutil.rmtree(path)


def check_losses(*rounds):
    expected = plain_net(LAST).means
    for losses in rounds:
        for step, loss in losses.items():
            assert abs(loss - float(expected[step])) < 1e-5, step


OTHERS = pytest.mark.every("stage 2 is in test_elastic_matrix, and the others write by the same rules")


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=OTHERS) for stage in (0, 1, 2)), 3])
def test_a_run_goes_on_from_memory_until_all_holders_are_lost(stage, tmp_path):
    folder = str(tmp_path / "run")
    with memory_hosts(2) as told:
        a, b = (variables for variables, _ in told)
        first = run_ranks(2, goes_on, [a, b], folder, stage, 5, 3, init=True)
        assert [part[:3] for part in first] == [(None, 0, None)] * 2
        for host in (a, b):  # both hold all of both ranks
            names = [os.path.basename(path) for path in found(host, "*.whole")]
            assert names == ["rank_00000.whole", "rank_00001.whole"]
        check_bytes(a, stage)

        again = run_ranks(2, goes_on, [a, b], folder, stage, 6, init=True)  # at the same number of ranks
        for path, began, at, _ in again:
            assert (began, at) == (4, 4) and path.startswith((a["DS_MEMORY_FOLDER"], b["DS_MEMORY_FOLDER"]))

        forget(a)
        smaller = run_ranks(1, goes_on, [b], folder, stage, 7, init=True)  # at a smaller one: the first host is lost
        assert smaller[0][0].startswith(b["DS_MEMORY_FOLDER"]) and smaller[0][1:3] == (6, 6)

        larger = run_ranks(4, goes_on, [a, b], folder, stage, LAST, init=True)  # the first host knows nothing
        assert [part[1] for part in larger] == [6] * 4

        for path in found(a, "rank_00001.whole") + found(b, "rank_00001.whole"):
            os.unlink(path)  # a rank was killed while it wrote
        assert run_ranks(1, goes_on, [b], folder, stage, 0, init=True)[0][1] == 6

        forget(a)
        forget(b)
        disk = run_ranks(2, goes_on, [a, b], folder, stage, 0, init=True)
        assert [part[1:3] for part in disk] == [(3, -3)] * 2 and disk[0][0].startswith(folder)
    check_losses(*(part[0][3] for part in (first, again, smaller, larger)))


def check_bytes(host, stage):
    """Each trained element has a weight and two moments in fp32, each other one and each buffer itself; at stages 1 and
    2 the weights that the model computes with stand once more in the first rank's file, at stage 2 frozen ones, too."""
    net, tensors = make_net(), {}
    trained = sum(param.numel() for param in net.parameters() if param.requires_grad)
    frozen = sum(param.numel() for param in net.parameters() if not param.requires_grad)
    never = sum(param.numel() for param in net.never.parameters())  # no gradient: no moments where ZeRO is off
    rest = sum(buffer.numel() * buffer.element_size() for buffer in net.buffers())
    for path in found(host, "*.whole"):
        for name, record in json.loads(pathlib.Path(path).read_text())["files"].items():
            assert os.path.getsize(os.path.join(os.path.dirname(path), name)) == record["bytes"]
            if not name.startswith("run_rank"):
                tensors.update({(name, one["offset"]): one["bytes"] for one in record["tensors"]})
    padding = 2 * 3 * 4 * 16  # shards are equal; a frozen parameter is cut into slices at stage 3
    formula = 12 * trained + 4 * frozen + rest + (-8 * never, 4 * trained, 4 * trained + 4 * frozen, 0)[stage]
    assert 0 <= sum(tensors.values()) - formula <= padding + 8 * len(tensors)


@pytest.fixture
def hosts():
    """One host."""
    with memory_hosts(1) as told:
        yield [told[0][0]]


@on_ranks(2, init=True)
def test_too_little_memory_is_an_error_before_training(rank, world, hosts):
    enter(rank, world, hosts)
    words = "^elasticity.memory_copies: rank 0: two snapshots of the ranks of host .*"
    words += "bytes in main memory, and 1000 bytes are free: give it more memory"
    with mock.patch.object(memory_module, "memory_bytes", lambda: (0, 1000)):
        refused(RuntimeError, "(?s)" + words, made, world, 2)


@on_ranks(1)
def test_without_an_agent_there_are_no_snapshots(rank, world, folder):
    engine = made(world, 1)
    assert engine.load_checkpoint(folder)[0] is None
    for _ in range(2):
        take_step(engine, loss_on(engine, 0))
    assert engine._memory_copies.snapshots is None
    engine.save_checkpoint(folder)
    assert engine.load_checkpoint(folder)[0].startswith(folder)


@on_ranks(1)
def test_the_last_snapshot_stays_when_the_run_is_saved_elsewhere(rank, world, hosts, folder):
    enter(rank, world, hosts)
    engine, kept = made(world, 0), []
    engine.load_checkpoint(folder + "/a")
    for step in range(8):
        take_step(engine, loss_on(engine, 0))
        engine._memory_copies.snapshots._behind.drain()
        if step == 2:
            engine.save_checkpoint(folder + "/b")
        steps = glob.glob(os.path.join(os.environ["DS_MEMORY_FOLDER"], "*", "step*"))
        kept.append(sorted(int(os.path.basename(path)[4:].split(".")[0]) for path in steps))
    engine.destroy()
    assert kept == [[], [2], [2], [2, 4], [4], [4, 6], [4, 6], [6, 8]]


@on_ranks(1)
def test_masters_and_moments_go_to_the_snapshot_in_one_pass_over_pages_that_are_there(rank, world, hosts, folder):
    enter(rank, world, hosts)
    copied, copy = [], snapshot_module._copy
    snapshot_module._copy = lambda block, parts: (copied.extend(parts), copy(block, parts))
    engine, inodes = made(world, 1), []
    engine.load_checkpoint(folder)
    for step in range(10):
        take_step(engine, loss_on(engine, 0))
        engine._memory_copies.snapshots._behind.drain()
        if step % 2:
            named = [path for path in found(hosts[0], "*") if not path.endswith(".whole")]
            inodes.append({os.path.basename(path): os.stat(path).st_ino for path in named})
    weights, states = snapshot_module.MemoryRanges(), HeldStates(engine._checkpoints.run_state())
    own = [*engine.module.parameters(), *engine.module.buffers()]
    for one in own:
        weights.add(one.data_ptr(), one.numel() * one.element_size())
    of_weights = sum(bytes for address, _, bytes in copied if weights.find(address, 1))
    of_states = sum(bytes for address, _, bytes in copied if states.cover(address, bytes))
    core = engine.core
    kept = [*core.masters(), *(one for slot in range(len(core.slot_names())) for one in core.slots(slot))]
    engine.destroy()
    in_all = [sum(one.numel() * one.element_size() for one in some) for some in (own, kept)]
    assert (of_weights, of_states) == (5 * in_all[0], 0) and in_all[1] > 2 * 4 * 300
    for first, second, third in zip(inodes, inodes[1:], inodes[2:]):
        assert first == third and not set(first.values()) & set(second.values())


@on_ranks(1)
def test_two_engines_need_two_directories(rank, world, hosts, folder):
    enter(rank, world, hosts)
    first, second = made(world, 0), made(world, 0)
    first.load_checkpoint(folder)
    words = "^elasticity.memory_copies: two engines of this process take snapshots of the run in "
    refused(RuntimeError, words, second.load_checkpoint, folder)
    first.destroy()
    second.load_checkpoint(folder)
    second.destroy()
