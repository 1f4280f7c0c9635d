"""What differs between two checkpoints, parameter by parameter, whatever stage and number of ranks wrote each."""

import os

import torch

from deepspeed.checkpoint import listing, names
from deepspeed.checkpoint.saved_state import open_saved

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def open_any(path, tag=None):
    """The checkpoint in ``path``: the folder of a tag, or a directory of which ``tag`` or the latest one is meant."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no directory {path}")
    if tag is None and listing.is_checkpoint(path):
        return open_saved(path)
    tag = names.latest_tag(path) if tag is None else str(tag)
    if tag is None:
        raise FileNotFoundError(f"{path} is no checkpoint and has no file 'latest' that names one")
    return open_saved(os.path.join(path, tag))


def _whole(saved, name, kind):
    pieces = saved.pieces(name, kind)
    if not pieces:
        return None
    end = max(begin + numel for begin, numel, _ in pieces)
    flat = None
    for begin, numel, reader in pieces:
        values = reader.read_range(0, numel)
        if flat is None:
            flat = torch.zeros(end, dtype=values.dtype)
        flat[begin : begin + numel] = values
    return flat


def _compare(what, a, b):
    if (a is None) != (b is None):
        return [f"{what}: only in {'B' if a is None else 'A'}"]
    if a is None or (a.shape == b.shape and torch.equal(a.double(), b.double())):
        return []
    if a.shape != b.shape:
        return [f"{what}: {a.numel()} elements in A, {b.numel()} in B"]
    if not a.is_floating_point():
        return [f"{what}: {int((a != b).sum())} of {a.numel()} elements differ"]
    gap = (a.double() - b.double()).abs()
    count = int(((gap > 0) | gap.isnan()).sum())
    if not count:
        return []
    return [f"{what}: {count} of {a.numel()} elements differ, by at most {gap.nan_to_num(float('inf')).max():.3g}"]


def difference(first, second, limit=50):
    """Lines that say what differs: weights, fp32 masters, optimizer states, steps, counters. One tensor at a time is in
    memory. At most ``limit`` lines and one that says how many more; [] when all is equal."""
    a, b = open_any(first), open_any(second)
    lines = [
        f"{key}: {a.model.get(key)} in A, {b.model.get(key)} in B"
        for key in _COUNTERS
        if a.model.get(key) != b.model.get(key)
    ]
    weights = dict.fromkeys([*a.module(), *a.shapes(), *b.module(), *b.shapes()])
    aliases = {**a.aliases(), **b.aliases()}
    for name in weights:
        if name in aliases:
            continue  # the same tensor under another name
        shapes = [saved.weight_shape(name) for saved in (a, b)]
        if None not in shapes and shapes[0] != shapes[1]:
            lines.append(f"{name}: {tuple(shapes[0])} in A, {tuple(shapes[1])} in B")
            continue
        lines += _compare(name, _whole(a, name, "weight"), _whole(b, name, "weight"))
    kinds = dict.fromkeys(["fp32", *a.state_names(), *b.state_names()])
    for name in a.shapes().keys() & b.shapes().keys():
        for kind in kinds:
            lines += _compare(f"{kind} of {name}", _whole(a, name, kind), _whole(b, name, kind))
        if a.step(name) != b.step(name):
            lines.append(f"step of {name}: {a.step(name)} in A, {b.step(name)} in B")
    if bool(a.shapes()) != bool(b.shapes()):
        lines.append("optimizer states are not compared: only one of the two says whose they are (stage 0 does not)")
    if len(lines) > limit:
        lines[limit:] = [f"... and {len(lines) - limit} more"]
    return lines
