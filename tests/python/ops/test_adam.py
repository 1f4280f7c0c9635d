"""DeepSpeedCPUAdam and FusedAdam against torch.optim and against fp64, over dtypes, layouts and options."""

import copy
import functools
from unittest import mock

import numpy as np
import pytest
import torch

import native_classes
from deepspeed._native import _C
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from native_classes import copies_of, equal, run, set_grads, train_alike, with_gradient
from refusals import refused

SHAPES = [(1,), (7,), (33, 5), (4, 3, 2, 2), (1000, 17), (0,), (3, 0)]
HALF = [torch.bfloat16, torch.float16]


make_params = functools.partial(native_classes.make_params, shapes=SHAPES)


def ours(cls, params, adamw, **kwargs):
    if cls is DeepSpeedCPUAdam:
        return cls(params, adamw_mode=adamw, **kwargs)
    return cls(params, adam_w_mode=adamw, **kwargs)


CLASSES = pytest.mark.parametrize("cls", [DeepSpeedCPUAdam, FusedAdam])
ADAMW = pytest.mark.parametrize("adamw", [True, False])


@CLASSES
@ADAMW
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fp32_equals_torch(cls, adamw, weight_decay):
    params, expected = make_params(), make_params()
    optimizer = ours(cls, params, adamw, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    reference = (torch.optim.AdamW if adamw else torch.optim.Adam)(
        expected, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay
    )
    train_alike(optimizer, params, reference, expected, [None] * 50)
    for p, q in zip(params, expected, strict=True):
        if p.numel():
            torch.testing.assert_close(
                optimizer.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"], rtol=1e-5, atol=1e-7
            )


def wide_copies(params):
    return [torch.nn.Parameter(p.detach().float()) for p in params]


@CLASSES
@ADAMW
@pytest.mark.parametrize("dtype", HALF)
def test_half_computes_in_fp32(cls, adamw, dtype):
    """One step of a 16-bit parameter is the fp32 step, rounded once; the moments stay fp32."""
    params = make_params(dtype)
    wide = wide_copies(params)
    optimizer = ours(cls, params, adamw, lr=0.01, weight_decay=0.1)
    reference = ours(cls, wide, adamw, lr=0.01, weight_decay=0.1)
    for step in range(5):
        set_grads(params, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
            w.data.copy_(p.data.float())
        optimizer.step()
        reference.step()
        for p, w in zip(params, wide, strict=True):
            assert torch.equal(p.data, w.data.to(dtype)) and optimizer.state[p]["exp_avg"].dtype == torch.float32
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], reference.state[w]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", HALF)
def test_half_stays_close_to_torch(dtype):
    """Against torch's Adam of fp32 copies, which rounds nothing: the drift is that of the 16-bit parameters."""
    params = make_params(dtype)
    wide = wide_copies(params)
    optimizer, reference = DeepSpeedCPUAdam(params, lr=0.01), torch.optim.AdamW(wide, lr=0.01, weight_decay=0)
    for step in range(10):
        set_grads(params, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
        reference.step()
    assert all((p.float() - w).norm() <= 1e-2 * w.norm() for p, w in zip(params, wide, strict=True) if p.numel())


@pytest.mark.parametrize("dtype", HALF)
def test_half_states(dtype):
    params = make_params(dtype)
    optimizer = DeepSpeedCPUAdam(params, lr=0.01, fp32_optimizer_states=False)
    run(optimizer, params, 1)
    for p in params:
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype
        torch.testing.assert_close(state["exp_avg"], (0.1 * p.grad.float()).to(dtype), rtol=1e-2, atol=1e-6)
    before = copies_of(params)
    run(optimizer, params, 1, first=1)
    assert all(p.numel() == 0 or not torch.equal(p, b) for p, b in zip(params, before, strict=True))


@CLASSES
def test_fp32_grads_of_half_params_by_group(cls):
    """fp32, bf16 and fp16 parameters in one group are three kernel launches of one call."""
    params = make_params() + make_params(torch.bfloat16) + make_params(torch.float16)
    separate = copy.deepcopy(params)
    optimizer, others = cls(params, lr=0.01), [cls([p], lr=0.01) for p in separate]
    for step in range(3):
        set_grads(params, step)
        for p, q, other in zip(params, separate, others, strict=True):
            q.grad = p.grad.clone()
            other.step()
        optimizer.step()
    assert equal(params, separate)


def test_one_native_call_per_group():
    params = make_params()
    optimizer = DeepSpeedCPUAdam([{"params": params[:3]}, {"params": params[3:], "lr": 0.1}])
    kernel = mock.Mock(wraps=optimizer._runner("adam"))
    optimizer._runners = {"adam": kernel}
    run(optimizer, params, 1)
    assert [len(call.args[0]) for call in kernel.step.call_args_list] == [3, len(params) - 3]


@CLASSES
def test_missing_gradients_and_their_step_counts(cls):
    """A parameter without a gradient is left alone, and its bias correction counts its own updates."""
    params, expected = make_params(shapes=[(5,), (6,)]), make_params(shapes=[(5,), (6,)])
    optimizer = cls(params, lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW(expected, lr=0.01, weight_decay=0.1)
    for step in range(4):
        for one, group in ((optimizer, params), (reference, expected)):
            set_grads(group, step)
            if step % 2:
                group[1].grad = None
            one.step()
    assert [optimizer.state[p]["step"] for p in params] == [4, 2]
    torch.testing.assert_close(params, expected, rtol=2e-6, atol=2e-6)


@CLASSES
def test_no_bias_correction(cls):
    p = with_gradient(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25]))
    cls([p], lr=0.1, bias_correction=False).step()
    m, v = 0.1 * np.array([0.5, 0.25]), 0.001 * np.array([0.5, 0.25]) ** 2
    np.testing.assert_allclose(p.detach().numpy(), [1, -2] - 0.1 * m / (np.sqrt(v) + 1e-8), rtol=1e-6)


@CLASSES
def test_strided_parameters_and_gradients(cls):
    """channels_last, transposed and sliced parameters, with gradients of another layout."""
    base = torch.randn(8, 6, 5, 4)
    for make in (
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 3),
        lambda t: t[:, ::2],
        lambda t: t[1:3, 1],
    ):
        p, q = torch.nn.Parameter(make(base.clone())), torch.nn.Parameter(make(base.clone()).contiguous())
        optimizer, reference = cls([p], lr=0.01), cls([q], lr=0.01)
        for _ in range(3):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad.clone(memory_format=torch.contiguous_format)
            optimizer.step()
            reference.step()
        assert torch.equal(p, q) and torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])


def test_takes_over_a_torch_adamw_checkpoint():
    expected = make_params()
    reference = torch.optim.AdamW(expected, lr=0.01, weight_decay=0.1)
    run(reference, expected, 1)
    params = copies_of(expected)
    optimizer = DeepSpeedCPUAdam(params, lr=0.01, weight_decay=0.1)
    saved = copy.deepcopy(reference.state_dict())
    saved["param_groups"][0]["bias_correction"] = True
    optimizer.load_state_dict(saved)
    for one, own in ((optimizer, params), (reference, expected)):
        run(one, own, 1, first=1)
    torch.testing.assert_close(params, expected, rtol=1e-6, atol=1e-6)


@CLASSES
def test_closure(cls):
    p = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = cls([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert p.item() == pytest.approx(1.9)


@CLASSES
def test_autograd_notices_the_update(cls):
    """A parameter that a pending backward needs has changed: that must be an error, not a wrong gradient."""
    p = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    loss = (p * p).sum()
    p.grad = torch.ones(2)
    cls([p]).step()
    refused(RuntimeError, "modified by an inplace operation", loss.backward)


@CLASSES
def test_learning_rate_changes_between_steps(cls):
    params, expected = make_params(), make_params()
    optimizer, reference = cls(params, lr=0.1), torch.optim.AdamW(expected, lr=0.1, weight_decay=0)
    rates = [lambda o, lr=lr: o.param_groups[0].update(lr=lr) for lr in (0.1, 0.0, 0.05)]
    train_alike(optimizer, params, reference, expected, rates)


@CLASSES
def test_hyperparameters_of_the_rule(cls):
    optimizer = ours(cls, make_params(), False, lr=0.1, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    assert optimizer.rule_args(optimizer.param_groups[0]) == {
        "lr": 0.1,
        "beta1": 0.5,
        "beta2": 0.6,
        "eps": 1e-3,
        "weight_decay": 0.2,
        "bias_correction": 1.0,
        "decoupled": 0.0,
    }


@CLASSES
@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9,)},
        {"eps": -1},
        {"weight_decay": -1},
    ],
)
def test_bad_hyperparameters(cls, bad):
    refused(ValueError, cls.__name__, cls, make_params(), **bad)
    refused(ValueError, cls.__name__, cls, [{"params": make_params(), **bad}])


@CLASSES
def test_sparse_gradients_are_refused(cls):
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))
    refused(RuntimeError, "sparse", cls([with_gradient(torch.zeros(4, 2), sparse)]).step)


@CLASSES
def test_state_of_another_shape_is_refused(cls):
    p = with_gradient(torch.zeros(4))
    optimizer = cls([p])
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(5)
    before = p.detach().clone()
    refused(ValueError, "another model", optimizer.step)
    assert optimizer.state[p]["step"] == 1 and torch.equal(p, before)


def test_fused_adam_refuses_unknown_devices():
    step = FusedAdam([with_gradient(torch.zeros(4, device="meta"))]).step
    refused(RuntimeError, "no kernels of FusedAdam for tensors on meta", step)


@pytest.mark.parametrize("to_none", [True, False])
def test_fused_adam_zero_grad(to_none):
    params = make_params()
    optimizer = FusedAdam(params, set_grad_none=to_none)
    set_grads(params, 0)
    optimizer.zero_grad()
    assert all(p.grad is None if to_none else not p.grad.any() for p in params)


@ADAMW
def test_subgroups_of_a_partition_are_the_whole_partition(adamw):
    """Parts of a flat partition, each under its id in the place of one parameter, get what the whole would get: the
    parts of one step all count one step."""
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(23))
    flat, slot = whole.detach().clone(), torch.nn.Parameter(torch.empty(0))
    options, sizes = {"lr": 0.1, "weight_decay": 0.2, "adamw_mode": adamw}, [10, 7, 6]
    reference, optimizer = DeepSpeedCPUAdam([whole], **options), DeepSpeedCPUAdam([slot], **options)
    for step in range(4):
        whole.grad = torch.randn(23)
        reference.step()
        for number, (part, grad) in enumerate(zip(flat.split(sizes), whole.grad.split(sizes))):
            slot.data, slot.grad = part, None
            slot.grad = grad
            optimizer.step_subgroup(number)
        assert torch.equal(flat, whole.detach())
        assert [optimizer.state[number]["step"] for number in range(3)] == [step + 1] * 3
    assert slot not in optimizer.state
    assert torch.equal(torch.cat([optimizer.state[n]["exp_avg"] for n in range(3)]), reference.state[whole]["exp_avg"])


def test_a_subgroup_of_several_parameters_counts_once_and_survives_saving():
    def in_two_groups(params):
        return DeepSpeedCPUAdam([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.5}], lr=0.1)

    params = make_params(shapes=[(5,), (2, 3)])
    twin = copies_of(params)
    optimizer, reference = in_two_groups(params), in_two_groups(twin)
    for step in range(3):
        if step == 2:  # a new object goes on
            saved = optimizer.state_dict()
            assert set(saved["state"]) == set() and set(saved["subgroups"]) == {7}
            optimizer = in_two_groups(params)
            optimizer.load_state_dict(saved)
        set_grads(params, step)
        optimizer.step_subgroup(7)
        run(reference, twin, 1, first=step)
        assert optimizer.state[7]["step"] == step + 1 and equal(params, twin)
    params[0].grad = None
    refused(ValueError, "subgroup 7 has states of 11 elements, .* now have 6", optimizer.step_subgroup, 7)
    params[1].grad = None
    optimizer.step_subgroup(8)
    assert 8 not in optimizer.state  # nothing to update, nothing made
    assert "subgroups" not in reference.state_dict()


@ADAMW
def test_rollback_subgroup_restores_the_values(adamw):
    params = make_params(shapes=[(50, 3), (6,)])
    optimizer = DeepSpeedCPUAdam([{"params": [p]} for p in params], lr=0.1, weight_decay=0.2, adamw_mode=adamw)
    for step in range(3):
        before, state = copies_of(params), copy.deepcopy(optimizer.state.get(0))
        set_grads(params, step)
        optimizer.step_subgroup(0)
        assert optimizer.state[0]["step"] == step + 1
        optimizer.rollback_subgroup(0)
        assert optimizer.state[0]["step"] == step
        torch.testing.assert_close(params, before, rtol=1e-6, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq") if state else ():
            torch.testing.assert_close(optimizer.state[0][name], state[name], rtol=1e-5, atol=1e-6)
        optimizer.step_subgroup(0)


def test_rollback_refuses_what_it_cannot_do():
    p = with_gradient(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([p])
    not_yet = "Cannot rollback optimizer state for sub_group_id 0 as it has not been ini"
    refused(RuntimeError, not_yet, optimizer.rollback_subgroup, 0)
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    refused(RuntimeError, "Cannot rollback sub_group_id 0: step count is 0", optimizer.rollback_subgroup, 0)
    p.grad[1] = float("nan")
    optimizer.step_subgroup(0)
    after = p.detach().clone()
    refused(RuntimeError, "not finite", optimizer.rollback_subgroup, 0)
    assert torch.equal(p.isnan(), after.isnan()) and optimizer.state[0]["step"] == 1


def test_kernel_info():
    info = _C.kernel_info("cpu")
    assert info["error"] is None and info["isa"] in ("scalar", "neon", "sse4", "avx2", "avx512")
    assert "cannot be loaded" in _C.kernel_info("abacus")["error"]


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@cuda
@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_cuda_equals_cpu(cls, dtype):
    host = make_params(dtype)
    device = [torch.nn.Parameter(p.detach().cuda()) for p in host]
    on_host, on_device = cls(host, lr=0.01), FusedAdam(device, lr=0.01)
    for step in range(5):
        set_grads(host, step)
        for p, d in zip(host, device, strict=True):
            d.grad = p.grad.cuda()
        on_host.step()
        on_device.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close([d.cpu() for d in device], host, rtol=tolerance, atol=tolerance)


@cuda
def test_cuda_runs_on_the_current_stream():
    p = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    stream, optimizer = torch.cuda.Stream(), FusedAdam([p], lr=1.0)
    with torch.cuda.stream(stream):
        p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        result = p.detach().clone()
    stream.synchronize()
    assert torch.allclose(result, torch.full_like(result, -1.0))


@cuda
def test_cpu_adam_refuses_cuda_parameters():
    refused(AssertionError, "host memory", DeepSpeedCPUAdam([with_gradient(torch.zeros(4, device="cuda"))]).step)
