"""Some tokens of each sample as a tensor of their own, and back. Gradients are those of explicit indexing."""

import torch

from deepspeed import _native
from deepspeed.ops.token_rows import ops, positions_of


def _rows(activations):
    return activations.reshape(-1, activations.shape[-1])


def _numbers(sorted_indices, activations, batch_first):
    """The rows of ``activations`` that the tokens ``sorted_indices`` [samples, kept] are, int32 and flat."""
    samples, length = activations.shape[:2] if batch_first else activations.shape[1::-1]
    if sorted_indices.shape[0] != samples:
        raise ValueError(
            f"tokens were chosen for {sorted_indices.shape[0]} samples, and activations of shape "
            f"{tuple(activations.shape)} have {samples} (batch_first={batch_first})"
        )
    sample = torch.arange(samples, dtype=torch.int32, device=sorted_indices.device)
    index = sorted_indices.to(torch.int32)
    if batch_first:
        return (sample.unsqueeze(1) * length + index).reshape(-1)
    return (index.t() * samples + sample).reshape(-1)


class GatherTokens(torch.autograd.Function):
    """``apply(activations, sorted_indices, batch_first)``: ``(activations, kept)``. ``activations`` are [samples,
    tokens, width], or [tokens, samples, width] where ``batch_first`` is false; ``sorted_indices`` [samples, kept]."""

    @staticmethod
    def forward(ctx, activations, sorted_indices, batch_first):
        numbers = _numbers(sorted_indices, activations, batch_first)
        ctx.save_for_backward(numbers)
        ctx.shape = activations.shape
        kept = ops().permute_rows(_rows(activations), numbers, 1)
        samples, tokens = sorted_indices.shape
        return activations, kept.view(*((samples, tokens) if batch_first else (tokens, samples)), -1)

    @staticmethod
    def backward(ctx, a_gradients, g_gradients):
        (numbers,) = ctx.saved_tensors
        slots = positions_of(numbers, ctx.shape[0] * ctx.shape[1])
        found = ops().combine_rows(_rows(g_gradients), slots.unsqueeze(1)).view(ctx.shape)
        return found.add_(a_gradients), None, None


class ScatterTokens(torch.autograd.Function):
    """``apply(all_activations, layer_activations, sorted_indices, batch_first)``: ``all_activations`` with
    ``layer_activations`` in the place of the tokens ``sorted_indices``."""

    @staticmethod
    def forward(ctx, all_activations, layer_activations, sorted_indices, batch_first):
        numbers = _numbers(sorted_indices, all_activations, batch_first)
        ctx.save_for_backward(numbers)
        ctx.shape = layer_activations.shape
        found = all_activations.clone(memory_format=torch.contiguous_format)
        _rows(found).index_copy_(0, numbers.long(), _rows(layer_activations).to(found.dtype))
        return found

    @staticmethod
    def backward(ctx, out_gradients):
        (numbers,) = ctx.saved_tensors
        of_layer = ops().permute_rows(_rows(out_gradients), numbers, 1).view(ctx.shape)
        of_all = out_gradients.clone(memory_format=torch.contiguous_format)
        _rows(of_all).index_fill_(0, numbers.long(), 0)
        return of_all, of_layer, None, None


def cut_mask(mask, sorted_indices, length):
    """The attention mask for the tokens ``sorted_indices`` [samples, kept] of sequences of ``length`` tokens.

    ``mask`` is [samples, length], or has 1 or all samples in front and [1 or length, length] at its end. Who may look
    at whom is what it was among the kept tokens. ValueError for another shape."""
    samples = len(sorted_indices)
    shape, index = mask.shape, sorted_indices.long()
    if mask.dim() == 2 and samples != 1 and shape == (samples, length) == (length, length):
        raise ValueError(
            f"an attention mask of shape {tuple(shape)} may be one of {samples} samples or of {length} tokens: give it "
            "a dimension for samples and one for heads"
        )
    if mask.dim() == 2 and shape[0] == length and shape[0] != samples:  # of all samples alike
        mask, shape = mask.unsqueeze(0), (1, *shape)
    fits = mask.dim() >= 2 and shape[0] in (1, samples) and shape[-1] == length
    fits = fits and (mask.dim() == 2 or shape[-2] in (1, length))
    if not fits:
        raise ValueError(
            f"an attention mask of shape {tuple(shape)} does not fit {samples} samples of {length} tokens: its last "
            "dimension counts tokens, the one before tokens or 1, the first samples or 1"
        )
    if mask.dim() == 2:
        return mask.expand(samples, length).gather(1, index)
    heads = [1] * (mask.dim() - 3)
    if shape[-2] == length:
        rows = index.view(samples, *heads, -1, 1)
        mask = mask.expand(samples, *mask.shape[1:]).gather(-2, rows.expand(samples, *mask.shape[1:-2], -1, length))
    columns = index.view(samples, *heads, 1, -1)
    return mask.expand(samples, *mask.shape[1:]).gather(-1, columns.expand(samples, *mask.shape[1:-1], -1))


def _sample(reserved_length, seq_length, batch_size, layers, device):
    """int32 [layers, samples, reserved_length] by torch's generator: a seed of it for each call."""
    seed = int(torch.randint(2**62, ()))
    chosen = [
        _native._C.choose_tokens(seed, 0, layer, 0, batch_size, seq_length, reserved_length) for layer in range(layers)
    ]
    return torch.stack(chosen).to(device)


def gpt_sample_tokens(reserved_length, seq_length, batch_size, layers=1, device="cpu", attn_mask=None):
    """``(indices, mask)`` for decoders: ascending numbers of random tokens [layers, batch_size, reserved_length], and
    the causal ``attn_mask`` [.., seq_length, seq_length] cut to that length, which all choices have in common."""
    mask = None if attn_mask is None else attn_mask[..., :reserved_length, :reserved_length]
    return _sample(reserved_length, seq_length, batch_size, layers, device), mask


def bert_sample_tokens(reserved_length, seq_length, batch_size, layers=1, device="cpu", attn_mask=None):
    """``(indices, masks)`` for encoders: as ``gpt_sample_tokens``, and for each layer ``attn_mask`` [samples, heads or
    1, 1 or tokens, tokens] among its tokens; None without a mask."""
    indices = _sample(reserved_length, seq_length, batch_size, layers, device)
    return indices, None if attn_mask is None else [cut_mask(attn_mask, chosen, seq_length) for chosen in indices]
