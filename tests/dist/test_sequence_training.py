"""Engines on sequences that ranks share: groups, batch sizes, and at every stage the gradient of the mean over replicas
of the whole sequence's loss, whichever published loss ran. SGD: Adam would hide a factor."""

import functools
import gc

import pytest
import torch
import torch.distributed.nn.functional

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence import gradients, weighted_loss
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from harness import on_ranks, run_ranks
from refusals import refused
from runs import engine_of, settings, take_step, weight_list
from sampling import every_case, sample
from sequence_models import attend, batch_of, mean_loss, of_cases, plain_sgd, tiny, vocab_loss, worst

RATE = 0.5


def config_of(stage, accumulate=1, **more):
    more = {"optimizer": None, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, **more}
    return settings(stage, 2, accumulate, zero={"reduce_bucket_size": 150}, **more)


def start(model, config, **more):
    deepspeed.log.logger.setLevel("WARNING")
    return engine_of(model, config, torch.optim.SGD(model.parameters(), lr=RATE), **more)


def shared_model(heads=4, kv=2):
    @functools.cache
    def made():  # once there is a group
        return DistributedAttention(lambda q, k, v: attend(q, k, v, "causal"), groups._get_sequence_parallel_group())

    return tiny(heads, kv, lambda q, k, v: made()(q, k, v, 0))


# ---- groups ----------------------------------------------------------------------------------------------------------
WAYS = {  # to ask for two ranks for a sequence: keys of the configuration, arguments of initialize
    "mpu": ({}, {"mpu": parallel_state_sp}),
    "mesh": ({}, {"mesh_param": (2, 2)}),
    "key": ({"sequence_parallel_size": 2}, {}),
    "both keys": ({"sequence_parallel_size": 2, "data_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4, timeout=60)
def test_groups_and_batch_sizes(rank, world, way):
    if way == "mpu":
        deepspeed.init_distributed()
        parallel_state_sp.initialize_sequence_parallel(2)
    keys, more = WAYS[way]
    engine = start(tiny(), config_of(1, **keys), **more)
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (4, 2, 1)
    assert engine.train_batch_size() == 4 and engine.sequence_parallel_size == 2
    assert engine.get_sequence_parallel_group() is engine.seq_parallel_group is groups._get_sequence_parallel_group()
    assert dist.get_all_ranks_from_group(engine.seq_parallel_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, rank % 2)
    assert dist.get_all_ranks_from_group(engine.data_parallel_group) == [rank % 2, rank % 2 + 2]
    assert dist.get_world_size(engine.optimizer.dp_process_group) == 4  # ZeRO shards over both
    assert engine.communication_data_type == torch.float32
    if way == "mesh":
        assert tuple(engine.mesh_device.mesh_dim_names) == ("data_parallel", "sequence_parallel")
        refused(ValueError, "has made groups of 2 ranks", parallel_state_sp.initialize_sequence_parallel, 4)
    if way == "mpu":
        assert parallel_state_sp.get_model_parallel_rank is parallel_state_sp.get_sequence_parallel_rank
        assert parallel_state_sp.get_data_parallel_world_size() == 2
        assert parallel_state_sp.get_sequence_data_parallel_world_size() == 4
    engine.destroy()
    groups.clear()


class NotEnough:
    """An mpu of which ZeRO cannot learn who holds the same weights."""

    get_data_parallel_group = get_sequence_parallel_group = lambda self: dist.get_world_group()
    get_data_parallel_rank = get_sequence_parallel_rank = lambda self: 0
    get_data_parallel_world_size = lambda self: 1
    get_sequence_parallel_world_size = lambda self: 2


@on_ranks(2, init=True)
def test_an_mpu_without_the_ranks_of_zero_is_refused(rank, world):
    given = tiny(), config_of(1)
    refused(AttributeError, "no get_sequence_data_parallel_group", start, *given, mpu=NotEnough())


# ---- one gradient ----------------------------------------------------------------------------------------------------
def tutorial_loss(loss, labels, group):
    """The published ten lines."""
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    good = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
    return sum(losses[rank] * good[rank] for rank in range(len(good)) if good[rank] > 0) / max(sum(good), 1)


def whole_loss(kind, logits, labels, group):
    if kind == "tutorial":
        return tutorial_loss(mean_loss(logits, labels), labels, group)
    if kind == "weighted":
        return weighted_loss(mean_loss(logits, labels), labels)
    return vocab_loss(logits, labels, group)


def reference(model, steps, accumulate, replicas):
    def loss_at(model, step, part):
        tokens, places, labels = batch_of(step * accumulate + part // replicas, part % replicas)
        return mean_loss(model(tokens, places), labels)

    return plain_sgd(model, RATE, loss_at, steps, accumulate * replicas)


def train_case(rank, world, stage, size, kind, accumulate, plain, more):
    heads = (5, 1) if size == 4 else (4, 2)
    engine = start(shared_model(*heads), config_of(stage, accumulate, sequence_parallel_size=size, **more))
    group, place, replica = engine.seq_parallel_group, rank % size, rank // size
    steps, found = 3, []
    for step in range(steps):
        for micro in range(accumulate):
            whole = batch_of(step * accumulate + micro, replica)
            tokens, places, labels = (x.chunk(size, 1)[place] for x in whole)
            found.append(take_step(engine, whole_loss(kind, engine(tokens, places), labels, group), plain))
    replicas = world // size
    expected = reference(tiny(*heads), steps, accumulate, replicas)
    gap = worst(zip(weight_list(engine), expected.params.values()))
    losses = max(abs(one - loss) for one, loss in zip(found, sum(expected.losses, [])[replica::replicas]))
    engine.destroy()
    groups.clear()
    return max(gap, losses)


def check(world, cases, bound=2e-6):
    for gaps in run_ranks(world, of_cases, train_case, cases, timeout=60 + 5 * len(cases)):
        assert all(gap < bound for gap in gaps), list(zip(cases, gaps))


KINDS = [
    # torch's gather in some of the ranks: its gradient goes through gloo's scatter, which takes a place for a rank
    *((kind, world, size) for kind in ("weighted", "vocab") for world, size in ((2, 2), (4, 2), (4, 4))),
    ("tutorial", 2, 2),
    ("tutorial", 4, 4),
]


@pytest.mark.parametrize("world", [2, 4])
def test_one_gradient(world):
    """All stages, losses, ranks, accumulated and not, by engine.backward and by loss.backward."""
    cases = [
        (stage, kind, accumulate, plain)
        for stage in range(4)
        for kind in KINDS
        for accumulate in (1, 3)
        for plain in (False, True)
    ]
    chosen = cases if every_case() else [cases[index] for index in sample(cases)]
    own = [(stage, kind, *rest) for stage, kind, *rest in chosen if kind[1] == world]
    check(world, [(stage, kind[2], kind[0], *rest, {}) for stage, kind, *rest in own])


def test_other_options():
    """A sum over one sequence is its gradient; the audit agrees."""
    audits = [{"stage": stage, "audit_steps": 3, "stage3_param_persistence_threshold": 0} for stage in (1, 2, 3)]
    sums = [(stage, 2, "weighted", 1, False, {"gradient_allreduce_op": "sum"}) for stage in (0, 2)]
    check(2, sums + [(zero["stage"], 2, "vocab", 3, False, {"zero_optimization": zero}) for zero in audits])


def test_bf16():
    """Gradients travel as fp32; what is left is the rounding of the model itself."""
    check(2, [(stage, 2, "weighted", 1, False, {"bf16": {"enabled": True}}) for stage in (0, 2, 3)], 3e-2)


@on_ranks(2, init=True, timeout=60)
def test_two_engines_on_one_group(rank, world):
    """The rule holds while some engine trains on the group."""
    group, found = dist.get_world_group(), [gradients.summed_in(dist.get_world_group())]
    first = start(shared_model(), config_of(1, sequence_parallel_size=2))
    second = start(shared_model(), config_of(1, sequence_parallel_size=2))
    found.append(gradients.summed_in(group))
    first.destroy()
    found.append(gradients.summed_in(group))
    del second
    gc.collect()
    found.append(gradients.summed_in(group))
    groups.clear()
    assert found == [False, True, True, False]


# ---- losses by themselves --------------------------------------------------------------------------------------------


VOCAB_SIZE = 11


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(init=True)
def test_cross_entropy_of_a_shared_sequence(rank, world):
    """Without an engine: each rank the part of its own gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 2, VOCAB_SIZE, generator=generator, dtype=torch.float32).requires_grad_()
    target = torch.randint(0, VOCAB_SIZE, (8, 2), generator=generator)
    expected = torch.nn.functional.cross_entropy(logits.permute(0, 2, 1), target, reduction="none")
    weights = torch.rand(8, 2, generator=generator)
    (expected * weights).sum().backward()
    mine = logits.detach().chunk(world)[rank].clone().requires_grad_()
    found = vocab_sequence_parallel_cross_entropy(mine, target.chunk(world)[rank], dist.get_world_group())
    (found * weights).sum().backward()
    refused(
        ValueError,
        "need targets of shape",
        vocab_sequence_parallel_cross_entropy,
        mine,
        target[:1],
        dist.get_world_group(),
    )
    assert worst([(found, expected), (mine.grad, logits.grad.chunk(world)[rank])]) < 1e-6


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True)
def test_a_sequence_without_labels_has_the_loss_0(rank, world):
    labels = torch.full((2, 3), -100)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = weighted_loss(mean_loss(logits, labels), labels, dist.get_world_group())
    loss.backward()
    assert [loss.item(), float(logits.grad.abs().max())] == [0.0, 0.0]


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def body_checkpoint(rank, world, folder, size, save):
    return [checkpoint_case(rank, world, f"{folder}/{stage}", stage, size, save) for stage in (0, 2, 3)]


def checkpoint_case(rank, world, folder, stage, size, save):
    """A step on one sequence, saved; then loaded by ranks that share sequences otherwise, and the next step."""
    model = shared_model() if size > 1 else tiny()
    config = config_of(stage, sequence_parallel_size=size)
    config["optimizer"] = {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}}
    deepspeed.log.logger.setLevel("WARNING")
    engine = engine_of(model, config)
    if not save:
        engine.load_checkpoint(folder)
    whole = batch_of(0 if save else 1, 0)  # the same sequence on every replica
    tokens, places, labels = (x.chunk(size, 1)[rank % size] for x in whole)
    logits = engine(tokens, places)
    loss = weighted_loss(mean_loss(logits, labels), labels, engine.seq_parallel_group) if size > 1 else None
    take_step(engine, mean_loss(logits, labels) if loss is None else loss)
    if save:
        engine.save_checkpoint(folder)
    found = [weight.tolist() for weight in weight_list(engine)]
    engine.destroy()
    groups.clear()
    return found


def test_checkpoints_load_whoever_shares_sequences(tmp_path):
    run_ranks(2, body_checkpoint, str(tmp_path), 2, True, timeout=90)
    every = [
        run_ranks(world, body_checkpoint, str(tmp_path), size, False, timeout=90)[0]
        for world, size in [(2, 2), (2, 1), (4, 2), (4, 4)]
    ]
    for found in zip(*every):  # of one stage
        expected = [torch.tensor(param) for param in found[0]]
        for other in found[1:]:
            assert worst(zip(expected, map(torch.tensor, other))) < 1e-5
