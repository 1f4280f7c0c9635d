"""Tiles of a sequence: values and gradients of the whole, with a short last tile, dropout, tiles without labels."""

import pytest
import torch

from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from deepspeed.sequence.tiled import tile_sizes
from gradients import gradients
from refusals import refused


class Mlp(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, 6).double(), torch.nn.Linear(6, 4).double()
        self.dropout, self.most = torch.nn.Dropout(dropout), 0

    def forward(self, x):
        self.most = max(self.most, x.shape[-2])
        return self.down(self.dropout(torch.tanh(self.up(x))))


def tokens(length, requires_grad=True):
    return torch.randn(2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_(
        requires_grad
    )


def compare(found, expected, leaves):
    """The same value and the same gradients, after different gradients from above."""
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    one, other = ([result, *gradients(result, leaves, weights)] for result in (found, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_tiles():
    assert tile_sizes(7, 3) == [3, 3, 1] and tile_sizes(8, 2) == [4, 4] and tile_sizes(2, 5) == [1, 1]
    assert tile_sizes(5, 4) == [2, 2, 1] and tile_sizes(0, 2) == []
    refused(ValueError, "shards is 0", tile_sizes, 3, 0)


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 20])
def test_mlp(shards, needs):
    mlp, x = Mlp(), tokens(7, needs)
    found = TiledMLP.apply(Mlp.forward, mlp, x, shards, list(mlp.parameters()))
    assert mlp.most == -(-7 // min(shards, 7))
    compare(found, mlp(x), [x, *mlp.parameters()])


def test_mlp_without_batches_and_under_no_grad():
    mlp, x = Mlp(), tokens(5)[0].detach().requires_grad_()
    compare(TiledMLP.apply(Mlp.forward, mlp, x, 2), mlp(x), [x, *mlp.parameters()])
    with torch.no_grad():
        assert not TiledMLP.apply(Mlp.forward, mlp, x, 2, None).requires_grad
    refused(ValueError, r"got shape \(3,\)", TiledMLP.apply, Mlp.forward, mlp, torch.zeros(3), 2, None)


def test_dropout_of_backward_is_that_of_forward():
    mlp, x = Mlp(0.5), tokens(6)
    torch.manual_seed(3)
    found = TiledMLP.apply(Mlp.forward, mlp, x, 3, None)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    compare(found, torch.cat([mlp(tile) for tile in x.split(2, 1)], 1), [x, *mlp.parameters()])
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_are_added_and_only_wanted_ones():
    mlp, x = Mlp(), tokens(6)
    mlp.up.weight.requires_grad_(False)
    out = TiledMLP.apply(Mlp.forward, mlp, x, 2, None).sum()
    out.backward(retain_graph=True)
    once = mlp.down.weight.grad.clone()
    out.backward()
    assert torch.allclose(mlp.down.weight.grad, 2 * once) and mlp.up.weight.grad is None


# ---- losses ----------------------------------------------------------------------------------------------------------
class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(4, 9, bias=False).double()
        self.most = 0


def cross_entropy(self, x, y, mask=None, reduction="mean"):
    self.most = max(self.most, x.shape[1])
    losses = torch.nn.functional.cross_entropy(
        self.head(x).flatten(0, 1), y.flatten(), reduction="none" if mask is not None else reduction
    )
    return losses if mask is None else (losses * mask.flatten()).sum() / mask.sum()


@pytest.mark.parametrize("kind", ["all", "ignored", "empty tiles", "mask"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_loss(shards, reduction, kind):
    model, x = Head(), tokens(7)
    y = torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(4))
    if kind == "ignored":
        y[0, :5] = y[1, 3] = -100
    if kind == "empty tiles":
        y[:, 2:] = -100
    mask = (torch.arange(7) % 3 > 0).expand(2, 7) if kind == "mask" and reduction == "mean" else None

    def fn(self, *args):
        return cross_entropy(self, *args, reduction=reduction)

    found = TiledFusedLogitsLoss.apply(fn, model, x, y, mask, shards, [model.head.weight], reduction)
    assert model.most == -(-7 // shards)
    compare(found, fn(model, x, y, *([mask] if mask is not None else [])), [x, model.head.weight])


@pytest.mark.parametrize("masked", [False, True])
def test_functions_get_contiguous_tiles(masked):
    """``view(-1)`` is what many write: the tiles of a batch of two are strided views of the whole tensors."""
    model, x = Head(), tokens(7)
    y = torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 7, dtype=torch.bool) if masked else None

    def fn(self, x, y, mask=None):
        assert all(one.is_contiguous() for one in (x, y, mask) if one is not None)
        losses = torch.nn.functional.cross_entropy(self.head(x.view(-1, 4)), y.view(-1), reduction="none")
        return losses.mean() if mask is None else (losses * mask.view(-1)).sum() / mask.sum()

    found = TiledFusedLogitsLoss.apply(fn, model, x, y, mask, 3, [model.head.weight], "mean")
    compare(found, fn(model, x, y), [x, model.head.weight])
    tiled = sequence_tiled_compute(
        lambda x, y, scale: fn(model, x, y) * scale, 7, 3, {"x": x, "y": y}, {"scale": 2.0}, "x", [model.head.weight]
    )
    compare(tiled, 2 * fn(model, x, y), [x, model.head.weight])
    flat = TiledMLP.apply(lambda self, x: self.head(x.view(-1, 4)).view(2, -1, 9), model, x, 3, None)
    compare(flat, model.head(x), [x, model.head.weight])


def test_a_loss_without_labels_is_0():
    model, x = Head(), tokens(4)
    loss = TiledFusedLogitsLoss.apply(
        cross_entropy, model, x, torch.full((2, 4), -100), None, 2, [model.head.weight], "mean"
    )
    loss.backward()
    assert loss == 0 and x.grad.abs().max() == 0
    given = (cross_entropy, model, x, x, None, 2, [], "max")
    refused(ValueError, "output_reduction is 'max'", TiledFusedLogitsLoss.apply, *given)


# ---- any function ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("shards", [1, 3])
def test_any_function(shards, reduction):
    mlp, x, scale = Mlp(), tokens(7), torch.rand(2, 7, 1, dtype=torch.float64)

    def fn(x, scale, factor, nothing):
        out = mlp(x) * scale * factor
        return out if reduction is None else getattr(out, reduction)()

    found = sequence_tiled_compute(
        fn, 7, shards, {"x": x, "scale": scale, "nothing": None}, {"factor": 3.0}, "x", output_reduction=reduction
    )
    compare(found, fn(x, scale, 3.0, None), [x, *mlp.parameters()])


@pytest.mark.parametrize(
    "words, length, key, more",
    [
        (r"kwargs_to_shard\['x'\] has shape \(2, 7, 4\).*seqlen, 8", 8, "x", {}),
        ("grad_requiring_tensor_key 'y' is none of kwargs_to_shard: x", 7, "y", {}),
        ("output_reduction is 'max'", 7, "x", {"output_reduction": "max"}),
    ],
)
def test_what_is_wrong_is_named(words, length, key, more):
    refused(ValueError, words, sequence_tiled_compute, lambda x: x, length, 2, {"x": tokens(7)}, {}, key, **more)
