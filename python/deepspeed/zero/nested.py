"""Tensors inside lists, tuples, dicts and dataclasses."""

import copy

import torch

from deepspeed._native import _C

# All tensors in nested lists, tuples, dicts (the outputs of Hugging Face models) and dataclasses, in order.
tensors_in = _C.tensors_in
# The same, and also in the attributes of objects of any class, wherever they refer to each other. Each tensor once.
tensors_within = _C.tensors_within


def replace(item, wanted, change, keep=True):
    """`item` with `change` applied to what is `wanted`. Lists, tuples (named ones too) and dicts around it are made
    anew; those without any are kept, or are copied without `keep`."""
    if wanted(item):
        return change(item)
    if not isinstance(item, (dict, list, tuple)):
        return item
    before = list(item.values()) if isinstance(item, dict) else item
    after = [replace(value, wanted, change, keep) for value in before]
    if keep and all(new is old and not wanted(old) for new, old in zip(after, before)):
        return item
    if isinstance(item, dict):
        made = copy.copy(item)  # with what a subclass knows besides, such as the factory of a defaultdict
        for key, value in zip(item, after):
            made[key] = value
        return made
    return type(item)(*after) if hasattr(item, "_fields") else type(item)(after)


def loss_in(output):
    """The loss in the output of a model: its attribute ``loss``, or its first tensor of one element; None: neither."""
    loss = getattr(output, "loss", None)
    if torch.is_tensor(loss):
        return loss
    return next((one for one in tensors_in(output) if one.numel() == 1), None)


def loss_or_sum(output):
    """The same; without one the sum of the first tensor. ValueError where there is no tensor."""
    loss = loss_in(output)
    if loss is not None:
        return loss
    first = next(iter(tensors_in(output)), None)
    if first is None:
        raise ValueError(f"the model returned {type(output).__name__} without a tensor: its loss is not known")
    return first.float().sum()


def move_to_device(item, device, criterion_func=None):
    """`item` with every tensor in it on `device`; lists, tuples (named ones too) and dicts are made anew around them.

    criterion_func: what to move: called with each item; default: torch.is_tensor. Other items are kept as they are.
    """
    return replace(item, criterion_func or torch.is_tensor, lambda tensor: tensor.to(device))


def cast_floats(item, dtype):
    """`item` with its floating point tensors cast to `dtype`; everything else is kept as it is."""
    return replace(item, lambda x: torch.is_tensor(x) and x.is_floating_point(), lambda tensor: tensor.to(dtype))
