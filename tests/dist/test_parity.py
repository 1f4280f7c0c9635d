"""The net of ``engine_models`` at every stage against one plain PyTorch process: losses, norms, gradients, parameters
and moments, over worlds, accumulation, ways to communicate, optimizers, and ways to call backward.

The net has shared, frozen, unused, sometimes used and sparse parameters. The plain process computes in fp64; one test
compares with a plain fp32 process as well.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import devices
from cases import Case, over
from claims import equals_plain, plain_of
from engine_models import (
    adam_like,
    batch,
    config,
    difference,
    loss_of,
    loss_on,
    make_net,
    plain_net,
    train_engine,
    uses_extra,
)
from harness import on_ranks
from models import Parts, seeded
from plain import Plain
from programs import ADAM, CLIENTS, PROGRAMS
from runs import engine_of, take_step, together
from zero_models import relative


def net_at(stage, name="net"):
    """Fewer steps where more ranks, or a device, take their time."""
    return f"{name}, 10 steps" if stage or devices.NAME != "cpu" else name


@pytest.mark.any_device
@over("stage", "world", "user_backward", accumulate=[1, 2, 4], cover="pairs")
@on_ranks()
def test_equals_plain_training(rank, world, stage, accumulate, user_backward):
    equals_plain(rank, net_at(stage), Case(stage, world, "fp32", accumulate, user_backward))


WAYS = {
    "overlap": ((1, 2, 3), {"overlap_comm": True}, {}),
    "no overlap": ((0, 1, 2, 3), {"overlap_comm": False}, {}),
    "all-reduce": ((1, 2, 3), {"reduce_scatter": False}, {}),
    "broadcasts": ((1, 2, 3), {"allgather_partitions": False}, {}),
    "one bucket": ((1, 2, 3), {"reduce_bucket_size": 10_000_000, "allgather_bucket_size": 10_000_000}, {}),
    "in turn": ((1, 2, 3), {"contiguous_gradients": False, "round_robin_gradients": True}, {}),
    "prescale": ((0,), {}, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    "fp32 travels": ((0,), {}, {"managed_gradient_accumulation": True, "communication_data_type": "fp32"}),
}


@pytest.mark.any_device
@pytest.mark.sample("values", 11)
@pytest.mark.parametrize("way, stage", [(way, stage) for way, (stages, *_) in WAYS.items() for stage in stages])
@on_ranks(2)
def test_ways_to_communicate_are_equal(rank, world, stage, way):
    _, zero, more = WAYS[way]
    equals_plain(rank, net_at(stage), Case(stage, world, "fp32", 2 if stage else 1, zero=zero, more=more))


@pytest.mark.skipif(devices.NAME == "standin", reason="torch has no sparse tensors on PrivateUse1 devices")
@pytest.mark.any_device
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_sparse_gradients_are_summed(rank, world, stage):
    equals_plain(rank, net_at(stage, "sparse net"), Case(stage, world, accumulate=2))


@on_ranks(2)
def test_closer_to_the_truth_than_plain_fp32(rank, world):
    model = make_net()
    train_engine(engine_of(model, config(world, 2)), 50, rank, world)
    exact, plain = plain_net(50).model, plain_net(50, dtype=torch.float32).model
    plains = difference(plain, exact)
    assert difference(model, exact) < plains
    assert difference(model, plain) < plains + 1e-6


def of_client(name):
    """A model, and the optimizer that a script makes for it."""
    model = make_net()
    return model, PROGRAMS[name].optimizer([p for p in model.parameters() if p.requires_grad])


@on_ranks(2)
def test_client_optimizer_with_groups_has_the_same_moments(rank, world):
    model, optimizer = of_client("groups")
    engine = equals_plain(rank, "groups", Case(0, world, accumulate=2), model, client=optimizer)
    assert engine.optimizer is optimizer
    plain = plain_of("groups", "fp32", 2 * world)
    for name, param in model.named_parameters():
        wanted = plain.optimizer.state.get(plain.masters[name], {"step": 0})
        if param.requires_grad:
            assert float(optimizer.state[param]["step"]) == float(wanted["step"])
        for kind in ADAM if len(wanted) > 1 else ():
            assert relative(optimizer.state[param][kind], wanted[kind]) < 2e-5


@over(as_callable=[False, True], name=list(CLIENTS))
@on_ranks(2)
def test_torch_optimizers_of_the_caller(rank, world, name, as_callable):
    model, client = (None, None) if as_callable else of_client(name)
    engine = equals_plain(rank, name, Case(0, world, accumulate=2), model, client=client)
    assert engine.lr_scheduler.last_epoch == PROGRAMS[name].steps


@on_ranks(2)
def test_torch_optimizer_by_name(rank, world):
    assert isinstance(equals_plain(rank, "SGD by name", Case(0, world)).optimizer, torch.optim.SGD)


def plain_net_of(model):
    return Plain(model, adam_like, clip=0.5)


def beside_plain(world, accumulate, size):
    """The net, an engine that trains it, and the plain process that trains a copy of it."""
    model = make_net()
    return model, engine_of(model, config(world, accumulate, size=size)), plain_net_of(make_net())


@on_ranks(2)
def test_no_sync_and_several_backwards_before_a_step(rank, world):
    model, engine, plain = beside_plain(world, 1, size=8)
    for step in range(10):
        tokens, targets = batch(step)
        mine = slice(rank * 4, rank * 4 + 4)
        with engine.no_sync():
            engine.backward(loss_of(engine(tokens[mine], extra=uses_extra(step)), targets[mine]))
        take_step(engine, loss_of(engine(tokens[mine] % 5, extra=uses_extra(step)), targets[mine]))
        plain.step(*(loss_of(plain.model(x, extra=uses_extra(step)), targets) for x in (tokens, tokens % 5)), share=1)
    assert difference(model, plain.model) < 1e-6


@on_ranks(2)
def test_boundaries_set_by_the_caller(rank, world):
    model, engine, plain = beside_plain(world, 4, size=16)
    for step in range(6):
        losses = []
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 2)
            engine.backward(loss_on(engine, 10 * step + micro, 4, rank, world))
            if micro == 2:
                engine.step()
            losses.append(loss_on(plain.model, 10 * step + micro, 4))
        plain.step(*losses, share=1 / 4)
    assert engine.global_steps == 6
    assert difference(model, plain.model) < 1e-6


@on_ranks(2)
def test_two_engines_in_one_process(rank, world):
    """A generator and a discriminator: the first one's loss runs through the second, whose gradients do not count."""
    models = [make_net(seed=1), seeded(torch.nn.Linear, 5, 1, seed=5)]
    plain = [plain_net_of(model) for model in models]
    engines = [engine_of(model, config(world, 1)) for model in models]
    for step in range(8):
        tokens, _ = batch(step)
        pairs = ((engines, slice(rank * 4, rank * 4 + 4)), ([one.model for one in plain], slice(0, 8)))
        for (generator, judge), part in pairs:
            real = torch.nn.functional.one_hot(tokens[part] % 5, 5).to(judge.weight.dtype)
            fake = generator(tokens[part], extra=True)
            losses = judge(real).square().mean(), (judge(fake.detach()) - 1).square().mean()
            if generator is engines[0]:
                for loss in losses:
                    engines[1].backward(loss)
                engines[1].step()
            else:
                plain[1].step(*losses, share=1)
            judge.requires_grad_(False)
            loss = judge(generator(tokens[part], extra=True)).square().mean()
            take_step(engines[0], loss) if generator is engines[0] else plain[0].step(loss)
            judge.requires_grad_(True)
    assert max(difference(model, one.model) for model, one in zip(models, plain)) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_activation_checkpointing_of_a_shared_module(rank, world, reentrant):
    def forward_twice(net, x, again):
        for _ in range(2 + again):  # the same module in several re-entrant segments
            x = checkpoint(lambda v: torch.tanh(net.inner(v)), x, use_reentrant=reentrant)
        return net.outer(x)

    def twice():
        torch.manual_seed(3)
        return Parts(
            forward_twice,
            inner=torch.nn.Linear(12, 12),
            outer=torch.nn.Linear(12, 12),
        )

    model, plain = twice(), plain_net_of(twice())
    engine = engine_of(model, config(world, 1, zero_optimization={"stage": 0, "reduce_bucket_size": 10}))
    for step in range(12):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        again = (step // 4) % 3  # more uses than ever before: their gradients are late
        mine = x[rank * 4 : rank * 4 + 4].clone().requires_grad_(True)
        take_step(engine, engine(mine, again).square().mean())
        plain.step(plain.model(x.double().requires_grad_(True), again).square().mean())
    assert difference(model, plain.model) < 1e-6


@on_ranks(3)
def test_all_ranks_start_from_rank_zero(rank, world):
    model = make_net(seed=rank)
    with torch.no_grad():
        model.count += rank
    engine_of(model, config(1, train_batch_size=3, train_micro_batch_size_per_gpu=1))
    first, second, third = together(
        [float(p.detach().double().sum()) for p in model.parameters()], model.count.tolist()
    )
    assert first == second == third
