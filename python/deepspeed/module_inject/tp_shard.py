"""Sizes of the slices that tensor-parallel ranks have of a dimension: published functions over one arithmetic."""

from deepspeed import comm as dist
from deepspeed._native import _C

# Published: scripts read these two names, and set them by the functions below.
num_kv_heads = None
tp_grain_size = 1

_n_embd = None
_CUT_ANYWHERE = {"lm_head", "embed_out"}  # vocabularies have no heads
_MLP_NAMES = {"gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # nor have layers of experts


def set_num_kv_heads(num):
    """Sizes that this number divides are cut between key/value heads; None switches that off."""
    global num_kv_heads
    num_kv_heads = num


def get_num_kv_heads():
    """The number that ``set_num_kv_heads`` was given last."""
    return num_kv_heads


def set_n_embd(num):
    """The width of the model's hidden states."""
    global _n_embd
    _n_embd = num


def get_n_embd():
    """The number that ``set_n_embd`` was given last."""
    return _n_embd


def set_tp_grain_size(num):
    """Sizes of slices without heads are multiples of this number, where the whole size is not smaller than it."""
    global tp_grain_size
    tp_grain_size = num


def get_shard_size_list(total_size, mp_size, name=None, num_kv_heads=None):
    """The size of each rank's slice. A rest that is smaller than the grain belongs to no rank, as published.

    Args:
        name: the layer. Layers of an MLP, of experts and of the vocabulary are not cut between heads.
        num_kv_heads: the number of heads; None stands for that of ``set_num_kv_heads``.
    """
    heads = num_kv_heads or get_num_kv_heads()
    parts = [part for part in str(name).split(".") if part not in ("weight", "bias")]
    has_heads = "mlp" not in str(name) and parts[-1] not in _CUT_ANYWHERE and not _MLP_NAMES.intersection(parts)
    units = heads if heads and has_heads and total_size % heads == 0 else 0
    return _C.shard_sizes(total_size, mp_size, tp_grain_size, units)


def get_shard_size(total_size, mp_size, name=None, rank=None, mp_group=None, num_kv_heads=None):
    """The size of one rank's slice, as ``get_shard_size_list`` has it. ``rank``: None stands for this process's rank in
    ``mp_group``; without a group ``mp_size`` neighbours among all ranks share the dimension."""
    if rank is None:
        rank = dist.get_rank() % mp_size if mp_group is None else dist.get_rank(group=mp_group)
    if not 0 <= rank < mp_size:
        raise ValueError(f"rank {rank} is none of the {mp_size} ranks that share a dimension of size {total_size}")
    return get_shard_size_list(total_size, mp_size, name, num_kv_heads)[rank]
