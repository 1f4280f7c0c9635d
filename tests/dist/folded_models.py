"""Models whose blocks have an attention and experts: the one is cut over ranks, which share the others."""

import torch
from torch import nn

from hf_like_moe import Block, Model
from models import beside
from moe_models import fill, gate_weights
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


class MoEBlock(nn.Module):
    """An attention, and a layer with experts that the script has made."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.self_attn, self.layer = RMSNorm(6), LlamaAttention(6, 4, 2, 4), layer

    def forward(self, x):
        angles = angles_of(0, x.shape[1], 4, x.device)
        x = x + self.self_attn(self.norm(x), angles)
        out, aux, *_ = self.layer(x.flatten(0, 1))
        return x + out.view(x.shape), aux


class MoEModel(nn.Module):
    """``forward`` takes [tokens, width]."""

    def __init__(self, layer):
        super().__init__()
        self.blocks, self.last = nn.ModuleList([MoEBlock(layer)]), nn.Linear(6, 1)

    def forward(self, x):
        x, aux = self.blocks[0](beside(self.blocks[0].norm.weight, x).view(2, -1, 6))
        return self.last(x).square().mean() + 0.05 * aux

    @property
    def dummy_inputs(self):
        return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(0))}


def moe_model_of(layer, wg, experts):
    """``experts``: number -> expert; ``wg``: the gate."""
    model = MoEModel(layer)
    for number, one in enumerate((model.blocks[0].norm, model.blocks[0].self_attn, model.last)):
        fill(one, 40 * number)
    with torch.no_grad():
        wg.weight.copy_(gate_weights(wg.out_features))
    for number, one in experts.items():
        fill(one, 1000 * (number + 1))
    return model
