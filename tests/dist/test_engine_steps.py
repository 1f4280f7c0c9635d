"""The counters of a step, and the learning-rate schedule that moves with it: skipped steps, steps without a gradient,
schedules that want an argument, schedules that raise."""

import copy
import functools

import pytest
import torch

from harness import on_ranks
from logs import logged
from models import Parts
from plain import Plain
from refusals import refused
from runs import engine_of, settings, take_step
from runs import weight_list as weights

LR, SAMPLES = 0.1, 2  # per rank and micro-step


def net_of(dtype=torch.float32):
    torch.manual_seed(0)
    return Parts(
        lambda net, x: net.last(torch.tanh(net.first(x))).square().mean(),
        first=torch.nn.Linear(6, 5),
        last=torch.nn.Linear(5, 1),
    ).to(dtype)


def inputs(step, rank, micro=0):
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def start(stage=0, optimizer=None, scheduler=None, accumulate=1, model=None, **more):
    made = settings(stage, SAMPLES, accumulate, rate=LR, gradient_clipping=0.0, **more)
    return engine_of(net_of() if model is None else model, made, optimizer, lr_scheduler=scheduler)


sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9)


# ---- steps that are skipped ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage, world", [(0, 1), (2, 2)])
@on_ranks()
def test_a_skipped_step_counts_but_does_not_move_the_schedule(rank, world, stage):
    engine = start(
        stage,
        model=net_of(torch.bfloat16),
        bf16={"enabled": True},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        steps_per_print=5,
    )
    turns = 0
    with logged() as records:
        while engine.global_steps < 5 and turns < 10:
            x = inputs(turns, rank).bfloat16()
            take_step(engine, engine(x * float("inf") if turns in (1, 3) and rank == world - 1 else x))
            turns += 1
    seen = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
    assert turns == 5 and seen == (5, 5 * SAMPLES * world, 5, 2)
    assert engine.lr_scheduler.last_epoch == 3 and engine.get_lr() == [pytest.approx(LR * 0.5**3)]
    assert rank or any("step=5, skipped=2" in text for text in records)


# ---- schedules that want an argument ---------------------------------------------------------------------------------
class Increments:
    """As Megatron's OptimizerParamScheduler."""

    def __init__(self, optimizer):
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment):
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = LR / (1 + self.num_steps)

    def state_dict(self):
        return {"num_steps": self.num_steps}


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def plain_plateau(world, accumulate, told=None):
    plain, rates = Plain(net_of(), sgd, dtype=None), []
    scheduler = plateau(plain.optimizer)
    parts = [(rank, micro) for micro in range(accumulate) for rank in range(world)]
    for step in range(4):
        losses = plain.step(*(plain.model(inputs(step, *part)) for part in parts))
        scheduler.step(sum(losses) / len(losses) if told is None else told)
        rates.append(plain.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("world, stage, accumulate", [(1, 0, 2), (2, 1, 1)])
@on_ranks()
def test_schedules_get_the_argument_that_their_step_wants(rank, world, stage, accumulate):
    samples = SAMPLES * world * accumulate
    found = {}
    for name, scheduler in (("megatron", Increments), ("plateau", plateau), ("told", plateau)):
        engine = start(stage, sgd, scheduler, accumulate)
        rates = []
        for step in range(4):
            for micro in range(accumulate):
                engine.backward(engine(inputs(step, rank, micro)))
                engine.step(lr_kwargs={"metrics": 1.0} if name == "told" else None)
            rates += engine.get_lr()
        found[name] = rates
        engine.destroy()
    assert found["megatron"] == [pytest.approx(LR / (1 + samples * k)) for k in range(1, 5)]
    assert found["plateau"] == pytest.approx(plain_plateau(world, accumulate))
    assert found["told"] == pytest.approx(plain_plateau(world, accumulate, told=1.0))
    assert found["told"][-1] < LR


class ByEpoch(Increments):
    def step(self, epoch):
        super().step(epoch)


@on_ranks(1)
def test_a_schedule_that_counts_epochs_is_refused(rank, world):
    engine = start(0, sgd, ByEpoch)
    before = weights(engine)
    engine.backward(engine(inputs(0, rank)))
    refused(TypeError, "needs `epoch`, and an engine can give a schedule only `increment`", engine.step)
    assert engine.get_lr() == [LR] and all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    engine.step(lr_kwargs={"epoch": 3})
    assert engine.get_lr() == [pytest.approx(LR / 4)] and engine.global_steps == 1


@on_ranks(2)
def test_a_step_that_does_not_fit_the_schedule_moves_nothing(rank, world):
    engine = start(0, sgd, plateau)
    engine(inputs(0, rank)).backward()  # not engine.backward: the engine does not know the loss
    before = weights(engine)
    refused(TypeError, "needs `metrics`", engine.step)
    refused(
        TypeError,
        r"lr_kwargs=\{'epochs': 3\}\) does not fit ReduceLROnPlateau.step",
        engine.step,
        lr_kwargs={"epochs": 3},
    )
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (0, 0, 0)
    engine.step(lr_kwargs={"metrics": 0.5})
    assert engine.global_steps == 1


# ---- schedules that raise --------------------------------------------------------------------------------------------
class Raises(torch.optim.lr_scheduler.StepLR):
    fails = ()

    def step(self, epoch=None):
        super().step()
        if self.last_epoch in self.fails:
            self.optimizer.param_groups[0]["extra"] = 1
            raise RuntimeError("this schedule fails on purpose")


@pytest.mark.parametrize("stage, native, world", [(0, True, 1), (0, False, 2), (2, True, 2), (3, False, 2)])
@on_ranks()
def test_nothing_has_moved_when_the_schedule_raises(rank, world, stage, native):
    def train(fails):
        engine = start(
            stage, None if native else sgd, lambda optimizer: Raises(optimizer, 1, 0.5), wall_clock_breakdown=True
        )
        scheduler = engine.lr_scheduler
        caught = []
        for step in range(3):
            engine.backward(engine(inputs(step, rank)))
            scheduler.fails = fails
            while scheduler.last_epoch == step:
                before = weights(engine), copy.deepcopy(scheduler.state_dict()), engine.get_lr()
                counts = engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps
                try:
                    engine.step()
                except RuntimeError as error:
                    caught.append(str(error))
                    assert all(torch.equal(a, b) for a, b in zip(before[0], weights(engine), strict=True))
                    assert (before[1], before[2]) == (scheduler.state_dict(), engine.get_lr())
                    now = engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps
                    assert counts == now and "extra" not in scheduler.optimizer.param_groups[0]
                    scheduler.fails = ()
        found = weights(engine), engine.get_lr()
        return found, caught

    (smooth, nothing), (repeated, caught) = train(()), train((2,))
    assert nothing == [] and caught == ["this schedule fails on purpose"]
    assert all(torch.equal(a, b) for a, b in zip(smooth[0], repeated[0], strict=True))
    assert smooth[1] == repeated[1] == [LR / 8]


# ---- steps without a gradient ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage, world", [(0, 1), (0, 2), (2, 2), (3, 2)])
@on_ranks()
def test_steps_without_a_gradient_count_and_are_told_once(rank, world, stage):
    engine = start(stage, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    before = weights(engine)
    with logged() as records:
        for _ in range(3):
            engine.step()
    same = all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    take_step(engine, engine(inputs(0, rank)))
    moved = not any(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    said = sum("without a gradient" in text for text in records)
    assert (same, moved, said, engine.global_steps, engine.lr_scheduler.last_epoch) == (True, True, 1, 4, 4)


def lacks(rank, step, micro):
    """Rank 1 has no backward in the first step, nor in the last micro-step of the third, nor anywhere in the fourth."""
    return rank == 1 and (step in (0, 3) or (step == 2 and micro == 1))


def plain_one_lacks(world, accumulate):
    plain = Plain(net_of(), sgd, dtype=None)
    parts = [(rank, micro) for micro in range(accumulate) for rank in range(world)]
    for step in range(5):
        there = (part for part in parts if not lacks(part[0], step, part[1]))
        plain.step(*(plain.model(inputs(step, *part)) for part in there), share=1 / len(parts))
    return [param.detach() for param in plain.params.values()]


@pytest.mark.parametrize(
    "stage, accumulate, plainly", [(0, 1, False), (0, 2, True), (1, 2, False), (2, 2, False), (3, 1, True)]
)
@on_ranks(2, timeout=60)
def test_a_rank_without_a_backward_still_steps_with_the_others(rank, world, stage, accumulate, plainly):
    engine = start(stage, sgd, accumulate=accumulate)
    for step in range(5):
        for micro in range(accumulate):
            if not lacks(rank, step, micro):
                loss = engine(inputs(step, rank, micro))
                loss.backward() if plainly else engine.backward(loss)
            engine.step()
    assert (engine.global_steps, engine.micro_steps) == (5, 5 * accumulate)
    for a, b in zip(weights(engine), plain_one_lacks(2, accumulate), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
