"""Cuts the sequences of a batch to a length."""

import itertools
from collections.abc import Mapping

import torch

from deepspeed.zero.nested import replace


def checked_dimensions(given):
    """``{name or position as text: dimensions}`` of the key ``truncate``. ValueError for other values."""
    found = {}
    for key, value in given.items():
        dims = list(value) if isinstance(value, (list, tuple)) else [value]
        if not dims or any(isinstance(dim, bool) or not isinstance(dim, int) for dim in dims):
            raise ValueError(f"truncate.{key} is {value!r}: give the dimension that counts tokens, or a list of them")
        found[str(key)] = dims
    return found


def truncated(batch, dimensions, length):
    """``batch`` with the first ``length`` elements of the named tensors along their dimensions.

    A tensor is called as its key in a dict, or by its position among all tensors of the batch, tuples and dicts in it
    counted through. Shorter ones stay as they are. ValueError for a name that the batch lacks.
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
                        f"curriculum_learning.truncate.{name} is dimension {dim}, and that tensor has the shape "
                        f"{tuple(tensor.shape)}"
                    )
                tensor = tensor.narrow(dim, 0, min(length, tensor.shape[dim]))
        return tensor.contiguous()

    made = replace(batch, torch.is_tensor, cut)
    if missing:
        there = [*dict.fromkeys(names.values()), f"and the positions 0 to {next(numbers) - 1}"]
        raise ValueError(
            f"curriculum_learning.truncate names {', '.join(map(repr, sorted(missing)))}, and the batch has only the "
            f"tensors {' '.join(there)}"
        )
    return made


def _name(item, names):
    for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
        if torch.is_tensor(value) and isinstance(item, Mapping):
            names[id(value)] = str(key)
        elif isinstance(value, (list, tuple, Mapping)):
            _name(value, names)
