"""Finds the parts of a multimodal model that work on a shared sequence: attention of the vision tower and of the
language model, and the projection between both."""

import re
from dataclasses import dataclass, field
from typing import List, Optional, Tuple

from torch import nn

_ATTENTION = re.compile(r"(Attention|SelfAttention|SdpaAttention|FlashAttention2?|MultiheadAttention)$")
_VISION_CLASS = re.compile(
    r"^(CLIP(?!Text)|Siglip2?(?!Text)|ViT|DeiT|Dinov2|InternVision|InternVLVision|Vision)|Vision"
)
_VISION_PATH = re.compile(r"(^|[._])(vision|visual|vit|image_encoder|img_encoder)", re.IGNORECASE)
_PROJECTION = re.compile(
    r"(^|\.)(multi_modal_projector|mm_projector|vision_proj\w*|visual_proj\w*|image_proj\w*|mlp1|connector|aligner|"
    r"(visual|vision_\w+)\.merger)$"
)


@dataclass
class SPModelInfo:
    """Pairs of name and module."""

    vit_attn_modules: List[Tuple[str, nn.Module]] = field(default_factory=list)
    llm_attn_modules: List[Tuple[str, nn.Module]] = field(default_factory=list)
    vision_projection_module: Optional[Tuple[str, nn.Module]] = None


def detect_model_sp_info(model):
    """``SPModelInfo`` of ``model``, by the names of its classes and of its parts. If attention modules contain
    others, the outermost counts."""
    info, inside = SPModelInfo(), None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        kind = type(module).__name__
        if _ATTENTION.search(kind):
            inside = f"{name}."
            is_vision = _VISION_CLASS.search(kind) or _VISION_PATH.search(name)
            (info.vit_attn_modules if is_vision else info.llm_attn_modules).append((name, module))
        elif info.vision_projection_module is None and _PROJECTION.search(name):
            info.vision_projection_module = (name, module)
    return info
