"""Optimizers whose ranks exchange signs instead of gradients: 1-bit Adam, 1-bit LAMB, 0/1 Adam."""

from deepspeed.ops.onebit.adam import OnebitAdam
from deepspeed.ops.onebit.lamb import OnebitLamb
from deepspeed.ops.onebit.zoadam import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "build"]

_CLASSES = {"onebitadam": OnebitAdam, "onebitlamb": OnebitLamb, "zerooneadam": ZeroOneAdam}


def build(name, parameters, params):
    """The optimizer that ``optimizer.type`` of a configuration names (in lower case), with its parameters."""
    return _CLASSES[name](parameters, **params)
