"""Tensor-parallel slices of a parameter put together, and cut again for another number of ranks."""

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.universal_info import even_widths, sub_sizes


def merge_slices(name, slices, rules):
    """``(whole tensor, hints)`` of the slices of all tensor-parallel ranks, in rank order.

    The hints are what cutting the whole again needs; they go into its file beside ``param``. Raises ValueError when
    replicas differ or shapes do not fit.
    """
    # Every rule is asked, so that the patterns of a single rank count as used.
    replicated, averaged = rules.is_replicated(name), rules.is_averaged(name)
    halves, sub = rules.has_two_halves(name), rules.sub_param(name)
    row, vocabulary = rules.is_row_parallel(name), rules.is_vocabulary(name)
    if replicated:
        for rank, other in enumerate(slices[1:], 1):
            if not torch.equal(slices[0], other):
                raise ValueError(
                    f"parameter '{name}' matches {keys.TP_REPLICATED_PARAMETER_PATTERNS}, but tensor-parallel ranks 0 "
                    f"and {rank} have different values: correct the patterns of {keys.UNIVERSAL_CHECKPOINT_INFO}"
                )
        return slices[0], {}
    if averaged:
        return (slices[0] if len(slices) == 1 else torch.stack(slices).mean(dim=0)), {}
    if halves:
        parts = zip(*(torch.chunk(piece, 2, dim=0) for piece in slices), strict=True)
        return torch.cat([torch.cat(part) for part in parts]), {keys.CAT_DIM: 0, keys.PARAM_N_SUB_PARAMS: 2}
    if sub is not None:
        whole = _merge_sub_params(name, slices, sub, rules.shard_widths(name))
        return whole, {keys.CAT_DIM: sub.partition_dim, keys.SUB_PARAM_SHAPE: sub}
    dim = 1 if row and slices[0].dim() > 1 else 0
    whole = slices[0] if len(slices) == 1 or not slices[0].dim() else torch.cat(slices, dim=dim)
    hints = {keys.CAT_DIM: dim}
    if vocabulary:
        size = rules.info.get(keys.ORIGINAL_VOCAB_SIZE)
        if size is not None:
            whole = whole[:size]
        hints[keys.VOCAB_TENSOR] = True
    return whole, hints


def _merge_sub_params(name, slices, sub, widths):
    sizes, whole = sub_sizes(sub.shape, sub.partition_dim)
    dim, count = sub.partition_dim, len(slices)
    widths = widths or [even_widths(size, count, f"parameter '{name}'") for size in sizes]
    views = []
    for rank, piece in enumerate(slices):
        shape = list(whole)
        shape[dim] = sum(width[rank] for width in widths)
        if -1 in shape:
            shape[shape.index(-1)] = -(piece.numel() // torch.Size(shape).numel())
        if torch.Size(shape).numel() != piece.numel():
            raise ValueError(
                f"parameter '{name}' of tensor-parallel rank {rank} has {piece.numel()} elements, the entry of "
                f"{keys.PARAMETER_WITH_SUB_PARAMS} that it matches gives {tuple(shape)}"
            )
        views.append(piece.reshape(shape).split([width[rank] for width in widths], dim=dim))
    joined = torch.cat([torch.cat(part, dim=dim) for part in zip(*views, strict=True)], dim=dim)
    # The module may keep it in fewer dimensions than the table has.
    fits = slices[0].dim() == len(whole)
    return joined if fits else joined.reshape(-1, *slices[0].shape[1:])


def narrow_sub_params(full, dim, sizes, widths, rank, count, what):
    """A rank's slices of all sub-parameters, side by side. ``widths`` of another number of ranks do not count."""
    if widths is None or any(len(width) != count for width in widths):
        widths = [even_widths(size, count, what) for size in sizes]
    parts = [
        part.narrow(dim, sum(width[:rank]), width[rank])
        for part, width in zip(full.split(list(sizes), dim=dim), widths, strict=True)
    ]
    return torch.cat(parts, dim=dim)


def local_slice(name, file, full, shape, rank, count):
    """What tensor-parallel rank ``rank`` of ``count`` has of a whole parameter; ``shape``: what its module has.

    ``file``: the content of the parameter's file, for the hints in it. Words beyond the vocabulary are zeros. Raises
    ValueError where the slice does not have that shape.
    """
    shape = torch.Size(shape)
    if full.shape == shape:
        return full
    if file.get(keys.VOCAB_TENSOR):
        full = _pad_words(name, full, shape[0] * (count if full.dim() == 1 or full.shape[1:] == shape[1:] else 1))
    if full.numel() == shape.numel():
        return full.reshape(shape)
    sub = file.get(keys.SUB_PARAM_SHAPE)
    if sub is not None:
        sizes, whole = sub_sizes(sub.shape, sub.partition_dim)
        piece = narrow_sub_params(
            full.reshape(whole), sub.partition_dim, sizes, None, rank, count, f"parameter '{name}'"
        )
    elif file.get(keys.PARAM_N_SUB_PARAMS, 1) > 1:
        parts = torch.chunk(full, file[keys.PARAM_N_SUB_PARAMS], dim=file.get(keys.CAT_DIM, 0))
        cut = [_cut(name, part, file.get(keys.CAT_DIM, 0), rank, count) for part in parts]
        piece = torch.cat(cut, dim=file.get(keys.CAT_DIM, 0))
    elif keys.CAT_DIM in file:
        piece = _cut(name, full, file[keys.CAT_DIM], rank, count)
    else:
        piece = full  # replicas and averages are whole on every rank
    if piece.numel() != shape.numel():
        raise ValueError(
            f"parameter '{name}' has shape {tuple(full.shape)} in the universal checkpoint, which gives "
            f"{tuple(piece.shape)} to one of {count} tensor-parallel rank(s); this model has {tuple(shape)}: it is "
            "another model"
        )
    return piece.reshape(shape)


def _cut(name, full, dim, rank, count):
    width = even_widths(full.shape[dim], count, f"parameter '{name}'")[0]
    return full.narrow(dim, rank * width, width)


def _pad_words(name, full, rows):
    if full.shape[0] == rows:
        return full
    if full.shape[0] > rows:
        raise ValueError(
            f"parameter '{name}' has {full.shape[0]} words in the universal checkpoint, this model has room for {rows}"
        )
    padding = torch.zeros(rows - full.shape[0], *full.shape[1:], dtype=full.dtype)
    return torch.cat([full, padding])
