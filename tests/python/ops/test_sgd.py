"""SGD with momentum against its formula in fp64 and against torch."""

import functools

import pytest
import torch

from deepspeed.ops.sgd import FusedSGD
from native_classes import assert_formula, make_params, train_alike
from refusals import refused

OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.99, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


def sgd(lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    def formula(weight, grad, state, step):
        grad = grad + weight_decay * weight
        if momentum:
            state["b"] = grad if step == 1 else momentum * state["b"] + (1 - dampening) * grad
            grad = grad + momentum * state["b"] if nesterov else state["b"]
        return weight - lr * grad

    return formula


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula(options):
    assert_formula(functools.partial(FusedSGD, lr=2e-4, **options), sgd(2e-4, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torch(options):
    params, expected = make_params(), make_params()
    optimizer, reference = FusedSGD(params, lr=0.01, **options), torch.optim.SGD(expected, lr=0.01, **options)
    train_alike(optimizer, params, reference, expected, [None] * 20)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum(options):
    refused(ValueError, "nesterov needs a momentum above 0 and no dampening", FusedSGD, make_params(), **options)
