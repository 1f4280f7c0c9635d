"""Cuts the sequences of a batch to a length."""

import itertools
from collections.abc import Mapping

import torch

from deepspeed.zero.nested import replace


def checked_dimensions(given):
    """Reads the key ``truncate``: ``{name, or position as text: dimensions}``. ValueError for other values."""
    found = {}
    for key, value in given.items():
        dims = list(value) if isinstance(value, (list, tuple)) else [value]
        if not dims or any(isinstance(dim, bool) or not isinstance(dim, int) for dim in dims):
            raise ValueError(
                f"truncate.{key} is {value!r}: it must be the dimension that counts tokens, or a list of dimensions"
            )
        found[str(key)] = dims
    return found


def truncated(batch, dimensions, length):
    """Cuts the named tensors of ``batch`` to their first ``length`` elements along the given dimensions.

    The name of a tensor is its key in a dict, or its position among all tensors of the batch, also of tuples and dicts
    in it. Shorter tensors stay as they are. ValueError if the batch has no tensor of a name.
    """
    names, numbers, missing = {}, itertools.count(), set(dimensions)
    _name([batch], names)

    def cut(tensor):
        position = str(next(numbers))
        for name in {names.get(id(tensor), position), position}.intersection(dimensions):
            missing.discard(name)
            for dim in dimensions[name]:
                if not -tensor.dim() <= dim < tensor.dim():
                    raise ValueError(
                        f"curriculum_learning.truncate.{name} names dimension {dim}, and that tensor has the shape "
                        f"{tuple(tensor.shape)}"
                    )
                tensor = tensor.narrow(dim, 0, min(length, tensor.shape[dim]))
        return tensor.contiguous()

    made = replace(batch, torch.is_tensor, cut)
    if missing:
        there = [*map(repr, dict.fromkeys(names.values())), f"the positions 0 to {next(numbers) - 1}"]
        raise ValueError(
            f"curriculum_learning.truncate names {', '.join(map(repr, sorted(missing)))}, and the batch does not have "
            f"it: its tensors have the names {', '.join(there)}"
        )
    return made


def _name(item, names):
    for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
        if torch.is_tensor(value) and isinstance(item, Mapping):
            names[id(value)] = str(key)
        elif isinstance(value, (list, tuple, Mapping)):
            _name(value, names)
