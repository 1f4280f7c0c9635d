"""16-bit training: fp32 masters and accumulation, loss scaling, skipped steps."""

import copy
import functools

import pytest
import torch

import deepspeed
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from engine_models import config, difference, loss_on, make_net, plain_net, train_engine, uses_extra
from harness import on_ranks, run_ranks
from logs import logged
from models import Parts, seeded
from refusals import refused
from runs import engine_of, initialized, take_step, together

HALF_ON_CPU = deepspeed.get_accelerator().is_fp16_supported()
needs_fp16 = pytest.mark.skipif(not HALF_ON_CPU, reason="this torch has no fp16 matrix product on this device")


@pytest.mark.sample("values")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_bf16_follows_fp32(rank, world, accumulate):
    expected = plain_net(30).means
    model = make_net()
    engine, optimizer, _, _ = initialized(model, config(world, accumulate, bf16={"enabled": True}))
    losses, _ = train_engine(engine, 30, rank, world)
    masters = torch.cat(optimizer.fp32_groups_flat)
    weights = torch.cat([p.detach().float().reshape(-1) for p in model.parameters() if p.requires_grad])
    for step, own in enumerate(zip(*together(losses))):
        assert sum(own) / world == pytest.approx(expected[step], rel=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.count.dtype == torch.float32
    assert torch.equal(masters.bfloat16().float(), weights), "the model computes with the rounded masters"
    assert int((masters != weights).sum()) > 100, "masters hold more than bf16 can"
    assert len(set(together(float(weights.double().sum())))) == 1
    assert type(optimizer).__name__ == "FP16_Optimizer" and optimizer.cur_scale == 1.0


@pytest.mark.parametrize(
    "more",
    [{"communication_data_type": "bf16"}, {"data_types": {"grad_accum_dtype": "bf16"}}],
    ids=["bf16 travels", "bf16 sums"],
)
@on_ranks(2)
def test_bf16_gradients_on_request(rank, world, more):
    expected = plain_net(30).means
    losses, _ = train_engine(engine_of(make_net(), config(world, 2, bf16={"enabled": True}, **more)), 30, rank, world)
    assert losses[-1] == pytest.approx(expected[-1], rel=0.2)


@on_ranks(2)
def test_bf16_with_a_torch_optimizer(rank, world):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 5)

    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    expected = plain_net(12, sgd, schedule=schedule).means
    model = make_net()
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    groups = optimizer.param_groups
    made = config(world, 1, bf16={"enabled": True})
    engine, wrapped, _, _ = initialized(model, made, optimizer, lr_scheduler=schedule(optimizer))
    losses, _ = train_engine(engine, 12, rank, world)
    assert wrapped.optimizer is optimizer and wrapped.param_groups is groups
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.05 * 0.01)
    assert all(p.dtype == torch.float32 for p in groups[0]["params"])
    assert type(wrapped).__name__ == "FP16_UnfusedOptimizer"
    first, second = together(losses)
    assert [(a + b) / 2 for a, b in zip(first, second)] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("kind, flat", [("Adam", True), ("Lamb", False), ("Lion", False)])
@on_ranks(1)
def test_only_adam_is_saved_flat(rank, world, kind, flat):
    """The contents of published checkpoints, and the classes that scripts ask for."""
    name = "FP16_Optimizer" if flat else "FP16_UnfusedOptimizer"
    made = config(world, 1, bf16={"enabled": True}, optimizer={"type": kind, "params": {"lr": 0.01}})
    engine, wrapped, _, _ = deepspeed.initialize(model=make_net(), config=made)
    train_engine(engine, 2, rank, world)
    saved = wrapped.state_dict()
    masters = [float(m.double().sum()) for group in wrapped.fp32_groups for m in group]
    for group in wrapped.fp32_groups:
        for master in group:
            master.data.zero_()
    wrapped.load_state_dict(saved)
    assert masters == [float(m.double().sum()) for group in wrapped.fp32_groups for m in group]
    assert (type(wrapped).__name__, "fp32_groups_flat" in saved, "fp32_groups" in saved) == (name, flat, not flat)


def test_the_unfused_wrapper_takes_its_published_arguments():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5)
    wrapped = FP16_UnfusedOptimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args=None, fused_lamb_legacy=True)
    assert wrapped.loss_scale_config.dynamic_loss_scale
    refused(TypeError, "initial_dynamic_scale", FP16_UnfusedOptimizer, optimizer, initial_dynamic_scale=4)


def poisoned():
    """Gives an infinite or missing number as gradient of one weight in chosen steps on chosen ranks."""
    return Parts(
        lambda net, x, poison: (net.good * x).sum() + (net.bad * poison).sum(),
        good=torch.nn.Parameter(torch.randn(9)),
        bad=torch.nn.Parameter(torch.randn(5)),
    )


def simulate(overflows, power, window, hysteresis, floor, settling):
    """The published rule of dynamic loss scaling; returns the scale after each step. `settling`: clean steps after the
    start and after an overflow that do not count, one without ZeRO."""
    scale, since, left, scales = 2.0**power, -settling, hysteresis, []
    for overflow in overflows:
        if overflow:
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, floor)
            since = -settling
        else:
            since += 1
            if since == window:
                scale, since, left = scale * 2, 0, hysteresis
        scales.append(scale)
    return scales


def body_overflow(rank, world, precision, pattern):
    model = seeded(poisoned)
    made = config(world, 1, size=world, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, **precision)
    scales, steps, frozen = [], [], []
    with logged() as records:
        engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=made)
        given = {"dtype": model.good.dtype, "device": engine.device}
        for bad_rank, value in pattern:
            before = [p.detach().clone() for p in model.parameters()]
            last = scheduler.last_batch_iteration
            poison = torch.full((5,), value if rank == bad_rank else 0.01, **given)
            take_step(engine, engine(torch.full((9,), 0.1, **given), poison))
            overflow = bad_rank is not None
            assert engine.was_step_applied() == (not overflow)
            assert optimizer.overflow == overflow
            if overflow:
                assert scheduler.last_batch_iteration == last
                frozen.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters())))
            scales.append(optimizer.cur_scale)
            steps.append((engine.global_steps, engine.skipped_steps))
    return scales, steps, frozen, [r for r in records if "overflow" in r]


INF, NAN = float("inf"), float("nan")
PATTERN = [(None, 0)] * 3 + [(0, INF), (None, 0), (1, NAN), (1, INF)] + [(None, 0)] * 6 + [(0, NAN)]


@needs_fp16
@pytest.mark.any_device
@pytest.mark.parametrize("stage, hysteresis", [(0, None), (0, 2), (1, None), (1, 1)])
def test_fp16_dynamic_scale_follows_the_rule_on_every_rank(stage, hysteresis):
    """Without ZeRO the first overflow lowers the scale unless the configuration asks for hysteresis."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "min_loss_scale": 1}
    if hysteresis is not None:
        fp16["hysteresis"] = hysteresis
    more = {"fp16": fp16, "zero_optimization": {"stage": stage}}
    tolerated = hysteresis or (2 if stage else 1)
    overflows = [bad is not None for bad, _ in PATTERN]
    for scales, steps, frozen, _ in run_ranks(2, body_overflow, more, PATTERN):
        assert scales == simulate(overflows, 8, 3, tolerated, 1, 0 if stage else 1)
        assert steps == [(step + 1, sum(overflows[: step + 1])) for step in range(len(overflows))]
        assert frozen == [True] * sum(overflows)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "precision",
    [{"bf16": {"enabled": True}}, pytest.param({"fp16": {"enabled": True, "loss_scale": 4}}, marks=needs_fp16)],
    ids=["bf16", "fp16 static"],
)
def test_an_overflow_names_rank_parameter_and_kind(precision):
    ranks = run_ranks(2, body_overflow, precision, [(None, 0), (1, NAN), (0, INF)])
    for _, steps, frozen, _ in ranks:
        assert steps[-1] == (3, 2) and frozen == [True, True]
    on_first, on_second = ranks[0][3], ranks[1][3]
    assert any("[Rank 1]" in line and "'bad' has nan" in line for line in on_second)
    assert any("[Rank 0]" in line and "'bad' has inf" in line for line in on_first)
    assert not any("'good'" in line for line in on_first + on_second)


@needs_fp16
@on_ranks(1)
def test_fp16_clips_unscaled_gradients(rank, world):
    expected = plain_net(20)
    engine = engine_of(make_net(), config(world, 1, fp16={"enabled": True, "initial_scale_power": 10}))
    losses, got = train_engine(engine, 20, rank, world)
    assert got == pytest.approx(expected.norms, rel=0.05)
    assert losses == pytest.approx(expected.means, rel=0.02)


@needs_fp16
@pytest.mark.parametrize("by_scale", [False, True], ids=["loss.backward", "engine.scale"])
@on_ranks(1)
def test_fp16_with_a_backward_of_the_user(rank, world, by_scale):
    made = config(1, 2, fp16={"enabled": True, "initial_scale_power": 10})
    models = [make_net(), make_net()]
    engines = [engine_of(m, copy.deepcopy(made)) for m in models]
    for step in range(4):
        for micro in range(2):
            take_step(engines[0], loss_on(engines[0], step, rank=micro, world=2))
            loss = loss_on(engines[1], step, rank=micro, world=2)
            (engines[1].scale(loss) if by_scale else loss).backward()
            engines[1].step()
    first, second = [[float(p.detach().double().sum()) for p in m.parameters()] for m in models]
    assert first == pytest.approx(second, rel=1e-6)


@on_ranks(1)
def test_mixed_dtypes_in_one_model(rank, world):
    """A bf16 layer in an fp32 model trains with a master of its own, without being asked for."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4).bfloat16()})
    before = [p.detach().clone() for p in model.parameters()]

    both = Parts(lambda net, x: net.parts["b"](net.parts["a"](x).bfloat16()).float().square().mean(), parts=model)
    engine = engine_of(both, config(1))
    for _ in range(3):
        take_step(engine, engine(torch.ones(2, 4)))
    assert all(not torch.equal(a, b.detach()) for a, b in zip(before, model.parameters()))


def test_difference_notices(tmp_path):
    """The measure that these tests lean on sees a small change."""
    model, other = make_net(), make_net()
    assert difference(model, other) == 0
    with torch.no_grad():
        other.out.bias *= 1 + 1e-5
    assert difference(model, other) > 5e-6
    assert uses_extra(0) and not uses_extra(1)
