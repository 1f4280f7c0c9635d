"""Models whose blocks have an attention and experts: the one is cut over ranks, which share the others."""

import torch
from torch import nn

from hf_like_moe import EXPERTS, FORMS, Block, Model  # noqa: F401
from tensor_models import LlamaAttention, RMSNorm, angles_of


class FoldedBlock(Block):
    """An attention before the experts."""

    def __init__(self, config, dense, form):
        super().__init__(config, dense, form)
        self.first_norm, self.self_attn = RMSNorm(6), LlamaAttention(6, 4, 2, 4)

    def forward(self, x):
        angles = angles_of(0, x.shape[1], 4, x.device)
        return super().forward(x + self.self_attn(self.first_norm(x), angles))


class FoldedModel(Model):
    def __init__(self, family, form=None):
        super().__init__(family, form=form)
        for number in range(2):
            self.model.layers[number] = FoldedBlock(self.config, self.dense_first and number == 0, self.form)

    @property
    def dummy_inputs(self):
        return {"x": torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))}


def folded_model_of(family, form=None):
    model = FoldedModel(family, form)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            wave = torch.sin(torch.arange(param.numel(), dtype=torch.float32) * 0.37 + number)
            param.copy_(wave.view(param.shape) * 0.8)
    return model
