"""Small floats: each element becomes the nearest number of its format times the scale of its group."""

import types

import pytest
import torch

from deepspeed.ops.fp_quantizer import FP_Quantize, matmul_fp8
from deepspeed.ops.op_builder import FPQuantizerBuilder
from deepspeed.profiling.op_costs import cost_of
from refusals import refusing

FORMATS = {4: (2, 1), 6: (3, 2), 8: (4, 3), 12: (4, 7)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantizer_of(group=64, **more):
    return FP_Quantize(types.SimpleNamespace(group_size=group, **more))


def numbers_of(bits):
    """All numbers of a format, the smallest first."""
    exponent, mantissa = FORMATS[bits]
    bias, found = 2 ** (exponent - 1) - 1, []
    for e in range(2**exponent):
        for m in range(2**mantissa):
            found.append((m / 2**mantissa + (e > 0)) * 2.0 ** (max(e, 1) - bias))
    return torch.tensor([*(-x for x in reversed(found[1:])), *found], dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FORMATS)
def test_elements_become_the_nearest_numbers(bits, dtype):
    torch.manual_seed(bits)
    x = (torch.randn(6, 128) * 3).to(dtype)
    quantizer, numbers = quantizer_of(), numbers_of(bits)
    rows = quantizer.quantize(x, q_bits=bits)
    assert rows.dtype == torch.uint8 and rows.shape == (12, 64 * bits // 8 + 4)
    scales = quantizer.get_scales()
    assert numbers.max() == FPQuantizerBuilder.get_quant_range(bits)
    torch.testing.assert_close(scales, x.float().view(12, 64).abs().amax(1) / numbers.max().float())
    found = quantizer.dequantize(rows, q_bits=bits)
    assert found.dtype == dtype and found.shape == x.shape
    exact = (x.float().view(12, 64) / scales[:, None]).double()
    gaps = (exact[..., None] - numbers).abs().amin(-1)
    wide = quantizer.dequantize(rows, torch.empty(6, 128), q_bits=bits).view(12, 64) / scales[:, None]
    torch.testing.assert_close((exact - wide).abs(), gaps, rtol=0, atol=1e-4)
    again = quantizer.quantize(quantizer.dequantize(rows, torch.empty(6, 128), q_bits=bits), q_bits=bits)
    assert torch.equal(again[:, :-4], rows[:, :-4])


def test_codes_and_scales_apart():
    x = torch.randn(4, 128)
    quantizer = quantizer_of()
    whole = quantizer.dequantize(quantizer.quantize(x))
    codes, scales = quantizer.quantize(x, return_meta_tensor=True)
    assert codes.shape == x.shape and scales.shape == (8, 4)
    for given in (scales, quantizer.get_scales(), quantizer.get_scales().view(8, 1)):
        assert torch.equal(quantizer.dequantize(codes, scale=given), whole)
    for bad in (0.0, float("inf"), float("nan")):
        wrong = quantizer.get_scales().clone()
        wrong[3] = bad
        with refusing(ValueError, "finite non-zero"):
            quantizer.dequantize(codes, scale=wrong)
    with refusing(ValueError, "return_meta_tensor is for 8 bits", "6"):
        quantizer.quantize(x, q_bits=6, return_meta_tensor=True)
    with refusing(ValueError, "8 groups of codes have 7 scales"):
        quantizer.dequantize(codes, scale=quantizer.get_scales()[:7])


@pytest.mark.parametrize("bits", FORMATS)
def test_chosen_rows(bits):
    x, index = torch.randn(5, 3, 64), torch.tensor([4, 0, 4])
    quantizer = quantizer_of()
    rows = quantizer.quantize(x, q_bits=bits)
    whole = quantizer.dequantize(rows, q_bits=bits)
    assert torch.equal(quantizer.selective_dequantize(rows, index, q_bits=bits), whole[index])
    out = torch.empty(3, 3, 64, dtype=torch.bfloat16)
    assert torch.equal(quantizer.selective_dequantize(rows, index, out, q_bits=bits), whole[index].to(out.dtype))
    other = quantizer_of(96)
    with refusing(ValueError, "10 groups of 96", "divides 192"):
        other.orig_shape = None
        rows = other.quantize(torch.randn(4, 240))
        other.orig_shape = torch.Size([3, 192])
        other.selective_dequantize(rows, index)


def test_stochastic_rounding_keeps_the_mean_and_follows_the_generator():
    x = torch.full((1, 4000), 0.3)
    x[0, 0] = 480.0
    quantizer, found = quantizer_of(4000), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(quantizer.dequantize(quantizer.quantize(x, stochastic_mode=True)))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert abs(float(found[0][0, 1:].mean()) - 0.3) < 4 * 0.0157 / 4000**0.5
    assert set(found[0][0, 1:].tolist()) == {0.28125, 0.3125}


def test_products_with_codes():
    inp, weight = torch.randn(3, 64), torch.randn(64, 128)
    quantizer = quantizer_of(128)
    codes, scale = quantizer.quantize(weight, return_meta_tensor=True)
    expected = inp @ quantizer.dequantize(codes, scale=scale)
    assert torch.equal(matmul_fp8(inp, codes, scale, 128, quantizer), expected)
    assert matmul_fp8(inp.bfloat16(), codes, scale, 128, quantizer).dtype == torch.bfloat16
    with refusing(ValueError, "quantization_group_size is 64", "128"):
        matmul_fp8(inp, codes, scale, 64, quantizer)


def test_odd_groups_and_arguments():
    quantizer = quantizer_of(4)
    x = torch.tensor([[1.0, float("nan"), 2, 3], [0, 0, 0, 0], [float("inf"), 1, 1, 1], [1e-45, 0, 0, 0]])
    found = quantizer.dequantize(quantizer.quantize(x))
    assert found[0].isnan().all() and found[2].isnan().all() and not found[1].any() and not found[3].any()
    with refusing(ValueError, "q_bits is 5", "4, 6, 8, 12"):
        quantizer.quantize(x, q_bits=5)
    with refusing(ValueError, "q_mantisa_bits is 4", "have 7"):
        quantizer.quantize(x, q_bits=12, q_mantisa_bits=4)
    with refusing(ValueError, "16 elements", "groups of 3"):
        quantizer_of(3).quantize(x)
    with refusing(ValueError, "groups of 2 floats of 6 bits", "multiple of 4"):
        quantizer_of(2).quantize(x, q_bits=6)
    with refusing(ValueError, "q_dtype is torch.int8"):
        quantizer_of(4, q_dtype=torch.int8)
    with refusing(ValueError, "needs fp_out"):
        quantizer_of(4).dequantize(torch.zeros(1, 8, dtype=torch.uint8))
    with refusing(ValueError, "nothing has been quantized"):
        quantizer_of(4).get_scales()
    with refusing(ValueError, "2 groups of 4 elements are not the 16"):
        quantizer.quantize(x)
        quantizer.dequantize(torch.zeros(2, 8, dtype=torch.uint8))


def test_meta_tensors_builders_and_costs():
    x = torch.empty(8, 64, device="meta")
    rows = quantizer_of().quantize(x)
    assert rows.is_meta and rows.shape == (8, 68)
    assert cost_of("deepspeed::encode_floats", (x,), {}, rows)[1] >= x.numel()
    assert FPQuantizerBuilder().load().FP_Quantize is FP_Quantize
    assert FPQuantizerBuilder.get_quant_range(4) == 6
