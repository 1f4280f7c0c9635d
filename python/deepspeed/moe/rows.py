"""Makes rows of tokens for experts, and tokens of rows: autograd over the kernels of csrc/kernels/routes.h.

An *assignment* is one choice of a token: number token * k + choice. ``sources`` has the assignment of each row (-1:
none, the row is zeros), ``slots`` [tokens, k] the row of each assignment (-1: none).
"""

import torch

from deepspeed import _native
from deepspeed.ops.token_rows import ops, positions_of


class _Dispatch(torch.autograd.Function):
    """``apply(tokens, sources, slots)``: a row for each entry of ``sources``: the token of that assignment."""

    @staticmethod
    def forward(ctx, tokens, sources, slots):
        ctx.save_for_backward(slots)
        return ops().permute_rows(tokens, sources, divisor=slots.shape[1])

    @staticmethod
    def backward(ctx, grad):
        return ops().combine_rows(grad, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    """``apply(rows, weights, sources, slots)``: for each token the sum of its rows, times their weights [tokens, k]."""

    @staticmethod
    def forward(ctx, rows, weights, sources, slots):
        ctx.save_for_backward(rows, weights, sources, slots)
        return ops().combine_rows(rows, slots, weights)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, sources, slots = ctx.saved_tensors
        wants_rows, wants_weights = ctx.needs_input_grad[:2]
        to_rows = ops().permute_rows(grad, sources, slots.shape[1], weights) if wants_rows else None
        to_weights = ops().dot_rows(rows, grad, slots).to(weights.dtype) if wants_weights else None
        return to_rows, to_weights, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k, select):
        probs, index = ops().topk_gate(logits, k, select)
        _native.tell_modes("topk_gate", probs, logits)
        ctx.save_for_backward(probs)
        ctx.mark_non_differentiable(index)
        return probs, index

    @staticmethod
    def backward(ctx, grad, _):
        (probs,) = ctx.saved_tensors
        scaled = grad * probs
        return scaled - probs * scaled.sum(-1, keepdim=True), None, None


class _AddLoss(torch.autograd.Function):
    """``apply(output, loss, scale)``: ``output``; its backward also runs that of ``scale()`` times ``loss``, a loss
    that the model does not return."""

    @staticmethod
    def forward(ctx, output, loss, scale):
        ctx.scale, ctx.like = scale, (loss.shape, loss.dtype, loss.device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        shape, dtype, device = ctx.like
        return grad, torch.full(shape, ctx.scale(), dtype=dtype, device=device), None


dispatch_rows, combine_rows, add_loss = _Dispatch.apply, _Combine.apply, _AddLoss.apply


def reorder_rows(rows, order):
    """``rows[order]`` for a permutation ``order``."""
    inverse = positions_of(order, len(order))
    return _Dispatch.apply(rows, order, inverse.unsqueeze(1)), inverse


def gate(logits, k, select=None):
    """``(softmax of logits, the k largest of them or of select)``; int32 numbers, -2 in rows with a nan."""
    return _Gate.apply(logits, k, select)
