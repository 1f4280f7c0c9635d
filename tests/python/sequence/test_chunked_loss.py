"""chunked_cross_entropy against torch's cross entropy of an fp32 copy."""

import itertools

import pytest
import torch

from deepspeed.runtime.chunked_cross_entropy import (
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)
from refusals import refused


@pytest.mark.parametrize(
    "reduction, block_rows, dtype",
    itertools.product(["mean", "sum", "none"], [None, 1, 3, 100], [torch.float32, torch.bfloat16]),
)
def test_equals_torch(reduction, block_rows, dtype):
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 11).to(dtype).requires_grad_()
    target = torch.randint(0, 11, (2, 7))
    target[0, :3] = target[1, 6] = -100
    loss = chunked_cross_entropy(logits, target, reduction=reduction, block_rows=block_rows)
    upper = torch.randn(loss.shape)
    (grad,) = torch.autograd.grad(loss, logits, upper)
    copy = logits.detach().clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(copy.float().view(-1, 11), target.view(-1), reduction=reduction)
    wanted = wanted.view(loss.shape)
    (other,) = torch.autograd.grad(wanted, copy, upper)
    assert loss.dtype == torch.float32 and torch.allclose(loss, wanted, atol=1e-6)
    assert grad.dtype == dtype and torch.allclose(grad.float(), other.float(), atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_no_row_that_counts_is_nan_as_in_torch():
    assert torch.isnan(chunked_cross_entropy(torch.randn(3, 5), torch.full((3,), -100)))
    assert chunked_cross_entropy(torch.randn(3, 5), torch.full((3,), -100), reduction="sum") == 0


def test_the_loss_of_a_language_model():
    torch.manual_seed(1)
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
    assert torch.allclose(ChunkedCausalLMLoss(block_rows=2)(logits, labels, vocab_size=7), plain)
    assert torch.allclose(ChunkedCausalLMLoss()(logits, labels, 7, num_items_in_batch=4), plain * 8 / 4)

    class Model(torch.nn.Module):
        loss_function = None

    model = install_chunked_causal_lm_loss(Model(), block_rows=3)
    assert model.loss_function.block_rows == 3
    refused(ValueError, "no loss_function", install_chunked_causal_lm_loss, torch.nn.Linear(1, 1))


def test_bad_arguments_are_named():
    logits, target = torch.randn(3, 5), torch.zeros(3, dtype=torch.long)
    refused(ValueError, "backend is 'triton'", chunked_cross_entropy, logits, target, backend="triton")
    refused(ValueError, "reduction is 'max'", chunked_cross_entropy, logits, target, reduction="max")
    refused(ValueError, "block_rows is 0", chunked_cross_entropy, logits, target, block_rows=0)
    refused(ValueError, "all but the last size", chunked_cross_entropy, logits, target[:2])
