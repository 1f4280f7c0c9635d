"""Gradients of stacked experts beyond 32 MiB: memory that nobody holds any more is used again, and only that."""

import torch

from deepspeed.moe.grouped import stacked_product
from gradients import gradients

EXPERTS, OUT, IN = 9, 1024, 1024


def gradient(x, weight):
    return gradients(stacked_product(x, [1] * EXPERTS, weight).sum(), [weight])[0]


def test_memory_of_a_gradient_is_used_again_when_it_is_free():
    torch.manual_seed(0)
    weight, x = torch.zeros(EXPERTS, OUT, IN, requires_grad=True), torch.randn(EXPERTS, IN)
    held = gradient(x, weight)
    place, before = held.data_ptr(), held.clone()
    other = gradient(x * 2, weight)
    assert other.data_ptr() != place and torch.equal(held, before) and torch.equal(other, 2 * before)
    part = held[3]
    del held
    third = gradient(x * 3, weight)  # a view of the first one lives
    assert third.data_ptr() != place and torch.equal(part, before[3])
    del part
    weight.grad = None
    assert gradient(x, weight).data_ptr() == place and torch.equal(weight.grad, before)
    assert torch.equal(other, 2 * before) and torch.equal(third, 3 * before)
