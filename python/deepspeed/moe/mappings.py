"""Splits tokens that all tensor-parallel ranks have into one part per rank, and gathers the results of all parts."""

from deepspeed._native import _C
from deepspeed.comm.group_communicators import native_of
from deepspeed.utils import groups


def tensor_ranks():
    """Ranks that split single weights among them."""
    return groups.get_tensor_model_parallel_world_size()


def gather_tokens(input_, dim=0):
    """The parts of all tensor-parallel ranks along ``dim``, one after the other; ``input_`` itself on one rank. Each
    rank's part of the gradient belongs to its own input."""
    if tensor_ranks() == 1:
        return input_
    return _C.gather_over_ranks(native_of(groups.get_tensor_model_parallel_group(), input_), input_, dim)


def drop_tokens(input_, dim=0):
    """This rank's part along ``dim`` of ``input_``, which every rank has; ``input_`` itself on one rank."""
    ranks, total = tensor_ranks(), input_.shape[dim]
    if ranks == 1:
        return input_
    if total % ranks != 0:
        raise ValueError(f"input dimension {dim} ({total}) is not divisible by tensor parallel world size ({ranks})")
    return _C.scatter_over_ranks(native_of(groups.get_tensor_model_parallel_group(), input_), input_, dim)
