"""The engine against one plain PyTorch process on the same data: losses, norms, parameters and moments, within 1e-6.

The plain process computes in fp64 (see ``train_plain``); one test compares with a plain fp32 process as well.

50 steps with clipping, over world sizes, accumulation, optimizers, groups and ways to call backward, on a model with
shared, frozen, unused, sometimes used and sparse parameters.
"""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deepspeed
from engine_models import (
    adam_like,
    batch,
    config,
    difference,
    loss_of,
    loss_on,
    make_net,
    train_engine,
    train_plain,
    uses_extra,
)
from harness import on_ranks
from models import Parts, seeded
from runs import engine_of, initialized, take_step, together

STEPS = 50


def two_groups(model, build):
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return build([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}])


def check(rank, world, engine, make_optimizer=adam_like, user_backward=False, **plain):
    """Trains ``engine``: losses, norms and parameters are those of a plain process."""
    losses, norms = train_engine(engine, STEPS, rank, world, user_backward)
    expected, plain_norms, reference = train_plain(STEPS, make_optimizer, **plain)
    for step, own in enumerate(zip(*together(losses))):
        assert sum(own) / world == pytest.approx(expected[step], rel=1e-6), f"loss of step {step}"
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    assert difference(engine.module, reference) < 1e-6


@pytest.mark.sample("values")
@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_fp32_equals_plain_training(rank, world, accumulate, user_backward):
    check(rank, world, engine_of(make_net(), config(world, accumulate)), user_backward=user_backward)


@on_ranks(2)
def test_closer_to_the_truth_than_plain_fp32(rank, world):
    model = make_net()
    train_engine(engine_of(model, config(world, 2)), STEPS, rank, world)
    _, _, exact = train_plain(STEPS, adam_like)
    _, _, plain = train_plain(STEPS, adam_like, dtype=torch.float32)
    plains = difference(plain, exact)
    assert difference(model, exact) < plains
    assert difference(model, plain) < plains + 1e-6


@pytest.mark.parametrize(
    "more",
    [
        {"zero_optimization": {"stage": 0, "overlap_comm": False}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"managed_gradient_accumulation": True, "communication_data_type": "fp32"},
    ],
    ids=["no overlap", "prescale", "fp32 travels"],
)
@on_ranks(2)
def test_ways_to_reduce_are_equal(rank, world, more):
    check(rank, world, engine_of(make_net(), config(world, 1, **more)))


@on_ranks(2)
def test_sparse_gradients_are_summed(rank, world):
    check(rank, world, engine_of(make_net(sparse=True), config(world, 2)), sparse=True)


@on_ranks(2)
def test_client_optimizer_with_groups_has_the_same_moments(rank, world):
    model = make_net()
    rates = {"lr": 3e-3, "betas": (0.9, 0.95)}
    optimizer = two_groups(model, lambda groups: deepspeed.ops.adam.FusedAdam(groups, **rates))
    engine, returned, _, _ = initialized(model, config(world, 2), optimizer)
    assert returned is optimizer
    optimizers = []

    def remember(reference):
        optimizers.append(two_groups(reference, lambda groups: torch.optim.AdamW(groups, **rates)))
        return optimizers[0]

    check(rank, world, engine, remember)
    for mine, theirs in zip(optimizer.param_groups, optimizers[0].param_groups):
        for p, q in zip(mine["params"], theirs["params"]):
            if q not in optimizers[0].state:
                assert float(optimizer.state[p]["step"]) == 0
                continue
            assert float(optimizer.state[p]["step"]) == float(optimizers[0].state[q]["step"])
            for name in ("exp_avg", "exp_avg_sq"):
                a, b = optimizer.state[p][name], optimizers[0].state[q][name]
                assert float((a - b).norm() / b.norm().clamp_min(1e-12)) < 2e-5


CLIENTS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3),
}


@pytest.mark.sample("values")
@pytest.mark.parametrize("as_callable", [False, True], ids=["object", "callable"])
@pytest.mark.parametrize("name", sorted(CLIENTS))
@on_ranks(2)
def test_torch_optimizers_of_the_caller(rank, world, name, as_callable):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

    model = make_net()
    client = CLIENTS[name] if as_callable else CLIENTS[name]([p for p in model.parameters() if p.requires_grad])
    engine, _, _, scheduler = initialized(model, config(world, 2), client, lr_scheduler=schedule)
    check(rank, world, engine, lambda m: CLIENTS[name](m.parameters()), schedule=schedule)
    assert scheduler.last_epoch == STEPS


@on_ranks(2)
def test_torch_optimizer_by_name(rank, world):
    section = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    engine, optimizer, _, _ = initialized(make_net(), config(world, 1, optimizer=section))
    assert isinstance(optimizer, torch.optim.SGD)
    check(rank, world, engine, lambda m: CLIENTS["sgd"](m.parameters()))


class Plain:
    """A copy of a model in fp64, which takes steps by itself."""

    def __init__(self, model):
        self.model = model.double()
        self.optimizer = adam_like(model)

    def step(self, *losses):
        self.optimizer.zero_grad(set_to_none=True)
        for loss in losses:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()


@on_ranks(2)
def test_no_sync_and_several_backwards_before_a_step(rank, world):
    model = make_net()
    engine = engine_of(model, config(world, 1, size=8))
    plain = Plain(make_net())
    for step in range(10):
        tokens, targets = batch(step)
        mine = slice(rank * 4, rank * 4 + 4)
        with engine.no_sync():
            engine.backward(loss_of(engine(tokens[mine], extra=uses_extra(step)), targets[mine]))
        take_step(engine, loss_of(engine(tokens[mine] % 5, extra=uses_extra(step)), targets[mine]))
        plain.step(*(loss_of(plain.model(x, extra=uses_extra(step)), targets) for x in (tokens, tokens % 5)))
    assert difference(model, plain.model) < 1e-6


@on_ranks(2)
def test_boundaries_set_by_the_caller(rank, world):
    model = make_net()
    engine = engine_of(model, config(world, 4, size=16))
    plain = Plain(make_net())
    for step in range(6):
        losses = []
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 2)
            engine.backward(loss_on(engine, 10 * step + micro, 4, rank, world))
            if micro == 2:
                engine.step()
            losses.append(loss_on(plain.model, 10 * step + micro, 4) / 4)
        plain.step(*losses)
    assert engine.global_steps == 6
    assert difference(model, plain.model) < 1e-6


@on_ranks(2)
def test_two_engines_in_one_process(rank, world):
    """A generator and a discriminator: the first one's loss runs through the second, whose gradients do not count."""
    models = [make_net(seed=1), seeded(torch.nn.Linear, 5, 1, seed=5)]
    plain = [Plain(copy.deepcopy(model)) for model in models]
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
                plain[1].step(*losses)
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

    model, plain = twice(), Plain(twice())
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
