"""Finds the channels of a block of layers that can be cut among ranks, from what the block computes.

A copy of the block runs on a small probe (``block_twin``). Every linear layer of the copy returns random numbers, which
are leaves of autograd, so the gradient of one layer's input tells which outputs of other layers reach it, with what
lies between them: elementwise functions, attention, norms. A layer whose input channels fall into *units* that no
output reaches across (single channels, heads) can be cut along its inputs, and the layers that reach it along their
outputs. Heads of keys and values that several units read are cut with these units. ``rank_play`` finds what else has to
change.
"""

import dataclasses

import torch
from torch import nn

from deepspeed.module_inject.block_twin import NotAnalysed, WholeRun, tensors_in, twin_of
from deepspeed.module_inject.cut_group import Group, Part
from deepspeed.module_inject.cut_results import results_of
from deepspeed.module_inject.rank_play import find_changes

_FEW = 4  # channels of one sub-parameter that an elementwise function reads at most (gate and up, for example)


@dataclasses.dataclass
class Analysis:
    """Groups of a block, and ``{layer: reason}`` of linear layers that stay whole."""

    groups: list
    whole: dict


# ---- which outputs reach which inputs -------------------------------------------------------------------------------
class _Reach:
    """Tells what reaches the inputs of the layers of one run."""

    def __init__(self, twin, run):
        self.run = run
        self.leaves = {("layer", name): made for name, made in run.outputs.items()}
        self.leaves.update({("param", name): one for name, one in twin.named_parameters() if one.device.type == "cpu"})
        self.leaves.update({("given", place): one for place, one in tensors_in(run.given) if one.requires_grad})
        self.keys = list(self.leaves)

    def of(self, target, channels=None):
        """leaf -> the gradient of random sums of ``channels`` (a slice; None: all) of a tensor, if it is not zero."""
        if not target.requires_grad:
            return {}
        weights = torch.zeros_like(target)
        chosen = weights if channels is None else weights[..., channels]
        chosen.copy_(torch.rand_like(chosen) + 0.5)
        found = torch.autograd.grad(target, list(self.leaves.values()), weights, retain_graph=True, allow_unused=True)
        return {key: grad for key, grad in zip(self.keys, found) if grad is not None and bool((grad != 0).any())}

    def channels(self, name, channels):
        """layer -> which of its output channels reach ``channels`` of the input of the layer ``name``."""
        found = self.of(self.run.inputs[name], channels)
        return {key[1]: _touched(grad) for key, grad in found.items() if key[0] == "layer"}


def _touched(grad):
    return (grad != 0).flatten(0, -2).any(0) if grad.dim() > 1 else grad != 0


def _divisors(number):
    return [one for one in range(1, number) if number % one == 0]


def _unit_width(reach, name, width):
    """The channels of a unit of a layer's input: the least number behind which other outputs are read."""

    def read_at(channel):
        return reach.channels(name, slice(channel, channel + 1))

    first = read_at(0)
    mixing = {one for one, seen in first.items() if int(seen.sum()) > max(1, min(_FEW, seen.numel() // width))}
    if not mixing:
        return 1
    for step in _divisors(width)[1:]:
        before, behind = read_at(step - 1), read_at(step)
        news = (behind[one] & ~before[one] if one in before else behind[one] for one in behind if one in mixing)
        totals = (behind[one] for one in behind if one in mixing)
        if any(4 * int(new.sum()) >= int(total.sum()) for new, total in zip(news, totals)):
            return step
    return None


def _parts_of(touched, units):
    """Sub-parameters of a layer from ``touched``: unit -> which of its outputs reach that unit; None without a rule."""
    table = torch.stack(touched)
    first, last = table.int().argmax(0), units - 1 - table.flip(0).int().argmax(0)
    if not bool(table.any(0).all()):  # outputs that reach nothing: a value behind a ReLU on this probe
        return None
    borders = [0, *(i for i in range(1, table.shape[1]) if first[i] < first[i - 1]), table.shape[1]]
    parts = []
    for start, stop in zip(borders, borders[1:]):
        readers = int(last[start] - first[start]) + 1
        size = stop - start
        if units % readers or size * readers % units:
            return None
        wide = size * readers // units
        rule = torch.arange(size) // wide * readers
        if not torch.equal(first[start:stop], rule) or not torch.equal(last[start:stop], rule + readers - 1):
            return None
        parts.append(Part(size, readers))
    return parts


def _elementwise_parts(reach, name, width, columns):
    """Parts of the layers that single channels of a layer's input read; None where the channels are not one for one."""
    found, probes = {}, sorted({0, 1, width // 2, width - 2, width - 1} & set(range(width)))
    seen = {channel: reach.channels(name, slice(channel, channel + 1)) for channel in probes}
    for one, outputs in columns.items():
        if outputs % width:
            return None
        count = outputs // width
        read = {channel: seen[channel][one].nonzero().flatten().tolist() for channel in probes if one in seen[channel]}
        side_by_side = all(set(at) <= {part * width + channel for part in range(count)} for channel, at in read.items())
        alternate = all(set(at) <= {count * channel + part for part in range(count)} for channel, at in read.items())
        if not read or not side_by_side and not alternate:
            return None
        found[one] = [Part(width)] * count if side_by_side else [Part(outputs)]
    # Runs of channels read the same runs of outputs: a permutation between the probes would show.
    step = max(1, width // 16)
    for start in range(0, width, step):
        stop = min(start + step, width)
        for one, seen_here in reach.channels(name, slice(start, stop)).items():
            if one not in found:
                return None
            size = found[one][0].size
            scale = size // width
            inside = torch.zeros(columns[one], dtype=torch.bool)
            for part in range(len(found[one])):
                inside[part * size + start * scale : part * size + stop * scale] = True
            if bool((seen_here & ~inside).any()):
                return None
    return found


def _group_of(reach, rows, columns):
    """The ``Group`` of layers ``rows`` that read the results of ``columns``, layer -> outputs; a text without one."""
    run, name = reach.run, rows[0]
    width = run.inputs[name].shape[-1]
    unit = _unit_width(reach, name, width)
    if unit is None:
        return "it reads sums over all channels"
    units, heads = width // unit, 1
    if unit == 1:
        found = _elementwise_parts(reach, name, width, columns)
    else:
        none = {one: torch.zeros(size, dtype=torch.bool) for one, size in columns.items()}
        seen = [{**none, **reach.channels(name, slice(one * unit, (one + 1) * unit))} for one in range(units)]
        found = {one: _parts_of([at[one] for at in seen], units) for one in columns}
        # Heads may lie in groups, each with the keys and values that they share: then the groups are the units.
        for more in _divisors(units)[1:] if None in found.values() else ():
            joined = [{one: _any(seen[at : at + more], one) for one in columns} for at in range(0, units, more)]
            found = {one: _parts_of([at[one] for at in joined], units // more) for one in columns}
            if None not in found.values():
                units, unit, heads = units // more, unit * more, more
                break
    if found is None or None in found.values():
        return "its inputs do not fall into heads or channels that can be cut"
    group = Group(list(rows), units, found, heads=heads)
    _place_params(reach, group, width, unit)
    return group


def _any(seen, layer):
    return torch.stack([at[layer] for at in seen]).any(0)


def _place_params(reach, group, width, unit):
    """Finds the arguments and the parameters outside of linear layers that reach the group: whole ones with a part of
    the gradient on each rank, and parameters of which each unit has elements of its own."""
    name = group.rows[0]
    keys = list(reach.of(reach.run.inputs[name]))
    group.shared = [place for kind, place in keys if kind == "given"]
    reached = [one for kind, one in keys if kind == "param"]
    if not reached:
        return
    probes = min(group.units, 256)
    per = -(-group.units // probes)
    runs = [(one, min(one + per, group.units)) for one in range(0, group.units, per)]
    seen = [reach.of(reach.run.inputs[name], slice(start * unit, stop * unit)) for start, stop in runs]
    for one in reached:
        shape = reach.leaves["param", one].shape
        hits = [at.get(("param", one)) for at in seen]
        dims = [dim for dim, size in enumerate(shape) if size % group.units == 0 and size > 1]
        for dim in dims:
            wide = shape[dim] // group.units
            if all(
                hit is not None and _only(hit, dim, start * wide, stop * wide) for hit, (start, stop) in zip(hits, runs)
            ):
                group.params[one] = dim, Part(shape[dim])
                break
        else:
            group.partial.append(one)


def _only(grad, dim, start, stop):
    outside = grad != 0
    outside.narrow(dim, start, stop - start).zero_()
    return not bool(outside.any())


# ---- a block --------------------------------------------------------------------------------------------------------
def analyse(block, given, ranks, training=True):
    """The ``Analysis`` of ``block`` for ``ranks`` ranks. ``given``: ``(args, kwargs)`` that it is called with."""
    twin = twin_of(block)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            whole = WholeRun(twin, given)
        except Exception as error:
            raise NotAnalysed(f"it does not run on the probe: {type(error).__name__}: {error}") from error
        reach = _Reach(twin, whole)
        made = _analyse(block, given, ranks, whole, reach, training)
        if training:
            _find_draws(twin, given, made.groups)
        return made


def _analyse(block, given, ranks, whole, reach, training):
    sources = {name: _layers(reach.of(x)) for name, x in whole.inputs.items() if x.is_floating_point()}
    leaves = [one for _, one in tensors_in(whole.made) if one.is_floating_point()]
    shown = set().union(*(_layers(reach.of(one)) for one in leaves)) if leaves else set()
    reasons, groups, taken = {}, [], {}
    for name in sorted(sources, key=lambda one: -whole.inputs[one].shape[-1]):
        if not sources[name] or name in taken:
            continue
        rows, columns = _closure(name, sources)
        returned = columns & shown
        tables = {one for one in returned if isinstance(block.get_submodule(one), nn.Embedding)}
        problem = _conflict(rows, columns, sources, taken, whole.twice)
        if problem is None:
            made = _group_of(reach, rows, {one: out.shape[-1] for one, out in whole.outputs.items() if one in columns})
            problem = made if isinstance(made, str) else None
        if problem is None:
            read = (whole.inputs[one] for one in columns)
            made.reads = len({id(x) for x in read if x.is_floating_point()})
        if problem is None and returned:
            # Other blocks read tables, so they are made whole. Weights of attention stay those of this rank's heads.
            by_unit = results_of(reach, made, tensors_in(whole.made), returned)
            made.results = (results_of(reach, made, tensors_in(whole.made), tables) or []) if tables else []
            if by_unit is None or any(_is_last(whole.made, *one) for one in by_unit if one not in made.results):
                problem = f"the block returns what '{min(returned)}' gives"
        if problem is None:
            problem = _try(block, given, ranks, whole, made, whole.inputs[name].shape[-1], training)
        if problem is None:
            groups.append(made)
            taken.update({one: made for one in (*rows, *columns)})
        else:
            reasons.update({one: problem for one in rows})
    layers = [one for one, x in whole.inputs.items() if x.is_floating_point() and one not in taken]
    return Analysis(
        groups, {one: reasons.get(one, "no layer that can be cut reads only its results") for one in layers}
    )


def _is_last(made, place, dim):
    """Whether a dimension of a result is its last one, which counts features and not heads."""
    return dim == next(one for at, one in tensors_in(made) if at == place).dim() - 1


def _try(block, given, ranks, whole, group, width, training):
    if group.units < ranks:
        return f"it has {group.units} heads or channels for {ranks} ranks"
    try:
        for one, parts in group.columns.items():
            cut = group.cut(parts, ranks)
            if training and cut.copied() and not all(cut.holders(rank) for rank in range(ranks)):
                return f"ranks share some heads of '{one}' and have others alone: only inference can cut it"
        return find_changes(block, given, whole, group, width, ranks)
    except (ValueError, RuntimeError) as error:
        return str(error)


def _find_draws(twin, given, groups):
    """Fills in ``draws`` of groups from a run of the copy in training."""
    try:
        run = WholeRun(twin.train(), given)
    except Exception:  # what training does beside: then nothing is known, and the switch of generators costs little
        run = None
    for group in groups:
        order = [*group.columns, *group.rows] if run is None else list(run.inputs)
        last = [[one for one in order if one in members][-1] for members in (group.columns, group.rows)]
        first_row = next(one for one in order if one in group.rows)
        if run is None or run.draws_between(last[0], first_row) or run.draws_between(last[0], last[1]):
            group.draws = tuple(last)


def _layers(found):
    return {key[1] for key in found if key[0] == "layer"}


def _closure(name, sources):
    """The layers that read the same results as ``name`` does, and the layers with these results."""
    rows, columns = {name}, set(sources[name])
    while True:
        more = {one for one, read in sources.items() if read & columns} - rows
        if not more:
            return sorted(rows, key=lambda one: one != name), columns
        rows |= more
        columns |= set().union(*(sources[one] for one in more))


def _conflict(rows, columns, sources, taken, twice):
    both = set(rows) & columns
    if both:
        return f"'{sorted(both)[0]}' reads and gives results of the same layers"
    if any(one in taken for one in (*rows, *columns)):
        return "its inputs come from a layer that is cut with others"
    if twice & {*rows, *columns}:
        return f"'{sorted(twice & {*rows, *columns})[0]}' runs several times"
    return None
