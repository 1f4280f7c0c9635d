"""Measured costs of the layers of a pipeline, which are built one at a time, on one micro-batch."""

import contextlib
import copy
import time
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._compat import memory_of
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe.layers import LayerSpec, call_of, describe
from deepspeed.utils.random_state import RandomState
from deepspeed.zero.nested import replace


@dataclass(frozen=True)
class LayerCost:
    """Seconds and bytes of one layer and one micro-batch."""

    forward: float
    backward: float
    activation_bytes: int
    output_bytes: int

    @property
    def seconds(self):
        """Both passes."""
        return self.forward + self.backward


def tensors_of(value):
    """The tensors in what passes between layers."""
    return [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, torch.Tensor)]


def fresh(value, device):
    """The same inputs, as if they had just been received."""
    return replace(
        value, torch.is_tensor, lambda one: one.detach().to(device).clone().requires_grad_(one.is_floating_point())
    )


@contextlib.contextmanager
def saved_bytes(module):
    """``{memory: bytes}`` of what autograd saves in this context, without parameters of ``module`` (or None)."""
    own = {memory_of(one) for one in module.parameters()} if module is not None else ()
    sizes, held = {}, []  # numbers of freed memory come again

    def pack(tensor):
        if memory_of(tensor) not in own:
            sizes[memory_of(tensor)] = tensor.numel() * tensor.element_size()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def _one_layer(layer, inputs, device, repeats):
    module = None
    if isinstance(layer, LayerSpec):
        module = layer.build().to(device)
    elif isinstance(layer, nn.Module):
        module = copy.deepcopy(layer).to(device)  # running statistics of the model stay as they are
    run = call_of(layer, module)
    forward, backward, out = [], [], None
    for _ in range(repeats + 1):  # the first one warms up
        x = fresh(inputs, device)
        begin = _now()
        with saved_bytes(module) as kept:
            out = run(x)
        middle = _now()
        heads = [one for one in tensors_of(out) if one.requires_grad]
        if heads:
            torch.autograd.backward(heads, [torch.ones_like(one) for one in heads])
        forward.append(middle - begin)
        backward.append(_now() - middle)
    sizes = [one.numel() * one.element_size() for one in tensors_of(out)]
    return LayerCost(min(forward[1:]), min(backward[1:]), sum(kept.values()), sum(sizes)), out


def _now():
    get_accelerator().synchronize()
    return time.perf_counter()


def profile_layers(layers, sample, repeats=3, group=None):
    """``LayerCost`` of every layer for the inputs ``sample``; the means of all ranks of ``group``, so they agree."""
    device, inputs, costs = get_accelerator().current_device_name(), sample, []
    with RandomState().replay(), torch.enable_grad():
        for number, layer in enumerate(layers):
            try:
                cost, inputs = _one_layer(layer, inputs, device, repeats)
            except Exception as error:
                raise RuntimeError(
                    f"profile_input does not go through {describe(number, layer)} of the pipeline: {error}"
                ) from error
            inputs = fresh(inputs, device)
            costs.append(cost)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        times = torch.tensor([[cost.forward, cost.backward] for cost in costs], dtype=torch.float64)
        rows = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, times.tolist(), group=group)
        mean = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
        costs = [LayerCost(*row, cost.activation_bytes, cost.output_bytes) for row, cost in zip(mean, costs)]
    return costs
