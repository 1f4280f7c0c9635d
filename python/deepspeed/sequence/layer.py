"""Ulysses: attention over a sequence that ranks share. Around any attention, ranks exchange their parts of the sequence
with all heads for the whole sequence with some heads."""

import contextlib
import itertools

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.sequence import exchange
from deepspeed.sequence.heads import shares

_torchembed_available = False  # another package's rotary kernels: ours are torch's operations


def _rotate_half(x):
    """The halves of the last dimension, the second one negated and first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(t, freqs_cos, freqs_sin):
    """Rotates the first ``freqs_cos.shape[-1]`` features of ``t``; the rest pass as they are."""
    width = freqs_cos.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    turned = turned * freqs_cos.to(t.dtype) + _rotate_half(turned) * freqs_sin.to(t.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


# ---- one tensor ------------------------------------------------------------------------------------------------------
def _exchanged(input, scatter_idx, batch_dim_idx, group):
    """``(result, what to wait for, whether heads were scattered, the runs)``."""
    world, heads = dist.get_world_size(group), scatter_idx >= exchange.HEADS
    if input.dim() < 3:
        raise ValueError(
            f"an exchange needs [batch, sequence, heads, ...] or [sequence, batch, heads, ...], got a tensor of shape "
            f"{tuple(input.shape)}"
        )
    length, local = input.shape[exchange.sequence_dim(batch_dim_idx)], input.shape[exchange.HEADS]
    if not heads and length % world:
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {world} equal parts: shape {tuple(input.shape)}, "
            f"batch_dim_idx {batch_dim_idx}"
        )
    if heads:
        runs = shares(local, world)
        if local % world:
            exchange.note_uneven(group)
    else:
        # Counts of heads differ where some earlier exchange of this group could not cut evenly: only then ranks ask.
        uneven = exchange.cuts_unevenly(group)
        counts = exchange.lengths_of(local, group, input.device) if uneven else [local] * world
        runs = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    return *exchange.start(input, runs, group, batch_dim_idx, heads), heads, runs


def single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group, async_op=False, handle=None, type=None):
    """``input`` with dimension ``scatter_idx`` cut over the ranks of ``group`` and ``gather_idx`` put together,
    without a gradient: 2 are the heads, what is smaller is the sequence, wherever ``batch_dim_idx`` leaves it.

    Heads that do not divide are cut into runs of whole heads. With ``async_op`` and a dictionary ``handle`` the result
    is complete when ``handle[type + "_work"].wait()`` has returned; None there has nothing to wait for.
    """
    later = async_op and handle is not None
    if dist.get_world_size(group) == 1:
        if later:
            handle[f"{type}_work"] = None
        return input
    result, work, _, _ = _exchanged(input, scatter_idx, batch_dim_idx, group)
    if later:
        handle[f"{type}_work"] = work
    else:
        work.wait()
    return result


class _SeqAllToAll(torch.autograd.Function):
    """``single_all_to_all`` with its gradient. ``stream``: where the exchange runs; the current one waits for it."""

    @staticmethod
    def forward(
        ctx, group, input, scatter_idx, gather_idx, batch_dim_idx, stream=None, handle=None, type=None, is_fwd=True
    ):
        ctx.plan, ctx.stream = None, stream
        if dist.get_world_size(group) == 1:
            return input.view_as(input)
        with _on_stream(stream, input):
            result, work, scattered, runs = _exchanged(input, scatter_idx, batch_dim_idx, group)
            work.wait()
        ctx.plan = scattered, runs, group, batch_dim_idx
        return result

    @staticmethod
    def backward(ctx, *grad_output):
        (grad,) = grad_output
        if ctx.plan is not None:
            scattered, runs, group, batch_dim_idx = ctx.plan
            with _on_stream(ctx.stream, grad):
                grad = exchange.exchanged([grad], [runs], group, batch_dim_idx, to_heads=not scattered)[0]
        return None, grad, None, None, None, None, None, None, None


@contextlib.contextmanager
def _on_stream(stream, tensor):
    """Work on ``stream`` that starts after and ends before what is around it; None: where everything runs."""
    if stream is None or tensor.device.type == "cpu":
        yield
        return
    stream.wait_stream(get_accelerator().current_stream())
    try:
        with get_accelerator().stream(stream):
            yield
    finally:
        get_accelerator().current_stream().wait_stream(stream)


# ---- around an attention ---------------------------------------------------------------------------------------------
class DistributedAttention(torch.nn.Module):
    """``local_attention`` over a sequence that the ranks of ``sequence_process_group`` share.

    Called ``(query, key, value, batch_dim_idx, rotary_pos_emb=None, *args, **kwargs)`` with this rank's part of the
    sequence and all heads, ``[batch, sequence, heads, size]`` for ``batch_dim_idx`` 0 and ``[sequence, batch, ...]``
    for 1; returns this rank's part of the attention's output. ``local_attention`` gets whole sequences of some heads,
    and ``args`` and ``kwargs`` as they are; ``rotary_pos_emb``, a pair of cosines and sines of the whole sequence, is
    applied to queries and keys before.

    Also called ``(query, key, value, attention_mask, ...)``: what comes after the values goes to ``local_attention``,
    and ``gather_idx`` says where the sequence is (0, the default: ``[sequence, batch, ...]``).

    Any number of heads: they are cut into runs of whole heads, fewer key/value heads than ranks are copied to those
    that read them; ranks that get none compute nothing. ``local_attention`` sees key/value heads that it must repeat
    evenly (grouped queries), or one for each query head where a rank's heads do not come in whole groups.
    ``sp_stream``: the exchanges run there.
    """

    def __init__(self, local_attention, sequence_process_group, scatter_idx=2, gather_idx=0, sp_stream=None):
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.sp_stream = sp_stream
        self.sp_overlap_comm = sp_stream is not None

    def layer_sync(self, layer):
        """Makes the current stream wait for the result of ``layer``, if another stream computed it."""
        if self.sp_overlap_comm and hasattr(layer, "done_event"):
            get_accelerator().current_stream().wait_event(layer.done_event)

    def forward(self, query, key, value, batch_dim_idx, rotary_pos_emb=None, *args, **kwargs):
        if isinstance(batch_dim_idx, bool) or not isinstance(batch_dim_idx, int):
            args = (batch_dim_idx, *([rotary_pos_emb] if rotary_pos_emb is not None else []), *args)
            batch_dim_idx, rotary_pos_emb = 0 if self.gather_idx == 1 else 1, None
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"batch_dim_idx is {batch_dim_idx}: it must be 0 ([batch, sequence, ...]) or 1")
        world = dist.get_world_size(self.spg)
        if world == 1:
            query, key = _rotated(query, key, rotary_pos_emb, batch_dim_idx)
            return self.local_attn(query, key, value, *args, **kwargs)
        self._check(query, key, value, batch_dim_idx)
        heads = exchange.HeadExchange(query.shape[2], key.shape[2], self.spg, batch_dim_idx)
        with _on_stream(self.sp_stream, query):
            q, k, v = heads.to_heads([query, key, value])
        q, k = _rotated(q, k, rotary_pos_emb, batch_dim_idx)
        k, v = heads.spread(k, v)
        idle = q.shape[exchange.HEADS] == 0 and not _must_run(self.local_attn)
        context = None if idle else self.local_attn(q, k, v, *args, **kwargs)
        dims, width = (0, 0) if idle else (context.dim(), _width(context, *heads.own))
        if heads.plan.query < world:  # ranks without heads get the shape of the result from the first rank
            dims, width = (exchange.lengths_of(one, self.spg, q.device)[0] for one in (dims, width))
            if idle:
                shape = [*q.shape[: exchange.HEADS], 0, *([v.shape[-1]] if dims > 3 else [])]
                context = (q.sum() + k.sum() + v.sum()) * q.new_zeros(shape)
        runs = [(start * width, stop * width) for start, stop in heads.plan.query_ranges]
        with _on_stream(self.sp_stream, query):
            return exchange.exchanged([context], [runs], self.spg, batch_dim_idx, to_heads=False)[0]

    def _check(self, query, key, value, batch_dim_idx):
        along = exchange.sequence_dim(batch_dim_idx)
        sizes = [(tensor.shape[along], tensor.shape[exchange.HEADS]) for tensor in (query, key, value)]
        if len({length for length, _ in sizes}) > 1 or sizes[1] != sizes[2]:
            raise ValueError(
                f"query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} do not "
                f"belong to one sequence (batch_dim_idx {batch_dim_idx})"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: make them one dtype"
            )
        # In every call: a rank that had met this length before, and did not ask, would leave the others in the check.
        exchange.check_lengths(sizes[0][0], self.spg, query.device)


def _must_run(attention):
    """Whether every rank must call the attention, even without heads: gathering its parameters is collective."""
    return isinstance(attention, torch.nn.Module) and next(attention.parameters(), None) is not None


def _width(context, start, stop):
    """The entries of dimension 2 of ``context`` for one head: 1, or the size of a head if the attention has joined
    both dimensions."""
    heads = max(stop - start, 1)
    if context.shape[exchange.HEADS] % heads:
        raise ValueError(
            f"local_attention returned shape {tuple(context.shape)} for {heads} heads: dimension 2 must be the heads, "
            "or heads times their size"
        )
    return context.shape[exchange.HEADS] // heads


def _rotated(query, key, rotary_pos_emb, batch_dim_idx):
    if rotary_pos_emb is None:
        return query, key
    cos, sin = rotary_pos_emb
    if cos.dim() == 4 and batch_dim_idx == 0 and cos.shape[0] == query.shape[1]:  # [sequence, 1, 1, size]
        cos, sin = cos.permute(1, 0, 2, 3), sin.permute(1, 0, 2, 3)
    return apply_rotary_pos_emb(query, cos, sin), apply_rotary_pos_emb(key, cos, sin)
