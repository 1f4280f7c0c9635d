"""Tensors inside lists, tuples and dicts."""

import torch


def move_to_device(item, device, criterion_func=None):
    """`item` with every tensor in it on `device`; lists, tuples (named ones too) and dicts are rebuilt around them.

    criterion_func: what to move: called with each item; default: torch.is_tensor. Other items are kept as they are.
    """
    wanted = criterion_func or torch.is_tensor
    if wanted(item):
        return item.to(device)
    if isinstance(item, dict):
        return type(item)((key, move_to_device(value, device, criterion_func)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(move_to_device(value, device, criterion_func) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item
