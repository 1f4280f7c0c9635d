"""Results on meta of operators that torch cannot run there. A run on the CPU with few rows tells their shapes."""

import itertools

import torch

from deepspeed.zero.nested import replace, tensors_in

_ROWS = (2, 4, 6)  # of the small runs, in place of the rows of the first argument; two give a line, the third checks it
_MOST = 1 << 28  # elements of the arguments of a run with all rows


def run_small(func, args, kwargs):
    """Returns the result of ``func(*args, **kwargs)``, with tensors on meta, in a tuple; None where no run succeeds.

    Floating numbers are random, flags are true, so that a mask chooses all, and whole numbers are 1, or 0 where that is
    no index. Sizes of results are linear in the number of rows, or the operator runs with all of them.
    """
    if any(one.alias_info is not None for one in func._schema.returns):
        return (_written(func._schema, args, kwargs),)
    tensors = tensors_in((args, kwargs))
    rows = next((one.size(0) for one in tensors if one.dim()), 0)
    ways = [(_ROWS, True), (_ROWS, False)] if rows > _ROWS[-1] else []
    if sum(one.numel() for one in tensors) <= _MOST:
        ways.append(((rows,), False))
    for (sizes, numbers), whole, wide in itertools.product(ways, (1, 0), (False, True)):
        try:
            with torch.random.fork_rng(devices=()):  # a plan in the job's process leaves its random numbers alone
                given = [_on_cpu((args, kwargs), rows, size, numbers, whole, wide) for size in sizes]
                made = [func(*args, **kwargs) for args, kwargs in given]
            return (_scaled(made, sizes, rows, tensors if wide else ()),)
        except Exception:  # it may run with other values
            continue
    return None


def _written(schema, args, kwargs):
    """The arguments that an operator writes and returns."""
    given = {one.name: value for one, value in zip(schema.arguments, args)} | kwargs
    names = {name: one.name for one in schema.arguments if one.alias_info for name in one.alias_info.before_set}
    found = tuple(given[names[next(iter(one.alias_info.before_set))]] for one in schema.returns)
    return found if len(found) != 1 else found[0]


def _on_cpu(given, rows, size, numbers, whole, wide):
    """The arguments with ``size`` in place of ``rows``; with ``numbers`` also in place of whole numbers."""

    def made(one):
        if not isinstance(one, torch.Tensor):
            return torch.device("cpu") if isinstance(one, torch.device) else size
        shape = [size if length == rows else length for length in one.shape]
        if not one.is_meta:
            return one[tuple(map(slice, shape))]
        dtype = torch.float32 if wide and one.is_floating_point() else one.dtype
        if dtype.is_floating_point or dtype.is_complex:
            return torch.rand(shape, device="cpu").to(dtype)
        return torch.full(shape, whole if dtype is not torch.bool else True, dtype=dtype, device="cpu")

    def differs(one):
        number = numbers and type(one) is int and one == rows
        return number or isinstance(one, (torch.Tensor, torch.device))

    return replace(given, differs, made)


def _scaled(made, sizes, rows, narrow):
    """The last result, on meta and with the sizes that it has with ``rows``. ValueError where they are not linear.
    ``narrow``: arguments that were made wider."""
    kinds = {one.dtype for one in narrow if one.is_floating_point()}
    shapes = iter(list(zip(*([tuple(one.shape) for one in tensors_in(each)] for each in made))))

    def on_meta(one):
        dtype = next(iter(kinds)) if len(kinds) == 1 and one.dtype is torch.float32 else one.dtype
        lengths = [_length(each, sizes, rows) for each in zip(*next(shapes))]
        return torch.empty(lengths, dtype=dtype, device="meta")

    return replace(made[-1], torch.is_tensor, on_meta)


def _length(found, sizes, rows):
    if len(sizes) == 1:
        return found[0]
    slope = (found[1] - found[0]) / (sizes[1] - sizes[0])
    if found[2] - found[1] != slope * (sizes[2] - sizes[1]):
        raise ValueError("not linear")
    return round(found[0] + slope * (rows - sizes[0]))
