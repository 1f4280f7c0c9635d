"""Attention of the Evoformer against einsum in float64: its four uses, gradients of both biases, refusals."""

import pytest
import torch

from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention, EvoformerFusedAttention
from deepspeed.ops.deepspeed4science.evoformer_attn import BiasShapeError
from refusals import refused

B, N, L, H, D = 2, 3, 21, 2, 8


def einsum(q, k, v, bias1=None, bias2=None):
    """As it is written down."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
    for bias in (bias1, bias2):
        scores = scores if bias is None else scores + bias
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)


def given(dtype, lead=(B, N), tokens=L, which=(True, True)):
    generator = torch.Generator().manual_seed(tokens)

    def one(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    leaves = [one(*lead, tokens, H, D) for _ in range(3)]
    few = (*lead[:-1], 1) if lead else ()
    biases = [one(*lead, 1, 1, tokens), one(*few, H, tokens, tokens)]
    return leaves, [bias if wanted else None for bias, wanted in zip(biases, which)]


def results(attend, leaves, biases):
    output = attend(leaves, biases)
    inputs = [one for one in (*leaves, *biases) if one is not None]
    upper = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, upper)]


def gap(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


WAYS = {
    "function": lambda leaves, biases: DS4Sci_EvoformerAttention(*leaves, biases),
    "class": lambda leaves, biases: EvoformerFusedAttention.apply(*leaves, *biases),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("lead, tokens", [((B, N), L), ((1, 4), 300), ((2, 2, 3), 5), ((3,), 17), ((), 33)])
def test_equals_einsum(lead, tokens, which, way):
    for dtype, most in ((torch.float32, 1e-5), (torch.float64, 1e-7)):
        expected = results(lambda leaves, biases: einsum(*leaves, *biases), *given(torch.float64, lead, tokens, which))
        assert gap(results(WAYS[way], *given(dtype, lead, tokens, which)), expected) < most, dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_have_the_error_of_einsum(dtype):
    leaves, biases = given(dtype, tokens=130)
    wide = [[one.detach().double().requires_grad_() for one in some] for some in (leaves, biases)]

    def rounded(leaves, biases):  # as torch's products of 16 bits, which sum up in fp32
        scores = torch.einsum("...qhd,...khd->...hqk", *[one.float() for one in leaves[:2]]).to(dtype) * D**-0.5
        used = (scores + biases[0] + biases[1]).float().softmax(-1).to(dtype)
        return torch.einsum("...hqk,...khd->...qhd", used.float(), leaves[2].float()).to(dtype)

    expected = results(lambda leaves, biases: einsum(*leaves, *biases), *wide)
    found, formula = results(WAYS["function"], leaves, biases), results(rounded, leaves, biases)
    assert gap(found, expected) < 2 * gap(formula, expected)


def test_the_four_uses():
    """MSA rows, MSA columns, and triangles around the first and the last node."""
    msa, pair = torch.randn(B, N, L, H, D), torch.randn(B, L, L, H, D)
    for one, bias in ((msa, torch.randn(B, 1, H, L, L)), (msa.transpose(1, 2), None)):
        mask = torch.zeros(*one.shape[:2], 1, 1, one.shape[2])
        found = DS4Sci_EvoformerAttention(one, one, one, [mask, bias])
        assert gap([found], [einsum(*[one.double()] * 3, mask, bias)]) < 1e-5
    for one in (pair, pair.transpose(1, 2)):
        mask, bias = torch.zeros(B, L, 1, 1, L), torch.randn(B, 1, H, L, L)
        mask[..., -4:] = -1e9
        found = DS4Sci_EvoformerAttention(one, one, one, [mask, bias])
        assert gap([found], [einsum(*[one.double()] * 3, mask, bias)]) < 1e-5


def test_biases_may_be_fp32_and_fewer():
    leaves, biases = given(torch.bfloat16)
    wide = [bias.detach().float().requires_grad_() for bias in biases]
    output = DS4Sci_EvoformerAttention(*leaves, wide)
    grads = torch.autograd.grad(output.float().sum(), wide)
    assert output.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in grads)
    assert torch.equal(DS4Sci_EvoformerAttention(*leaves, []), DS4Sci_EvoformerAttention(*leaves, [None, None]))


def test_refusals_name_the_shapes():
    (q, k, v), (bias1, bias2) = given(torch.float32)

    def call(*biases, q=q, k=k, v=v):
        return DS4Sci_EvoformerAttention(q, k, v, list(biases))

    expected = r"bias1 shape is incorrect: it is \(2, 1, 2, 21, 21\), .* the mask of residues is \(2, 3, 1, 1, 21\)"
    refused(BiasShapeError, expected, call, bias2)
    refused(AssertionError, "bias2 shape is incorrect", call, bias1, bias1)
    refused(ValueError, "at most 2 biases, got 3", call, bias1, bias2, bias2)
    refused(ValueError, r"differ in tokens alone", call, k=k[..., :4])
    refused(ValueError, "each key has one value", call, v=v[:, :, :5])
    refused(ValueError, "V is torch.float64 on cpu, and Q torch.float32", call, v=v.double())
    refused(ValueError, "bias1 is torch.float16 on cpu: it has the dtype of Q", call, bias1.half())
