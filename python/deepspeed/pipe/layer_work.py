"""The work of each layer of a pipeline for a micro-batch, found with meta tensors, which take no memory and no time."""

from dataclasses import dataclass

import torch
from torch import nn

from deepspeed._compat import memory_of
from deepspeed.pipe.layers import LayerSpec, built_on_meta, call_of, describe
from deepspeed.pipe.profile import fresh, saved_bytes, tensors_of
from deepspeed.profiling.op_costs import CountedOps, tensors_in
from deepspeed.utils.init_on_device import copy_on_meta

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


class _Splitting:
    """Adds up the cost of operators into ``work``. A product with a weight has two gradients, one of each kind; one of
    two activations has two of inputs."""

    def __init__(self, work, trainable, frozen):
        self.work, self.trainable, self.frozen = work, trainable, frozen

    def __call__(self, name, cost, operands, out):
        if cost.macs:
            params = [one for one in operands if memory_of(one) in self.trainable | self.frozen]
            weights = [one for one in params if one.dim() > 1] or params  # rather than the bias
            own = any(memory_of(one) in self.trainable for one in weights)
            self.work.forward += 2 * cost.macs
            self.work.backward_input += 2 * cost.macs if weights else 4 * cost.macs
            self.work.backward_weight += 2 * cost.macs if own else 0
        elif cost.bytes:
            written = {memory_of(one) for one in operands}
            count = ELEMENTWISE * sum(one.numel() for one in tensors_in([out]) if memory_of(one) not in written)
            self.work.forward += count
            self.work.backward_input += count


def _module(layer):
    if isinstance(layer, LayerSpec):
        return built_on_meta(layer).to("meta")
    return copy_on_meta(layer) if isinstance(layer, nn.Module) else None


def on_meta_call(layer):
    """A function that runs ``layer`` on meta tensors, and the layer's module or None."""
    module = _module(layer)
    return call_of(layer, module), module


def _one_layer(run, module, inputs):
    parameters = list(module.parameters()) if module is not None else []
    trainable = {memory_of(one) for one in parameters if one.requires_grad}
    frozen = {memory_of(one) for one in parameters if not one.requires_grad}
    work = LayerWork(parameters=sum(one.numel() for one in parameters))
    with torch.enable_grad(), saved_bytes(module) as kept, CountedOps(_Splitting(work, trainable, frozen)):
        out = run(inputs)
    work.activation_bytes = sum(kept.values())
    work.output_bytes = sum(one.numel() * one.element_size() for one in tensors_of(out))
    return work, out


def layer_works(layers, sample, calls=None):
    """``LayerWork`` of each layer for the inputs ``sample``, of which only shapes and types are read. Into the list
    ``calls`` goes what ``on_meta_call`` makes of each."""
    inputs, works = fresh(sample, "meta"), []
    for number, layer in enumerate(layers):
        try:
            call = on_meta_call(layer)
            work, out = _one_layer(*call, inputs)
        except Exception as error:
            raise RuntimeError(
                f"{describe(number, layer)} of the pipeline cannot run on meta tensors: {error}"
            ) from error
        works.append(work)
        if calls is not None:
            calls.append(call)
        inputs = fresh(out, "meta")
    return works
