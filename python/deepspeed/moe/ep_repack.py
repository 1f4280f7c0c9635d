"""Experts of a model that knows nothing of ranks, as the three stacked weights of the ranks that share them."""

import torch

from deepspeed.moe.errors import fail
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout


def source_weights(experts_source, spec):
    """The weights of the experts as the model has them: for experts in a list, w1, w2 and w3 (or None) of each expert;
    for stacked experts, ``[w1, w2]`` or ``[w1, w2, w3]`` of all."""
    names = [spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name]
    if spec.expert_storage == "module_list":
        return [[None if name is None else weight_of(expert, name) for name in names] for expert in experts_source]
    return [getattr(experts_source, name) for name in names if name is not None]


def weight_of(expert, name):
    """The weight ``name`` of an expert, or of its child of this name."""
    found = getattr(expert, name)
    return found if isinstance(found, torch.nn.Parameter) else found.weight


@torch.no_grad()
def repack_expert_weights(experts_source, spec, ep_rank, ep_size):
    """``(w1, w2, w3)`` of the experts of rank ``ep_rank`` of ``ep_size``: copies, ``[local, ffn, hidden]``,
    ``[local, hidden, ffn]``, ``[local, ffn, hidden]``; w3 None where experts have two weights.

    ``spec``: a ``MoELayerSpec``; of it ``expert_storage`` and ``expert_w1_name`` and so on are read. Parameters of ZeRO
    stage 3 have to be gathered.
    """
    weights = source_weights(experts_source, spec)
    count = len(weights) if spec.expert_storage == "module_list" else weights[0].shape[0]
    if ep_size < 1 or count % ep_size != 0 or not 0 <= ep_rank < ep_size:
        fail("", f"{count} experts cannot be shared by ep_size={ep_size} ranks, of which this is ep_rank={ep_rank}")
    local = count // ep_size
    own = slice(ep_rank * local, (ep_rank + 1) * local)
    if spec.expert_storage == "module_list":
        return tuple(None if kind[0] is None else torch.stack(kind) for kind in zip(*weights[own], strict=True))
    first, second = (weight.detach()[own] for weight in weights[:2])
    if len(weights) == 3:
        return first.clone(), second.clone(), weights[2].detach()[own].clone()
    if classify_fused_gate_up_layout(weights[0].shape, weights[1].shape) == "in_out":
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    gate, up = first.chunk(2, dim=1)
    like_rows = torch.contiguous_format
    return tuple(part.clone(memory_format=like_rows) for part in (gate, second, up))
