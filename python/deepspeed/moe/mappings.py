"""Splits tokens that all tensor-parallel ranks have into one part per rank, and gathers the results of all parts."""

import torch

from deepspeed import comm as dist
from deepspeed.utils import groups


def tensor_ranks():
    """Ranks that split single weights among them."""
    return groups.get_tensor_model_parallel_world_size()


def _gather_tokens(input_, dim=0):
    """The parts of all tensor-parallel ranks along ``dim``, one after the other."""
    input_ = input_.contiguous()
    parts = [torch.empty_like(input_) for _ in range(tensor_ranks())]
    parts[groups.get_tensor_model_parallel_rank()] = input_
    dist.all_gather(parts, input_, group=groups.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=dim).contiguous()


def _drop_tokens(input_, dim=0):
    """This rank's part of ``input_`` along ``dim``."""
    ranks, rank = tensor_ranks(), groups.get_tensor_model_parallel_rank()
    total = input_.shape[dim]
    if total % ranks != 0:
        raise ValueError(f"input dimension {dim} ({total}) is not divisible by tensor parallel world size ({ranks})")
    return torch.narrow(input_, dim, rank * (total // ranks), total // ranks).contiguous()


class _Exchanged(torch.autograd.Function):
    """``apply(input, dim, there, back)``: ``there(input, dim)``, whose gradient goes through ``back``."""

    @staticmethod
    def forward(ctx, input_, dim, there, back):
        ctx.dim, ctx.back = dim, back
        return there(input_, dim)

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.back(grad_output, ctx.dim), None, None, None


def gather_tokens(input_, dim=0):
    """``_gather_tokens``, of whose result each rank's part belongs to its own input; ``input_`` itself on one rank."""
    return _Exchanged.apply(input_, dim, _gather_tokens, _drop_tokens) if tensor_ranks() > 1 else input_


def drop_tokens(input_, dim=0):
    """``_drop_tokens``, whose input every rank has; ``input_`` itself on one rank."""
    return _Exchanged.apply(input_, dim, _drop_tokens, _gather_tokens) if tensor_ranks() > 1 else input_
