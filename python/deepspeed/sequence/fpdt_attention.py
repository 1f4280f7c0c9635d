"""Causal attention over a sequence that ranks share, in chunks: projections, exchange and attention of one chunk after
the other, while the keys and values of earlier ones wait in host memory. Source: Yao et al., "Training Ultra
Long-Context Language Model with Fully Pipelined Distributed Transformer" (2024)."""

import torch

from deepspeed.ops.attention.blocks import Dropped, Rows, ScoreRules
from deepspeed.ops.half_products import add_in_fp32
from deepspeed.sequence import exchange
from deepspeed.sequence.chunked import attend_to_chunks, chunk_gradients
from deepspeed.sequence.fpdt_chunks import Store
from deepspeed.sequence.layer import apply_rotary_pos_emb
from deepspeed.sequence.tiled import tile_sizes
from deepspeed.zero.gathers.linear import exact_linear

BATCH_DIM = 1  # [sequence, batch, heads, size]


def _refuse(attention_mask, inference_params, batch, length):
    if inference_params is not None:
        raise ValueError("FPDT trains: inference_params must be None")
    if attention_mask is None:
        return
    expected = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).triu(1)
    if attention_mask.shape[-2:] != expected.shape or not bool((attention_mask.to(torch.bool) == expected).all()):
        raise ValueError(
            f"FPDT computes causal attention: an attention_mask must be None or the causal one of {length} tokens "
            f"(True above the diagonal), got shape {tuple(attention_mask.shape)}"
        )


def _turn(tensor, tables, start, back=False):
    """Rotates a chunk that starts at ``start``; ``back``: the gradient of that."""
    if tables is None:
        return tensor
    cos, sin = (table[start : start + tensor.shape[0]] for table in tables)
    if not back:
        return apply_rotary_pos_emb(tensor, cos, sin)
    with torch.enable_grad():
        leaf = torch.zeros_like(tensor).requires_grad_()
        turned = apply_rotary_pos_emb(leaf, cos, sin)
    return torch.autograd.grad(turned, leaf, tensor)[0]


def _tables(rotary_pos_emb):
    """Cosines and sines ``[sequence, 1, 1, size]``."""
    if rotary_pos_emb is None:
        return None
    is_angles = torch.is_tensor(rotary_pos_emb)
    return (rotary_pos_emb.cos(), rotary_pos_emb.sin()) if is_angles else tuple(rotary_pos_emb)


def _for_blocks(tensor):
    """``[sequence, batch, heads, size]`` as attention of blocks wants it, and back."""
    return tensor.permute(1, 2, 0, 3)


def _from_blocks(tensor):
    return tensor.permute(2, 0, 1, 3)


class _Plan(exchange.HeadExchange):
    """Numbers of one call: chunks, heads, sizes."""

    def __init__(self, group, length, chunks, size, query_width, kv_width):
        super().__init__(query_width // size, kv_width // size, group, BATCH_DIM)
        self.sizes = tile_sizes(length, max(1, chunks))
        self.starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        self.firsts = [start * self.world for start in self.starts]  # tokens of the whole sequence
        self.size, self.widths = size, (query_width, kv_width, kv_width)
        self.idle = self.own[0] == self.own[1]

    def unspread(self, tensor):
        """The gradient of what ``spread`` has got."""
        if self.index is None:
            return tensor
        start, stop = self.plan.kv_ranges[self.rank]
        found = tensor.new_zeros(tensor.shape[0], stop - start, *tensor.shape[2:])
        return found.index_add_(1, torch.tensor(self.index, device=tensor.device), tensor)


class _FPDTGPUOffloadingAttentionImpl_(torch.autograd.Function):
    """``apply(layernorm_output, attention_mask, inference_params, rotary_pos_emb, spg, scatter_idx, gather_idx,
    hidden_size, projection_size, hidden_size_per_attention_head, kv_projection_size, qkv_linear_weight,
    qkv_linear_bias, dropout, num_chunks=8, cpu_offloading=True)``: this rank's part of the context, ``[batch,
    sequence, heads, size]``.

    ``layernorm_output``: ``[part of the sequence, batch, hidden]``, cut as ``FPDT_InputConstruct`` does. Rows of the
    weight are those of all queries, then of keys, then of values. ``rotary_pos_emb``: angles, or cosines and sines, of
    the whole sequence in its own order. ``dropout``: a module or a probability, of attention. ``cpu_offloading``:
    False; True: chunks wait in host memory; a folder: in files there.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(
        ctx,
        layernorm_output,
        attention_mask,
        inference_params,
        rotary_pos_emb,
        spg,
        scatter_idx,
        gather_idx,
        hidden_size,
        projection_size,
        hidden_size_per_attention_head,
        kv_projection_size,
        qkv_linear_weight,
        qkv_linear_bias,
        dropout,
        num_chunks=8,
        cpu_offloading=True,
    ):
        length, batch, _ = layernorm_output.shape
        size = hidden_size_per_attention_head
        plan = _Plan(spg, length, num_chunks, size, projection_size, kv_projection_size)
        _refuse(attention_mask, inference_params, batch, length * plan.world)
        tables = _tables(rotary_pos_emb)
        active = getattr(dropout, "training", True)
        dropped = Dropped.drawn(float(getattr(dropout, "p", dropout) or 0.0) if active else 0.0)
        dropped = dropped and dropped.of_heads(plan.own[0])
        rules = ScoreRules(size**-0.5, dropped=dropped)
        store = Store(layernorm_output.device, cpu_offloading)
        parts = []
        for index, (start, count) in enumerate(zip(plan.starts, plan.sizes)):
            x = layernorm_output[start : start + count]
            joined = exact_linear(x, qkv_linear_weight, qkv_linear_bias)
            own = [y.unflatten(-1, (-1, size)) for y in joined.split(plan.widths, dim=-1)]
            query, key, value = plan.to_heads(own)
            first = plan.firsts[index]
            query, key = _turn(query, tables, first), _turn(key, tables, first)
            query, key, value = (_for_blocks(y) for y in (query, key, value))
            if plan.idle:
                context = value.new_zeros(batch, 0, count * plan.world, size)
            else:
                key, value = plan.spread(key, value, dim=1)
                store.put("key", index, key)
                store.put("value", index, value)
                rows = Rows(query, key.shape[1], rules)
                attend_to_chunks(rows, store, index, True, plan.firsts)
                context, lse = rows.result()
                store.put("query", index, query)
                store.put("context", index, context)
                store.put("lse", index, lse)
            parts.append(plan.to_sequence([_from_blocks(context)])[0])
        ctx.plan, ctx.store, ctx.tables, ctx.rules = plan, store, tables, rules
        ctx.save_for_backward(layernorm_output, qkv_linear_weight, qkv_linear_bias)
        return torch.cat(parts).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, bias = ctx.saved_tensors
        plan, store, batch = ctx.plan, ctx.store, x.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        count = len(plan.sizes)
        grad_output = grad_output.transpose(0, 1)
        for index, (start, length) in enumerate(zip(plan.starts, plan.sizes)):
            grad = _for_blocks(plan.to_heads([grad_output[start : start + length].contiguous()])[0])
            if not plan.idle:
                store.put("grad", index, grad)
                context = store.take("context", index)
                store.put("row sum", index, (grad.to(wide) * context.to(wide)).sum(-1, keepdim=True))
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for index in reversed(range(count)):
            start, length, first = plan.starts[index], plan.sizes[index], plan.firsts[index]
            if plan.idle:
                grads = [x.new_zeros(length * plan.world, batch, 0, plan.size) for _ in range(3)]
            else:
                # The last chunk comes first: its queries read all keys. No other queries read its own keys after that.
                for_query, *others = chunk_gradients(store, index, ctx.rules, True, plan.firsts)
                grads = [_from_blocks(one).to(x.dtype) for one in (for_query, *map(plan.unspread, others))]
            grads = [_turn(grads[0], ctx.tables, first, True), _turn(grads[1], ctx.tables, first, True), grads[2]]
            own = torch.cat([one.flatten(2) for one in plan.to_sequence([one.contiguous() for one in grads])], -1)
            grad_x[start : start + length] = add_in_fp32(torch.matmul, own, weight)
            flat, seen = own.flatten(0, 1).to(wide), x[start : start + length].flatten(0, 1).to(wide)
            grad_weight += flat.t() @ seen
            if grad_bias is not None:
                grad_bias += flat.sum(0)
        grad_weight = grad_weight.to(weight.dtype)
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
        return (grad_x, *[None] * 10, grad_weight, grad_bias, None, None, None)
