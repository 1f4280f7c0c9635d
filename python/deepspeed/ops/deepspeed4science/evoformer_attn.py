"""Attention of the Evoformer, with two biases and their gradients, without scores in memory (ops/attention)."""

import torch

from deepspeed.ops.attention.whole import KernelAttention, Rules, attention


class BiasShapeError(ValueError, AssertionError):
    """A bias does not fit the queries and keys."""


def _by_heads(one):
    """``[*, tokens, heads, size]`` as ``[outer, inner, heads, tokens, size]``, a view."""
    lead = one.shape[:-3]
    outer, inner = lead[:-1].numel(), lead[-1] if lead else 1
    return one.reshape(outer, inner, *one.shape[-3:]).transpose(-3, -2)


def _by_tokens(one, shape):
    """The other way round, with the dimensions of queries of ``shape``."""
    return one.transpose(-3, -2).reshape(*shape[:-1], one.shape[-1])


def _checked(Q, K, V, bias1, bias2):
    """The biases as ``[outer, inner, heads, queries, keys]``, or None; raises for shapes, dtypes and devices."""
    if Q.dim() < 3 or K.dim() != Q.dim() or K.shape[-2:] != Q.shape[-2:] or K.shape[:-3] != Q.shape[:-3]:
        raise ValueError(
            f"Q and K have the shapes {tuple(Q.shape)} and {tuple(K.shape)}: both are [*, tokens, heads, size], and "
            "differ in tokens alone"
        )
    if V.shape[:-1] != K.shape[:-1]:
        raise ValueError(f"V has the shape {tuple(V.shape)} and K {tuple(K.shape)}: each key has one value")
    for name, one in (("K", K), ("V", V)):
        if one.dtype != Q.dtype or one.device != Q.device:
            raise ValueError(f"{name} is {one.dtype} on {one.device}, and Q {Q.dtype} on {Q.device}: they are alike")
    lead, heads, queries, keys = Q.shape[:-3], Q.shape[-2], Q.shape[-3], K.shape[-3]
    few = (*lead[:-1], 1) if lead else ()
    made = []
    for name, bias, shape in (("bias1", bias1, (*lead, 1, 1, keys)), ("bias2", bias2, (*few, heads, queries, keys))):
        if bias is None:
            made.append(None)
            continue
        if tuple(bias.shape) != shape:
            what = "the mask of residues" if name == "bias1" else "the bias of pairs"
            raise BiasShapeError(
                f"{name} shape is incorrect: it is {tuple(bias.shape)}, and for Q {tuple(Q.shape)} and K "
                f"{tuple(K.shape)} {what} is {shape}"
            )
        if bias.dtype not in (Q.dtype, torch.float32) or bias.device != Q.device:
            raise ValueError(
                f"{name} is {bias.dtype} on {bias.device}: it has the dtype of Q ({Q.dtype}) or fp32, on {Q.device}"
            )
        made.append(bias.reshape(lead[:-1].numel(), -1, *shape[-3:]))
    return made


class EvoformerFusedAttention(torch.autograd.Function):
    """``apply(q, k, v, bias1=None, bias2=None)``: ``DS4Sci_EvoformerAttention`` by our kernels."""

    @staticmethod
    def forward(ctx, q, k, v, bias1=None, bias2=None):
        ctx.shapes = [None if one is None else one.shape for one in (q, k, v, bias1, bias2)]
        biases = _checked(q, k, v, bias1, bias2)
        inner = q.shape[-4] if q.dim() > 3 else 1
        rules = Rules(q.shape[-1] ** -0.5, 0.0, False, 0, None, None, None, inner)
        heads_first = [_by_heads(one).flatten(0, 1) for one in (q, k, v)]
        return _by_tokens(KernelAttention.forward(ctx, *heads_first, *biases, rules), q.shape)

    @staticmethod
    def backward(ctx, grad_output):
        grads = KernelAttention.backward(ctx, _by_heads(grad_output).flatten(0, 1))[:5]
        grads = [one.transpose(1, 2) if index < 3 else one for index, one in enumerate(grads)]
        return tuple(None if one is None else one.reshape(shape) for one, shape in zip(grads, ctx.shapes))


def DS4Sci_EvoformerAttention(Q, K, V, biases):
    """``softmax(Q K^T / sqrt(size) + bias1 + bias2) V`` over the tokens, without scores in memory.

    Args:
        Q, K, V: ``[*, tokens, heads, size]``, such as ``[batch, N_seq, N_res, heads, size]``; any number of tokens.
            bf16, fp16, fp32 or fp64.
        biases: up to two tensors, in this order; None leaves one out. ``bias1``, the mask of residues
            ``[*, 1, 1, tokens]``, and ``bias2``, the bias of pairs ``[batch, 1, heads, tokens, tokens]``. Both have
            gradients. In the dtype of ``Q`` or fp32.

    Returns a tensor like ``Q``. Raises ``BiasShapeError`` (a ValueError and an AssertionError) for a bias of another
    shape.
    """
    if len(biases) > 2:
        raise ValueError(f"DS4Sci_EvoformerAttention takes at most 2 biases, got {len(biases)}")
    made = _checked(Q, K, V, *biases, *[None] * (2 - len(biases)))
    given = [bias for bias in made if bias is not None]
    return _by_tokens(attention(*[_by_heads(one) for one in (Q, K, V)], biases=given), Q.shape)
