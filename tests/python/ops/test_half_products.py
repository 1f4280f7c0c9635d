"""Products of 16-bit matrices that this library makes on the CPU add in fp32, whatever torch's own do there."""

import pytest
import torch

from deepspeed.host import product_error
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.sharded_moe import einsum
from deepspeed.ops import half_products
from deepspeed.ops.half_products import add_in_fp32
from deepspeed.sequence.fpdt_layer import FPDT_FFN
from deepspeed.zero.gathers.linear import exact_linear

BF16 = torch.bfloat16
INNER = 2048  # torch 1.13 without AVX-512 is wrong by 5 % there
ONE_ROUNDING = product_error.largest_error(BF16)


def gap(found, exact):
    exact = exact.double()
    return ((found.double() - exact).norm() / exact.norm()).item()


def draw(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["as torch is", "torch adds in 16 bits"])
def torch_products(request, monkeypatch):
    """On every processor also as on one where torch's own products are inexact."""
    if request.param != "as torch is":
        monkeypatch.setattr(half_products, "adds_in_fp32", lambda dtype: False)


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_products_are_rounded_once(turned, torch_products):
    a, b = draw(16, INNER), draw(INNER, 16, seed=1)
    a, b = (x.t().contiguous().t() if turn else x for x, turn in zip((a, b), turned))
    found = add_in_fp32(torch.matmul, a, b)
    assert found.dtype == BF16 and gap(found, a.double() @ b.double()) <= ONE_ROUNDING


def test_fp16_too(torch_products):
    """torch 1.13 has no such product."""
    a, b = draw(16, INNER, dtype=torch.half), draw(INNER, 16, seed=1, dtype=torch.half)
    found = add_in_fp32(torch.matmul, a, b)
    assert found.dtype == torch.half
    assert gap(found, a.double() @ b.double()) <= product_error.largest_error(torch.half)


def test_autocast_makes_no_16_bit_product_of_it(torch_products):
    a, b = draw(16, INNER), draw(INNER, 16, seed=1)
    with torch.autocast("cpu", dtype=BF16):
        found = add_in_fp32(torch.matmul, a, b)
        kept = torch.is_autocast_cpu_enabled()
    assert kept and found.dtype == BF16
    if half_products.needs_fp32(a, b):  # else it is torch's own
        assert gap(found, a.double() @ b.double()) <= ONE_ROUNDING


def test_other_products_are_torchs_own(monkeypatch):
    monkeypatch.setattr(half_products, "adds_in_fp32", lambda dtype: False)
    a, b = draw(3, 5), draw(5, 3, seed=1)
    for first, second in ((a.float(), b.float()), (a.double(), b.double()), (a.to("meta"), b.to("meta"))):
        assert not half_products.needs_fp32(first, second)
        assert add_in_fp32(torch.matmul, first, second).dtype == first.dtype
    with pytest.raises(RuntimeError):  # of two types: torch's own error
        add_in_fp32(torch.matmul, a, b.float())
    assert not half_products.needs_fp32(a, b.float())


def gradients(function, tensors, upper):
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, upper.to(out.dtype))]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_and_their_gradients(bias, torch_products):
    # Each of the three products has the large inner size in one of the cases.
    for tokens, wide, out in ((4, INNER, 3), (4, 3, INNER), (INNER, 3, 4)):
        tensors = [draw(2, tokens, wide), draw(out, wide, seed=1), draw(out, seed=2)][: 3 if bias else 2]
        upper = draw(2, tokens, out, seed=3)
        found = gradients(exact_linear, tensors, upper)
        exact = gradients(torch.nn.functional.linear, [t.double() for t in tensors], upper)
        assert {one.dtype for one in found} == {BF16}
        assert max(map(gap, found, exact)) <= 2 * ONE_ROUNDING  # a bias may be added behind a rounding


def test_einsum_of_masks_of_a_gate(torch_products):
    dispatch, tokens = draw(INNER, 2, 3), draw(INNER, 5, seed=1)
    found = einsum("sec,sm->ecm", dispatch, tokens)
    assert found.dtype == BF16
    assert gap(found, torch.einsum("sec,sm->ecm", dispatch.double(), tokens.double())) <= ONE_ROUNDING


def test_experts_one_after_the_other(torch_products):
    experts = GroupedExperts(4, 6, 2, use_grouped_mm=False).to(BF16)
    counts = torch.tensor([INNER, 7])
    x, upper = draw(INNER + 7, 4), draw(INNER + 7, 4, seed=1)
    with torch.no_grad():  # gradients of w2 are large sums over rows
        for weight in experts.parameters():
            weight.copy_(draw(*weight.shape, seed=2))
    grads = torch.autograd.grad(experts(x, counts), [experts.w2], upper)[0]
    exact = GroupedExperts(4, 6, 2, use_grouped_mm=False).double()
    exact.load_state_dict({name: value.double() for name, value in experts.state_dict().items()})
    goal = torch.autograd.grad(exact(x.double(), counts), [exact.w2], upper.double())[0]
    assert gap(grads, goal) <= 4 * ONE_ROUNDING  # of the rows between the layers, too


def test_gradients_of_a_chunked_mlp(torch_products):
    tensors = [draw(INNER, 1, 4), draw(6, 4, seed=1), draw(6, seed=2), draw(4, 6, seed=3)]
    upper = draw(INNER, 1, 4, seed=4)
    run = lambda x, w1, b1, w2: FPDT_FFN.apply(x, w1, b1, w2, None, True, INNER)[0]  # noqa: E731
    found, exact = gradients(run, tensors, upper), gradients(run, [t.double() for t in tensors], upper)
    assert max(map(gap, found, exact)) <= 4 * ONE_ROUNDING
