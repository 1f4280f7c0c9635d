"""torch's ``scaled_dot_product_attention`` as GPUs compute it. On meta tensors torch takes the form that keeps all
scores, which no GPU does while fused kernels are on."""

from itertools import zip_longest

import torch
from torch.overrides import TorchFunctionMode


def _fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The operators whose backward computes the scores again. Shapes: ``[batch, heads, tokens, width]``."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(groups, -3) for one in (key, value))
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16) and torch.backends.cuda.flash_sdp_enabled():
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2]).to(query.dtype)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


class FusedAttention(TorchFunctionMode):
    """Used where a fused kernel takes the tensors; torch's switches of kernels (``torch.nn.attention.sdpa_kernel``)
    count here, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is getattr(torch.nn.functional, "scaled_dot_product_attention", self):
            enabled = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()
            query = args[0] if args else kwargs["query"]
            if enabled and query.is_meta and query.dim() == 4:
                return _fused(*args, **(kwargs or {}))
        if func in (torch.Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _backward(self, tensors, grad_tensors=None, retain_graph=None, create_graph=False, **more):
        """torch turns a mode off while it handles a call, and a backward may compute a forward again. So this calls
        the engine of autograd itself, which no mode handles. The arguments are those of ``torch.autograd.backward``."""
        inputs, gradient = more.get("inputs") or (), more.get("gradient")
        tensors = (tensors,) if torch.is_tensor(tensors) else tuple(tensors)
        given = grad_tensors if gradient is None else gradient
        given = (given,) if given is None or torch.is_tensor(given) else given
        grads = [
            torch.ones_like(one) if grad is None and one.requires_grad else grad
            for one, grad in zip_longest(tensors, given)
        ]
        inputs = (inputs,) if torch.is_tensor(inputs) else tuple(inputs)
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                tensors, tuple(grads), keep, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
            )
