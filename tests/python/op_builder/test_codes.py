"""The ops of codes: signs as bits (``packbits``) and integers in groups (``quantizer``)."""

import numpy
import pytest
import torch

from deepspeed.ops.op_builder import PackbitsBuilder, QuantizerBuilder
from refusals import refused

HALF = 0.5 + 1e-3  # of a scale, and what fp16 rounds


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_come_back(numel, dtype):
    op = PackbitsBuilder().load()
    torch.manual_seed(numel)
    values = torch.randn(numel).to(dtype)
    values[::3] = 0
    bits = op.packbits(values, numel, 0)
    assert bits.dtype == torch.uint8 and bits.tolist() == numpy.packbits((values >= 0).numpy()).tolist()
    signs = op.unpackbits(bits, numel, 0)
    assert signs.dtype == torch.float32 and torch.equal(signs, torch.where(values >= 0, 1.0, -1.0))
    if numel > 8:
        assert torch.equal(op.packbits(values, 8, 0), bits[:1])
    refused(ValueError, "a bit for each of", op.unpackbits, bits, 8 * len(bits) + 1, 0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantized_values_are_off_by_half_a_scale_at_most(bits, asymmetric, dtype):
    op = QuantizerBuilder().load()
    torch.manual_seed(bits)
    values = (torch.randn(6, 64) + 1).to(dtype)
    kind = op.Asymmetric if asymmetric else op.Symmetric
    codes, params = op.quantize(values, 12, bits, kind)
    assert codes.dtype == torch.int8 and codes.shape == (6, 64 * bits // 8)
    assert params.dtype == torch.float32 and params.shape == (12, 2 if asymmetric else 1)
    again = op.dequantize_fp32(codes, params, 12, bits, kind)
    assert again.shape == values.shape and again.dtype == torch.float32
    off = (again - values.float()).abs().view(12, 32)
    assert (off <= params[:, :1] * HALF + 1e-6).all()
    if not asymmetric:
        largest = values.float().view(12, 32).abs().amax(1) / (2 ** (bits - 1) - 1)
        torch.testing.assert_close(params[:, 0], largest, rtol=3e-7, atol=0)  # rounded up
    half = op.dequantize(codes, params, 12, bits, kind)
    assert half.dtype == torch.float16 and torch.equal(half, again.half())


def test_codes_by_hand():
    op = QuantizerBuilder().load()
    codes, params = op.quantize(torch.tensor([7.0, -3.0, -7.0, 2.0]), 1, 4, op.Symmetric)
    assert params.tolist() == [[1.0]] and codes.view(torch.uint8).tolist() == [0xD7, 0x29]
    codes, params = op.quantize(torch.tensor([-1.0, 254.0, 10.0]), 1, 8, op.Asymmetric)
    assert params.tolist() == [[1.0, -1.0]] and codes.view(torch.uint8).tolist() == [0, 255, 11]


@pytest.mark.parametrize("bits", [4, 8])
def test_unsigned_codes_with_their_minima(bits):
    op = QuantizerBuilder().load()
    values = torch.rand(5, 16) * 3 - 1
    codes, params = op.quantize(values, 5, bits, op.Asymmetric)
    decode = {4: op.dequantize_int4_to_half_experimental, 8: op.dequantize_int8_to_half_experimental}[bits]
    found = decode(codes, params[:, 0], params[:, 1], 5, 16)
    assert found.dtype == torch.float16 and found.shape == (5, 16)
    assert torch.equal(found, op.dequantize(codes, params, 5, bits, op.Asymmetric))


@pytest.mark.parametrize("bits", [4, 8])
def test_two_exchanges_of_scripts(bits):
    """``swizzle_quant`` and ``quantized_reduction`` give the mean of the values of 2 hosts of 3 devices."""
    op = QuantizerBuilder().load()
    hosts, devices, part = 2, 3, 32
    torch.manual_seed(0)
    values = torch.randn(hosts * devices, hosts * devices, part)  # of each rank, a part for each rank
    swizzled = [op.swizzle_quant(one, 12, bits, op.Symmetric, 1, hosts, devices) for one in values]
    for rank, (codes, params) in enumerate(swizzled):
        # The parts for device 0 of both hosts, then those for device 1.
        back = op.dequantize_fp32(codes, params, 12, bits, op.Symmetric).view(devices, hosts, part)
        wanted = values[rank].view(hosts, devices, part).transpose(0, 1)
        assert (back - wanted).abs().max() <= params.max() * HALF
    for host in range(hosts):
        for device in range(devices):
            of_host = [swizzled[host * devices + one] for one in range(devices)]
            codes = torch.cat([codes.view(devices, -1)[device] for codes, _ in of_host])
            params = torch.cat([params.view(devices, -1)[device] for _, params in of_host])
            reduced, scales = op.quantized_reduction(codes, params, 4 * devices, 4, bits, op.Symmetric, devices)
            got = op.dequantize_fp32(reduced, scales, 4, bits, op.Symmetric).view(hosts, part)
            own = values[host * devices : (host + 1) * devices]
            wanted = own.view(devices, hosts, devices, part)[:, :, device].mean(0)
            assert (got - wanted).abs().max() <= (params.max() + scales.max()) * HALF
    pieces, _ = op.swizzle_quant(values[0], 24, 8, op.Symmetric, 2, hosts, devices)
    assert pieces.numel() == values[0].numel()
    refused(ValueError, "multiples of .* = 6", op.swizzle_quant, values[0], 13, 8, op.Symmetric, 1, hosts, devices)
    refused(ValueError, "equally many", op.quantized_reduction, codes, params, 13, 4, 8, op.Symmetric, 3)


def test_what_cannot_be_quantized():
    op = QuantizerBuilder().load()
    values = torch.ones(6)
    refused(ValueError, "6 elements cannot be cut into 4 equal groups", op.quantize, values, 4, 8, op.Symmetric)
    refused(ValueError, "quantization to 3 bits", op.quantize, values, 1, 3, op.Symmetric)
    refused(ValueError, "groups of 3 .* even size", op.quantize, values, 2, 4, op.Symmetric)
    refused(TypeError, "Double", op.quantize, values.double(), 1, 8, op.Symmetric)
    codes, params = op.quantize(values, 1, 8, op.Symmetric)
    refused(ValueError, "2 number", op.dequantize, codes, params, 1, 8, op.Asymmetric)
