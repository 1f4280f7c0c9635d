"""Layers of which each rank has a slice, for pipelines, and their data."""

import torch
from torch import nn

from deepspeed.module_inject.layers import exchange_of

MICRO_BATCHES, WIDTH, HIDDEN, LENGTH = 4, 32, 64, 40  # a micro-batch is large enough to travel in parts


class Whole(nn.Module):
    def __init__(self, *_):
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) * 0.1)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x):
        return x + torch.tanh(x @ self.up.t()) @ self.down.t() + self.bias


class Sliced(Whole):
    """Columns of ``up`` and rows of ``down`` on each slice rank; all have the bias."""

    grid = None

    def __init__(self):
        super().__init__()
        rank, size = self.grid.get_slice_parallel_rank(), self.grid.get_slice_parallel_world_size()
        self.up = nn.Parameter(self.up.detach().chunk(size, dim=0)[rank].clone())
        self.down = nn.Parameter(self.down.detach().chunk(size, dim=1)[rank].clone())
        for one in (self.up, self.down):
            one.tensor_model_parallel = True

    def forward(self, x):
        group = self.grid.get_slice_parallel_group()
        hidden = torch.tanh(exchange_of(group).copy_in(x) @ self.up.t())
        return x + exchange_of(group).sum_out(hidden @ self.down.t()) + self.bias


def batch(number, copy):
    generator = torch.Generator().manual_seed(100 * number + copy)
    return [tuple(torch.randn(2, LENGTH, WIDTH, generator=generator) for _ in range(2)) for _ in range(MICRO_BATCHES)]
