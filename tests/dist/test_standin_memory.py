"""The memory limit of the stand-in device, reached on one rank of two: each rank fails before anything is updated,
nothing is kept, and training goes on as if it had not been, or ends. tests/device/standin.py says how it is used."""

import contextlib
import gc

import pytest
import standin
import torch

import deepspeed
from engine_models import after_embedding, batch, loss_of, make_net, net_engine, train_engine, uses_extra
from harness import run_ranks
from models import Parts
from runs import weights
from sampling import every_case

pytestmark = pytest.mark.skipif(not standin.supported(), reason="the stand-in device needs torch 2.9 or newer")

SEEDS = range(1, 201 if every_case() else 21)
FULL = 1 << 32
TOLD = "data-parallel rank 1 could not compute its gradients; its own message says why."


class Hungry(torch.autograd.Function):
    """Asks for a MiB in the pass that ``place`` names."""

    place = None

    @staticmethod
    def ask(place, x):
        if Hungry.place == place:
            torch.empty(1 << 20, dtype=torch.uint8, device=x.device)

    @staticmethod
    def forward(ctx, x):
        Hungry.ask("forward", x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Hungry.ask("backward", grad)
        return grad.clone()


def hungry_net():
    """``make_net``, hungry in front of its second layer: most gradients are there when its backward asks."""
    parts = dict(make_net().named_children())
    return Parts(lambda net, tokens, extra=False: after_embedding(net, Hungry.apply(net.embed(tokens)), extra), **parts)


@contextlib.contextmanager
def limited(device, place, here):
    """A context in which the device has less than Hungry asks for."""
    if here:
        standin.limit(torch.standin.memory_reserved(device) + (256 << 10), device.index)
        Hungry.place = place
    try:
        yield
    finally:
        Hungry.place = None
        standin.limit(FULL, device.index)


@contextlib.contextmanager
def nothing_left(device, here):
    """A context in which all memory of the device is taken."""
    filler = []
    if here:
        torch.standin.synchronize(device)
        standin.limit(torch.standin.memory_reserved(device), device.index)
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                filler.append(torch.empty(4096, dtype=torch.uint8, device=device))
    try:
        yield
    finally:
        filler.clear()
        standin.limit(FULL, device.index)


def said(call, *given, **named):
    """The error of ``call``, as text; empty: nothing."""
    try:
        call(*given, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def part_of(engine, step, rank, world):
    return [one.chunk(world)[rank].to(engine.device) for one in batch(step)]


def failed_step(engine, step, rank, world, place):
    """The error of a step in which rank 1 has no memory at ``place``."""
    tokens, targets = part_of(engine, step, rank, world)
    short = rank == 1
    with limited(engine.device, place, short):
        if place == "forward" and short:
            return said(engine, tokens, extra=uses_extra(step))
        loss = loss_of(engine(tokens, extra=uses_extra(step)), targets)
        if place == "forward":
            return ""  # this rank waits in its backward until the other one has repeated its forward
        text = said(engine.backward, loss)
    if place == "backward":
        return text
    assert text == ""
    with nothing_left(engine.device, short):
        return said(engine.step)


def memory_of(engine):
    gc.collect()
    torch.standin.synchronize(engine.device)
    return torch.standin.memory_allocated(engine.device)


def trained(rank, world, stage, place, seeds):
    """The errors of failed steps, the memory in use after each, and the weights. Without ``place`` no step fails."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    engine = net_engine(world, stage, model=hungry_net())
    texts, sizes = [], []
    for step, seed in enumerate(seeds):  # the first step makes the states
        standin.choose(seed, lazy=seed % 2 == 1)
        if place:
            texts.append(failed_step(engine, step, rank, world, place))
        if place == "step":
            engine.step()  # the gradients are still there
        else:
            train_engine(engine, 1, rank, world, start=step)
        sizes.append(memory_of(engine))
    assert standin.faults_at_end() == []
    return texts, sizes, {name: value.cpu() for name, value in weights(engine).items()}


@pytest.mark.sample("values")
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_one_rank_had_no_memory(stage, place):
    seeds = list(SEEDS)
    expected = run_ranks(2, trained, stage, None, seeds, init=True, fresh=True, timeout=900)
    found = run_ranks(2, trained, stage, place, seeds, init=True, fresh=True, timeout=900)
    for rank, (texts, sizes, values) in enumerate(found):
        assert all(torch.equal(value, expected[rank][2][name]) for name, value in values.items())
        assert sizes == expected[rank][1], "something of a failed step is kept"
        for text in texts:
            if rank == 1:
                assert "is out of memory: " in text and text.count("\n") == 0, text
            else:
                assert (text == "") if place == "forward" else (TOLD in text), text


def ended(rank, world, stage, seeds):
    """The error of a backward in which rank 1 has no memory at all, not even to take part in the reduction."""
    deepspeed.accelerator.set_accelerator(standin.Standin_Accelerator())
    texts, left = [], []
    for seed in seeds:
        standin.choose(seed, lazy=seed % 2 == 1)
        engine = net_engine(world, stage, model=hungry_net())
        device = engine.device
        tokens, targets = part_of(engine, 1, rank, world)
        loss = loss_of(engine(tokens, extra=True), targets)
        with nothing_left(device, rank == 1):
            texts.append(said(engine.backward, loss))
        engine.destroy()
        del engine, loss, tokens, targets
        gc.collect()
        torch.standin.synchronize(device)
        left.append(torch.standin.memory_allocated(device))
    return texts, left, standin.faults_at_end()


@pytest.mark.sample("values")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_end_where_one_has_no_memory_to_tell_the_others(stage):
    seeds = list(SEEDS)[:5]
    for rank, (texts, left, faults) in enumerate(run_ranks(2, ended, stage, seeds, init=True, fresh=True, timeout=300)):
        assert faults == [] and left == [0] * len(seeds)
        for text in texts:
            if rank == 1:
                assert "is out of memory: " in text, text
            else:
                assert TOLD in text or "data-parallel rank 1 could not go on: " in text, text
