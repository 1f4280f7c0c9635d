"""The self-attention of BERT over blocks of keys."""

import torch

from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig


class BertSparseSelfAttention(torch.nn.Module):
    """Replaces the self-attention of a BERT layer; its parameters have the same names: ``query``, ``key``, ``value``.

    ``config``: with ``hidden_size`` and ``num_attention_heads``.
    """

    def __init__(self, config, sparsity_config=FixedSparsityConfig(num_heads=4)):  # noqa: B008 (published default)
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        if hidden % heads:
            raise ValueError(f"The hidden size ({hidden}) is not a multiple of the number of attention heads ({heads})")
        self.num_attention_heads, self.attention_head_size = heads, hidden // heads
        self.all_head_size = hidden
        self.query, self.key, self.value = (torch.nn.Linear(hidden, hidden) for _ in range(3))
        longest = max(2048, getattr(config, "max_position_embeddings", 0) or 0)
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=longest)

    def transpose_for_scores(self, x):
        """``[batch, tokens, hidden]`` as ``[batch, heads, tokens, size of a head]``."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def forward(self, hidden_states, attention_mask):
        """``[batch, tokens, hidden]``; ``attention_mask``: added to the scores of keys, ``[batch, 1, 1, tokens]``."""
        return self._attend(hidden_states, key_padding_mask=attention_mask)

    def _attend(self, hidden_states, **masks):
        heads = [self.transpose_for_scores(one(hidden_states)) for one in (self.query, self.key, self.value)]
        return self.sparse_self_attention(*heads, **masks).transpose(1, 2).flatten(2)


class TransformersSparseSelfAttention(BertSparseSelfAttention):
    """The same as transformers' layers call it: they take a tuple."""

    def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
        """Returns ``(context, None)``. ValueError for what sparse attention does not compute."""
        given = [f"argument {index + 3}" for index, one in enumerate(args) if torch.is_tensor(one)]
        given += [name for name, one in kwargs.items() if torch.is_tensor(one) and name != "cache_position"]
        given += [name for name in ("output_attentions", "past_key_values") if kwargs.get(name)]
        if given or any(one is True for one in args):
            raise ValueError(
                f"sparse attention got {', '.join(given) or 'output_attentions'}: it has no head masks, "
                "caches, cross-attention or probabilities to return"
            )
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype).masked_fill_(
                ~attention_mask, torch.finfo(hidden_states.dtype).min
            )
        if attention_mask is None or attention_mask.shape[-2] == 1:
            return super().forward(hidden_states, attention_mask), None
        return self._attend(hidden_states, rpe=attention_mask), None  # of pairs
