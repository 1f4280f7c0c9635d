"""Copies of models whose layers are cut: ``copy.deepcopy`` of one has the same slices, groups and sums of gradients."""

import copy
import functools

from deepspeed.module_inject.layers import is_autotp_training_mode, sum_over_holders
from deepspeed.utils.param_cut import cut_of

_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "ds_tensor_copies")


def make_copyable(model, group):
    """Lets ``copy.deepcopy(model)`` work, where ``model`` is cut over torch's ``group``, which cannot be copied."""
    model.__deepcopy__ = functools.partial(_copy_of, model, group)


def _copy_of(model, group, memo):
    memo[id(group)] = group
    plain = model.__dict__.pop("__deepcopy__")
    try:
        made = copy.deepcopy(model, memo)
    finally:
        model.__deepcopy__ = plain
    for param, other in zip(model.parameters(), made.parameters()):
        if other is param or cut_of(param) is None:
            continue
        other.ds_param_cut = cut_of(param)
        for mark in _MARKS:
            if hasattr(param, mark):
                setattr(other, mark, getattr(param, mark))
        if is_autotp_training_mode():
            sum_over_holders(other)
    make_copyable(made, group)
    return made
