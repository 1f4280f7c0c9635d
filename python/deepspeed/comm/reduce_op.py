"""Reductions over ranks, as an enum that also works where torch.distributed is absent."""

from enum import Enum

import torch
import torch.distributed as dist


class ReduceOp(Enum):
    """Accepted, like torch's own, by every reducing function of ``deepspeed.comm``."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


for _op in ReduceOp:
    _op.core = _op.name.lower()  # the core's name


_NAMES = [op.name for op in ReduceOp if op is not ReduceOp.UNUSED]


def _equal(op, torch_op):
    try:
        return bool(op == torch_op)
    except TypeError:  # torch 1.13 refuses to compare with other types
        return False


def _name_of(op):
    if isinstance(op, ReduceOp):
        return op.name
    # torch's ops compare equal by kind; 1.13 gives them no name attribute on every build.
    return next((one for one in _NAMES if _equal(op, getattr(dist.ReduceOp, one))), None)


def core_name(op):
    """``"sum"`` and so on for our or torch's op; None for those of torch that have no counterpart here: premultiplied
    sums. ValueError for what is not a reduction."""
    if isinstance(op, ReduceOp) and op is not ReduceOp.UNUSED:
        return op.core
    if isinstance(op, (dist.ReduceOp, type(dist.ReduceOp.SUM))) and _name_of(op) is None:
        return None
    return to_name(op).lower()


def to_name(op):
    """``"SUM"`` and so on for our or torch's op; ValueError for what no backend can reduce with."""
    name = _name_of(op)
    if name not in _NAMES:
        raise ValueError(f"{op!r} is not a reduction; use one of deepspeed.comm.ReduceOp.{{{', '.join(_NAMES)}}}.")
    return name


def to_torch(op, dtype=None):
    """torch's op for ours; torch's own, premultiplied sums too, are passed on. Of truth values (``dtype``)
    an average is whether any is true, as the core has it: torch knows none."""
    if dtype == torch.bool and _equal(op, dist.ReduceOp.AVG):
        op = ReduceOp.AVG
    if isinstance(op, (dist.ReduceOp, type(dist.ReduceOp.SUM))):
        return op
    if not isinstance(op, ReduceOp):
        to_name(op)  # refuses
    return dist.ReduceOp.MAX if dtype == torch.bool and op is ReduceOp.AVG else getattr(dist.ReduceOp, to_name(op))
