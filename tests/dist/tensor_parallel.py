"""Autograd functions for layers that are sliced over ranks. ``group`` None: all ranks."""

import torch

from deepspeed import comm as dist


class Copied(torch.autograd.Function):
    """``x`` itself, which every rank of ``group`` uses: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class AddedUp(torch.autograd.Function):
    """The sum over the ranks of ``group``; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx, x, group=None):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None
