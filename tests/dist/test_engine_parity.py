"""The engine against one plain PyTorch process on the same data: losses, norms, parameters and moments, within 1e-6.

The plain process computes in fp64 (see ``train_plain``); one test compares with a plain fp32 process as well.

50 steps with clipping, over world sizes, accumulation, optimizers, groups and ways to call backward, on a model with
shared, frozen, unused, sometimes used and sparse parameters.
"""

import pytest
import torch

import deepspeed
from engine_models import adam_like, batch, config, difference, loss_of, make_net, train_engine, train_plain, uses_extra
from harness import on_ranks, run_ranks
from runs import engine_of, take_step, together

STEPS = 50


adamw = adam_like


def two_groups(model, build):
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return build([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}])


def check_fp32(results, reference_losses, reference_norms):
    """``results``: (losses, norms, gap of the parameters) of each rank."""
    world = len(results)
    for step, expected in enumerate(reference_losses):
        mean = sum(losses[step] for losses, _, _ in results) / world
        assert mean == pytest.approx(expected, rel=1e-6), f"loss of step {step}"
    for _, norms, gap in results:
        assert norms == pytest.approx(reference_norms, rel=1e-5)
        assert gap < 1e-6


def body_config_optimizer(rank, world, accumulate, more, user_backward, sparse):
    model = make_net(sparse)
    engine = engine_of(model, config(world, accumulate, **more))
    losses, norms = train_engine(engine, STEPS, rank, world, user_backward)
    _, _, reference = train_plain(STEPS, adamw, sparse=sparse)
    return losses, norms, difference(model, reference)


@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("world", [1, 2])
def test_fp32_equals_plain_training(world, accumulate, user_backward):
    results = run_ranks(world, body_config_optimizer, accumulate, {}, user_backward, False)
    losses, norms, _ = train_plain(STEPS, adamw)
    check_fp32(results, losses, norms)


@on_ranks(2)
def test_closer_to_the_truth_than_plain_fp32(rank, world):
    model = make_net()
    engine = engine_of(model, config(world, 2))
    train_engine(engine, STEPS, rank, world)
    _, _, exact = train_plain(STEPS, adamw)
    _, _, plain = train_plain(STEPS, adamw, dtype=torch.float32)
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
def test_ways_to_reduce_are_equal(more):
    losses, norms, _ = train_plain(STEPS, adamw)
    check_fp32(run_ranks(2, body_config_optimizer, 1, more, False, False), losses, norms)


def test_sparse_gradients_are_summed():
    losses, norms, _ = train_plain(STEPS, adamw, sparse=True)
    check_fp32(run_ranks(2, body_config_optimizer, 2, {}, False, True), losses, norms)


def body_groups(rank, world):
    def ours(groups):
        return deepspeed.ops.adam.FusedAdam(groups, lr=3e-3, betas=(0.9, 0.95))

    def plain(groups):
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    model = make_net()
    optimizer = two_groups(model, ours)
    made = config(world, 2)
    del made["optimizer"]
    engine, returned, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=made)
    assert returned is optimizer
    losses, norms = train_engine(engine, STEPS, rank, world)
    optimizers = []

    def remember(reference):
        optimizers.append(two_groups(reference, plain))
        return optimizers[0]

    _, _, reference = train_plain(STEPS, remember)
    state = 0.0
    for mine, theirs in zip(optimizer.param_groups, optimizers[0].param_groups):
        for p, q in zip(mine["params"], theirs["params"]):
            if q not in optimizers[0].state:
                assert float(optimizer.state[p]["step"]) == 0
                continue
            assert float(optimizer.state[p]["step"]) == float(optimizers[0].state[q]["step"])
            for name in ("exp_avg", "exp_avg_sq"):
                a, b = optimizer.state[p][name], optimizers[0].state[q][name]
                state = max(state, float((a - b).norm() / b.norm().clamp_min(1e-12)))
    assert state < 2e-5
    return losses, norms, difference(model, reference)


def test_client_optimizer_with_groups_has_the_same_moments():
    losses, norms, _ = train_plain(
        STEPS, lambda m: two_groups(m, lambda g: torch.optim.AdamW(g, lr=3e-3, betas=(0.9, 0.95)))
    )
    check_fp32(run_ranks(2, body_groups), losses, norms)


CLIENTS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3),
}


def body_client(rank, world, name, as_callable):
    model = make_net()
    made = config(world, 2)
    del made["optimizer"]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = CLIENTS[name] if as_callable else CLIENTS[name](trainable)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.5),
        config=made,
    )
    losses, norms = train_engine(engine, STEPS, rank, world)
    assert scheduler.last_epoch == STEPS
    _, _, reference = train_plain(
        STEPS, lambda m: CLIENTS[name](m.parameters()), schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.5)
    )
    return losses, norms, difference(model, reference)


@pytest.mark.parametrize("as_callable", [False, True], ids=["object", "callable"])
@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_torch_optimizers_of_the_caller(name, as_callable):
    losses, norms, _ = train_plain(
        STEPS, lambda m: CLIENTS[name](m.parameters()), schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.5)
    )
    check_fp32(run_ranks(2, body_client, name, as_callable), losses, norms)


def body_torch_by_name(rank, world):
    model = make_net()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, config=config(world, 1, optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}})
    )
    assert isinstance(optimizer, torch.optim.SGD)
    losses, norms = train_engine(engine, STEPS, rank, world)
    _, _, reference = train_plain(STEPS, lambda m: CLIENTS["sgd"](m.parameters()))
    return losses, norms, difference(model, reference)


def test_torch_optimizer_by_name():
    losses, norms, _ = train_plain(STEPS, lambda m: CLIENTS["sgd"](m.parameters()))
    check_fp32(run_ranks(2, body_torch_by_name), losses, norms)


@on_ranks(2)
def test_no_sync_and_several_backwards_before_a_step(rank, world):
    model = make_net()
    engine = engine_of(model, config(world, 1, size=8))
    reference = make_net().double()
    optimizer = adamw(reference)
    for step in range(10):
        tokens, targets = batch(step)
        mine = slice(rank * 4, rank * 4 + 4)
        with engine.no_sync():
            engine.backward(loss_of(engine(tokens[mine], extra=uses_extra(step)), targets[mine]))
        take_step(engine, loss_of(engine(tokens[mine] % 5, extra=uses_extra(step)), targets[mine]))
        optimizer.zero_grad(set_to_none=True)
        loss_of(reference(tokens, extra=uses_extra(step)), targets).backward()
        loss_of(reference(tokens % 5, extra=uses_extra(step)), targets).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    assert difference(model, reference) < 1e-6


@on_ranks(2)
def test_boundaries_set_by_the_caller(rank, world):
    model = make_net()
    engine = engine_of(model, config(world, 4, size=16))
    reference = make_net().double()
    optimizer = adamw(reference)
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(3):
            tokens, targets = batch(10 * step + micro, size=4)
            mine = slice(rank * 2, rank * 2 + 2)
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 2)
            engine.backward(loss_of(engine(tokens[mine]), targets[mine]))
            if micro == 2:
                engine.step()
            (loss_of(reference(tokens), targets) / 4).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    assert engine.global_steps == 6
    assert difference(model, reference) < 1e-6


@on_ranks(2)
def test_two_engines_in_one_process(rank, world):
    """A generator and a discriminator: the first one's loss runs through the second, whose gradients do not count."""
    models, plain = (
        [make_net(seed=1), torch.nn.Linear(5, 1)],
        [make_net(seed=1).double(), torch.nn.Linear(5, 1).double()],
    )
    torch.manual_seed(5)
    plain[1].weight.data.normal_()
    models[1].load_state_dict(plain[1].state_dict())
    engines = [engine_of(m, config(world, 1)) for m in models]
    optimizers = [adamw(m) for m in plain]
    for step in range(8):
        tokens, _ = batch(step)
        mine = slice(rank * 4, rank * 4 + 4)
        for run, part, engine_like in ((0, mine, engines), (1, slice(0, 8), plain)):
            generator, judge = engine_like
            if run == 1:
                for o in optimizers:
                    o.zero_grad(set_to_none=True)
            real = torch.nn.functional.one_hot(tokens[part] % 5, 5).to(judge.weight.dtype)
            fake = generator(tokens[part], extra=True)
            for loss in (judge(real).square().mean(), (judge(fake.detach()) - 1).square().mean()):
                engines[1].backward(loss) if run == 0 else loss.backward()
            if run == 0:
                engines[1].step()
            else:
                torch.nn.utils.clip_grad_norm_(plain[1].parameters(), 0.5)
                optimizers[1].step()
                optimizers[1].zero_grad(set_to_none=True)
            for p in (models if run == 0 else plain)[1].parameters():
                p.requires_grad_(False)
            loss = judge(generator(tokens[part], extra=True)).square().mean()
            if run == 0:
                take_step(engines[0], loss)
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(plain[0].parameters(), 0.5)
                optimizers[0].step()
            for p in (models if run == 0 else plain)[1].parameters():
                p.requires_grad_(True)
    assert max(difference(m, p) for m, p in zip(models, plain)) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_activation_checkpointing_of_a_shared_module(rank, world, reentrant):
    from torch.utils.checkpoint import checkpoint

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.inner = torch.nn.Linear(12, 12)
            self.outer = torch.nn.Linear(12, 12)

        def forward(self, x, again):
            for _ in range(2 + again):  # the same module in several re-entrant segments
                x = checkpoint(lambda v: torch.tanh(self.inner(v)), x, use_reentrant=reentrant)
            return self.outer(x)

    model, reference = Twice(), Twice().double()
    made = config(world, 1)
    made["zero_optimization"]["reduce_bucket_size"] = 10
    engine = engine_of(model, made)
    optimizer = adamw(reference)
    late = 0
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 12, generator=generator, requires_grad=False)
        again = (step // 4) % 3  # more uses than ever before: their gradients are late
        mine = x[rank * 4 : rank * 4 + 4].clone().requires_grad_(True)
        take_step(engine, engine(mine, again).square().mean())
        late += engine.core.late_count
        optimizer.zero_grad(set_to_none=True)
        reference(x.double().requires_grad_(True), again).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    assert difference(model, reference) < 1e-6


@on_ranks(3)
def test_all_ranks_start_from_rank_zero(rank, world):
    made = config(1)
    made.update(train_batch_size=3, train_micro_batch_size_per_gpu=1)
    model = make_net(seed=rank)
    with torch.no_grad():
        model.count += rank
    deepspeed.initialize(model=model, config=made)
    first, second, third = together(
        [float(p.detach().double().sum()) for p in model.parameters()], model.count.tolist()
    )
    assert first == second == third
