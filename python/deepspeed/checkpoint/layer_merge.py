"""Megatron's names of the tensors in a layer file, and how tensor-parallel slices of a layer make a whole one."""

import torch

# Tensors that every tensor-parallel rank has whole, and dimensions other than 0 along which slices are joined. Names of
# Megatron-LM.
REPLICATED = {
    "input_layernorm.weight",
    "input_layernorm.bias",
    "self_attention.dense.bias",
    "post_attention_layernorm.weight",
    "post_attention_layernorm.bias",
    "mlp.dense_4h_to_h.bias",
    "position_embeddings.weight",
}
CONCAT_DIM = {"self_attention.dense.weight": 1, "mlp.dense_4h_to_h.weight": 1}


def _ends_with(key, names):
    return next((name for name in names if key == name or key.endswith("." + name)), None)


def merge_layer_slices(states):
    """One state dict of several tensor-parallel ranks' slices of the same layer."""
    merged = dict(states[0])
    for key, first in merged.items():
        if len(states) == 1 or not torch.is_tensor(first) or not first.dim() or _ends_with(key, REPLICATED):
            continue
        dim = CONCAT_DIM.get(_ends_with(key, CONCAT_DIM), 0)
        merged[key] = torch.cat([state[key] for state in states], dim=dim)
    return merged
