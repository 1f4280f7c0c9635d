"""Grouped products by torch's own matrix products, which devices other than the CPU use, equal those of the kernels."""

import pytest
import torch

from deepspeed._native import _C


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_by_torch_equal_those_of_the_kernels(dtype, biased, stacked):
    rows, wide, out = [3, 0, 7, 1], 5, 9
    torch.manual_seed(0)
    x, grad = torch.randn(sum(rows), wide, dtype=dtype), torch.randn(sum(rows), out, dtype=dtype)
    weights = list(torch.randn(len(rows), out, wide, dtype=dtype))
    biases = list(torch.randn(len(rows), out, dtype=dtype)) if biased else []
    found = []
    for torch_products in (False, True):
        ops = _C.RouteOps(1, torch_products=torch_products)
        y = ops.grouped_linear(x, rows, weights, biases)
        gx, gw, gb = ops.grouped_linear_grads(x, grad, rows, weights, True, True, biased, stacked)
        found.append([y, gx, *gw, *gb])
    # Both add in fp32 and round once, in bf16 to one of two neighbours.
    close = {"rtol": torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    for kernel, product in zip(*found, strict=True):
        torch.testing.assert_close(product, kernel, **close)
