"""The work of each layer of a pipeline for a micro-batch, found with meta tensors, which take no memory and no time."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed._compat import TORCH2
from deepspeed.pipe.layers import LayerSpec, built_on_meta, call_of, describe
from deepspeed.pipe.profile import tensors_of
from deepspeed.zero.nested import replace

ELEMENTWISE = 8  # operations that writing one element costs as much as, where no matrices are multiplied


@dataclass
class LayerWork:
    """Operations (of products of matrices and convolutions, and some for each element that others write), bytes."""

    forward: float = 0
    backward_input: float = 0
    backward_weight: float = 0
    parameters: int = 0
    activation_bytes: int = 0  # kept for the backward
    output_bytes: int = 0
    state_bytes: int = 0  # what its parameters take with gradients and optimizer states


def _memory(tensor):
    """An identity of the memory of a tensor: meta tensors have no address."""
    return (tensor.untyped_storage() if TORCH2 else tensor.storage())._cdata


class _Counting(TorchDispatchMode):
    """Adds up what is done into ``work``. A product with a weight has two gradients, one of each kind; a product of two
    activations has two of inputs."""

    def __init__(self, work, trainable, frozen):
        super().__init__()
        self.work, self.trainable, self.frozen = work, trainable, frozen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        operands = [one for one in args if isinstance(one, torch.Tensor)]
        product = _product(name, operands, out)
        if product:
            weights = [one for one in operands[-2:] if _memory(one) in self.trainable | self.frozen]
            own = any(_memory(one) in self.trainable for one in weights)
            self.work.forward += product
            self.work.backward_input += product if weights else 2 * product
            self.work.backward_weight += product if own else 0
        elif isinstance(out, torch.Tensor) and name not in _FREE:
            if _memory(out) not in {_memory(one) for one in operands}:
                self.work.forward += ELEMENTWISE * out.numel()
                self.work.backward_input += ELEMENTWISE * out.numel()
        return out


_FREE = {"empty", "empty_like", "_unsafe_view"}  # and views, which share their operand's memory


def _product(name, operands, out):
    if name in ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv"):
        return 2 * operands[-2].numel() * (operands[-1].shape[-1] if operands[-1].dim() > 1 else 1)
    if name == "convolution":
        return 2 * out.numel() * operands[1].numel() // operands[1].shape[0]
    if "scaled_dot_product" in name:
        q, k = operands[0], operands[1]
        return 4 * q.numel() * k.shape[-2]
    return 0


def on_meta(value):
    """The same inputs, without values."""
    return replace(
        value,
        torch.is_tensor,
        lambda one: torch.empty_like(one, device="meta").requires_grad_(one.is_floating_point()),
    )


def _module(layer):
    if isinstance(layer, LayerSpec):
        return built_on_meta(layer).to("meta")
    if not isinstance(layer, nn.Module):
        return None
    memo = {}
    for tensor in (*layer.parameters(), *layer.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(layer, memo)


def on_meta_call(layer):
    """A function that runs ``layer`` on meta tensors, and the layer's module or None."""
    module = _module(layer)
    return call_of(layer, module), module


def _one_layer(run, module, inputs):
    parameters = list(module.parameters()) if module is not None else []
    trainable = {_memory(one) for one in parameters if one.requires_grad}
    frozen = {_memory(one) for one in parameters if not one.requires_grad}
    work, kept = LayerWork(parameters=sum(one.numel() for one in parameters)), {}

    def pack(tensor):
        if _memory(tensor) not in trainable | frozen:
            kept[_memory(tensor)] = (tensor.numel() * tensor.element_size(), tensor)  # held: numbers are not reused
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with _Counting(work, trainable, frozen):
            out = run(inputs)
    work.activation_bytes = sum(size for size, _ in kept.values())
    work.output_bytes = sum(one.numel() * one.element_size() for one in tensors_of(out))
    return work, out


def layer_works(layers, sample, calls=None):
    """``LayerWork`` of each layer for the inputs ``sample``, of which only shapes and types are read. Into the list
    ``calls`` goes what ``on_meta_call`` makes of each."""
    inputs, works = on_meta(sample), []
    for place, layer in enumerate(layers):
        try:
            call = on_meta_call(layer)
            work, out = _one_layer(*call, inputs)
        except Exception as error:
            raise RuntimeError(
                f"{describe(place, layer)} of the pipeline cannot run on meta tensors: {error}"
            ) from error
        works.append(work)
        if calls is not None:
            calls.append(call)
        inputs = on_meta(out)
    return works
