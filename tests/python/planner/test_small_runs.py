"""Operators that torch cannot run on meta have the shapes of their results there, too."""

import pytest
import torch
from torch.nn import functional as F

import deepspeed
from deepspeed._compat import TORCH2
from deepspeed.planner.machine import Machine
from deepspeed.planner.small_runs import run_small
from deepspeed.zero.nested import replace, tensors_in

aten = torch.ops.aten
MACHINE = Machine("test", {"float32": 1e12}, 1e11, 0, (0, 1e18), (0, 1e18), 0, 0, 0)


def conv_backward(rows, channels=3, kernel=3, stride=2, dtype=torch.float32):
    x, weight = torch.ones(rows, channels, 9, 9, dtype=dtype), torch.ones(5, channels, kernel, kernel, dtype=dtype)
    grad = torch.ones_like(F.conv2d(x.float(), weight.float(), stride=stride, padding=1)).to(dtype)
    how = [5], [stride, stride], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    return aten.convolution_backward.default, (grad, x, weight, *how)


CALLS = {
    "convolution": conv_backward(32),
    "convolution of few rows": conv_backward(2),
    "as many rows as channels": conv_backward(16, channels=16),
    "a stride of the number of rows": conv_backward(7, stride=7),
    "bfloat16": conv_backward(8, dtype=torch.bfloat16),
    "nonzero": (aten.nonzero.default, (torch.ones(40, 3, dtype=torch.bool),)),
    "nonzero of numbers": (aten.nonzero.default, (torch.ones(12, 2),)),
    "masked_select": (aten.masked_select.default, (torch.ones(30, 7), torch.ones(30, 1, dtype=torch.bool))),
    "index with a mask": (aten.index.Tensor, (torch.ones(30, 7), [torch.ones(30, dtype=torch.bool)])),
    "multinomial": (aten.multinomial.default, (torch.ones(9, 20), 9, True)),
    "bincount": (aten.bincount.default, (torch.ones(100, dtype=torch.int64), None, 50)),
    "median": (aten.median.dim, (torch.ones(10, 10), 1)),
    "kthvalue": (aten.kthvalue.default, (torch.ones(12, 20), 12, 1)),
    "searchsorted": (aten.searchsorted.Tensor, (torch.ones(12), torch.ones(5, 12))),
    "pdist": (aten._pdist_forward.default, (torch.ones(13, 4), 2.0)),
    "repeat_interleave": (aten.repeat_interleave.Tensor, (torch.ones(11, dtype=torch.int64),)),
    "no dimension": (aten.histc.default, (torch.ones(()), 12)),
}


@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_those_of_a_run(name):
    func, args = CALLS[name]
    before, meta = torch.get_rng_state(), replace(args, torch.is_tensor, lambda one: one.to("meta"))
    (found,) = run_small(func, meta, {})
    assert torch.equal(before, torch.get_rng_state())
    wide = replace(args, torch.is_tensor, lambda one: one.float() if one.is_floating_point() else one)
    real = tensors_in(func(*wide))
    assert [one.shape for one in tensors_in(found)] == [one.shape for one in real]
    dtype = next((one.dtype for one in tensors_in(args) if one.is_floating_point()), None)
    assert all(one.is_meta for one in tensors_in(found))
    kinds = [dtype if one.is_floating_point() else one.dtype for one in real]
    assert [one.dtype for one in tensors_in(found)] == kinds


def test_an_operator_that_writes_returns_what_it_has_written():
    x, index = torch.ones(8, 2, device="meta"), torch.ones(8, dtype=torch.bool, device="meta")
    (found,) = run_small(aten.index_put_.default, (x, [index], torch.ones((), device="meta")), {})
    assert found is x


def test_what_runs_nowhere():
    x, mask = torch.ones(8, 3, device="meta"), torch.ones(5, dtype=torch.bool, device="meta")
    assert run_small(aten.masked_select.default, (x, mask), {}) is None
    with pytest.raises(deepspeed.planner.PlanError, match="masked_select.default runs on tensors without memory n"):
        plan_of(lambda x: x.masked_select(torch.ones(5, dtype=torch.bool, device=x.device)).sum())


class _Model(torch.nn.Module):
    def __init__(self, after):
        super().__init__()
        self.conv, self.after = torch.nn.Conv2d(3, 8, 3, padding=1), after

    def forward(self, x):
        return self.after(self.conv(x))


def plan_of(after):
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adam"}}
    sample = torch.zeros(8, 3, 16, 16)
    return deepspeed.plan(lambda: _Model(after), config, 1, sample=sample, machine=MACHINE)


def test_a_plan_names_them():
    found = plan_of(lambda x: x.square().sum()).fullest
    assert found.run_small == (() if TORCH2 else ("aten.convolution_backward.default",))
    chosen = plan_of(lambda x: x.masked_select(x > 0).square().sum())
    assert "aten.masked_select.default" in chosen.fullest.run_small
    assert "shapes from a small run on the CPU: aten." in str(chosen)
    rows = 4 * 8 * 8 * 16 * 16  # bytes of the output of the convolution, all of which is chosen
    assert 0 <= chosen.peak_bytes - found.peak_bytes - rows // 4 <= 1.5 * rows
