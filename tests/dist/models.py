"""Models that several files of tests share."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def seeded(make, *given, seed=0, **named):
    """``make(...)`` with the random numbers of a seed."""
    torch.manual_seed(seed)
    return make(*given, **named)


def beside(tensor, other):
    """``other`` on the device of ``tensor``: data that tests draw on the host, where a model or a loss uses it."""
    return other.to(tensor.device)


class Parts(nn.Module):
    """A model of named parts, whose forward is ``run(self, ...)``. A tensor that is no parameter becomes a buffer."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            is_buffer = torch.is_tensor(part) and not isinstance(part, nn.Parameter)
            (self.register_buffer if is_buffer else self.__setattr__)(name, part)

    def forward(self, *given, **named):
        return self.run(self, *given, **named)


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
        return torch.tanh(self.fc(beside(self.fc.weight, x))) * (1 + self.number / 10).to(x.dtype)


class NormAndDirection(nn.Module):
    """A parametrization: weight normalization, as wav2vec 2.0 has it, two parameters in place of a weight."""

    def forward(self, norm, direction):
        return direction * (norm / direction.norm(dim=1, keepdim=True))

    def right_inverse(self, weight):
        return weight.norm(dim=1, keepdim=True), weight


class Recomputed(nn.Module):
    """``count`` layers from ``make``, in checkpoints unless ``reentrant`` is None. All get the further arguments."""

    def __init__(self, make, count, reentrant):
        super().__init__()
        torch.manual_seed(3)
        self.layers, self.reentrant = nn.ModuleList(make() for _ in range(count)), reentrant

    def forward(self, x, *more):
        for layer in self.layers:
            given = (x, *more)
            x = layer(*given) if self.reentrant is None else checkpoint(layer, *given, use_reentrant=self.reentrant)
        return x


def two_layers(inside=6, hidden=5, outside=3, seed=0):
    """Two linear layers, and a tanh between them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inside, hidden), nn.Tanh(), nn.Linear(hidden, outside))


def waves(rows, width, shift=0.0):
    """Rows of numbers that differ."""
    return torch.sin(torch.arange(float(rows * width)).view(rows, width) * 0.7 + shift)


def samples(count, draw):
    """Training data: what ``draw`` makes with a generator that the number of the sample seeds."""
    return [draw(torch.Generator().manual_seed(number)) for number in range(count)]
