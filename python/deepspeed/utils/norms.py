"""Norms of gradients and weights over a model that may be split among model-parallel ranks, and clipping by them."""

import math

import torch

from deepspeed import comm as dist
from deepspeed.utils import groups


def is_model_parallel_parameter(p):
    """Whether the parameter is split among model-parallel ranks, as its ``model_parallel`` or
    ``tensor_model_parallel`` attribute says."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def is_moe_param(param):
    """Whether the parameter is an expert's, which its data-parallel ranks do not share (``allreduce = False``)."""
    return hasattr(param, "allreduce") and not param.allreduce


def _listed(parameters):
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _model_parallel_rank(mpu):
    names = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
    return next(getattr(mpu, name)() for name in names if hasattr(mpu, name))


def _norm(tensors, norm_type, mpu):
    """Norm over ``tensors``, pairs of a parameter and its tensor, of this rank and its model-parallel peers: a float,
    inf and nan included. A parameter that every model-parallel rank holds whole counts on the first of them only."""
    device = next((tensor.device for _, tensor in tensors), torch.device("cpu"))
    norm_type = float(norm_type)
    if norm_type == math.inf:
        total = torch.zeros((), device=device, dtype=torch.float)
        for _, tensor in tensors:
            total = torch.maximum(total, tensor.detach().abs().max().float()) if tensor.numel() else total
    else:
        total = torch.zeros((), device=device, dtype=torch.double if device.type == "cpu" else torch.float)
        for p, tensor in tensors:
            if is_model_parallel_parameter(p) or mpu is None or _model_parallel_rank(mpu) == 0:
                total += tensor.detach().float().norm(norm_type).to(total.dtype) ** norm_type
    if mpu is not None:
        total, op = total.reshape(1), dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    total = total.item()
    return total if norm_type == math.inf else total ** (1.0 / norm_type)


def get_grad_norm(parameters, norm_type=2, mpu=None):
    """Norm of all gradients as of one vector, a float; -1.0 where it is inf or nan.

    mpu: an object with Megatron's get_model_parallel_group() and get_model_parallel_rank(), or None.
    """
    norm = _grad_norm(_listed(parameters), norm_type, mpu)
    return norm if math.isfinite(norm) else -1.0


def _grad_norm(parameters, norm_type, mpu):
    grads = [(p, p.grad) for p in parameters if p.grad is not None]
    return _norm([(p, g.coalesce().values() if g.is_sparse else g) for p, g in grads], norm_type, mpu)


def get_weight_norm(parameters, norm_type=2, mpu=None):
    """Norm of all parameters as of one vector, a float; -1.0 where it is inf or nan."""
    norm = _norm([(p, p.data) for p in _listed(parameters)], norm_type, mpu)
    return norm if math.isfinite(norm) else -1.0


def get_global_norm(norm_list):
    """The 2-norm of a vector whose pieces have these 2-norms."""
    return math.sqrt(sum(norm**2.0 for norm in norm_list))


def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    """Scales the gradients in place so that their norm over the model-parallel ranks is at most `max_norm`; returns
    the norm they had, a float.

    Where expert parameters are among them, gradients differ between data-parallel ranks; all ranks then clip by the
    mean of their norms, so that what they share stays equal.
    """
    parameters = _listed(parameters)
    norm = _grad_norm(parameters, norm_type, mpu)
    if any(is_moe_param(p) for p in parameters):
        device = parameters[0].device
        group = getattr(mpu, "get_data_parallel_group", groups.get_data_parallel_group)()
        mean = torch.tensor([norm], device=device, dtype=torch.double if device.type == "cpu" else torch.float)
        dist.all_reduce(mean, group=group)
        norm = mean.item() / dist.get_world_size(group=group)
    factor = float(max_norm) / (norm + 1e-6)
    if factor < 1:
        for p in parameters:
            if p.grad is not None:
                p.grad.detach().mul_(factor)
    return norm
