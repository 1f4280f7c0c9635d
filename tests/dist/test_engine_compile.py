"""engine.compile: where torch has a compiler, and the clear refusal where it has none."""

import copy
import pickle

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


class Block(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def blocks_of():
    def run(net, x):
        for block in net.blocks:
            x = block(x)
        return net.head(x)

    return Parts(run, blocks=torch.nn.ModuleList(Block() for _ in range(10)), head=torch.nn.Linear(8, 3))


def train_blocks(engine, rank):
    torch.manual_seed(1 + rank)
    return [take_step(engine, engine(torch.randn(2, 8)).square().mean()) for _ in range(4)]


@needs_compiler
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_blocks_are_compiled_without_breaks(rank, world, stage):
    """At stage 3 each block is compiled with its hooks outside; blocks share a graph."""
    expected = train_blocks(engine_of(seeded(blocks_of), settings(stage)), rank)
    engine = engine_of(seeded(blocks_of), settings(stage))
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine.compile(backend=backend)
    found = train_blocks(engine, rank)
    assert found == pytest.approx(expected, rel=1e-6)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and not counters["recompile_limit"], counters
    by_blocks = stage == 3 and world > 1
    one_graph = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)  # earlier ones compile each module anew
    if one_graph:
        # The head, and two of the blocks: the input of the first one wants no gradient.
        assert len(graphs) == (3 if by_blocks else 1), graphs
    assert any(torch.nn.functional.gelu in graph for graph in graphs)
    # Parts of a block outside of it, and the model elsewhere.
    part = engine.module.blocks[3].first
    assert part(torch.ones(2, 8)).shape == (2, 16)
    again = pickle.loads(pickle.dumps(copy.deepcopy(engine.module.blocks[2]).forward)) if world == 1 else None
    assert again is None or again.__func__ is Block.forward
    engine.destroy()


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
