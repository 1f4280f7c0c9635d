"""Layers that are left out: how often, which, and what takes their place."""

import math
import types

import pytest
import torch
from torch import nn

from deepspeed.data.layer_drop import DroppableForward, LayerDropping, ProgressiveLayerDrop, convert_to_pld
from deepspeed.log import logger
from deepspeed.utils import random_state


class Layer(nn.Module):
    def __init__(self, form=None):
        super().__init__()
        self.fc, self.form, self.calls = nn.Linear(4, 4), form, 0

    def forward(self, x, extra=None):
        self.calls += 1
        x = x + torch.tanh(self.fc(x))
        return x if self.form is None else self.form([x, extra])


def planned(count=6, seed=5, form=None):
    torch.manual_seed(0)
    model = convert_to_pld(nn.Sequential(*(Layer(form) for _ in range(count))), Layer)
    return model, LayerDropping(DroppableForward.of(model), seed)


def test_the_probability_is_its_formula_and_the_log_says_what_is_on(caplog):
    logger.addHandler(caplog.handler)
    try:
        drop = ProgressiveLayerDrop(theta=0.5, gamma=0.001)
    finally:
        logger.removeHandler(caplog.handler)
    assert any("Enabled progressive layer dropping (theta = 0.5)" in one for one in caplog.messages)
    assert drop.get_theta() == 1.0
    for step in range(20000):
        drop.update_state(step)
        assert drop.get_theta() == pytest.approx(0.5 * math.exp(-0.001 * step) + 0.5, rel=1e-12)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": drop.get_theta()}
    assert (ProgressiveLayerDrop().theta, ProgressiveLayerDrop().gamma) == (0.5, 0.001)


def test_as_many_layers_are_dropped_as_the_formula_says():
    _, plan = planned(24)
    drop, dropped, mean, variance = ProgressiveLayerDrop(0.5, 0.001), 0, 0.0, 0.0
    of_layer = torch.zeros(24)
    for step in range(2000):
        drop.update_state(step)
        plan.place(step, 0, drop.get_theta())
        dropped += len(plan.dropped)
        of_layer[list(plan.dropped)] += 1
        mean += 24 * (1 - drop.get_theta())
        variance += 24 * drop.get_theta() * (1 - drop.get_theta())
    assert abs(dropped - mean) < 4 * math.sqrt(variance)
    assert ((of_layer - mean / 24).abs() < 4 * math.sqrt(variance / 24)).all()


def test_the_choice_depends_on_seed_step_and_micro_step_alone():
    _, plan = planned(24)
    _, other = planned(24)
    _, third = planned(24, seed=6)
    chosen = set()
    for step in range(5):
        for micro in range(3):
            for one in (plan, other, third):
                one.place(step, micro, 0.5)
            assert plan.dropped == other.dropped != third.dropped
            chosen.add(plan.dropped)
    assert len(chosen) == 15
    plan.place(0, 0, 1.0)
    assert not plan.dropped


@pytest.mark.parametrize("form", [None, tuple, list])
def test_a_dropped_layer_passes_its_input_and_a_kept_one_is_right_in_the_mean(form):
    model, plan = planned(form=form)
    plan.place(3, 0, 0.5)
    first, kept = min(plan.dropped), min(set(range(6)) - plan.dropped)
    x, calls = torch.randn(2, 4), [layer.calls for layer in model]
    whole = model.eval()[kept](x) if form is None else model.eval()[kept](x)[0]
    model.train()
    before = torch.get_rng_state()
    made = model[first](x, extra="given")
    assert torch.equal(torch.get_rng_state(), before)  # a call that asks for the form leaves random numbers alone
    assert made is x if form is None else type(made) is form and made[0] is x and made[1:] == form([None])
    made = model[kept](x, extra="given")
    if form is not None:
        assert type(made) is form and made[1] == "given"
        made = made[0]
    torch.testing.assert_close(made, x + (whole - x) / 0.5)
    model[first](x)
    assert model[first].calls - calls[first] == 1  # that call alone: now the form is known
    plan.place(3, 0, 1.0)
    made = model[kept](x)
    assert torch.equal(made if form is None else made[0], whole)  # bit by bit


def test_the_call_that_finds_the_form_uses_the_generator_of_one_device(monkeypatch):
    """A process that uses one GPU of several does not begin to use the others."""
    used = []
    device = types.SimpleNamespace(
        device_name=lambda: "gpu",
        is_available=lambda: True,
        current_device=lambda: 3,
        get_rng_state=used.append,
        set_rng_state=lambda state, index: used.append(index),
    )
    monkeypatch.setattr(random_state, "get_accelerator", lambda: device)
    model, plan = planned(form=tuple)
    plan.place(3, 0, 0.5)
    model[min(plan.dropped)](torch.zeros(2, 4))
    assert set(used) == {3}


def test_refused():
    class Narrow(nn.Module):
        def forward(self, x):
            return x[:, :2]

    model = convert_to_pld(nn.Sequential(Narrow(), Narrow()), Narrow)
    plan = LayerDropping(DroppableForward.of(model), 1)
    plan.place(0, 0, 0.999)
    with pytest.raises(TypeError, match=r"Narrow returns \(3, 2\) for an input of shape \(3, 4\)"):
        model[0](torch.zeros(3, 4))
    with pytest.raises(ValueError, match="convert_to_pld: the model has no layer of the class Linear"):
        convert_to_pld(nn.Sequential(nn.Tanh()), nn.Linear)
