"""The op ``random_ltd``: tokens of samples by number."""

import torch

from deepspeed.ops.random_ltd.dropping_utils import GatherTokens, ScatterTokens, cut_mask


def token_sort_(indices, seq_length):
    """``indices`` [layers, samples, kept] below ``seq_length``, sorted in place."""
    return indices.copy_(indices.sort(-1).values)


@torch.no_grad()
def token_gather(activations, sorted_indices, batch_first):
    """The tokens ``sorted_indices`` [samples, kept] of ``activations``."""
    return GatherTokens.apply(activations, sorted_indices, batch_first)[1]


@torch.no_grad()
def token_scatter_(all_activations, layer_activations, sorted_indices, batch_first):
    """Puts ``layer_activations`` in the place of these tokens, in ``all_activations``, which it returns."""
    return all_activations.copy_(ScatterTokens.apply(all_activations, layer_activations, sorted_indices, batch_first))


def mask_gather_bert(dense_mask, sorted_indices):
    """For each layer of ``sorted_indices`` [layers, samples, kept] the mask among its tokens."""
    return [cut_mask(dense_mask, chosen, dense_mask.shape[-1]) for chosen in sorted_indices]


def mask_gather_gpt(dense_mask, truncated_seq_len):
    """A causal mask for ``truncated_seq_len`` tokens."""
    return dense_mask[..., :truncated_seq_len, :truncated_seq_len]
