"""Fusion of pictures and text: ranks that share patches and tokens join both, and each gets a part of the whole."""

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.sequence.autosp_vit import gathered

_DEFAULT_IMAGE_TOKEN_ID = -200  # LLaVA's


class _FusionAdapter(nn.Module):
    """The base of the adapters, which know the tokens that visual features replace."""

    def __init__(self, projection, process_group):
        super().__init__()
        self.projection, self.process_group = projection, process_group

    def forward(self, visual_features, text_embeds, input_ids):
        replaced = self.replaced(input_ids)
        group = self.process_group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if replaced.shape != text_embeds.shape[:2]:
            raise ValueError(
                f"input_ids of shape {tuple(replaced.shape)} do not belong to text_embeds of shape "
                f"{tuple(text_embeds.shape)}"
            )
        projected = self.projection(visual_features)
        whole = gathered(projected, group, 1) if world > 1 else projected
        rows = [_row(*row) for row in zip(text_embeds, whole.to(text_embeds.dtype), replaced)]
        lengths = sorted({row.shape[0] for row in rows})
        if len(lengths) > 1 or lengths[0] % world:
            raise ValueError(
                f"with their visual features the {len(rows)} rows have {', '.join(map(str, lengths))} tokens: all must "
                f"have the same number, a multiple of the {world} ranks that share them; pad the text"
            )
        return torch.stack(rows).chunk(world, dim=1)[rank]


class ModalityFusionSPAdapter(_FusionAdapter):
    """Called ``(visual_features, text_embeds, input_ids)`` with this rank's part of the visual features (``[batch,
    part, features]``), and the embeddings and ids of the whole text (``[batch, tokens(, hidden)]``); returns this
    rank's part of the whole sequence, ``[batch, part, hidden]``.

    Visual features pass ``projection``. They replace the tokens ``image_token_id``: one each where there
    are as many, else all of a row grow to an equal number of features. Gradients are those of one process.
    """

    def __init__(self, projection, process_group, image_token_id=_DEFAULT_IMAGE_TOKEN_ID):
        super().__init__(projection, process_group)
        self.image_token_id = image_token_id

    def replaced(self, input_ids):
        """A mask ``[batch, tokens]``: True for tokens that visual features replace."""
        return input_ids == self.image_token_id


class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """LLaVA: ``<image>`` tokens."""


class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """InternVL: ``<IMG_CONTEXT>`` tokens; pass their id."""


class Qwen2VLFusionAdapter(_FusionAdapter):
    """As ``ModalityFusionSPAdapter``: visual features replace the tokens between ``vision_start_token_id`` and
    ``vision_end_token_id``."""

    def __init__(self, projection, process_group, vision_start_token_id, vision_end_token_id):
        super().__init__(projection, process_group)
        self.vision_start_token_id, self.vision_end_token_id = vision_start_token_id, vision_end_token_id

    def replaced(self, input_ids):
        starts, ends = input_ids == self.vision_start_token_id, input_ids == self.vision_end_token_id
        if not torch.equal(starts.sum(1), ends.sum(1)):
            raise ValueError(
                f"vision_start_token_id ({self.vision_start_token_id}) and vision_end_token_id "
                f"({self.vision_end_token_id}) do not come in pairs: "
                f"{starts.sum(1).tolist()} and {ends.sum(1).tolist()}"
            )
        return (starts.cumsum(1) - ends.cumsum(1) > 0) & ~starts


def _row(text, visual, replaced):
    count = int(replaced.sum())
    if count == 0 and visual.shape[0]:
        return text + 0 * visual.sum()  # a text without pictures: all ranks still meet in backward
    if count and visual.shape[0] == count:
        fused = text.clone()
        fused[replaced] = visual
        return fused
    if count == 0 or visual.shape[0] % count:
        raise ValueError(
            f"{visual.shape[0]} visual features for {count} image tokens: there must be one each, or the same "
            "number for each; is image_token_id right?"
        )
    pictures = iter(visual.split(visual.shape[0] // count))
    cuts = [-1, *replaced.nonzero().flatten().tolist(), replaced.shape[0]]
    parts = []
    for before, after in zip(cuts[:-1], cuts[1:]):
        parts.append(text[before + 1 : after])
        if after < replaced.shape[0]:
            parts.append(next(pictures))
    return torch.cat(parts)
