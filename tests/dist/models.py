"""Models that several files of tests share."""

import torch
from torch import nn


class Numbered(nn.Module):
    """A layer that knows its number, which also seeds its weights; the buffer is in checkpoints."""

    def __init__(self, number, width, bias=True):
        super().__init__()
        torch.manual_seed(number)
        self.fc = nn.Linear(width, width, bias=bias)
        self.register_buffer("number", torch.tensor([float(number)]))

    @property
    def weight(self):
        return self.fc.weight

    def forward(self, x):
        return torch.tanh(self.fc(x)) * (1 + self.number / 10).to(x.dtype)


def two_layers(inside=6, hidden=5, outside=3, seed=0):
    """Two linear layers, and a tanh between them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inside, hidden), nn.Tanh(), nn.Linear(hidden, outside))


def waves(rows, width, shift=0.0):
    """Rows of numbers that differ."""
    return torch.sin(torch.arange(float(rows * width)).view(rows, width) * 0.7 + shift)
