"""Checkpoints of runs whose layers are cut over ranks (``tensor_parallel.autotp_size``): any number of tensor-parallel
and data-parallel ranks and any ZeRO stage read them, as they are and as universal ones."""

import os
import types

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.param_cut import cut_of
from harness import run_ranks
from runs import NATIVE, SMALL_PARTS, engine_of, identical, moments, settings, take_step, weights
from tensor_models import WORDS, Decoder, FalconBlock, GPT2Block, LlamaBlock, model_of, tokens_of

SAMPLES = 4  # of a step: 1, 2 and 4 data-parallel ranks share them


def _uneven():
    """Three heads, and 41 channels of the gated unit: two ranks have unequal slices."""
    return Decoder([LlamaBlock(width=24, heads=3, shared_heads=3, inner=41) for _ in range(2)], "rotary", 24)


def _copies():
    """Two key/value heads: each has two copies on four ranks."""
    return Decoder([LlamaBlock(width=32, heads=4, shared_heads=2) for _ in range(2)], "rotary", 32)


def _fused():
    """Query, key and value in one matrix; the embedding is the head, and one block is frozen."""
    model = Decoder([GPT2Block(width=32, heads=4) for _ in range(2)], "learned", 32, tied=True)
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    return model


MODELS = {"uneven": _uneven, "copies": _copies, "fused": _fused}


def make(name, tp, stage, world, seed=0, **more):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name]()
    tensor = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    config = settings(stage, SAMPLES * tp // world, rate=0.003, zero=SMALL_PARTS, gradient_clipping=1.0, **tensor, **more)
    return engine_of(model, config)


def train(engine, step):
    """The mean loss of the same samples, whoever has them."""
    tokens = tokens_of(SAMPLES, seed=step)
    copies, copy = engine.parallel.dp_world_size, engine.parallel.dp_rank
    own = tokens.chunk(copies)[copy].to(engine.device)
    logits = engine(own)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), own[:, 1:].reshape(-1))
    total = torch.tensor([take_step(engine, loss)], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def states(engine):
    """name -> whole weight, master and moments."""
    found = {name: [value] for name, value in weights(engine).items()}
    for name, kinds in moments(engine).items():
        found[name] += kinds
    cuts = {name: cut_of(param) for name, param in engine.module.named_parameters()}
    return {
        name: [one if cuts[name] is None else cuts[name].join(one.contiguous()).clone() for one in kinds]
        for name, kinds in found.items()
    }


def save(rank, world, name, tp, stage, native, folder):
    engine = make(name, tp, stage, world, checkpoint=NATIVE if native else {})
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7})
    found = states(engine)
    return found, [train(engine, step) for step in (2, 3)], states(engine)


def load(rank, world, name, tp, stage, folder, universal=False):
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = make(name, tp, stage, world, seed=5, **more)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.requires_grad or param.add_(1)
    _, client_state = engine.load_checkpoint(folder, tag="universal" if universal else "t")
    assert client_state["mine"] == 7 and engine.global_steps == 2
    found = states(engine)
    return found, [train(engine, step) for step in (2, 3)], states(engine)


def check_same(saved, loaded, bits=False):
    """The states that were saved are in every rank of ``loaded``, bit by bit, and training goes on alike."""
    for found in loaded:
        assert found[0].keys() == saved[0].keys()
        for name, kinds in saved[0].items():
            assert len(found[0][name]) == len(kinds), name
            assert all(torch.equal(a, b) for a, b in zip(found[0][name], kinds)), name
        assert found[1] == (saved[1] if bits else pytest.approx(saved[1], rel=1e-4))
        assert not bits or identical(found[2], saved[2])


@pytest.mark.sample("values")
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("world, tp", [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("native", [False, True])
def test_the_same_ranks_go_on_bit_by_bit(name, world, tp, stage, native, tmp_path):
    if name == "uneven" and tp == 4:
        tp = 2
    saved = run_ranks(world, save, name, tp, stage, native, str(tmp_path), init=True)
    check_same(saved[0], run_ranks(world, load, name, tp, stage, str(tmp_path), init=True), bits=True)


BEFORE = [(1, 1), (2, 2), (4, 2), (4, 4), (2, 1)]  # ranks, tensor-parallel ranks
AFTER = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (3, 3)]


@pytest.mark.sample
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("saved_at", [0, 1, 2, 3])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("loaded_at", [0, 1, 2, 3])
def test_any_number_of_ranks_reads_it(name, before, saved_at, native, after, loaded_at, tmp_path):
    saved = run_ranks(before[0], save, name, before[1], saved_at, native, str(tmp_path), init=True)
    loaded = run_ranks(after[0], load, name, after[1], loaded_at, str(tmp_path), init=True)
    check_same(saved[0], loaded)


def to_universal(folder):
    ds_to_universal.main(
        types.SimpleNamespace(input_folder=os.path.join(folder, "t"), output_folder=os.path.join(folder, "universal"))
    )


@pytest.mark.sample
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("saved_at", [0, 1, 2, 3])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("loaded_at", [0, 1, 2, 3])
def test_any_number_of_ranks_reads_the_universal_one(name, before, saved_at, native, after, loaded_at, tmp_path):
    saved = run_ranks(before[0], save, name, before[1], saved_at, native, str(tmp_path), init=True)
    to_universal(str(tmp_path))
    loaded = run_ranks(after[0], load, name, after[1], loaded_at, str(tmp_path), True, init=True)
    check_same(saved[0], loaded)
