"""Sequence parallelism for multimodal models without a change of their code."""

import inspect

from deepspeed.sequence.autosp_detector import detect_model_sp_info
from deepspeed.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.sequence.hf_attention import share_model
from deepspeed.sequence.layer import DistributedAttention

_CLASS_TOKENS = ("class_embedding", "cls_token")


def auto_wrap_model_for_sp(model, process_group):
    """Makes attention of ``model`` share sequences among the ranks of ``process_group``, in place; returns the model.

    Attention of a vision tower becomes ``UlyssesSPViTAttention``. Attention of the language model goes through
    transformers' table of attention functions where the model has a config, and becomes ``DistributedAttention`` where
    a module takes query, key and value. How pictures enter the text is the script's: see the fusion adapters.
    ValueError where there is no attention, or one that cannot share.
    """
    info = detect_model_sp_info(model)
    if not info.vit_attn_modules and not info.llm_attn_modules:
        raise ValueError(
            f"{type(model).__name__} has no attention that sequence parallelism knows: classes must be called "
            "...Attention. Wrap its attention in deepspeed.sequence.layer.DistributedAttention"
        )
    bare = [(name, module) for name, module in info.llm_attn_modules if _takes_projections(module)]
    others = [name for name, module in info.llm_attn_modules if not _takes_projections(module)]
    if others and not hasattr(model, "config"):
        raise ValueError(
            f"'{others[0]}' takes no query, key and value, and the model has no config of transformers: its attention "
            "cannot be reached. Wrap it in deepspeed.sequence.layer.DistributedAttention"
        )
    if others:
        share_model(model, map(model.get_submodule, others), process_group)
    for name, module in bare:
        _replace(model, name, DistributedAttention(module, process_group, gather_idx=1))
    for name, module in info.vit_attn_modules:
        _replace(model, name, UlyssesSPViTAttention(module, process_group, _has_class_token(model, name)))
    return model


def _takes_projections(module):
    return [name[0] for name in inspect.signature(module.forward).parameters][:3] == ["q", "k", "v"]


def _has_class_token(model, name):
    """Whether the tower around the attention called ``name`` has one: the nearest one with embeddings says so."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        tower = model.get_submodule(".".join(parts[:depth])) if depth else model
        own = [path.rsplit(".", 1)[-1] for path, _ in tower.named_parameters()]
        if any(token in own for token in _CLASS_TOKENS):
            return True
        if any("patch_embed" in path or "embeddings" in path for path, _ in tower.named_modules()):
            return False
    return False


def _replace(model, name, module):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, last, module)
