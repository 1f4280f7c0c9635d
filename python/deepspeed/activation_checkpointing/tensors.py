"""Taking arguments and results apart into tensors and the rest, and putting them together again."""

import torch

from deepspeed.activation_checkpointing.settings import current
from deepspeed.zero.nested import replace


def extract_tensors(all_objects):
    """``(tensors, others, flags)`` of a list or tuple, in order; ``flags[i]`` says whether object i is a tensor. The
    first two are of the type of ``all_objects``."""
    kind = tuple if isinstance(all_objects, tuple) else list
    flags = [torch.is_tensor(one) for one in all_objects]
    tensors = kind(one for one, flag in zip(all_objects, flags) if flag)
    others = kind(one for one, flag in zip(all_objects, flags) if not flag)
    return tensors, others, kind(flags)


def merge_tensors(tensor_objects, non_tensor_objects, tensor_flags):
    """Inverse of ``extract_tensors``, as a tuple."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors if flag else others) for flag in tensor_flags)


def detach_variable(inputs, device=None):
    """The tensors of a list or tuple outside of any graph, on ``device`` if one is given; each requires a gradient if
    it did before. Other objects stay as they are. Returns a tuple."""
    if not isinstance(inputs, (list, tuple)):
        raise RuntimeError(f"detach_variable takes a tuple of tensors and other objects, not a {type(inputs).__name__}")
    detached = []
    for one in inputs:
        if torch.is_tensor(one):
            wanted = one.requires_grad
            one = (one if device is None else one.to(device)).detach()
            one.requires_grad_(wanted)
        detached.append(one)
    return tuple(detached)


def is_activation_to_checkpoint(item):
    """Whether ``item`` is worth sharding or moving: a floating point tensor with an element for each model-parallel
    rank. Parameters are not: they stay in memory anyway."""
    if not torch.is_tensor(item) or isinstance(item, torch.nn.Parameter):
        return False
    return item.is_floating_point() and item.layout == torch.strided and item.numel() >= max(1, current.parts())


class Slot:
    """Stands for tensor number ``index`` in a template."""

    __slots__ = ("index",)

    def __init__(self, index):
        self.index = index


def flatten(item):
    """``(template, tensors)``: the tensors in nested lists, tuples and dicts, each once, and what is around them.

    Containers without tensors, and all other objects, are part of the template as they are.
    """
    tensors, numbers = [], {}

    def slot(tensor):
        number = numbers.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor)
        return Slot(number)

    return replace(item, torch.is_tensor, slot), tensors


def fill(template, tensors):
    """Inverse of ``flatten``."""
    return replace(template, lambda one: isinstance(one, Slot), lambda slot: tensors[slot.index])
