"""The section ``sparse_attention`` through an engine: with ranks that share sequences, the losses of one rank."""

import pytest
import torch

import deepspeed
import toy_transformers
from deepspeed._native import DeepSpeedConfigError
from harness import on_ranks, run_ranks
from refusals import refusing

SECTION = {"mode": "bigbird", "block": 4, "num_random_blocks": 1, "different_layout_per_head": True}


def engine_of(model, section=SECTION, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "sparse_attention": section,
        **more,
    }
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=model, config=config)[0]


def losses_of(rank, world, shared):
    """The losses of three steps on one sequence, which ``shared`` ranks have together."""
    with toy_transformers.installed():
        torch.manual_seed(0)
        more = {"sequence_parallel_size": shared, "sequence_parallel": {}} if shared > 1 else {}
        engine, found = engine_of(toy_transformers.ToyForCausalLM(), **more), []
        for step in range(3):
            ids = torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(step))
            part = ids.chunk(shared, 1)[rank]
            logits = engine(input_ids=part).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten())
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            found.append(float(total) / world)
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_sequences_compute_as_one(world):
    expected = run_ranks(1, losses_of, 1, init=True)[0]
    for found in run_ranks(world, losses_of, world, init=True):
        assert found == pytest.approx(expected, rel=1e-5)


@on_ranks(2, init=True)
def test_rings_and_other_models_are_refused(rank, world):
    with toy_transformers.installed():
        shared = {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ring"}}
        engine = engine_of(toy_transformers.ToyForCausalLM(), **shared)
        with refusing(ValueError, 'method "ring"', "sparse_attention has a layout of its own blocks"):
            engine(input_ids=torch.zeros(2, 8, dtype=torch.long))
        engine.destroy()
    with refusing(DeepSpeedConfigError, "sparse_attention is for models of transformers", "Linear"):
        engine_of(torch.nn.Linear(2, 2))
