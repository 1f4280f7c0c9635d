"""Calls around backward that scripts make themselves: scaled losses, boundaries, several engines of one loss."""

import pytest
import torch

import deepspeed
import pipe_models as models
from engine_models import batch, config, loss_of, make_net
from harness import run_ranks


def refuses(rank, world):
    engine = deepspeed.initialize(model=make_net(), config=config(world))[0]
    for wrong in (torch.ones(2), torch.ones(1, 3), 1.0):
        with pytest.raises(AssertionError, match="scalar tensor"):
            engine.scale(wrong)
    assert engine.scale(torch.ones(())) == 1 == engine.scale(torch.ones(1))
    engine = deepspeed.initialize(model=make_net(), config=config(world, managed_gradient_accumulation=False))[0]
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary.*managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(AssertionError, match="coalesce_grad_reduction.*managed_gradient_accumulation"):
        with engine.coalesce_grad_reduction():
            pass
    assert not engine.inside_no_sync_ctxt
    with pytest.raises(AssertionError, match="managed_gradient_accumulation.*not supported with pipeline parallelism"):
        models.engine_of("plain", 1, world, 2, managed_gradient_accumulation=False)
    with pytest.raises(AssertionError, match="coalesce_grad_reduction is not supported with pipeline parallelism"):
        models.engine_of("plain", 1, world, 2).coalesce_grad_reduction()


def test_what_is_refused():
    run_ranks(1, refuses, init=True)


def with_one_loss(rank, world, stage, calls):
    """Two engines, whose models' losses are added up; the weights of both after three steps."""
    engines = []
    for _ in range(2):
        made = config(world, 2, zero_optimization={"stage": stage})
        engines.append(deepspeed.initialize(model=make_net(), config=made)[0])
    for step in range(6):
        tokens, targets = batch(step)
        rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
        loss = sum(loss_of(engine(tokens[rows]), targets[rows]) * (1 + n) for n, engine in enumerate(engines))
        loss.backward()
        for engine in engines:
            if calls:
                engine._backward_epilogue()
            engine.step()
    params = [param for engine in engines for param in engine.module.parameters()]
    with deepspeed.zero.GatheredParameters(params, enabled=stage == 3):
        return [engine.global_steps for engine in engines], [param.detach().clone() for param in params]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_engines_of_one_loss(stage):
    (steps, found), (_, expected) = (run_ranks(2, with_one_loss, stage, calls)[0] for calls in (True, False))
    assert steps == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
