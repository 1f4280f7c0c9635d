"""ZenFlow's optimizers as classes: AdamW of chosen columns, and a CPU Adam that steps beside the caller."""

import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, ZenFlowCPUAdam, ZenFlowSelectiveAdamW, ZenFlowSelectiveAdamW_stage3
from native_classes import with_gradient
from refusals import refused

ARGS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}
COLUMNS = torch.tensor([1, 4, 5])


def chosen(dtype=torch.float32):
    """A matrix of which some columns are chosen, a vector and a matrix without a gradient; AdamW of torch on copies."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in ((3, 6), (5,), (2, 2))]
    params[0].selected_indices = COLUMNS
    plain = [torch.nn.Parameter(params[0].detach()[:, COLUMNS].float()), torch.nn.Parameter(params[1].detach().float())]
    return params, plain, torch.optim.AdamW(plain, **ARGS)


def give(params, plain, seed):
    generator = torch.Generator().manual_seed(seed)
    for param, copy in zip(params, plain):
        copy.grad = torch.randn(copy.shape, generator=generator)
        param.selected_grad = copy.grad.to(param.dtype)
        copy.grad = param.selected_grad.float()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", [ZenFlowSelectiveAdamW, ZenFlowSelectiveAdamW_stage3])
def test_chosen_columns_are_stepped_as_by_adamw(kind, offload):
    params, plain, reference = chosen()
    others = params[0].detach()[:, [0, 2, 3]].clone(), params[2].detach().clone()
    optimizer = kind([{"params": params[:1]}, {"params": params[1:]}], offload=offload, bucket_size=4, **ARGS)
    assert isinstance(optimizer, torch.optim.AdamW)
    for step in range(5):
        give(params, plain, step)
        reference.step()
        if step % 2 == 0:
            optimizer.step()
        elif kind is ZenFlowSelectiveAdamW:
            optimizer.group_step({0: params[:1], 1: params[1:]})
        else:
            optimizer.group_step(params)
        assert all(param.selected_grad is None for param in params[:2])
    torch.testing.assert_close(params[0].detach()[:, COLUMNS], plain[0].detach())
    torch.testing.assert_close(params[1].detach(), plain[1].detach())
    assert torch.equal(params[0].detach()[:, [0, 2, 3]], others[0]) and torch.equal(params[2].detach(), others[1])


@pytest.mark.parametrize("kind", [ZenFlowSelectiveAdamW, ZenFlowSelectiveAdamW_stage3])
def test_updates_start_from_what_was_put_aside(kind):
    params, plain, reference = chosen()
    optimizer = kind(params, **ARGS)
    give(params, plain, 0)
    listed = {0: params} if kind is ZenFlowSelectiveAdamW else params
    optimizer.temp_copy_param(listed)
    with torch.no_grad():
        params[1].fill_(100.0)
    reference.step()
    optimizer.group_step(listed)
    torch.testing.assert_close(params[1].detach(), plain[1].detach())


def test_moments_belong_to_a_choice():
    params, plain, _ = chosen()
    optimizer = ZenFlowSelectiveAdamW(params, **ARGS)
    give(params, plain, 0)
    optimizer.step()
    params[0].selected_indices = COLUMNS[:2]
    params[0].selected_grad = torch.ones(3, 2)
    refused(ValueError, "clear_selected_mv", optimizer.step)
    optimizer.clear_selected_mv()
    fresh = with_gradient(params[0].detach()[:, COLUMNS[:2]].clone())
    optimizer.step()
    torch.optim.AdamW([fresh], **ARGS).step()
    torch.testing.assert_close(params[0].detach()[:, COLUMNS[:2]], fresh.detach())
    params[0].selected_grad = torch.ones(3, 6)
    refused(ValueError, "selected_grad of a parameter of shape", optimizer.step)


def test_half_precision_keeps_moments_in_fp32():
    params, plain, reference = chosen(torch.bfloat16)
    optimizer = ZenFlowSelectiveAdamW(params, **ARGS)
    give(params, plain, 0)
    reference.step()
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    assert torch.equal(params[0].detach()[:, COLUMNS], plain[0].detach().to(torch.bfloat16))


def test_cpu_adam_beside_the_caller():
    results = []
    for kind, more in ((DeepSpeedCPUAdam, {}), (ZenFlowCPUAdam, {}), (ZenFlowCPUAdam, {"overlap_step": True})):
        torch.manual_seed(1)
        param = torch.nn.Parameter(torch.randn(1000))
        optimizer = kind([param], lr=0.1, **more)
        for step in range(4):
            param.grad = torch.full_like(param, 1.0 + step)
            assert optimizer.step() is None
            optimizer.zero_grad()
        results.append((param.detach().clone(), optimizer.state_dict()["state"][0]["exp_avg"]))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_what_fails_beside_the_caller_is_raised_by_the_next_call():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = ZenFlowCPUAdam([param], overlap_step=True)
    param.grad = torch.zeros(3).to_sparse()
    optimizer.step()
    refused(RuntimeError, "sparse", optimizer.wait)
    optimizer.wait()  # told once
