"""Operations of model libraries on sharded parameters while they build a model: none of it needs absent values."""

import functools

import pytest
import torch
from torch.nn.utils import parametrize

import deepspeed
from engine_models import assert_like_sgd, six, square_losses
from harness import on_ranks
from models import NormAndDirection, Parts, seeded, two_layers
from plain import Plain
from refusals import refused
from runs import engine_of, take_step, together

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def normed():
    first = torch.nn.Linear(6, 5)
    with deepspeed.zero.GatheredParameters(first.weight, modifier_rank=0):
        parametrize.register_parametrization(first, "weight", NormAndDirection(), unsafe=True)
    return Parts(lambda net, x: net.last(torch.tanh(net.first(x))), first=first, last=torch.nn.Linear(5, 1))


@on_ranks(2, init=True)
def test_parametrized_modules(rank, world):
    torch.manual_seed(4)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = normed()
    shapes = {name: tuple(param.ds_shape) for name, param in model.named_parameters()}
    assert shapes["first.parametrizations.weight.original0"] == (5, 1)
    assert shapes["first.parametrizations.weight.original1"] == (5, 6) and "first.weight" not in shapes
    sharded = together(square_losses(engine_of(model, CONFIG, model_parameters=model.parameters()), rank, 3))
    assert_like_sgd(seeded(normed, seed=4), sharded)


def normed_before_forward():
    """Two layers. A hook before each forward of the first one computes its weight, as ``spectral_norm`` does."""

    def compute(layer, inputs):
        layer.weight = layer.kept / layer.kept.reshape(layer.kept.size(0), -1).norm()

    model = two_layers(outside=1, seed=4)
    first = model[0]
    first.kept = first.weight
    del first.weight
    first.register_forward_pre_hook(compute)
    return model


@on_ranks(2, init=True)
def test_hooks_that_compute_weights(rank, world):
    model, shapes = normed_before_forward(), []
    model[2].register_forward_pre_hook(lambda layer, inputs: shapes.append(tuple(layer.weight.shape)))
    sharded = together(square_losses(engine_of(model, CONFIG, model_parameters=model.parameters()), rank, 3))
    assert_like_sgd(normed_before_forward(), sharded)
    assert shapes == [(1, 5)] * 3


@on_ranks(2, init=True)
def test_facts_of_parameters_that_are_elsewhere(rank, world):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = torch.nn.Linear(4, 3)
    weight, bias = layer.weight, layer.bias
    # Sizes of their own: only dtype and device are the parameter's.
    for made in (weight.new_zeros(3), weight.data.new_full((3,), 0.0), weight.detach().new_tensor([0.0, 0.0, 0.0])):
        assert type(made) is torch.Tensor and made.dtype == torch.bfloat16 and made.tolist() == [0.0] * 3
    assert weight.new_empty((2, 5)).shape == (2, 5) and weight.new_ones(2, dtype=torch.int64).dtype == torch.int64

    # transformers makes a tied head's bias as long as its weight has rows, which are 0 here for both.
    bias.data = torch.nn.functional.pad(bias.data, (0, weight.shape[0] - bias.shape[0]), "constant", 0)
    refused(
        RuntimeError,
        "pad: the values of parameter 'Linear.bias'.*not on this rank",
        torch.nn.functional.pad,
        bias.data,
        (0, 2),
    )
    refused(
        RuntimeError, "Parameter: the values of parameter 'Linear.weight'.*not on this rank", torch.nn.Parameter, weight
    )

    with deepspeed.zero.GatheredParameters([weight, bias]):
        assert bias.shape == (3,)
        copy = torch.nn.Parameter(weight, requires_grad=False)
        assert type(copy) is torch.nn.Parameter and not copy.requires_grad and torch.equal(copy, weight)
    assert type(torch.nn.Parameter(torch.ones(2))) is torch.nn.Parameter and torch.nn.Parameter().shape == (0,)


class Project(torch.autograd.Function):
    """``hidden @ weight.T`` that gathers the weight of another module by itself, as trl's fused language-model head."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        with deepspeed.zero.GatheredParameters([weight]):
            assert weight.shape == (7, 5)
            return grad @ weight, grad.t() @ hidden


def forward_fused_head(net, x):
    hidden = torch.tanh(net.body(x))
    with deepspeed.zero.GatheredParameters([net.head.weight]):
        return Project.apply(hidden, net.head.weight)


def fused_head():
    return Parts(
        forward_fused_head,
        body=torch.nn.Linear(6, 5),
        head=torch.nn.Linear(5, 7, bias=False),
    )


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks(init=True)
def test_a_gradient_of_a_parameter_that_is_released_again(rank, world, micro_steps):
    model = seeded(fused_head, seed=4)
    config = {**CONFIG, "gradient_accumulation_steps": micro_steps}
    sharded = together(square_losses(engine_of(model, config, model_parameters=model.parameters()), rank, 4))
    assert_like_sgd(seeded(fused_head, seed=4), sharded, 4, micro_steps)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2, init=True)
def test_an_engine_that_only_looks_beside_one_that_trains(rank, world, stage):
    """An engine that only runs the model, before and beside the one that trains it, as trl computes its reference."""
    model = two_layers(6, 5, 1, seed=4)
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}, "gradient_clipping": 0.0}
    untrained = {key: value for key, value in config.items() if key != "optimizer"}
    if stage < 3:
        untrained = {**untrained, "zero_optimization": {"stage": 0}}
    looker = engine_of(model, untrained)
    with torch.no_grad():
        losses = [looker(six(rank, 0)).square().mean().item()]
    engine = engine_of(model, config, model_parameters=model.parameters())
    for step in range(2):
        loss = engine(six(rank, step)).square().mean()
        losses.append(loss.item())
        take_step(engine, loss)
        with torch.no_grad():
            losses.append(looker(six(rank, step)).square().mean().item())
    looker.destroy()
    losses.append(engine(six(rank, 0)).square().mean().item())
    engine.destroy()
    sharded = together(losses)
    plain = Plain(two_layers(6, 5, 1, seed=4), functools.partial(torch.optim.SGD, lr=0.1), dtype=None)

    def parts(step):
        return [plain.model(six(rank, step)).square().mean() for rank in range(2)]

    expected = [[part.item() for part in parts(0)]]
    for step in range(2):
        expected.append(plain.step(*parts(step)))
        expected.append([part.item() for part in parts(step)])
    expected.append([part.item() for part in parts(0)])
    for rank in range(2):
        assert sharded[rank] == pytest.approx([row[rank] for row in expected], abs=1e-6)
