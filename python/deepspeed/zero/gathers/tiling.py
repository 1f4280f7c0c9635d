"""A linear layer as a grid of smaller ones, so that stage 3 gathers one tile at a time instead of the whole weight."""

import functools

import torch

from deepspeed.utils.partition import partition_uniform


class TiledLinear(torch.nn.Module):
    """Computes what ``torch.nn.Linear`` computes, tile by tile: y[i] = sum over j of W[i, j] x[j] (+ b[i]).

    in_features, out_features, bias: as in ``torch.nn.Linear``.
    in_splits, out_splits:  tiles along each dimension; sizes need not divide.
    input_is_already_split: forward takes a list of ``in_splits`` tensors, of the sizes ``in_parts`` says.
    combine_out_splits:     forward returns one tensor; False: the list of ``out_splits`` tensors.
    linear_cls:             class of the tiles, made as ``linear_cls(in, out, bias=..., **kwargs)``.
    init_linear:            a layer whose parameters are copied; it is not needed any more afterwards.

    ``linears[i][j]`` is the tile of outputs ``out_parts[i]`` to ``out_parts[i + 1]`` and inputs likewise;
    the last one of each row has the bias. RuntimeError for splits that are not between 1 and the number of features.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        in_splits=1,
        out_splits=1,
        input_is_already_split=False,
        combine_out_splits=True,
        linear_cls=torch.nn.Linear,
        init_linear=None,
        **kwargs,
    ):
        super().__init__()
        for what, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{what}_splits must be between 1 and {what}_features = {features}, got {splits}.")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = list(partition_uniform(num_items=in_features, num_parts=in_splits))
        self.out_parts = list(partition_uniform(num_items=out_features, num_parts=out_splits))
        self.linears = torch.nn.ModuleList()
        for out_size in _sizes(self.out_parts):
            row = torch.nn.ModuleList()
            for number, in_size in enumerate(_sizes(self.in_parts)):
                # One bias per row: were it on every tile, it would be added in_splits times.
                row.append(linear_cls(in_size, out_size, bias=bias and number == in_splits - 1, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_):
        """``input_``: (..., in_features), or the list of its parts. Returns (..., out_features), or the list."""
        inputs = self._split(input_)
        outputs = [functools.reduce(self._add, (tile(part) for tile, part in zip(row, inputs))) for row in self.linears]
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _split(self, input_):
        if self.input_is_already_split and not torch.is_tensor(input_):
            parts = list(input_)
        elif self.input_is_already_split and self.in_splits > 1:
            raise RuntimeError(
                f"this TiledLinear was made with input_is_already_split=True: pass the list of {self.in_splits} parts."
            )
        else:
            return list(torch.split(input_, list(_sizes(self.in_parts)), dim=-1))
        got = [part.shape[-1] for part in parts]
        if got != list(_sizes(self.in_parts)):
            raise RuntimeError(
                f"the input comes in parts of {got} features, but the tiles take {_sizes(self.in_parts)}."
            )
        return parts

    def _add(self, total, result):
        return total + result

    def _combine(self, outputs):
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other):
        """Copies weight and bias of ``other``, a layer of the same sizes. Parameters that are sharded are gathered by
        the caller (``deepspeed.zero.GatheredParameters`` over both, with ``modifier_rank=0``)."""
        wanted = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != wanted:
            raise RuntimeError(
                f"cannot copy a weight of shape {tuple(other.weight.shape)} into a layer of shape {wanted}. If it is "
                f"sharded, gather it first: with deepspeed.zero.GatheredParameters(...)."
            )
        if (getattr(other, "bias", None) is not None) != bool(self.use_bias):
            raise RuntimeError("one of the two layers has a bias and the other one has none.")
        for row, (top, bottom) in zip(self.linears, _ranges(self.out_parts)):
            for tile, (left, right) in zip(row, _ranges(self.in_parts)):
                tile.weight.copy_(other.weight[top:bottom, left:right])
            if self.use_bias:
                row[-1].bias.copy_(other.bias[top:bottom])

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` over tiles that return ``(output, bias)``, as Megatron's do to fuse the bias with what follows.
    Returns the same pair; the bias is None where no tile has one."""

    def _add(self, total, result):
        output = total[0] + result[0]
        if total[1] is None or result[1] is None:
            return output, result[1] if total[1] is None else total[1]
        return output, total[1] + result[1]

    def _combine(self, outputs):
        biases = [bias for _, bias in outputs]
        bias = None if any(one is None for one in biases) else torch.cat(biases, dim=-1)
        return torch.cat([output for output, _ in outputs], dim=-1), bias

    def forward(self, input_):
        """As the base class; without ``combine_out_splits`` a list of outputs and a list of biases."""
        result = super().forward(input_)
        if self.combine_out_splits:
            return result
        return [output for output, _ in result], [bias for _, bias in result]


def _sizes(parts):
    return [end - begin for begin, end in zip(parts, parts[1:])]


def _ranges(parts):
    return list(zip(parts, parts[1:]))
