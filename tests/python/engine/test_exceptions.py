"""An exception of the model, the loss or the optimizer leaves the engine as it was: the next call works."""

from unittest import mock

import pytest
import torch

from refusals import refused
from runs import KEEP_GATHERED, engine_of, settings, take_step, weight_list

STEPS = 4


class Model(torch.nn.Module):
    """Raises where ``fails`` says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.fails = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), None

    def forward(self, x):
        if self.fails == "forward":
            raise KeyError("forward")
        hidden = self.first(x)
        if self.fails == "backward":
            hidden.register_hook(self.raise_in_backward)
        return self.last(hidden).square().mean()

    def raise_in_backward(self, grad):
        raise KeyError("backward")


def trained(stage, fails_in):
    model, schedule = Model(), mock.NonCallableMock(spec=["step", "state_dict"])
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    more = {"wall_clock_breakdown": True, "gradient_clipping": 0.0}
    engine = engine_of(model, settings(stage, optimizer=adam, zero=KEEP_GATHERED, **more), lr_scheduler=schedule)
    for step in range(STEPS):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        if step in (1, 2) and fails_in != "step":
            model.fails = fails_in
            refused(KeyError, fails_in, lambda x: engine.backward(engine(x)), x)
            model.fails = None
        engine.backward(engine(x))
        if step == 1 and fails_in == "step":
            schedule.step.side_effect = KeyError("step")
            refused(KeyError, "step", engine.step)
            schedule.step.side_effect = None
        engine.step()
    running = [name for name, timer in engine.progress.timers.get_timers().items() if timer.started_]
    weights = weight_list(model)
    engine.destroy()
    return weights, running


@pytest.fixture(scope="module")
def without_exceptions():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("fails_in", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on(stage, fails_in, without_exceptions):
    weights, running = trained(stage, fails_in)
    assert running == []
    torch.testing.assert_close(weights, without_exceptions, rtol=1e-5, atol=1e-6)


def test_a_timer_whose_start_has_failed(monkeypatch):
    """The first of two timers runs when the second cannot start."""
    model = Model()
    engine = engine_of(model, {"train_batch_size": 2, "wall_clock_breakdown": True, "optimizer": {"type": "Adam"}})
    timers = engine.progress.timers
    take_step(engine, engine(torch.ones(2, 4)))
    for name, call in (
        ("fwd", lambda: engine(torch.ones(2, 4))),
        ("bwd", lambda: engine.backward(engine(torch.ones(2, 4)))),
        ("step", engine.step),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(timers(name), "start", mock.Mock(side_effect=KeyError("start")))
            refused(KeyError, "start", call)
        assert not any(timer.started_ for timer in timers.get_timers().values())
        call()
    engine.destroy()
