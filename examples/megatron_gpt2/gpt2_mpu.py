"""Model parallelism in plain PyTorch: groups of ranks, layers that are split over a group, random numbers.

Ranks that follow each other share a model (the model-parallel group). Ranks that have the same slice of a model train
on different data (the data-parallel group). `deepspeed.initialize` gets this module as its `mpu`.
"""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint

_GROUPS = {}
_RANDOM = torch.cuda if torch.cuda.is_available() else torch  # the functions of the device's random numbers


# ---- groups of ranks -------------------------------------------------------------------------------------------------


def device_of(local_rank):
    """The device of a rank: a GPU if there is one."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def init_process_group(local_rank):
    """Starts torch.distributed: with the ranks that a launcher has started, or with this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def initialize_model_parallel(size):
    """Makes all groups. Every rank makes them in the same order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % size:
        raise SystemExit(f"--model-parallel-size {size}: {world} ranks are not a multiple of it")
    model = [range(first, first + size) for first in range(0, world, size)]
    data = [range(first, world, size) for first in range(size)]
    for kind, parts in (("model", model), ("data", data)):
        made = [dist.new_group(list(ranks)) for ranks in parts]
        _GROUPS[kind] = next(group for group, ranks in zip(made, parts) if rank in ranks)


def get_model_parallel_group():
    return _GROUPS["model"]


def get_model_parallel_world_size():
    return dist.get_world_size(_GROUPS["model"])


def get_model_parallel_rank():
    return dist.get_rank(_GROUPS["model"])


def get_data_parallel_group():
    return _GROUPS["data"]


def get_data_parallel_world_size():
    return dist.get_world_size(_GROUPS["data"])


def get_data_parallel_rank():
    return dist.get_rank(_GROUPS["data"])


# ---- layers that are split -------------------------------------------------------------------------------------------


class _Copied(torch.autograd.Function):
    """The input of split layers: each rank has the same one, and its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad)


class _Reduced(torch.autograd.Function):
    """The result of split layers: the sum over the ranks, whose gradient each rank gets."""

    @staticmethod
    def forward(ctx, x):
        return _summed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _summed(x):
    """The sum over the model-parallel ranks. On CPUs it is computed in fp32, because gloo cannot add bf16."""
    dtype = torch.float32 if x.device.type == "cpu" else x.dtype
    total = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=get_model_parallel_group())
    return total.to(x.dtype)


def _slice(whole, dim):
    """This rank's slice of a whole weight, as a parameter with the marks of Megatron's parameters."""
    own = whole.chunk(get_model_parallel_world_size(), dim)[get_model_parallel_rank()]
    param = nn.Parameter(own.clone(memory_format=torch.contiguous_format))
    param.model_parallel = param.tensor_model_parallel = True
    param.partition_dim, param.partition_stride = dim, 1
    return param


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, inputs, outputs, std):
        super().__init__()
        self.weight = _slice(torch.randn(outputs, inputs) * std, 0)
        self.bias = _slice(torch.zeros(outputs), 0)

    def forward(self, x):
        return nn.functional.linear(_Copied.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has some inputs. The bias is not split: it is added to the sum."""

    def __init__(self, inputs, outputs, std):
        super().__init__()
        self.weight = _slice(torch.randn(outputs, inputs) * std, 1)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return _Reduced.apply(nn.functional.linear(x, self.weight)) + self.bias


# ---- random numbers and activation checkpointing ---------------------------------------------------------------------


class _Tracker:
    """The random numbers of split layers, which differ on the ranks of a model."""

    state = None

    @contextlib.contextmanager
    def fork(self):
        """The random numbers in the block are those of this tracker."""
        outside = _RANDOM.get_rng_state()
        _RANDOM.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = _RANDOM.get_rng_state()
            _RANDOM.set_rng_state(outside)


_TRACKER = _Tracker()


def get_cuda_rng_tracker():
    return _TRACKER


def model_parallel_cuda_manual_seed(seed):
    """Seeds the device equally on all ranks, and the tracker differently on the ranks of a model."""
    _RANDOM.manual_seed(seed + 2718 + get_model_parallel_rank())
    _TRACKER.state = _RANDOM.get_rng_state()
    _RANDOM.manual_seed(seed)


def checkpoint(function, x):
    """``function(x)``, whose activations are computed again in the backward pass, with the same random numbers."""
    first, calls = _TRACKER.state, []

    def run(x):
        latest = _TRACKER.state
        calls.append(x.shape)
        if len(calls) == 1:
            return function(x)
        _TRACKER.state = first
        result = function(x)
        _TRACKER.state = latest
        return result

    return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=True)


# ---- gradients and losses of several ranks ---------------------------------------------------------------------------


def all_reduce_gradients(model):
    """Averages the gradients over the data-parallel ranks."""
    for param in model.parameters():
        param.grad /= get_data_parallel_world_size()
        dist.all_reduce(param.grad, group=get_data_parallel_group())


def clip_grad_norm(optimizer, most):
    """Scales gradients down to the norm ``most``. Split parameters count with all their slices, others once."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    counted = [param for param in params if get_model_parallel_rank() == 0 or hasattr(param, "model_parallel")]
    total = sum(param.grad.double().square().sum() for param in counted)
    dist.all_reduce(total, group=get_model_parallel_group())
    factor = most / (total.sqrt().item() + 1e-6)
    for param in params if 0 < factor < 1 else []:
        param.grad *= factor


def average(loss):
    """The mean of a loss over the data-parallel ranks, a number."""
    loss = loss.detach().clone() / get_data_parallel_world_size()
    dist.all_reduce(loss, group=get_data_parallel_group())
    return loss.item()
