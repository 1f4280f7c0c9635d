"""Biases of attention that depend on the head (ALiBi, Press et al. 2022), for the heads of one tensor-parallel rank.

A model computes them from its number of heads, outside of the layers that are cut. These functions take the place of
the model's own; ``install_head_sharded_helper`` puts them there.
"""

import functools
import inspect

import torch

from deepspeed import comm as dist
from deepspeed._native import _C


def _heads(num_heads, mp_group, head_shard_sizes, total_num_heads):
    """``(number of all heads, slice of them that this rank has)``.

    ``num_heads`` are all heads. With ``total_num_heads`` it may be this rank's number instead, or None.
    """
    total = total_num_heads or num_heads
    rank, ranks = (0, 1) if mp_group is None else (dist.get_rank(group=mp_group), dist.get_world_size(group=mp_group))
    sizes = head_shard_sizes or _C.shard_sizes(total, ranks, 1, 0)
    if len(sizes) != ranks or sum(sizes) != total:
        raise ValueError(
            f"head_shard_sizes {list(sizes)} do not spread {total} heads over the {ranks} ranks of mp_group"
        )
    if num_heads not in (None, total, sizes[rank]):
        raise ValueError(f"num_heads is {num_heads}, and rank {rank} of mp_group has {sizes[rank]} of {total} heads")
    first = sum(sizes[:rank])
    return total, slice(first, first + sizes[rank])


def _powers(count):
    """Slopes for a power of two of heads: a geometric sequence that ends at 2**-8."""
    return [2 ** (-8 * (head + 1) / count) for head in range(count)]


def _slopes(heads):
    """Slopes for any number of heads: those beyond a power of two are every second one of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    return torch.tensor(_powers(power) + _powers(2 * power)[: 2 * (heads - power) : 2], dtype=torch.float32)


def build_bloom_alibi_tensor(
    attention_mask, num_heads, dtype, mp_group=None, head_shard_sizes=None, total_num_heads=None
):
    """BLOOM's biases: positions among the tokens that the mask lets through, times the slope of a head.

    Args:
        attention_mask: 1 for tokens and 0 for padding, of shape ``(batch, tokens)``.
        num_heads: the number of all heads; with ``total_num_heads``, this rank's.
        mp_group: the ranks that share the heads; None: this rank has all of them.
        head_shard_sizes: the number of heads of each rank; None: as even as they can be.
        total_num_heads: the number of all heads; None: ``num_heads`` is that number.

    Returns a tensor of shape ``(batch * heads of this rank, 1, tokens)``.
    """
    total, mine = _heads(num_heads, mp_group, head_shard_sizes, total_num_heads)
    positions = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    biases = _slopes(total)[mine, None].to(attention_mask.device) * positions
    return biases.flatten(0, 1)[:, None, :].to(dtype)


def build_mpt_alibi_tensor(
    self,
    num_heads,
    sequence_length,
    alibi_bias_max=8,
    device=None,
    mp_group=None,
    head_shard_sizes=None,
    total_num_heads=None,
):
    """MPT's biases: distances to the last token, times the slope of a head. ``self`` is the model; what it kept as
    ``build_mpt_alibi_tensor_orig`` computes the biases of all heads.

    Arguments without a word here are those of ``build_bloom_alibi_tensor``.

    Returns a tensor of shape ``(heads of this rank, 1, sequence_length)``.
    """
    total, mine = _heads(num_heads, mp_group, head_shard_sizes, total_num_heads)
    compute = getattr(self, "build_mpt_alibi_tensor_orig", _mpt_biases)
    return compute(total, sequence_length, alibi_bias_max=alibi_bias_max, device=device)[mine]


def _mpt_biases(heads, sequence_length, alibi_bias_max, device):
    power = 1 << (heads - 1).bit_length()
    slopes = torch.tensor([2 ** (-alibi_bias_max * (head + 1) / power) for head in range(power)], device=device)
    if power != heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:heads]
    return slopes[:, None, None] * torch.arange(1 - sequence_length, 1, device=device)


def get_alibi_mask(self, tensor, seq_length_with_past, mp_group=None, head_shard_sizes=None, total_num_heads=None):
    """Baichuan's biases with a causal mask: positions times the slope of a head, and -inf for later tokens. ``self`` is
    the model; what it kept as ``get_alibi_mask_orig`` computes the mask of all its ``n_head`` heads.

    Args:
        tensor: gives the mask its dtype and device.

    Arguments without a word here are those of ``build_bloom_alibi_tensor``.

    Returns a tensor of shape ``(heads of this rank, seq_length_with_past, seq_length_with_past)``.
    """
    total, mine = _heads(None, mp_group, head_shard_sizes, total_num_heads or self.n_head)
    compute = getattr(self, "get_alibi_mask_orig", None)
    if compute is None:
        mask = _causal_biases(total, seq_length_with_past).to(tensor)
    else:
        mask = compute(tensor, seq_length_with_past)
    if mask.shape[0] != total:
        raise ValueError(
            f"get_alibi_mask_orig has returned {mask.shape[0]} heads of {total}: the model needs all of them"
        )
    return mask[mine, :seq_length_with_past, :seq_length_with_past]


def _causal_biases(heads, tokens):
    later = torch.full((tokens, tokens), float("-inf")).triu(1)
    return _slopes(heads)[:, None, None] * torch.arange(tokens) + later


def install_head_sharded_helper(module, name, wrapper, mp_group=None, num_heads=None, num_kv_heads=None):
    """Replaces the function ``name`` of one module by ``wrapper`` for this rank's heads.

    The function that was there stays as ``<name>_orig``. Other modules of its class keep theirs.

    Args:
        wrapper: a function of this file, or one with the same last three arguments. Its first argument is the module
            if it is called ``self``.
        mp_group: the ranks that share the heads. num_heads: the number of all heads; None: each call says it.
        num_kv_heads: the number of key/value heads, between which the heads are cut; ranks that are a multiple of
            them share each, and get numbers of heads that are as even as they can be.
    """
    if not hasattr(module, f"{name}_orig"):
        setattr(module, f"{name}_orig", getattr(module, name))
    sizes = None
    if num_heads is not None and mp_group is not None:
        ranks = dist.get_world_size(group=mp_group)
        cut_between = num_kv_heads and num_heads % num_kv_heads == 0 and ranks % num_kv_heads != 0
        sizes = _C.shard_sizes(num_heads, ranks, 1, num_kv_heads if cut_between else 0)
    options = {"mp_group": mp_group, "head_shard_sizes": sizes, "total_num_heads": num_heads}
    first = (module,) if next(iter(inspect.signature(wrapper).parameters)) == "self" else ()
    setattr(module, name, functools.partial(wrapper, *first, **options))
