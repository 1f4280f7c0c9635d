"""Attention over the blocks of keys that a pattern says (``SparsityConfig``)."""

import torch

from deepspeed.ops.attention import attention
from deepspeed.ops.sparse_attention.layouts import layout_of
from deepspeed.ops.sparse_attention.matmul import MatMul
from deepspeed.ops.sparse_attention.softmax import Softmax, mask_of
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig


class SparseSelfAttention(torch.nn.Module):
    """``softmax(query key^T / sqrt(size) + masks) value`` over the blocks of a pattern.

    ``key_padding_mask_mode``, ``attn_mask_mode``: "add", masks are added to scores, or "mul", keys with a 0 are not
    seen. ``max_seq_length``: the most tokens of a sequence.
    """

    ops = {}  # of each module its own: see get_ops

    def __init__(
        self,
        sparsity_config=SparsityConfig(num_heads=4),  # noqa: B008 (published default)
        key_padding_mask_mode="add",
        attn_mask_mode="mul",
        max_seq_length=2048,
    ):
        super().__init__()
        self.ops = {}
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ValueError(f"{name} is {mode!r}: it is 'add' or 'mul'")
        self.sparsity_config, self.max_seq_length = sparsity_config, max_seq_length
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode

    def get_layout(self, L):
        """The layout for ``L`` tokens, ``[heads, blocks, blocks]``."""
        if L > self.max_seq_length:
            raise ValueError(f"a sequence of {L} tokens is longer than max_seq_length, {self.max_seq_length}")
        return layout_of(self.sparsity_config, L).layout.long()

    def get_ops(self, H, L):
        """``(product of queries and keys, softmax, product with values)``, of blocks, for ``H`` heads and ``L``
        tokens."""
        if self.sparsity_config.num_heads != H:
            raise ValueError(f"the layout has {self.sparsity_config.num_heads} heads and the queries {H}")
        config, layout = self.sparsity_config, self.get_layout(L)
        if (H, L) not in self.ops:
            self.ops[H, L] = (
                MatMul(layout, config.block, "sdd", trans_a=False, trans_b=True),
                Softmax(layout, config.block),
                MatMul(layout, config.block, "dsd", trans_a=False, trans_b=False),
            )
        return self.ops[H, L]

    def transpose_key_for_scores(self, x, L):
        """Keys ``[batch, heads, L, size]``, which may be given as ``[batch, heads, size, L]``."""
        return x if x.shape[-2] == L else x.transpose(-1, -2)

    def transpose_mask_for_sparse(self, qtype, x, is_key_padding_mask=False):
        """A mask in the dtype ``qtype`` without its dimensions of 1: ``[L, L]``, or ``[batch, L]`` of padding."""
        x = x.type(qtype)
        if not is_key_padding_mask:
            return x.squeeze()
        for dim in range(x.dim() - 1, 0, -1):
            x = x.squeeze(dim) if x.dim() > 2 else x
        return x

    def forward(self, query, key, value, rpe=None, key_padding_mask=None, attn_mask=None):
        """``[batch, heads, tokens, size]``.

        ``rpe``: added to scores, ``[tokens, tokens]`` behind any of heads and batch; it has a gradient.
        ``key_padding_mask``: ``[batch, tokens]``, also with dimensions of 1 between them. ``attn_mask``:
        ``[tokens, tokens]``, also behind dimensions of 1.
        """
        length = query.shape[-2]
        key = self.transpose_key_for_scores(key, length)
        if query.shape != key.shape or key.shape != value.shape:
            raise NotImplementedError(
                "only self-attention is supported for now: query, key and value have the shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if length > self.max_seq_length:
            raise ValueError(f"a sequence of {length} tokens is longer than max_seq_length, {self.max_seq_length}")
        if key_padding_mask is not None:
            key_padding_mask = self.transpose_mask_for_sparse(query.dtype, key_padding_mask, is_key_padding_mask=True)
        if attn_mask is not None:
            attn_mask = self.transpose_mask_for_sparse(query.dtype, attn_mask)
        biases, looks = mask_of(
            (query.shape[0], query.shape[1], length),
            rpe,
            key_padding_mask,
            attn_mask,
            self.key_padding_mask_mode,
            self.attn_mask_mode,
        )
        return attention(query, key, value, biases, layout_of(self.sparsity_config, length), looks=looks)
