"""Sparse attention in models that nobody changes: the section ``sparse_attention`` of the configuration."""

import inspect
import weakref
from typing import NamedTuple

import torch

from deepspeed.ops.attention import Dropped, KeyBlocks, attention
from deepspeed.ops.attention import table as table_of
from deepspeed.ops.sparse_attention import sparsity_config as patterns
from deepspeed.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from deepspeed.ops.sparse_attention.layouts import layout_of
from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention

PATTERNS = {
    "dense": patterns.DenseSparsityConfig,
    "fixed": patterns.FixedSparsityConfig,
    "variable": patterns.VariableSparsityConfig,
    "bigbird": patterns.BigBirdSparsityConfig,
    "bslongformer": patterns.BSLongformerSparsityConfig,
}


def pattern_of(section, heads):
    """The ``SparsityConfig`` of a section ``sparse_attention``, a dict, for ``heads`` heads. Keys of other modes are
    left out: the configuration has defaults for all."""
    mode = section.get("mode", "fixed")
    if mode not in PATTERNS:
        raise NotImplementedError(f"sparse_attention.mode is {mode!r}: it is one of {', '.join(PATTERNS)}")
    own = inspect.signature(PATTERNS[mode]).parameters
    return PATTERNS[mode](num_heads=heads, **{name: value for name, value in section.items() if name in own})


class SparseFunction:
    """An attention function of transformers over the blocks of a pattern. ``core``: the function that it replaces.

    The model's own mask applies, too. Sequences need not be whole blocks: the last one may have fewer tokens.
    """

    takes_first_head = True
    not_by_blocks = "sparse_attention has a layout of its own blocks, which needs whole sequences"

    def __init__(self, pattern, core):
        self.pattern, self.core, self._blocks = pattern, core, {}
        self.__name__ = f"sparse_{table_of.name_of(core)}"

    def __call__(self, module, query, key, value, mask, *args, first_head=0, **kwargs):
        """Tensors are ``[batch, heads, tokens, size]``; returns ``(output, None)`` with
        ``[batch, tokens, heads, size]``. ``first_head``: the number of the first head in the model."""
        odd = [name for name in ("s_aux", "cu_seq_lens_q", "cu_seq_lens_k") if kwargs.get(name) is not None]
        if odd or args:
            raise ValueError(
                f"{type(module).__name__} passes {', '.join(odd) or 'more than is known'} to its attention, which "
                "sparse_attention does not have: leave the section out for this model"
            )
        queries, keys = query.shape[2], key.shape[2]
        causal, looks, biases = table_of.causal_of(module, kwargs), None, []
        if mask is not None and mask.dim() == 2:  # of padding, as flash attention takes it
            looks = mask[:, None, None, -keys:] != 0
        elif mask is not None:
            causal, mask = False, mask[..., :keys]  # the mask says it
            if mask.is_floating_point():
                biases.append(mask)
            elif mask.shape[1] == 1:
                looks = mask != 0
            else:
                biases.append(_as_bias(mask != 0))
        if kwargs.get("position_bias") is not None:
            biases.append(kwargs["position_bias"])
        window = (table_of.window_of(module, kwargs) or 0) if causal else 0
        blocks = self.blocks(keys, first_head, query.shape[1])
        if queries < keys:  # with a cache of keys: the last rows of the layout, as a bias
            biases.append(_as_bias(_last_rows(blocks, queries, keys, causal, window, query.device)))
            blocks, causal, window = None, False, 0
        if len(biases) > 2:
            raise ValueError(
                f"{type(module).__name__} adds a mask and a position_bias to scores: with a cache of keys "
                "sparse_attention takes one of them. Generate with use_cache=False"
            )
        output = attention(
            query, key, value, biases, blocks, causal, window, looks, kwargs.get("scaling"),
            kwargs.get("softcap") or 0.0, Dropped.drawn(kwargs.get("dropout") or 0.0),
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None

    def blocks(self, tokens, first, heads):
        """The blocks of ``heads`` heads from number ``first`` on."""
        alike = not self.pattern.different_layout_per_head
        name = (tokens, 0, 1) if alike else (tokens, first, heads)
        block = self.pattern.block
        whole = layout_of(self.pattern, -(-tokens // block) * block)
        if name not in self._blocks:
            self._blocks[name] = KeyBlocks(whole.layout[name[1] : name[1] + name[2]], block)
        return self._blocks[name]


def _as_bias(seen):
    """Zeros where keys are seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, float("-inf"))


def _last_rows(blocks, queries, keys, causal, window, device):
    """Where the last ``queries`` of ``keys`` tokens look, bool ``[1, heads or 1, queries, keys]``."""
    seen = blocks.mask(keys, keys, device)[:, keys - queries :].unsqueeze(0)
    if not causal:
        return seen
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    return seen & (ahead <= 0) & (ahead > -window) if window else seen & (ahead <= 0)


def _is_sparse(module):
    sparse = isinstance(module, (BertSparseSelfAttention, SparseSelfAttention))
    return sparse or getattr(module, "sparsity_config", None) is not None


def sparsify(model, section):
    """Makes all attention of a transformers ``model`` sparse, as a section ``sparse_attention`` (a dict) says.

    A model that has sparse attention already, as SparseAttentionUtils and DeepSpeedTransformerLayer make it, is left as
    it is. ValueError for other models, and for those whose attention is not in transformers' table.
    """
    modules = list(model.modules())
    if any(map(_is_sparse, modules)):
        return
    if not table_of.is_model(model):
        raise ValueError(
            f"sparse_attention is for models of transformers, and {type(model).__name__} is none: put "
            "deepspeed.ops.sparse_attention.SparseSelfAttention into it, or leave the section out"
        )
    base = table_of.base_of(model)
    try:
        table, name = table_of.table(), base.config._attn_implementation
    except (ImportError, AttributeError):
        raise ValueError(
            "sparse_attention needs a transformers whose models look their attention up in a table (4.48 or newer): "
            "update it, or use SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention for BERT"
        ) from None
    core = table_of.core_of(table, name, "attn_implementation", "be made sparse")
    made = SparseFunction(pattern_of(section, base.config.get_text_config().num_attention_heads), core)
    sharing = [one for one in table_of.installed(table, name, modules) if hasattr(one, "process_group")]
    for one in sharing:  # ranks share its sequences, and exchange tokens for heads around this
        one.attn = made
    if not sharing:
        own = weakref.WeakSet(modules)
        table_of.install(table, name, lambda module: module in own, made)


class Explained(NamedTuple):
    """The cost of a pattern for one sequence. ``flops``, ``dense_flops``: of forward and backward; ``bytes``,
    ``dense_bytes``: of the scores, in fp32, which are never all in memory; ``rows_without_keys``: blocks of queries
    of all heads that see nothing, whose outputs are zeros."""

    length: int
    heads: int
    block: int
    density: float
    flops: int
    dense_flops: int
    bytes: int
    dense_bytes: int
    rows_without_keys: int

    def __str__(self):
        return (
            f"{self.heads} heads of {self.length} tokens in blocks of {self.block}: {self.density:.1%} of all pairs of "
            f"blocks; {self.flops / 1e9:.2f} of {self.dense_flops / 1e9:.2f} GFLOP; scores of "
            f"{self.bytes / 2**20:.1f} of {self.dense_bytes / 2**20:.1f} MiB; {self.rows_without_keys} rows of blocks "
            "see nothing"
        )


def explain(config, length, num_heads=None, head_size=64):
    """Returns the cost of a pattern: an ``Explained``, which prints as a sentence.

    ``config``: a ``SparsityConfig``, or a section ``sparse_attention`` with ``num_heads``. ``length``: tokens, rounded
    up to whole blocks.
    """
    if isinstance(config, dict):
        if num_heads is None:
            raise ValueError("explain of a section needs num_heads, because a section does not say the number of heads")
        config = pattern_of(config, num_heads)
    blocks = -(-length // config.block)
    layout = layout_of(config, blocks * config.block).layout
    pairs, every = int(layout.sum()), layout.numel()
    area = config.block**2
    return Explained(
        length, config.num_heads, config.block, pairs / every, 14 * pairs * area * head_size,
        14 * every * area * head_size, 4 * pairs * area, 4 * every * area, int((~layout.any(-1)).sum()),
    )  # fmt: skip
