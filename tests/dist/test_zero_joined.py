"""Engines that meet in one graph: every parameter gets the gradient of the loss, once scaled, whoever runs backward."""

import pytest
import torch

from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from models import Parts, seeded
from runs import KEEP_GATHERED, engine_of, settings, with_fp16

HOWS = ("plain", "first", "second", "scale first", "scale second")


class Linear(torch.nn.Linear):
    """In any precision: a CPU has no fp16 products on torch 1.13."""

    def forward(self, x):
        return torch.nn.functional.linear(x.float(), self.weight.float()).to(x.dtype)


def linear(seed, inputs, outputs):
    return seeded(Linear, inputs, outputs, bias=False, seed=seed)


def make_engine(model, stage, precision, accumulation, scale=64.0):
    made = settings(stage, 4, accumulation, precision, {"type": "AdamW"}, zero=KEEP_GATHERED)
    if precision == "fp16":
        made["fp16"] = {"enabled": True, "loss_scale": scale}
    with with_fp16():
        return engine_of(model, made)


def backward(how, engines, loss):
    if how in ("first", "second"):
        engines[how == "second"].backward(loss)
    elif how == "plain":
        loss.backward()
    else:
        engines[how == "scale second"].scale(loss).backward()


def batch(rank, micro):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + micro))


def loss_of(first, second, x, dtype):
    hidden = first(x.to(dtype))
    # Both ways into the loss: through the second model, and past it.
    return second(hidden).float().square().mean() + 0.3 * hidden.float().square().mean()


def grads_of(world, accumulation, dtype):
    """The losses of one process that has everybody's batches."""
    first, second = linear(1, 3, 5).to(dtype), linear(2, 5, 2).to(dtype)
    sums = [torch.zeros_like(model.weight, dtype=torch.float32) for model in (first, second)]
    for rank in range(world):
        for micro in range(accumulation):
            loss_of(first, second, batch(rank, micro), dtype).backward()
            for total, model in zip(sums, (first, second)):
                total += model.weight.grad.float() / (accumulation * world)
                model.weight.grad = None
    return sums


@pytest.mark.sample("values", 6)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_two_engines_in_a_graph(rank, world, stage, precision):
    accumulation = 2
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    expected = grads_of(world, accumulation, dtype)
    for how in HOWS:
        engines = [
            make_engine(linear(1, 3, 5), stage, precision, accumulation),
            make_engine(linear(2, 5, 2), stage, precision, accumulation, scale=1024.0),  # not that of the first
        ]
        for micro in range(accumulation):
            backward(how, engines, loss_of(*engines, batch(rank, micro), dtype))
            if micro < accumulation - 1:
                for engine in engines:
                    engine.step()
        for name, engine, grad in zip(("first", "second"), engines, expected):
            found = safe_get_full_grad(engine.module.weight)
            limit = 1e-6 if precision == "fp32" else 2e-2
            most = grad.abs().max().item()
            torch.testing.assert_close(found, grad, rtol=limit, atol=limit * most, msg=f"{how} {name}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(1)
def test_an_engine_that_is_fed_its_own_output(rank, world, stage):
    model = linear(1, 3, 3)
    for micro in range(2):
        (model(model(batch(0, micro))).square().mean() / 2).backward()
    for how in ("plain", "first", "scale first"):
        engine = make_engine(linear(1, 3, 3), stage, "fp32", 2)
        for micro in range(2):
            backward(how, [engine], engine(engine(batch(0, micro))).square().mean())
            if not micro:
                engine.step()
        torch.testing.assert_close(safe_get_full_grad(engine.module.weight), model.weight.grad)


@on_ranks(1)
def test_what_is_outside_of_the_engine_gets_the_gradient_of_the_loss(rank, world):
    model = linear(1, 3, 2)
    given, shown = batch(0, 0).requires_grad_(), torch.ones(2, requires_grad=True)
    (model(given) * shown).square().mean().backward()
    engine = make_engine(linear(1, 3, 2), 1, "fp32", 4)
    own, factor = batch(0, 0).requires_grad_(), torch.ones(2, requires_grad=True)
    (engine(own) * factor).square().mean().backward()
    assert torch.equal(own.grad, given.grad) and torch.equal(factor.grad, shown.grad)
    assert safe_get_full_grad(engine.module.weight).allclose(model.weight.grad / 4)


def nested():
    return Parts(
        lambda net, pair, more=None: (net.inner(pair[0]) + net.inner(more["x"][1]), more["name"]),
        inner=linear(1, 3, 3),
    )


@on_ranks(1)
def test_inputs_in_containers(rank, world):
    outer, model = linear(2, 3, 3), nested()
    hidden = outer(batch(0, 0))
    model((hidden, 1), more={"x": [None, hidden * 2], "name": "n"})[0].square().mean().backward()
    engine, own = make_engine(nested(), 1, "fp32", 2), linear(2, 3, 3)
    hidden = own(batch(0, 0))
    found, name = engine((hidden, 1), more={"x": [None, hidden * 2], "name": "n"})
    found.square().mean().backward()
    assert name == "n"
    torch.testing.assert_close(own.weight.grad, outer.weight.grad)
