"""Calls around backward that scripts make themselves: scaled losses, boundaries, several engines of one loss."""

import pytest
import torch

import deepspeed
import pipe_models as models
from engine_models import loss_on, net_engine
from harness import on_ranks, run_ranks
from refusals import refused
from runs import weight_list


@on_ranks(1, init=True)
def test_what_is_refused(rank, world):
    engine = net_engine(world)
    for wrong in (torch.ones(2), torch.ones(1, 3), 1.0):
        refused(AssertionError, "scalar tensor", engine.scale, wrong)
    assert engine.scale(torch.ones(())) == 1 == engine.scale(torch.ones(1))
    engine = net_engine(world, managed_gradient_accumulation=False)
    refused(
        AssertionError,
        "set_gradient_accumulation_boundary.*managed_gradient_accumulation",
        engine.set_gradient_accumulation_boundary,
        True,
    )
    with pytest.raises(AssertionError, match="coalesce_grad_reduction.*managed_gradient_accumulation"):
        with engine.coalesce_grad_reduction():
            pass
    assert not engine.inside_no_sync_ctxt
    refused(
        AssertionError,
        "managed_gradient_accumulation.*not supported with pipeline parallelism",
        models.engine_of,
        "plain",
        1,
        world,
        2,
        managed_gradient_accumulation=False,
    )
    refused(
        AssertionError,
        "coalesce_grad_reduction is not supported with pipeline parallelism",
        models.engine_of("plain", 1, world, 2).coalesce_grad_reduction,
    )


def with_one_loss(rank, world, stage, calls):
    """Two engines, whose models' losses are added up; the weights of both after three steps."""
    engines = [net_engine(world, stage, 2) for _ in range(2)]
    for step in range(6):
        sum(loss_on(engine, step, rank=rank, world=world) * (1 + n) for n, engine in enumerate(engines)).backward()
        for engine in engines:
            if calls:
                engine._backward_epilogue()
            engine.step()
    return [engine.global_steps for engine in engines], [one for engine in engines for one in weight_list(engine)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_engines_of_one_loss(stage):
    (steps, found), (_, expected) = (run_ranks(2, with_one_loss, stage, calls)[0] for calls in (True, False))
    assert steps == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(1, init=True)
def test_a_gradient_of_the_outputs(rank, world):
    gradient = torch.tensor([[0.5], [-2.0]])
    plain, engine = torch.nn.Linear(3, 1), None
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(plain.state_dict())
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    optimizer, x = torch.optim.SGD(plain.parameters(), lr=0.1), torch.randn(2, 3)
    for _ in range(2):
        engine.backward(engine(x), gradient=gradient)
        engine.step()
        (plain(x) / 2).backward(gradient)
    optimizer.step()
    assert torch.allclose(model.weight, plain.weight) and torch.allclose(model.bias, plain.bias)
    refused(
        ValueError,
        r"gradient has shape \(1,\) and the tensor \(2, 1\)",
        engine.backward,
        engine(x),
        gradient=torch.ones(1),
    )
