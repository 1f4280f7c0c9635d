"""The model of the tests of post-mortems, which ``ds_postmortem --model`` loads by the path of this file."""

import torch
from torch import nn

BROKEN = {"once": False, "raises": False}  # of this process: a replay runs in another one


class Layer(nn.Module):
    """No matrix product, so that fp16 runs on every CPU."""

    def __init__(self, number, width=8):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width, generator=generator))
        self.bias = nn.Parameter(0.1 * torch.randn(width, generator=generator))

    def forward(self, x, gain=1.0):
        return (x * self.weight + self.bias) * gain


class Steep(nn.Module):
    """An operator that is inf where it is asked to be, or at one time in one process."""

    def forward(self, x, steep):
        if BROKEN["raises"]:
            raise RuntimeError("the disk of this script is full")
        if BROKEN["once"]:
            return x / 0.0
        return torch.exp(x * x + 1000.0) if steep else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(3))
        self.steep = Steep()
        self.centers = nn.Parameter(0.1 * torch.ones(4, 8))

    def forward(self, x, y, steep=False, gain=1.0):
        x = self.layers[0](x.to(self.centers.dtype))
        x = self.layers[1](self.steep(x, steep), gain)
        x = self.layers[2](x) + 0.01 * torch.rand(8).to(x.dtype)
        return (x.float() - self.centers[y].float()).square().mean()


def factory():
    return Net()


def with_labels(model, x, y, **more):
    """The loss as a script computes it that keeps its labels to itself."""
    return model(x, y, **more)
