"""The linear layer that keeps the weight, and no view of it, against torch's own."""

import inspect

import pytest
import torch

from deepspeed.runtime.utils import noop_decorator
from deepspeed.runtime.zero.linear import (
    LinearFunctionForZeroStage3,
    LinearModuleForZeroStage3,
    autocast_custom_bwd,
    autocast_custom_fwd,
    zero3_linear_wrap,
)
from deepspeed.runtime.zero.utils import ZeRORuntimeException, is_zero_param
from deepspeed.zero.gathers.linear import exact_linear
from gradients import gradients
from runs import TORCH2

F = torch.nn.functional


def leaves(shape, bias, dtype=torch.float32):
    torch.manual_seed(0)
    made = [torch.randn(*shape, 5, dtype=dtype), torch.randn(3, 5, dtype=dtype), torch.randn(3, dtype=dtype)]
    return [t.requires_grad_() for t in made[: 3 if bias else 2]]


def run(function, tensors):
    out = function(*tensors)
    return [out, *gradients(out.float().square().sum(), tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (2, 1, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("function", [zero3_linear_wrap, LinearFunctionForZeroStage3.apply], ids=["C++", "Python"])
def test_equals_torch(function, shape, bias, dtype):
    ours = run(function, leaves(shape, bias, dtype))
    theirs = run(F.linear, leaves(shape, bias, dtype))
    assert torch.equal(ours[0], theirs[0])
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(), (4,), (2, 4)], ids=str)
def test_bf16_has_the_products_that_torch_has(shape):
    """Whether torch's add in bf16 depends on the processor, and a model trains at stage 3 as at the others."""
    ours = run(zero3_linear_wrap, leaves(shape, True, torch.bfloat16))
    for a, b in zip(ours, run(F.linear, leaves(shape, True, torch.bfloat16)), strict=True):
        assert a.dtype == torch.bfloat16 and torch.allclose(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_bf16_equals_fp64_of_the_same_numbers(shape, bias):
    """Not torch's own bf16 products: whether those add in bf16 depends on the processor."""
    tensors = leaves(shape, bias, torch.bfloat16)
    ours = run(exact_linear, tensors)
    for a, b in zip(ours, run(F.linear, [t.detach().double().requires_grad_() for t in tensors]), strict=True):
        assert a.shape == b.shape and a.dtype == torch.bfloat16
        assert torch.linalg.norm(a.double() - b) <= 0.01 * torch.linalg.norm(b)  # of two roundings, 0.4 % each at most


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)], ids=str)
def test_derivatives_of_both_orders(shape, bias):
    tensors = leaves(shape, bias, torch.float64)
    assert torch.autograd.gradcheck(zero3_linear_wrap, tensors)
    assert torch.autograd.gradgradcheck(zero3_linear_wrap, tensors)


@pytest.mark.parametrize("wanting", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_wanted_gets_a_gradient(wanting):
    tensors = [t.detach().requires_grad_(wants) for t, wants in zip(leaves((4,), True), wanting)]
    run(zero3_linear_wrap, tensors)
    assert [t.grad is not None for t in tensors] == list(wanting)


def test_the_weight_itself_is_saved():
    x, weight, bias = leaves((2, 4), True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        zero3_linear_wrap(x, weight, bias)
    storage = torch.Tensor.untyped_storage if TORCH2 else torch.Tensor.storage
    of_weight = [t for t in saved if storage(t).data_ptr() == storage(weight).data_ptr()]
    assert len(of_weight) == 1 and of_weight[0] is weight


def test_values_may_go_and_come_back_between_forward_and_backward():
    x, weight, bias = leaves((2, 4), True)
    out = zero3_linear_wrap(x, weight, bias)
    values = weight.data
    weight.data = torch.empty(0)
    weight.data = values.clone()
    values.zero_()  # the memory of the forward pass is somebody else's now
    out.square().sum().backward()
    assert torch.allclose(x.grad, run(F.linear, leaves((2, 4), True))[1], rtol=1e-5)


def test_a_backward_under_autocast_is_that_of_its_forward():
    tensors = leaves((4,), True)
    out = zero3_linear_wrap(*tensors).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = gradients(out, tensors)
    theirs = gradients(F.linear(*tensors).square().sum(), tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not TORCH2, reason="torch.compile came with torch 2")
def test_a_compiled_layer_is_one_graph():
    layer, x = LinearModuleForZeroStage3(5, 3), torch.randn(4, 5)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("function", [zero3_linear_wrap, LinearFunctionForZeroStage3.apply])
def test_under_autocast(function):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = function(*(mine := leaves((4,), True)))
        theirs = F.linear(*(other := leaves((4,), True)))
    assert ours.dtype == theirs.dtype == torch.bfloat16 and torch.equal(ours, theirs)
    ours, theirs = gradients(ours.float().square().sum(), mine), gradients(theirs.float().square().sum(), other)
    assert all(grad.dtype == torch.float32 for grad in ours)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_under_autocast_the_wrapper_is_torchs_own():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "LinearFunctionForZeroStage3" not in zero3_linear_wrap(*leaves((4,), True)).grad_fn.name()
    assert "LinearFunctionForZeroStage3" in zero3_linear_wrap(*leaves((4,), True)).grad_fn.name()


def test_it_may_stand_in_the_place_of_torchs_own(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    layer = torch.nn.Linear(5, 3)
    x = torch.randn(4, 5)
    assert torch.allclose(layer(x), x @ layer.weight.t() + layer.bias, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_module():
    torch.manual_seed(3)
    ours = LinearModuleForZeroStage3(5, 3)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(5, 3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    assert repr(ours) == repr(theirs).replace("Linear(", "LinearModuleForZeroStage3(")
    x = torch.randn(2, 5)
    out = ours(x)
    assert torch.equal(out, theirs(x)) and "LinearFunctionForZeroStage3" in out.grad_fn.name()
    assert LinearModuleForZeroStage3(5, 3, bias=False).bias is None
    names = inspect.signature(LinearModuleForZeroStage3.__init__).parameters
    assert list(names) == ["self", "in_features", "out_features", "bias"] and names["bias"].default is True


@pytest.mark.skipif(not TORCH2, reason="torch.func came with torch 2")
@pytest.mark.parametrize("function", [zero3_linear_wrap, LinearFunctionForZeroStage3.apply])
def test_vmap_and_per_sample_gradients(function):
    x, weight, bias = (t.detach() for t in leaves((4,), True))

    def loss(function):
        return lambda w, b, row: function(row, w, b).square().sum()

    ours, theirs = (
        torch.func.vmap(torch.func.grad(loss(f), argnums=(0, 1)), in_dims=(None, None, 0))(weight, bias, x)
        for f in (function, F.linear)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not TORCH2, reason="setup_context came with torch 2")
def test_signatures_of_the_function():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(LinearFunctionForZeroStage3.forward) == ["input", "weight", "bias"]
    assert names(LinearFunctionForZeroStage3.setup_context) == ["ctx", "inputs", "output"]
    assert names(LinearFunctionForZeroStage3.backward) == ["ctx", "grad_output"]


def test_autocast_decorators_make_a_function_work():
    class Double(torch.autograd.Function):
        @staticmethod
        @autocast_custom_fwd
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @autocast_custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_small_things():
    assert issubclass(ZeRORuntimeException, Exception)
    param = torch.nn.Parameter(torch.zeros(2))
    assert not is_zero_param(param) and not is_zero_param("text")
    param.ds_id = 0
    assert is_zero_param(param)
    assert noop_decorator(test_small_things) is test_small_things
