"""Hazards of sharded training in practice: other branches on other ranks, exceptions, unusual calls.

Every test trains next to one plain fp64 process on the same data.
"""

import dataclasses
import hashlib

import pytest
import torch

from harness import on_ranks
from models import Parts, seeded
from refusals import refused
from runs import take_step, together, weight_list, weights
from sampling import every_case
from zero_models import make, outputs_of, relative
from zero_training import STAGES, WIDTH, Deep, batch, below, beside, gap, loss_of, loss_on, start, train_beside

pytestmark = pytest.mark.any_device


# ---- one result, always --------------------------------
@pytest.mark.sample("values")
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(timeout=120)
def test_many_runs_have_one_result(rank, world, stage):
    found = []
    for _ in range(50 if every_case() else 10):
        model = make("unused")
        engine = start(model, stage, world, 2, zero={"overlap_comm": True, "reduce_bucket_size": 30})
        for step in range(3):
            for micro in range(2):
                for loss in outputs_of(engine, step, 2 * rank + micro):
                    engine.backward(loss)
                engine.step()
        digest = hashlib.sha256(str(engine.get_global_grad_norm()).encode())
        for _, value in sorted(weights(model).items()):
            digest.update(value.cpu().numpy().tobytes())
        found.append(digest.hexdigest())
        engine.destroy()
    assert len({digest for digests in together(found) for digest in digests}) == 1


# ---- ranks that do not do the same --------------------------------
ALONE = {"DS_PEER_MEMORY": "0"}  # as between hosts and on GPUs: the ranks agree on what is gathered next


@pytest.mark.sample("values")
@pytest.mark.parametrize("how", ["expert", "depth"])
@pytest.mark.parametrize("stage, env", [*((stage, {}) for stage in STAGES), (3, ALONE)])
@on_ranks(3, timeout=30, given=["env"])
def test_ranks_take_other_branches(rank, world, stage, how):
    def layers(step, part):
        if how == "expert":
            return [0, 1 + (part + step) % 3]
        return range((part + step) % 4 + 1)

    engine, reference = beside(seeded(Deep), stage, world)
    train_beside(engine, reference, rank, world, range(6), lambda step, part: (layers(step, part),))
    below(gap(engine, reference))


def evaluate(engine, times):
    engine.eval()
    with torch.no_grad():
        for index in range(times):
            engine(batch(99, index)[0].to(engine.device), range(index + 1))
    engine.train()


@pytest.mark.sample("values")
@pytest.mark.parametrize("env", [{}, ALONE], ids=["shared memory", "without"])
@pytest.mark.parametrize("how", ["gather", "eval before", "eval between", "eval after"])
@on_ranks(3, timeout=30, given=["env"])
def test_one_rank_alone(rank, world, how):
    model = seeded(Deep)
    engine, reference = beside(model, 3, world)
    for step in range(5):
        if how == "gather" and rank == 0:
            assert all(relative(a, b) < 1e-6 for a, b in zip(weight_list(model), reference.model.parameters()))
        if how == "eval before" and rank == step % world:
            evaluate(engine, 3)
        loss = loss_on(engine, step, rank)
        if how == "eval between" and rank == step % world:
            evaluate(engine, 2)
        engine.backward(loss)
        if how == "eval after" and rank == step % world:
            evaluate(engine, 2)
        engine.step()
        reference.run(loss_on, [step], world)
    below(gap(engine, reference))


# ---- exceptions --------------------------------
class Trap(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Trap.armed:
            raise ArithmeticError("half-way")
        return grad


class Trapped(Deep):
    fails = False

    def forward(self, x):
        hidden = x * self.extra[0]
        for index, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden))
            if index == 1:
                if self.fails:
                    raise ArithmeticError("half-way")
                hidden = Trap.apply(hidden)
        return self.head(hidden + self.extra[1])


@pytest.mark.sample("values")
@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_training_goes_on_after_a_backward_that_raised(rank, world, stage, accumulate, user_backward):
    engine, reference = beside(seeded(Trapped), stage, world, accumulate, zero={"overlap_comm": True})

    def backward(step, micro):
        loss = loss_on(engine, step, rank * accumulate + micro)
        loss.backward() if user_backward else engine.backward(loss)

    for step in range(5):
        if step in (2, 3):
            for micro in range(accumulate - 1):
                backward(step, micro)
            Trap.armed = True
            refused(ArithmeticError, None, backward, step, accumulate - 1)
            Trap.armed = False
            engine.zero_grad()
        for micro in range(accumulate):
            backward(step, micro)
            engine.step()
        Trap.armed = False
        reference.run(loss_on, [step], world * accumulate)
    below(gap(engine, reference))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_training_goes_on_after_a_forward_that_raised_on_one_rank(rank, world, stage):
    model = seeded(Trapped)
    engine, reference = beside(model, stage, world)
    for step in range(4):
        x, _ = batch(step, rank)
        if step in (1, 2) and rank == 0:
            model.fails = True
            refused(ArithmeticError, None, engine, x.to(engine.device))
            model.fails = False
            released = [p for p in model.parameters() if p.numel() == 0]
            assert bool(released) == (stage == 3)
            for param in released:  # nothing runs any more: a touch is an error again
                refused(RuntimeError, "GatheredParameters", param.norm)
        train_beside(engine, reference, rank, world, [step])
    below(gap(engine, reference))


# ---- ways to call backward --------------------------------
def _no_sync(engine, losses, parts):
    with engine.no_sync():
        for _ in range(parts - 1):
            engine.backward(next(losses) / parts)
    engine.backward(next(losses) / parts)


def _no_sync_and_step_reduces(engine, losses, parts):
    with engine.no_sync():
        _in_turn(engine, losses, parts)


def _in_turn(engine, losses, parts):
    for loss in losses:
        (loss / parts).backward()


def _accumulation(engine, losses, parts):
    for _ in range(parts - 1):
        take_step(engine, next(losses), plain=True)
    next(losses).backward()


# how -> a function of the engine, losses that are computed when they are asked for, and their number
BACKWARDS = {
    "no_sync": _no_sync,
    "no_sync, step reduces": _no_sync_and_step_reduces,
    "several backwards": lambda engine, losses, parts: [engine.backward(loss / parts) for loss in losses],
    "several user backwards": _in_turn,
    "engine.scale": lambda engine, losses, parts: [engine.scale(loss / parts).backward() for loss in losses],
    "several forwards, one backward": lambda engine, losses, parts: engine.backward(sum(list(losses)) / parts),
    "several forwards, backwards in turn": lambda engine, losses, parts: _in_turn(engine, list(losses), parts),
    "accumulation": _accumulation,
}


@pytest.mark.sample("values", 12)
@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_ways_to_call_backward(rank, world, stage, how):
    parts = 3
    engine, reference = beside(seeded(Deep), stage, world, parts if how == "accumulation" else 1)
    mine = range(rank * parts, (rank + 1) * parts)
    for step in range(5):
        losses = (loss_on(engine, step, part) for part in mine)
        BACKWARDS[how](engine, losses, parts)
        engine.step()
        reference.run(loss_on, [step], world * parts)
    below(gap(engine, reference))


class Forces(Deep):
    """The output contains a gradient of the model: training goes through it a second time."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x).sum()
            force = torch.autograd.grad(energy, x, create_graph=True)[0]
        return force[:, :2] + energy / 10


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_autograd_grad_inside_forward(rank, world, stage):
    engine, reference = beside(seeded(Forces), stage, world)
    for step in range(5):
        take_step(engine, loss_on(engine, step, rank), step % 2)
        reference.run(loss_on, [step], world)
    below(gap(engine, reference))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_gradient_penalty_outside_forward(rank, world, stage):
    engine, reference = beside(seeded(Deep), stage, world)

    def penalized(module, step, part):
        x, target = batch(step, part)
        x = x.to(next(module.parameters())).requires_grad_()
        output = module(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        return loss_of(output, target) + (slope**2).mean()

    for step in range(5):
        take_step(engine, penalized(engine, step, rank))
        reference.run(penalized, [step], world)
    if stage == 3:
        assert engine.core.gatherer.live_numel == 0
    below(gap(engine, reference))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_parameters_frozen_and_thawed_between_steps(rank, world, stage):
    model = seeded(Deep)
    engine, reference = beside(model, stage, world)
    for step in range(8):
        for one in (model, reference.model):
            one.layers[1].requires_grad_(step not in (2, 3))
            one.head.weight.requires_grad_(step % 3 != 1)
            one.extra.requires_grad_(step < 6)
        train_beside(engine, reference, rank, world, [step])
    below(gap(engine, reference))


# ---- ways to call a module --------------------------------
@dataclasses.dataclass
class Both:
    first: torch.Tensor
    rest: object = None


def pair_of(kind):
    """Two inputs, each with a weight; returns what ``kind`` says."""
    return Parts(
        lambda net, *, x, y: pack(net.kind, torch.tanh(x @ net.a), torch.tanh(y @ net.b)),
        kind=kind,
        a=torch.nn.Parameter(torch.rand(WIDTH, WIDTH) / 3),
        b=torch.nn.Parameter(torch.rand(WIDTH, WIDTH) / 3),
    )


def pack(kind, first, second):
    if kind == "dict":
        return {"first": first, "second": {"it": second}}
    if kind == "list":
        return [first, ([second],)]
    return Both(first, [Both(second)]) if kind == "dataclass" else (first, second)


def unpack(value):
    if isinstance(value, dict):
        return value["first"], value["second"]["it"]
    if isinstance(value, list):
        return value[0], value[1][0][0]
    return (value.first, value.rest[0].first) if isinstance(value, Both) else value


def forward_keywords(net, *, inputs):
    x = net.inlet(inputs["x"])
    x, y = unpack(net.pair(x=x, y=x + 1))
    x, y = unpack(net.outlet(y=y, x=x))
    return pack(net.pair.kind, x[:, :2], y[:, 2:4])


def keywords(kind):
    inlet = torch.nn.Linear(WIDTH, WIDTH)
    return Parts(forward_keywords, inlet=inlet, pair=pair_of(kind), outlet=pair_of(kind))


@pytest.mark.sample("values", 8)
@pytest.mark.parametrize("user_backward", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "list", "dataclass"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_keyword_arguments_and_nested_outputs(rank, world, stage, kind, user_backward):
    accumulate = 2
    engine, reference = beside(seeded(keywords, kind), stage, world, accumulate)

    def both_losses(module, step, part):
        x, target = batch(step, part)
        return sum(loss_of(one, target) for one in unpack(module(inputs={"x": x.to(next(module.parameters()))})))

    for step in range(4):
        for micro in range(accumulate):
            take_step(engine, both_losses(engine, step, rank * accumulate + micro), user_backward)
        reference.run(both_losses, [step], world * accumulate)
    below(gap(engine, reference))


def forward_mixed(net, x):
    hidden = net.inlet(x)
    hidden = net.inner(hidden * 1, weight=net.head.weight, other=torch.tanh(hidden))
    return net.head(hidden)


def mixed():
    """Positional and keyword inputs that need gradients, changed in place, and parameters as inputs of a child."""
    return Parts(
        forward_mixed,
        inlet=torch.nn.Linear(WIDTH, WIDTH),
        inner=inner(),
        head=torch.nn.Linear(WIDTH, 2),
    )


def forward_inner(net, x, weight, other):
    before = (2 * x) @ net.a
    x += 1
    return before * (torch.tanh(x) @ net.b) + other @ (net.a * net.b) + (other @ weight.t()).sum()


def inner():
    return Parts(
        forward_inner,
        a=torch.nn.Parameter(torch.rand(WIDTH, WIDTH) / 3),
        b=torch.nn.Parameter(torch.rand(WIDTH, WIDTH) / 3),
    )


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_inputs_changed_in_place_and_borrowed_weights(rank, world, stage):
    engine, reference = beside(seeded(mixed), stage, world)
    train_beside(engine, reference, rank, world)
    below(gap(engine, reference))


def lends(kind):
    """Hands out its bias beside its result, and never calls the layer whose weight it uses."""
    return Parts(
        lambda net, x: pack(net.kind, torch.nn.functional.linear(x, net.uncalled.weight), net.bias),
        uncalled=torch.nn.Linear(WIDTH, WIDTH, bias=False),
        bias=torch.nn.Parameter(torch.rand(WIDTH)),
        kind=kind,
    )


def forward_borrows(net, x):
    result, bias = unpack(net.lender(net.inlet(x)))
    net.seen.append(tuple(bias.shape))
    return net.head(torch.tanh(result + bias))


def borrows(kind):
    return Parts(
        forward_borrows,
        inlet=torch.nn.Linear(WIDTH, WIDTH),
        lender=lends(kind),
        head=torch.nn.Linear(WIDTH, 2),
        seen=[],
    )


@pytest.mark.sample("values")
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, timeout=30)
def test_weights_of_layers_that_are_not_called_and_parameters_as_outputs(rank, world, stage, kind):
    model = seeded(lambda: borrows(kind))
    engine, reference = beside(model, stage, world)
    train_beside(engine, reference, rank, world)
    with torch.no_grad():
        engine(batch(3, rank)[0].to(engine.device))
    assert model.seen == [(WIDTH,)] * 5
    if stage == 3:
        assert not any(param.ds_handle.holders for param in model.parameters()), "given back after each call"
    below(gap(engine, reference))
