"""Lion against the paper's program in fp64, and the contract's signatures."""

import functools

import pytest
import torch

from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion, cpu_lion, fused_lion
from native_classes import assert_formula, make_params, positional_defaults, with_gradient
from refusals import refused

CLASSES = pytest.mark.parametrize("cls", [DeepSpeedCPULion, FusedLion])


def lion(lr, betas, weight_decay):
    """Chen et al. 2023, program 1."""

    def formula(weight, grad, state, step):
        momentum = state.get("m", torch.zeros_like(weight))
        direction = (betas[0] * momentum + (1 - betas[0]) * grad).sign()
        state["m"] = betas[1] * momentum + (1 - betas[1]) * grad
        return weight - lr * (direction + weight_decay * weight)

    return formula


@pytest.mark.sample("values")
@CLASSES
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_paper(cls, weight_decay):
    # A power of two: every step has the same size, and a size that the weights cannot hold is rounded the same way each
    # time, which after 1,000 steps is 1,000 half units of the last place for any arithmetic with fp32 weights.
    lr = 2.0**-12
    make = functools.partial(cls, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
    assert_formula(make, lion(lr, (0.9, 0.99), weight_decay))


@CLASSES
def test_a_zero_gradient_moves_nothing(cls):
    p = with_gradient(torch.ones(5), torch.zeros(5))
    cls([p], lr=0.1).step()
    assert torch.equal(p.detach(), torch.ones(5))


@CLASSES
@pytest.mark.parametrize("betas, shown", [((1.0, 0.9), "betas.0."), ((0.9, -0.1), "betas.1.")])
def test_bad_betas(cls, betas, shown):
    refused(ValueError, f"{cls.__name__}: {shown} must be at least 0 and below 1", cls, make_params(), betas=betas)


def test_contract():
    assert cpu_lion.DeepSpeedCPULion is DeepSpeedCPULion and fused_lion.FusedLion is FusedLion
    assert positional_defaults(DeepSpeedCPULion) == [
        ("lr", 0.001), ("betas", (0.9, 0.999)), ("weight_decay", 0), ("fp32_optimizer_states", True)
    ]  # fmt: skip
    assert positional_defaults(FusedLion) == [
        ("lr", 0.001), ("betas", (0.9, 0.999)), ("weight_decay", 0.0), ("set_grad_none", True)
    ]  # fmt: skip
