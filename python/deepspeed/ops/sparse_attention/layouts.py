"""Layouts of patterns, each made once for a configuration and a length, and the same on all ranks."""

import torch

from deepspeed.comm import process_group as dist
from deepspeed.ops.attention import KeyBlocks
from deepspeed.ops.sparse_attention import sparsity_config
from deepspeed.utils import groups


def _agreed(layout):
    """``layout`` of the first rank with the same weights: what another package's code makes may be random."""
    if not dist.is_initialized() or dist.get_world_size(group := groups.get_data_parallel_group()) == 1:
        return layout
    from_first = [layout]
    torch.distributed.broadcast_object_list(from_first, src=dist.get_all_ranks_from_group(group)[0], group=group)
    return from_first[0]


def layout_of(config, length):
    """The ``KeyBlocks`` of a ``SparsityConfig`` for ``length`` tokens. ValueError if its layout has other shapes. The
    first call for a pattern that is not one of ours is a collective of the ranks with the same weights."""
    known = config.made
    if length not in known:
        layout = config.make_layout(length)
        blocks = length // config.block
        if tuple(layout.shape) != (config.num_heads, blocks, blocks):
            raise ValueError(
                f"{type(config).__name__}.make_layout({length}) returned the shape {tuple(layout.shape)}: a layout of "
                f"{config.num_heads} heads and {length} tokens in blocks of {config.block} is "
                f"{(config.num_heads, blocks, blocks)}"
            )
        if type(config).make_layout.__module__ != sparsity_config.__name__:
            layout = _agreed(layout)
        known[length] = KeyBlocks(layout, config.block)
    return known[length]
