"""Tensors inside lists, tuples, dicts and dataclasses."""

import dataclasses
import types

import torch


def tensors_in(item):
    """All tensors in nested lists, tuples, dicts (the outputs of Hugging Face models) and dataclasses, in order."""
    if torch.is_tensor(item):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from tensors_in(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from tensors_in(getattr(item, field.name, None))


# Objects of these kinds hold no results of a forward; some hold half the program.
_CLOSED = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    torch.nn.Module,
)


def tensors_within(item):
    """``tensors_in``, and also in the attributes of objects of any class, wherever they refer to each other. Each
    tensor once."""
    yield from _within(item, set())


def _within(item, seen):
    if item is None or isinstance(item, _CLOSED) or id(item) in seen:
        return
    seen.add(id(item))
    if torch.is_tensor(item):
        yield item
        return
    if isinstance(item, dict):
        held = list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        held = list(item)
    else:
        held = []
    held += getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held.append(getattr(item, name, None) if name not in ("__dict__", "__weakref__") else None)
    for value in held:
        yield from _within(value, seen)


def replace(item, wanted, change):
    """`item` with `change` applied to what is `wanted`; lists, tuples (named ones too) and dicts are rebuilt."""
    if wanted(item):
        return change(item)
    if isinstance(item, dict):
        return type(item)((key, replace(value, wanted, change)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(replace(value, wanted, change) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(replace(value, wanted, change) for value in item)
    return item


def move_to_device(item, device, criterion_func=None):
    """`item` with every tensor in it on `device`; lists, tuples (named ones too) and dicts are rebuilt around them.

    criterion_func: what to move: called with each item; default: torch.is_tensor. Other items are kept as they are.
    """
    return replace(item, criterion_func or torch.is_tensor, lambda tensor: tensor.to(device))


def cast_floats(item, dtype):
    """`item` with its floating point tensors cast to `dtype`; everything else is kept as it is."""
    return replace(item, lambda x: torch.is_tensor(x) and x.is_floating_point(), lambda tensor: tensor.to(dtype))
