"""The units in which stage 3 gathers a model: its blocks, and modules that are called."""

import torch

from deepspeed.zero.gathers.module_hooks import repeated_blocks, unit_parameters


class Mlp(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return self.down(self.up(x))


class Block(torch.nn.Module):
    """With experts, which are blocks of one class, too."""

    def __init__(self):
        super().__init__()
        self.norm, self.experts = torch.nn.LayerNorm(8), torch.nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x):
        return x + sum(expert(self.norm(x)) for expert in self.experts)


class Model(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.first, self.blocks = torch.nn.Linear(8, 8), torch.nn.ModuleList(Block() for _ in range(blocks))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 2) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return [head(x) for head in self.heads]


def numel(module):
    return sum(param.numel() for param in module.parameters())


def test_the_outer_ones_of_repeated_modules_are_blocks():
    model = Model(6)
    assert set(repeated_blocks(model, 10**9)) == set(model.blocks), "no experts, and no layers without sub-modules"
    in_sequence = torch.nn.Sequential(*(Mlp() for _ in range(5)), torch.nn.Linear(8, 8))
    assert set(repeated_blocks(in_sequence, 10**9)) == set(in_sequence[:5])
    assert repeated_blocks(torch.nn.Sequential(Mlp(), torch.nn.Linear(8, 8)), 10**9) == [], "it is the only one"


def test_a_block_that_is_too_large_is_cut_into_the_blocks_in_it():
    model = Model(6)
    experts = {expert for block in model.blocks for expert in block.experts}
    assert set(repeated_blocks(model, numel(model.blocks[0]) - 1)) == experts
    few = Model(2)  # each block has more than a third of the model
    assert set(repeated_blocks(few, 10**9)) == {expert for block in few.blocks for expert in block.experts}
    assert repeated_blocks(model, 0) == []


def test_a_module_that_is_never_called_is_not_a_unit():
    """Hooks on a ModuleList never run, so its parameters would be gathered twice, by its parts."""
    model = Model(6)
    threshold = 10**6  # all modules are fine-grained
    assert unit_parameters(model.blocks, threshold, whole=False)[1] is False
    assert unit_parameters(model.blocks[0], threshold, whole=False)[1] is True
