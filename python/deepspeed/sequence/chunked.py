"""Attention of a whole sequence, chunk by chunk: the queries of one chunk at a time, with the scores of one block in
memory. Queries, keys and values of other chunks may wait in another memory."""

import itertools

import torch

from deepspeed.ops.attention.blocks import Rows, ScoreRules, block_gradients, sink_gradient
from deepspeed.sequence.fpdt_chunks import Store
from deepspeed.sequence.tiled import tile_sizes

TOKENS = 2  # the dimension of [batch, heads, tokens, size]
_KEYS = ("key", "value")


def _visited(last, query, known):
    """Numbers of chunks up to ``last``. Of planned ones (meta) those alone that need memory of another kind than those
    before: ``known(number)``, which are like others."""
    return (seen for seen in range(last + 1) if not (query.is_meta and 1 < seen < last - 1 and known(seen)))


def attend_to_chunks(rows, store, index, causal, starts, looks=None):
    """``rows``, the queries of chunk ``index``, see the keys of ``store``: earlier ones and their own, or all.
    ``starts``: the first token of each chunk. ``looks(chunk of queries, chunk of keys)``: a mask of keys that a
    query may use, or None."""
    last = index if causal else max(number for name, number in store.kept if name == "key")
    for seen in _visited(last, rows.query, lambda _: True):
        key, value = (store.get(name, seen) for name in _KEYS)
        store.ahead(_KEYS, seen + 1)
        position = (starts[index], starts[seen])
        rows.see(key, value, causal and seen == index, position, looks and looks(index, seen))


def chunk_gradients(store, index, rules, causal, starts, last=None, looks=None):
    """Gradients of the queries, keys and values of chunk ``index``, once those of later chunks are done. Not causal: of
    the queries; those of all keys up to ``last`` have grown."""
    query, grad = store.take("query", index), store.take("grad", index)
    row_sum, lse = store.take("row sum", index), store.take("lse", index)
    whole = None
    for seen in _visited(index if causal else last, query, lambda number: ("key gradient", number) in store.kept):
        key, value = store.get("key", seen), store.get("value", seen)
        store.ahead(_KEYS, seen + 1)
        diagonal = causal and seen == index
        may = looks and looks(index, seen)
        position = (starts[index], starts[seen])
        found = block_gradients(query, key, value, grad, row_sum, lse, rules, diagonal, position, may)
        whole = found[0] if whole is None else whole + found[0]
        store.add("key gradient", seen, found[1])
        store.add("value gradient", seen, found[2])
    if not causal:
        return [whole]
    for name in _KEYS:
        store.kept.pop((name, index))
    return [whole, store.take("key gradient", index), store.take("value gradient", index)]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, chunk, causal, rules, offload, looks):
        sizes = tile_sizes(query.shape[TOKENS], -(-query.shape[TOKENS] // chunk))
        ctx.starts = starts = [0, *itertools.accumulate(sizes)]
        ctx.looks = looks = None if looks is None else _of_chunks(looks, starts)
        store = Store(query.device, offload)
        for name, tensor in (("key", key), ("value", value)):
            for index, part in enumerate(tensor.split(sizes, TOKENS)):
                store.put(name, index, part)
        output = torch.empty_like(query)
        parts = output.split(sizes, TOKENS)
        for index, part in enumerate(query.split(sizes, TOKENS)):
            rows = Rows(part, key.shape[1], rules._replace(sinks=sinks))
            attend_to_chunks(rows, store, index, causal, starts, looks)
            result, lse = rows.result()
            parts[index].copy_(result)
            store.put("query", index, part)
            store.put("lse", index, lse)
        ctx.store, ctx.sizes, ctx.causal, ctx.rules = store, sizes, causal, rules
        ctx.shapes = query.shape, key.shape, value.shape
        ctx.save_for_backward(output, sinks)
        return output

    @staticmethod
    def backward(ctx, grad):
        output, sinks = ctx.saved_tensors
        store, sizes, causal, count = ctx.store, ctx.sizes, ctx.causal, len(ctx.sizes)
        wide = torch.promote_types(grad.dtype, torch.float32)
        grads = [grad.new_empty(shape) for shape in ctx.shapes]
        slots = [one.split(sizes, TOKENS) for one in grads]
        for_sinks = None if sinks is None else grad.new_zeros(sinks.shape, dtype=wide)
        for index, (own, result) in enumerate(zip(grad.split(sizes, TOKENS), output.split(sizes, TOKENS))):
            row_sum = (own.to(wide) * result.to(wide)).sum(-1, keepdim=True)
            if for_sinks is not None:
                for_sinks += sink_gradient(sinks, store.get("lse", index), row_sum)
            store.put("grad", index, own)
            store.put("row sum", index, row_sum)
        for index in reversed(range(count)):  # the last queries have seen all keys
            found = chunk_gradients(store, index, ctx.rules, causal, ctx.starts, count - 1, ctx.looks)
            for slot, one in zip(slots, found):
                slot[index].copy_(one)
        for index in range(count) if not causal else ():
            slots[1][index].copy_(store.take("key gradient", index))
            slots[2][index].copy_(store.take("value gradient", index))
        store.kept.clear()
        return (*grads, None if sinks is None else for_sinks.to(sinks.dtype), *[None] * 5)


def _of_chunks(looks, starts):
    spans = list(zip(starts[:-1], starts[1:]))
    return lambda query, key: looks(spans[query], spans[key])


def chunked_attention(
    query,
    key,
    value,
    chunk,
    causal=True,
    scale=None,
    offload=False,
    looks=None,
    soft_cap=0.0,
    sinks=None,
    dropped=None,
):
    """Attention of ``[batch, heads, tokens, size]``, ``chunk`` tokens at a time; key/value heads may be fewer.

    ``offload``: the memory in which queries, keys and values wait for backward. False: the device; True: host memory; a
    text: files in that folder. Only one backward may run, because it consumes them. ``looks(queries, keys)``, of
    two runs of tokens ``(start, stop)``: where a query may look beside being causal, ``[batch or 1, 1, queries,
    keys]``, or None. ``scale``, ``soft_cap``, ``sinks`` (``[heads]``), ``dropped``: see ``ScoreRules`` in
    ops/attention/blocks.py.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: attention is computed for 1 token or more at a time")
    rules = ScoreRules.checked(query, scale, soft_cap, sinks, dropped)._replace(sinks=None)
    return _Chunked.apply(query, key, value, sinks, chunk, causal, rules, offload, looks)
