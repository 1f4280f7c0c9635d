"""Rounding in place: the published formulas, groups, dtypes, and functions of the op."""

import pytest
import torch

from deepspeed.ops.op_builder import QuantizerBuilder
from deepspeed.ops.quantizer import ds_quantizer
from refusals import refused


def published(x, groups, bits, asym):
    rows = x.float().reshape(groups, -1)
    if asym:
        low = rows.amin(1, keepdim=True)
        step = (rows.amax(1, keepdim=True) - low + 1e-5) / 2**bits
        return (((rows - low) / step).round().clamp(0, 2**bits - 1) * step + low).view_as(x).to(x.dtype)
    scale = 2**bits / (2 * rows.abs().amax(1, keepdim=True) + 1e-5)
    return ((rows * scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) / scale).view_as(x).to(x.dtype)


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_published_formulas(dtype, bits, asym):
    torch.manual_seed(bits)
    x = torch.randn(6, 50).to(dtype)
    for groups in (1, 6, 60):
        found = x.clone()
        assert ds_quantizer(found, groups, bits, asym=asym) is found
        expected = published(x, groups, bits, asym)
        # A quotient at the middle between two numbers may go either way, and a number to its neighbour in the dtype.
        gap = (found.float() - expected.float()).abs()
        step = 2 * float(x.float().abs().max() + 1e-5) / 2**bits
        assert float(gap.max()) <= 1.01 * step
        assert float((gap > 2 * torch.finfo(dtype).eps * expected.float().abs().max()).float().mean()) < 0.01
        assert all(len(row.float().unique()) <= 2**bits for row in found.view(groups, -1))


def test_stochastic_rounding_follows_torchs_generator():
    x = torch.full((1000,), 0.3)
    x[0] = 1.0
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(ds_quantizer(x.clone(), bit_num=3, sr=True))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert abs(float(found[0][1:].mean()) - 0.3) < 0.02 and len(found[0][1:].unique()) == 2


def test_a_group_with_a_nan_comes_back_as_nan():
    x = torch.ones(4, 8)
    x[2, 3] = float("nan")
    found = ds_quantizer(x, groups=4)
    assert found.isnan().all(1).tolist() == [False, False, True, False]


def test_views_with_gaps_are_changed_in_place():
    whole = torch.randn(8, 8)
    kept, part = whole.clone(), whole[:, ::2]
    assert ds_quantizer(part, 2, 4) is part
    assert torch.equal(whole[:, 1::2], kept[:, 1::2]) and not torch.equal(whole[:, ::2], kept[:, ::2])


def test_functions_of_the_op():
    op, x = QuantizerBuilder().load(), torch.randn(64)
    assert torch.equal(op.ds_quantize_fp32(x.clone(), 4, 4), ds_quantizer(x.clone(), 4, 4))
    assert torch.equal(op.ds_quantize_asym_fp32(x.clone(), 4, 4), ds_quantizer(x.clone(), 4, 4, asym=True))
    for name in ("ds_sr_quantize", "ds_sr_quantize_asym"):
        torch.manual_seed(3)
        found = getattr(op, f"{name}_fp16")(x.half(), 4, 4)
        torch.manual_seed(3)
        assert torch.equal(found, ds_quantizer(x.half(), 4, 4, sr=True, asym=name.endswith("asym")))


def test_bad_calls_name_both_numbers():
    refused(ValueError, "10 elements cannot be cut into 3 equal groups", ds_quantizer, torch.zeros(10), 3)
    refused(ValueError, "quantization to 9 bits is not there; use 1 to 8", ds_quantizer, torch.zeros(10), 1, 9)
    refused(TypeError, "the tensor to quantize", ds_quantizer, torch.zeros(10, dtype=torch.int32))
    meta = torch.zeros(10, device="meta")
    assert ds_quantizer(meta) is meta
