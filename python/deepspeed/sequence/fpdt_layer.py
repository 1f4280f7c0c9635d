"""FPDT (Ulysses-Offload): layers of a transformer over a sequence that ranks share, chunk by chunk."""

import torch

from deepspeed import comm as dist
from deepspeed.sequence.fpdt_attention import _FPDTGPUOffloadingAttentionImpl_
from deepspeed.sequence.fpdt_chunks import FPDT_InputConstruct  # noqa: F401
from deepspeed.sequence.gradients import own_part, parts_of_all
from deepspeed.sequence.tiled import tile_sizes
from deepspeed.zero.gathers.linear import exact_linear


class FPDT_Attention(torch.nn.Module):
    """Self-attention with its projections: ``first_*`` make queries, keys and values, ``second_*`` take the context
    back.

    ``config``: an object with Megatron's ``num_attention_heads``, ``kv_channels``, ``hidden_size``,
    ``attention_dropout`` and, for grouped queries, ``num_key_value_heads``. ``chunk_size``: tokens of all ranks in a
    chunk; any length. Calls take ``[part of the sequence, batch, hidden]`` and return the same; with ``return_bias`` a
    pair with ``second_bias``, which is then not added. ``enable_offloading``: chunks wait in host memory, or in files
    in ``folder`` where there is one.
    """

    def __init__(
        self,
        config,
        first_weight,
        first_bias,
        second_weight,
        second_bias,
        sequence_process_group,
        gather_idx=0,
        scatter_idx=2,
        return_bias=True,
        chunk_size=65536,
        enable_offloading=True,
        folder=None,
    ):
        super().__init__()
        heads = config.num_attention_heads
        self.hidden_size, self.hidden_size_per_attention_head = config.hidden_size, config.kv_channels
        self.projection_size = config.kv_channels * heads
        self.kv_projection_size = config.kv_channels * (getattr(config, "num_key_value_heads", None) or heads)
        self.spg, self.gather_idx, self.scatter_idx = sequence_process_group, gather_idx, scatter_idx
        self.dropout = torch.nn.Dropout(config.attention_dropout)
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        self.return_bias, self.chunk_size, self.enable_offloading = return_bias, chunk_size, enable_offloading
        self.folder = folder

    def forward(self, layernorm_output, attention_mask, inference_params, rotary_pos_emb, cpu_offloading=True):
        length = layernorm_output.shape[0]
        per_rank = max(1, self.chunk_size // dist.get_world_size(self.spg))
        context = _FPDTGPUOffloadingAttentionImpl_.apply(
            layernorm_output,
            attention_mask,
            inference_params,
            rotary_pos_emb,
            self.spg,
            self.scatter_idx,
            self.gather_idx,
            self.hidden_size,
            self.projection_size,
            self.hidden_size_per_attention_head,
            self.kv_projection_size,
            self.qkv_linear_weight,
            self.qkv_linear_bias,
            self.dropout,
            -(-length // per_rank),
            (self.folder or True) if cpu_offloading and self.enable_offloading else False,
        )
        joined = context.transpose(0, 1).flatten(2)
        if self.return_bias:
            return exact_linear(joined, self.qkv_dense_weight), self.qkv_dense_bias
        return exact_linear(joined, self.qkv_dense_weight, self.qkv_dense_bias)


def _gradients(function, chunks, params, uppers):
    """Gradients of ``function(*chunk, *params)``, which runs again chunk by chunk: of the first tensors of the chunks,
    joined, and of ``params``, added up in fp32; None for a parameter that is None. ``uppers``: of the results."""
    leaves = [None if param is None else param.detach().requires_grad_() for param in params]
    wanted, parts = [leaf for leaf in leaves if leaf is not None], []
    sums = [torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in wanted]
    for (first, *others), upper in zip(chunks, uppers):
        first = first.detach().requires_grad_()
        with torch.enable_grad():
            out = function(first, *others, *leaves)
        found = torch.autograd.grad(out, [first, *wanted], upper)
        parts.append(found[0])
        for total, one in zip(sums, found[1:]):
            total += one
    rounded = (total.to(leaf.dtype) for total, leaf in zip(sums, wanted))
    return torch.cat(parts), *(None if leaf is None else next(rounded) for leaf in leaves)


def _ffn(x, w1, b1, w2, b2=None):
    return exact_linear(torch.nn.functional.gelu(exact_linear(x, w1, b1), approximate="tanh"), w2, b2)


class FPDT_FFN(torch.autograd.Function):
    """``apply(x, w1, b1, w2, b2, add_bias, chunk_size)``: ``gelu(x w1' + b1) w2'`` (gelu by tanh) of ``[sequence,
    batch, hidden]``, ``chunk_size`` tokens at a time. Returns ``(output, None)`` with ``b2`` added, or ``(output,
    b2)``."""

    generate_vmap_rule = False

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, add_bias, chunk_size):
        ctx.save_for_backward(x, w1, b1, w2)
        ctx.chunk_size, ctx.bias_of, ctx.adds = chunk_size, None if b2 is None else b2.shape, add_bias
        parts = [_ffn(part, w1, b1, w2, b2 if add_bias else None) for part in x.split(chunk_size)]
        return torch.cat(parts), None if add_bias or b2 is None else b2.clone()

    @staticmethod
    def backward(ctx, grad_output, grad_bias):
        x, *params = ctx.saved_tensors
        chunks = ((part,) for part in x.split(ctx.chunk_size))
        grad_x, for_w1, for_b1, for_w2 = _gradients(_ffn, chunks, params, grad_output.split(ctx.chunk_size))
        for_b2 = None
        if ctx.bias_of is not None:
            for_b2 = grad_output.flatten(0, -2).sum(0) if ctx.adds else grad_bias
        return grad_x, for_w1, for_b1, for_w2, for_b2, None, None


class FPDT_LogitsLoss(torch.autograd.Function):
    """``apply(lm_output, labels, logit_weights, rank, spg_size, spg, num_chunk)``: the losses of all tokens of all
    ranks, ``[sequence, batch]``, with the logits of one chunk at a time.

    ``lm_output``: ``[part of the sequence, batch, hidden]``; ``labels``: ``[batch, part]``. The gradient follows the
    rule of ``vocab_sequence_parallel_cross_entropy``: this rank's part, of the sum over ranks where an engine trains
    on ``spg``.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(ctx, lm_output, labels, logit_weights, rank, spg_size, spg, num_chunk):
        if labels.shape != (lm_output.shape[1], lm_output.shape[0]):
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} for lm_output of shape {tuple(lm_output.shape)}: they must be "
                f"[batch, part of the sequence], {(lm_output.shape[1], lm_output.shape[0])}"
            )
        labels = labels.t().contiguous()
        ctx.save_for_backward(lm_output, labels, logit_weights)
        ctx.sizes, ctx.group = tile_sizes(lm_output.shape[0], max(1, num_chunk)), spg
        parts = [
            _losses(chunk, labels, logit_weights)
            for chunk, labels in zip(lm_output.split(ctx.sizes), labels.split(ctx.sizes))
        ]
        own = torch.cat(parts)
        return own if spg_size == 1 else parts_of_all(own, spg)

    @staticmethod
    def backward(ctx, grad_output):
        lm_output, labels, weight = ctx.saved_tensors
        *chunks, uppers = (one.split(ctx.sizes) for one in (lm_output, labels, own_part(grad_output, ctx.group)))
        grad, for_weight = _gradients(_losses, zip(*chunks), [weight], uppers)
        return grad, None, for_weight, None, None, None, None


def _losses(hidden, labels, weight):
    logits = exact_linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return -logits.to(wide).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
