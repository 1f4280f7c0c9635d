"""A move of the schedule around an update: what the schedule writes counts, and so does what the optimizer writes."""

import pytest
import torch

from deepspeed.engine.scheduling import Move
from refusals import refused


class Counts(torch.optim.SGD):
    """Keeps counters in its groups, as FusedAdam, Prodigy and schedule-free optimizers do."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            group["scale"] *= 2  # in place
            group.pop("fresh", None)


class Writes(torch.optim.lr_scheduler.StepLR):
    fails = False

    def step(self, epoch=None):
        super().step()
        if self.optimizer.param_groups[0].pop("first", None) is None:
            self.optimizer.param_groups[0]["momentum"] = 0.5
        self.optimizer.param_groups[0]["gain"] += 1  # in place
        if self.fails:
            raise RuntimeError("this schedule fails on purpose")


def make():
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "scale": torch.ones(()), "fresh": True}
    optimizer = Counts([{**group, "gain": torch.zeros(())}], lr=8.0)
    scheduler = Writes(optimizer, 1, 0.5)
    optimizer.param_groups[0].update(first=True, momentum=0, gain=torch.zeros(()))  # the constructor has moved it
    return optimizer, scheduler, Move(scheduler, optimizer, (), {})


def seen(optimizer):
    group = optimizer.param_groups[0]
    return {
        key: float(value) if torch.is_tensor(value) else value
        for key, value in group.items()
        if key in ("lr", "momentum", "seen", "scale", "fresh", "first", "gain")
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_both_write():
    optimizer, _, move = make()
    move.make()
    assert seen(optimizer) == {"lr": 8.0, "momentum": 0, "scale": 1.0, "fresh": True, "first": True, "gain": 0.0}
    optimizer.step()
    move.keep()
    assert seen(optimizer) == {"lr": 4.0, "momentum": 0, "seen": 1, "scale": 2.0, "gain": 1.0}
    again = Move(move.scheduler, optimizer, (), {})
    again.make()
    optimizer.step()
    again.keep()
    assert seen(optimizer) == {"lr": 2.0, "momentum": 0.5, "seen": 2, "scale": 4.0, "gain": 2.0}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_undone():
    optimizer, scheduler, move = make()
    before = seen(optimizer)
    scheduler.fails = True
    refused(RuntimeError, "on purpose", move.make)
    assert seen(optimizer) == before and scheduler.last_epoch == 0
    scheduler.fails = False
    move = Move(scheduler, optimizer, (), {})
    move.make()
    optimizer.step()  # an update that raises after this
    move.undo()
    assert scheduler.last_epoch == 0
    assert seen(optimizer) == {"lr": 8.0, "momentum": 0, "seen": 1, "scale": 2.0, "first": True, "gain": 0.0}


class Wraps:
    """A schedule of a script: it holds another one, and changes a list, a dict and a tensor in place."""

    def __init__(self, optimizer):
        self.optimizer, self.after = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.rates, self.counts, self.total = [8.0], {"steps": 0}, torch.zeros(())
        self.groups = optimizer.param_groups

    def step(self):
        self.after.step()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.counts["steps"] += 1
        self.total += 1

    def state(self):
        return self.after.last_epoch, list(self.rates), dict(self.counts), float(self.total)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_a_schedule_holds_moves_back():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=8.0)
    scheduler = Wraps(optimizer)
    rates, before = scheduler.rates, scheduler.state()
    move = Move(scheduler, optimizer, (), {})
    move.make()
    assert scheduler.state() == (1, [8.0, 4.0], {"steps": 1}, 1.0)
    with torch.no_grad():
        weight.fill_(2.0)  # parameters are not the schedule's
    move.undo()
    assert scheduler.state() == before and scheduler.rates is rates and optimizer.param_groups[0]["lr"] == 8.0
    assert weight.tolist() == [2.0, 2.0]
    again = Move(scheduler, optimizer, (), {})
    again.make()
    again.keep()
    assert scheduler.state() == (1, [8.0, 4.0], {"steps": 1}, 1.0) and optimizer.param_groups[0]["lr"] == 4.0
