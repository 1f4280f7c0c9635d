"""The mesh: groups by their members alone, communicators of an engine's own, an axis that the tree does not know."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm import held, mesh, mesh_views
from deepspeed.module_inject.layers import exchange_of
from deepspeed.utils import groups
from harness import on_ranks
from models import Parts, seeded
from mpu import Mpu
from refusals import refused
from runs import total, value_of
from zero_training import WIDTH, Deep, below, beside, gap, plain_of, start, train_beside


# ---- groups ----------------------------------------------------------------------------------------------------------
@on_ranks(3, init="gloo", timeout=60)
def test_groups_are_made_by_their_members_alone(rank, world):
    if rank != 1:  # who is no member goes on
        pair = mesh.group_over([2, 0])
        assert dist.get_all_ranks_from_group(pair) == [0, 2] and dist.get_rank(pair) == rank // 2
        assert mesh.group_over([0, 2]) is pair and total(pair, rank) == 2
        dist.destroy_process_group(pair)
        again = mesh.group_over([0, 2])
        assert again is not pair and total(again, rank) == 2
    if rank == 1:  # what is asked for makes nothing that others wait for
        assert dist.get_all_ranks_from_group(groups.get_model_parallel_group()) == [1]
        assert groups._get_sequence_parallel_world_size() == 1
    everybody = dist.new_group([0, 1, 2])  # torch counts its own groups only: the ranks still agree on the number
    assert total(everybody, rank) == 3
    assert dist.new_group([0, 1, 2]) is not everybody


# ---- an engine's own communicators -----------------------------------------------------------------------------------
def mpu_of(rank, own=((0, 2), (1, 3), (0, 1), (2, 3))):
    """Ranks 0 and 2 train one model, 1 and 3 the other half of it, as far as the engine knows."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in own}
    return Mpu(next(made[ranks] for ranks in own if rank in ranks))


def trains(engine, reference, steps=6):
    """Each rank takes layers of its own, so gathers and reductions come in another order on each."""
    own, count = engine.parallel.dp_rank, engine.dp_world_size

    def layers(step, part):
        return [(step * 3 + part * 2 + index) % 4 for index in range(1 + (step + part) % 3)]

    train_beside(engine, reference, own, count, range(steps), lambda step, part: (layers(step, part),))
    return gap(engine, reference)


def communicators(engine):
    return len(held.held_by(engine.core))


@on_ranks(4, init="gloo", timeout=60, env={"DS_PEER_MEMORY": "0"})
def test_gathers_do_not_meet_reductions_under_an_mpu(rank, world):
    engine, reference = beside(seeded(Deep), 3, world, mpu=mpu_of(rank))
    assert communicators(engine) == 2  # reductions, gathers
    assert engine.core.gatherer.source == "scheduled collectives"
    below(trains(engine, reference))


@pytest.mark.parametrize(
    "own, size", [(None, 2), ([(0, 2), (1, 3)], 2), ([(0, 2), (1, 3)], 1), ([(0, 1), (2, 3)], 1), ([(0, 3), (1, 2)], 1)]
)
@on_ranks(4, init="gloo", timeout=60, env={"DS_PEER_MEMORY": "0"})
def test_mics_under_an_mpu_has_communicators_of_its_own(rank, world, own, size):
    """The last lists are of no grid."""
    mpu = own and mpu_of(rank, own)
    engine, reference = beside(seeded(Deep), 3, world, mpu=mpu, zero={"mics_shard_size": size})
    assert engine.module.head.weight.ds_world_size == size
    if size > 1:
        assert communicators(engine) == (3 if size < engine.dp_world_size else 2)  # and replicas
    below(trains(engine, reference))


@on_ranks(2, init="gloo", timeout=60)
def test_what_is_not_needed_is_not_opened(rank, world):
    engine, reference = beside(seeded(Deep), 3, world)
    assert engine.core.gatherer.source != "scheduled collectives" and communicators(engine) == 1
    below(trains(engine, reference))


# ---- "add a parallelism" of docs/adding.md: a toy axis ---------------------------------------------------------------
class Branches(Mpu):
    """Branch parallelism: neighbours hold other branches of a model, whose outputs are added."""

    def __init__(self, count):
        mesh = mesh_views.numbered(mesh_views.of_job(branch=(count, "train_branches")))
        self.branch = mesh_views.make("branch", mesh, ["branch"])
        self.data = mesh_views.make("data beside branches", mesh, ["dp"])
        super().__init__(self.data.group, self.branch.group)


def whole_model(count):
    """All branches in one process."""
    return Parts(
        lambda net, x: sum(branch(x) for branch in net.branches),
        branches=torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2) for _ in range(count)),
    )


def branch_of(whole, branches):
    """The branch of this rank."""
    net = Parts(
        lambda net, x: exchange_of(net.group).sum_out(net.own(x)),
        own=whole.branches[branches.branch.rank],
        group=branches.branch.group,
    )
    for param in net.parameters():
        param.model_parallel = True  # the norm counts the elements of every rank
    return net


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(4, init="gloo", timeout=60)
def test_an_axis_of_somebody_else(rank, world, stage):
    groups.clear()
    if stage == 0:
        refused(ValueError, "train_branches 3 does not divide the 4 ranks: use one of 1, 2, 4", Branches, 3)
    branches = Branches(2)
    whole = seeded(whole_model, 2, seed=1)
    reference = plain_of(whole)
    engine = start(branch_of(whole, branches), stage, world, mpu=branches)
    for step in range(4):
        train_beside(engine, reference, branches.data.rank, branches.data.size, [step])
        assert engine.get_global_grad_norm() == pytest.approx(reference.norms[-1], rel=1e-5)
    found = [value_of(param).double() for param in engine.module.own.parameters()]
    expected = reference.model.branches[branches.branch.rank].parameters()
    groups.clear()
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected)) < 1e-5
