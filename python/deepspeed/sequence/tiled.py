"""Runs modules that treat every token alone tile by tile along the sequence: intermediate results exist for one tile at
a time. Backward runs each tile again: only the input is kept, and parameters get the gradients of the tiles."""

import torch

from deepspeed import _native
from deepspeed._compat import autocast_now
from deepspeed.sequence.loss import IGNORED
from deepspeed.utils.random_state import RandomState

REDUCTIONS = ("mean", "sum")


def tile_sizes(length, shards):
    """Equal tiles, the last one shorter; at most ``length`` of them."""
    if shards < 1:
        raise ValueError(f"shards is {shards}: a sequence is cut into one tile or more")
    size = -(-length // min(shards, length)) if length else 1
    return [min(size, length - start) for start in range(0, length, size)]


def block_sizes(count, block_rows):
    """Sizes of blocks of at most ``block_rows`` of ``count`` rows."""
    if block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}; a block has at least one row")
    return tile_sizes(count, max(1, -(-count // block_rows)))


class _Tiles:
    """``compute(tile of x, index)`` for tiles of ``x`` along ``dim``, each contiguous, so that it may be viewed in any
    shape. ``weights``: of the tiles' results, which are then added up to one; None: they are joined along ``join``."""

    def __init__(self, compute, sizes, dim, join=None, weights=None):
        self.compute, self.sizes, self.dim, self.join, self.weights = compute, sizes, dim, join, weights

    def forward(self, ctx, x):
        kinds = {x.device.type, "cpu"} - {"meta"}
        ctx.tiles, ctx.random, ctx.autocast = self, RandomState([x]), autocast_now(kinds)
        ctx.save_for_backward(x)
        with torch.no_grad():
            tiles = x.split(self.sizes, self.dim)
            parts = [self.compute(tile.contiguous(), index) for index, tile in enumerate(tiles)]
        if self.weights is None:
            ctx.parts = [part.shape[self.join] for part in parts]
            return torch.cat(parts, dim=self.join)
        # The result of a tile without weight is not used: it may be 0 / 0.
        total = sum(part * weight for part, weight in zip(parts, self.weights) if weight)
        return total if torch.is_tensor(total) else torch.zeros_like(parts[0])

    def backward(self, ctx, grad):
        """The gradient of ``x``; parameters have got theirs."""
        (x,) = ctx.saved_tensors
        found = torch.zeros_like(x) if ctx.needs_x else None
        grads = grad.split(ctx.parts, self.join) if self.weights is None else [grad * one for one in self.weights]
        tiles = x.detach().split(self.sizes, self.dim)
        slots = [None] * len(tiles) if found is None else found.split(self.sizes, self.dim)
        with ctx.random.replay([x]), _native._C.OneUse():
            for index, (tile, upper, slot) in enumerate(zip(tiles, grads, slots)):
                tile = tile.detach().contiguous().requires_grad_(ctx.needs_x)
                with torch.enable_grad(), ctx.autocast():
                    out = self.compute(tile, index)
                if out.requires_grad and (self.weights is None or self.weights[index]):
                    torch.autograd.backward(out, upper.to(out.dtype))
                    if tile.grad is not None:
                        slot.copy_(tile.grad)
        return found


class _Tiled(torch.autograd.Function):
    """``_Tiled.apply(tiles, x, link)``. ``link``: anything that needs a gradient, where ``x`` may not."""

    @staticmethod
    def forward(ctx, tiles, x, link):
        ctx.needs_x = ctx.needs_input_grad[1]
        return tiles.forward(ctx, x)

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.tiles.backward(ctx, grad), None


def _apply(tiles, x, params):
    """``params``: whose gradients may be wanted where ``x`` needs none."""
    wanted = not x.requires_grad and any(param.requires_grad for param in params or ())
    return _Tiled.apply(tiles, x, torch.empty(0, device=x.device).requires_grad_() if wanted else None)


def _params_of(module, compute_params):
    return compute_params if compute_params is not None else getattr(module, "parameters", list)()


def _dim(x):
    """The sequence is the last dimension but one."""
    if x.dim() < 2:
        raise ValueError(f"tiles are cut along the sequence of [batch, sequence, features], got shape {tuple(x.shape)}")
    return x.dim() - 2


def _mlp_tiles(fn, module, x, shards):
    dim = _dim(x)
    return _Tiles(lambda tile, index: fn(module, tile), tile_sizes(x.shape[dim], shards), dim, join=dim)


class TiledMLP(torch.autograd.Function):
    """``TiledMLP.apply(fn, self, x, shards, compute_params)``: ``fn(self, x)`` tile by tile along the sequence of ``x``
    (``[batch, sequence, features]``), ``shards`` of them.

    ``fn``: the module's own forward, which treats every token alone. ``compute_params``: the parameters that it uses,
    to know whether gradients are wanted where ``x`` needs none; None: those of ``self``.
    """

    @classmethod
    def apply(cls, fn, self, x, shards, compute_params=None):
        return _apply(_mlp_tiles(fn, self, x, shards), x, _params_of(self, compute_params))

    @staticmethod
    def forward(ctx, fn, self, x, shards, compute_params):
        ctx.needs_x = x.requires_grad
        return _mlp_tiles(fn, self, x, shards).forward(ctx, x)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, ctx.tiles.backward(ctx, grads[0]), None, None


def _loss_tiles(fn, module, x, y, mask, shards, reduction):
    """Means are those of all tokens that count: a tile's weight is how many of its tokens do, by the mask where there
    is one, else by labels that are not -100."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'output_reduction is {reduction!r}: it must be "mean" or "sum"')
    dim = _dim(x)
    sizes = tile_sizes(x.shape[dim], shards)
    ys, masks = y.split(sizes, dim), mask.split(sizes, dim) if mask is not None else [()] * len(sizes)
    weights = [1] * len(sizes)
    if reduction == "mean" and y.is_meta:  # which has no values: as if all counted
        weights = [size / max(sum(sizes), 1) for size in sizes]
    elif reduction == "mean":
        counted = masks if mask is not None else [part != IGNORED for part in ys]
        counts = torch.stack([part.sum() for part in counted]).tolist()
        weights = [count / max(sum(counts), 1) for count in counts]

    def compute(tile, index):
        return fn(module, tile, ys[index].contiguous(), *([masks[index].contiguous()] if mask is not None else []))

    return _Tiles(compute, sizes, dim, weights=weights)


class TiledFusedLogitsLoss(torch.autograd.Function):
    """``TiledFusedLogitsLoss.apply(fn, self, x, y, mask, shards, compute_params, output_reduction)``: the loss
    ``fn(self, x, y)``, a scalar, tile by tile along the sequence, so that memory never holds all logits.

    ``x``: ``[batch, sequence, features]``; ``y``, and ``mask`` where it is not None (then ``fn`` gets it, too):
    ``[batch, sequence, ...]``. ``output_reduction``: "mean" where ``fn`` returns the mean over the tokens that count
    (by the mask, else labels that are not -100): the result is the mean over all of them, however they are spread over
    the tiles; "sum" where it returns a sum. ``compute_params``: as for ``TiledMLP``.
    """

    @classmethod
    def apply(cls, fn, self, x, y, mask, shards, compute_params=None, output_reduction="mean"):
        tiles = _loss_tiles(fn, self, x, y, mask, shards, output_reduction)
        return _apply(tiles, x, _params_of(self, compute_params))

    @staticmethod
    def forward(ctx, fn, self, x, y, mask, shards, compute_params, output_reduction):
        ctx.needs_x = x.requires_grad
        return _loss_tiles(fn, self, x, y, mask, shards, output_reduction).forward(ctx, x)

    @staticmethod
    def backward(ctx, *grads):
        return (None, None, ctx.tiles.backward(ctx, grads[0]), *[None] * 5)


def sequence_tiled_compute(
    fn,
    seqlen,
    shards,
    kwargs_to_shard,
    kwargs_to_pass,
    grad_requiring_tensor_key,
    compute_params=None,
    output_unshard_dimension=1,
    output_reduction="mean",
):
    """``fn(**kwargs_to_shard, **kwargs_to_pass)``, ``shards`` tiles of the sequence after each other.

    ``kwargs_to_shard``: tensors with the sequence of ``seqlen`` in dimension 1 (None is passed on);
    ``grad_requiring_tensor_key`` is the one of them that gets a gradient. ``output_reduction``: "mean" and "sum" of the
    tiles' results, a mean weighted by their lengths; None: results are joined along ``output_unshard_dimension``.
    ``compute_params``: parameters that ``fn`` uses, where the tensor needs no gradient itself.
    """
    if output_reduction is not None and output_reduction not in REDUCTIONS:
        raise ValueError(f'output_reduction is {output_reduction!r}: it must be "mean", "sum" or None')
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ValueError(
            f"grad_requiring_tensor_key {grad_requiring_tensor_key!r} is none of kwargs_to_shard: "
            f"{', '.join(kwargs_to_shard)}"
        )
    for name, value in kwargs_to_shard.items():
        if value is not None and (value.dim() < 2 or value.shape[1] != seqlen):
            raise ValueError(
                f"kwargs_to_shard['{name}'] has shape {tuple(value.shape)}: dimension 1 must be seqlen, {seqlen}; pass "
                "what is not cut in kwargs_to_pass"
            )
    sizes = tile_sizes(seqlen, shards)
    x = kwargs_to_shard[grad_requiring_tensor_key]
    cut = {
        name: value.split(sizes, 1) if value is not None else [None] * len(sizes)
        for name, value in kwargs_to_shard.items()
        if name != grad_requiring_tensor_key
    }

    def compute(tile, index):
        tiles = {name: None if parts[index] is None else parts[index].contiguous() for name, parts in cut.items()}
        return fn(**{grad_requiring_tensor_key: tile}, **tiles, **kwargs_to_pass)

    weights = {None: None, "sum": [1] * len(sizes), "mean": [size / max(seqlen, 1) for size in sizes]}[output_reduction]
    return _apply(_Tiles(compute, sizes, 1, output_unshard_dimension, weights), x, compute_params)
