"""TiledLinear against torch.nn.Linear."""

import copy

import pytest
import torch

import deepspeed
from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from refusals import refused


def pair(in_features, out_features, in_splits, out_splits, bias=True, **more):
    torch.manual_seed(0)
    base = torch.nn.Linear(in_features, out_features, bias=bias)
    tiled = TiledLinear(in_features, out_features, bias, in_splits, out_splits, init_linear=copy.deepcopy(base), **more)
    return base, tiled


def test_public_path():
    assert deepspeed.zero.TiledLinear is TiledLinear and deepspeed.zero.TiledLinearReturnBias is TiledLinearReturnBias


@pytest.mark.parametrize("in_splits, out_splits", [(1, 1), (2, 2), (3, 1), (1, 4), (5, 3), (23, 29)])
def test_tiles_hold_their_part_of_the_weight(in_splits, out_splits):
    base, tiled = pair(23, 29, in_splits, out_splits)
    assert tiled.in_parts[0] == 0 and tiled.in_parts[-1] == 23 and len(tiled.in_parts) == in_splits + 1
    assert tiled.out_parts[-1] == 29 and len(tiled.linears) == out_splits
    for row in range(out_splits):
        for column in range(in_splits):
            tile = tiled.linears[row][column]
            part = slice(tiled.out_parts[row], tiled.out_parts[row + 1])
            assert torch.equal(tile.weight, base.weight[part, tiled.in_parts[column] : tiled.in_parts[column + 1]])
            if column == in_splits - 1:
                assert torch.equal(tile.bias, base.bias[part])
            else:
                assert tile.bias is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
@pytest.mark.parametrize("in_splits, out_splits", [(1, 1), (2, 2), (3, 5), (7, 1), (1, 6)])
def test_outputs_and_gradients_are_those_of_a_linear(in_splits, out_splits, shape, bias):
    base, tiled = pair(23, 29, in_splits, out_splits, bias)
    x = torch.randn(*shape, 23)
    mine, theirs = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    out, expected = tiled(mine), base(theirs)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(expected)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    grid = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(grid), base.weight.grad)
    if bias:
        torch.testing.assert_close(torch.cat([row[-1].bias.grad for row in tiled.linears]), base.bias.grad)


def test_inputs_and_outputs_in_parts():
    base, tiled = pair(10, 7, 3, 2, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(4, 10)
    parts = tiled(list(torch.split(x, [4, 3, 3], dim=-1)))
    assert [part.shape[-1] for part in parts] == [4, 3]
    torch.testing.assert_close(torch.cat(parts, dim=-1), base(x))
    refused(RuntimeError, "list of 3 parts", tiled, x)
    refused(RuntimeError, r"parts of \[5, 5\] features", tiled, list(torch.split(x, [5, 5], dim=-1)))


class Megatron(torch.nn.Linear):
    """Returns its bias instead of adding it."""

    def __init__(self, *args, scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight) * self.scale, self.bias


@pytest.mark.parametrize("in_splits, out_splits", [(1, 1), (2, 2), (3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_returned_bias(in_splits, out_splits, bias):
    base = Megatron(11, 13, bias=bias, scale=2.0)
    tiled = TiledLinearReturnBias(11, 13, bias, in_splits, out_splits, linear_cls=Megatron, init_linear=base, scale=2.0)
    x = torch.randn(3, 11)
    (out, got), (expected, wanted) = tiled(x), base(x)
    torch.testing.assert_close(out, expected)
    assert (got is None) == (not bias)
    if bias:
        assert torch.equal(got, wanted)
    tiled.combine_out_splits = False
    outs, biases = tiled(x)
    torch.testing.assert_close(torch.cat(outs, dim=-1), expected)
    assert len(biases) == out_splits


def test_what_does_not_fit_is_refused():
    for splits in ({"in_splits": 0}, {"in_splits": 5}, {"out_splits": 0}, {"out_splits": 7}):
        refused(RuntimeError, "_splits must be between 1 and", TiledLinear, 4, 6, **splits)
    tiled = TiledLinear(4, 6, in_splits=2)
    refused(RuntimeError, "shape", tiled.copy_params_from, torch.nn.Linear(6, 4))
    refused(RuntimeError, "bias", tiled.copy_params_from, torch.nn.Linear(4, 6, bias=False))
