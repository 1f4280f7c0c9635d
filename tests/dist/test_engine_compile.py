"""engine.compile: where torch has a compiler, and the clear refusal where it has none."""

import pytest
import torch

from harness import on_ranks
from models import Parts, seeded
from refusals import refused
from runs import TORCH2, engine_of, settings, take_step

needs_compiler = pytest.mark.skipif(not TORCH2, reason="torch 1.13 has no torch.compile")


def net_of():
    """torch.compile skips torch's own containers when nothing is around them."""
    return Parts(
        lambda net, x: net.second(torch.tanh(net.first(x))),
        first=torch.nn.Linear(6, 8),
        second=torch.nn.Linear(8, 3),
    )


def make_engine(stage=0):
    return engine_of(seeded(net_of), settings(stage))


def train(engine):
    torch.manual_seed(1)
    return [take_step(engine, engine(torch.randn(2, 6)).square().mean()) for _ in range(4)]


@needs_compiler
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_a_compiled_model_trains_as_before(rank, world, stage):
    expected = train(make_engine(stage))
    engine = make_engine(stage)
    assert not engine.is_compiled
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    engine.compile(backend=backend)
    assert engine.is_compiled and not engine.is_deepcompile_active()
    found = train(engine)
    assert graphs, "nothing was compiled"
    engine.compile(backend="no such backend")  # compiled already: nothing happens
    engine.destroy()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(TORCH2, reason="for a torch without a compiler")
@on_ranks(1)
def test_without_a_compiler_it_says_so(rank, world):
    engine = make_engine()
    refused(RuntimeError, "torch 2.0 or later", engine.compile)
    assert not engine.is_compiled


@needs_compiler
@on_ranks(1)
def test_what_cannot_be_done_is_refused(rank, world):
    engine = make_engine()
    refused(ValueError, "DeepCompile", engine.compile, schedule=[])
    refused(ValueError, "hooks", engine.compile, compiled_autograd_enabled=True)
    refused(ValueError, "backend=", engine.compile, compile_kwargs={"backend": "eager"})
    assert not (engine.is_compiled or engine.is_deepcompile_enabled())
