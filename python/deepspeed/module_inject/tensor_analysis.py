"""Which channels of a block of layers can be cut among ranks. The answer follows from what the block computes.

A copy of the block runs on a small probe. Every linear layer of the copy returns random numbers, which are leaves of
autograd, so the gradient of one layer's input tells which outputs of other layers reach it, with what lies between
them: elementwise functions, attention, norms. A layer whose input channels fall into *units* that no output reaches
across (single channels, heads) can be cut along its inputs, and the layers that reach it along their outputs. Heads of
keys and values that several units read are cut with these units.

A second run plays one rank: the layers return this rank's channels, and the inputs that reach the next layer have to be
this rank's channels of the first run. It finds which integers of the modules (the number of heads, for example) and
which arguments of the block have to change with the cut.
"""

import copy
import dataclasses
import itertools
import re

import torch
from torch import nn

from deepspeed._native import _C
from deepspeed.module_inject.cut_results import results_of

# Names that models have for what changes with a cut. They are tried first; the second run decides.
_KNOWN_COUNTS = re.compile(r"(heads|_kv|_dim|_size|d_model|groups|_partition|n_embd)$|^(num|n)_")
_FEW = 4  # channels of one sub-parameter that an elementwise function reads at most (gate and up, for example)
_TRIES = 4096  # sets of integers and arguments that the second run tries at most


class NotAnalysed(Exception):
    """A block does not run on the probe."""


@dataclasses.dataclass
class Part:
    """A sub-parameter along the dimension that is cut: ``size`` elements; ``readers`` units in a row read the same
    elements of it."""

    size: int
    readers: int = 1


def grained_runs(count, ranks, grain):
    """``[start, stop)`` of each rank's elements of ``count``: multiples of ``grain`` where that divides the count and
    every rank gets some."""
    grain = grain if count % grain == 0 and count >= grain * ranks else 1
    return [(start * grain, stop * grain) for start, stop in _C.unit_runs(count // grain, ranks)]


@dataclasses.dataclass
class Group:
    """Layers that are cut together, by their names in the block. ``units`` units of the inputs of ``rows``; ``columns``:
    layer -> parts of its outputs; ``params``: parameter outside of linear layers -> ``(dimension, part)``; ``partial``:
    parameters that every rank has whole, of which each sees a part of the gradient; ``counts``: integers of modules,
    ``(module, attribute, units of one, elements of one)``; ``arguments``: places of the block's arguments and results
    that are cut, ``(place, dimension)``; ``shared``: places of arguments that only reach the layers through what lies
    between them, so that each rank sees a part of their gradient; ``results``: ``(place, dimension)`` of results of the
    block that have something for each unit (``cut_results``); ``grain``: of ``grained_runs``."""

    rows: list
    units: int
    columns: dict
    params: dict = dataclasses.field(default_factory=dict)
    partial: list = dataclasses.field(default_factory=list)
    counts: list = dataclasses.field(default_factory=list)
    arguments: list = dataclasses.field(default_factory=list)
    shared: list = dataclasses.field(default_factory=list)
    results: list = dataclasses.field(default_factory=list)
    grain: int = 1

    @property
    def readers(self):
        """Units that share heads of keys and values; 1 where none do."""
        parts = [part for parts in self.columns.values() for part in parts]
        return max([part.readers for part in parts] + [part.readers for _, part in self.params.values()])

    def runs(self, ranks):
        """``[start, stop)`` of each rank's units."""
        if self.readers == 1:
            return grained_runs(self.units, ranks, self.grain)
        return [tuple(run) for run in _C.grouped_runs(self.units, self.units // self.readers, ranks)[0]]

    def cut(self, parts, ranks):
        """The native ``TensorCut`` of sub-parameters for this many ranks."""
        runs = self.runs(ranks)
        return _C.TensorCut([part.size for part in parts], [[self.run(part, *run) for run in runs] for part in parts])

    def run(self, part, start, stop):
        """The elements of a sub-parameter that units from ``start`` up to ``stop`` read."""
        width = part.size * part.readers // self.units
        return (start // part.readers * width, -(-stop // part.readers) * width) if stop > start else (0, 0)


@dataclasses.dataclass
class Analysis:
    """Groups of a block, and ``{layer: reason}`` of linear layers that stay whole."""

    groups: list
    whole: dict


# ---- the copy of a block --------------------------------------------------------------------------------------------
def is_linear(module):
    """Whether a module multiplies by a matrix and adds a bias: ``torch.nn.Linear`` or the ``Conv1D`` of GPT-2."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def features(module):
    """``(inputs, outputs)`` of a linear layer, or None and the outputs of an embedding."""
    if isinstance(module, nn.Embedding):
        return None, module.embedding_dim
    rows, columns = getattr(module.weight, "ds_shape", module.weight.shape)
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


class _Stand(nn.Module):
    """Stands in for a linear layer or an embedding: the width of its results, and no arithmetic."""

    def __init__(self, module):
        super().__init__()
        inside, outside = features(module)
        self.in_features, self.out_features = self.num_embeddings, self.embedding_dim = inside, outside
        self.nf = outside
        self.weight = torch.empty(outside, inside or 1, device="meta")  # for code that asks for its dtype
        self.bias = None
        self.run = None

    def forward(self, x):
        return self.run(self, x)


def twin_of(block):
    """A copy of a block on the CPU in fp32 with random parameters, whose linear layers and embeddings are stand-ins."""
    stands = {id(one): _Stand(one) for one in block.modules() if is_linear(one) or isinstance(one, nn.Embedding)}
    held = {id(param): _random(param) for param in block.parameters()}
    hooks = [(one, one._forward_pre_hooks, one._forward_hooks) for one in block.modules()]
    for one, _, _ in hooks:
        one._forward_pre_hooks, one._forward_hooks = type(one._forward_pre_hooks)(), type(one._forward_hooks)()
    try:
        twin = copy.deepcopy(block, {**stands, **held})
    except Exception as error:
        raise NotAnalysed(f"it cannot be copied: {error}") from error
    finally:
        for one, before, after in hooks:
            one._forward_pre_hooks, one._forward_hooks = before, after
    for buffer in twin.buffers():
        buffer.data = buffer.data.cpu().float() if buffer.is_floating_point() else buffer.data.cpu()
    return twin.eval()


def _random(param):
    shape = getattr(param, "ds_shape", param.shape)
    stands = len(shape) == 2 and max(shape) > 512  # of a linear layer: nobody reads it
    values = torch.empty(shape, device="meta") if stands else torch.rand(shape) + 0.5
    return nn.Parameter(values, requires_grad=param.requires_grad or param.is_floating_point())


def tensors_in(value, place=()):
    """``(place, tensor)`` of the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from tensors_in(one, (*place, index))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_in(one, (*place, key))


def with_tensors(value, change, place=()):
    """``value`` with ``change(place, tensor)`` in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return change(place, value)
    if isinstance(value, dict) and type(value) is not dict:
        return value
    if isinstance(value, dict):
        return {key: with_tensors(one, change, (*place, key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        made = [with_tensors(one, change, (*place, index)) for index, one in enumerate(value)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


class _Run:
    """One run of a twin. ``inputs`` and ``outputs`` by layer, ``given``: the block's arguments, ``made``: its result."""

    def __init__(self, twin, given, respond):
        self.inputs, self.outputs, self.twice = {}, {}, set()
        self.names = {id(one): name for name, one in twin.named_modules() if isinstance(one, _Stand)}
        self.respond = respond
        for one in twin.modules():
            if isinstance(one, _Stand):
                one.run = self._layer
        self.given = with_tensors(given, _leaf)
        with torch.enable_grad():
            self.made = twin(*self.given[0], **self.given[1])

    def _layer(self, stand, x):
        name = self.names[id(stand)]
        if name in self.inputs:
            self.twice.add(name)
        self.inputs[name] = x
        self.outputs[name] = self.respond(name, stand, x)
        return self.outputs[name]


def _leaf(place, tensor):
    found = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
    return found.clone().requires_grad_(found.is_floating_point())


def _random_result(name, stand, x):
    shape = x.shape if stand.in_features is None else x.shape[:-1]
    return torch.randn(*shape, stand.out_features).requires_grad_()


# ---- which outputs reach which inputs -------------------------------------------------------------------------------
class _Reach:
    """What reaches the inputs of the layers of one run."""

    def __init__(self, twin, run):
        self.run = run
        self.leaves = {("layer", name): made for name, made in run.outputs.items()}
        self.leaves.update({("param", name): one for name, one in twin.named_parameters() if one.device.type == "cpu"})
        self.leaves.update({("given", place): one for place, one in tensors_in(run.given) if one.requires_grad})
        self.keys = list(self.leaves)

    def of(self, target, channels=None):
        """leaf -> the gradient of random sums of ``channels`` (a slice; None: all) of a tensor, where it is not zero."""
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
    if unit == 1:
        found = _elementwise_parts(reach, name, width, columns)
        units = width
    else:
        units = width // unit
        seen = [reach.channels(name, slice(one * unit, (one + 1) * unit)) for one in range(units)]
        none = {one: torch.zeros(size, dtype=torch.bool) for one, size in columns.items()}
        found = {one: _parts_of([at.get(one, none[one]) for at in seen], units) for one in columns}
    if found is None or None in found.values():
        return "its inputs do not fall into heads or channels that can be cut"
    group = Group(list(rows), units, found)
    _place_params(reach, group, width, unit)
    return group


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
            if all(hit is not None and _only(hit, dim, start * wide, stop * wide) for hit, (start, stop) in zip(hits, runs)):
                group.params[one] = dim, Part(shape[dim])
                break
        else:
            group.partial.append(one)


def _only(grad, dim, start, stop):
    outside = grad != 0
    outside.narrow(dim, start, stop - start).zero_()
    return not bool(outside.any())


# ---- one rank's run -------------------------------------------------------------------------------------------------
def _own(value, dim, cut, rank):
    return torch.cat([value.narrow(dim, start, length) for start, length in cut.runs(rank)], dim)


class _Played:
    """The run of one rank against the whole run: ``problem`` is None where they agree."""

    def __init__(self, block, given, whole, groups, ranks, rank):
        twin = twin_of(block)
        with torch.no_grad():
            for (_, to), (_, value) in zip(twin.named_parameters(), whole.params.items()):
                if to.device.type == "cpu":
                    to.copy_(value)
        self.problem, self.whole = None, whole
        self.columns = {one: group.cut(parts, ranks) for group in groups for one, parts in group.columns.items()}
        self.rows = {one: group.cut([Part(whole.inputs[one].shape[-1])], ranks) for group in groups for one in group.rows}
        self.rank = rank
        for group in groups:
            self._change(twin, group, ranks)
        arguments = {place: (dim, group, ranks) for group in groups for place, dim in group.arguments}
        given = with_tensors(given, lambda place, one: own_units(one, *arguments[place], rank) if place in arguments else one)
        try:
            _Run(twin, given, self._respond)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _change(self, twin, group, ranks):
        change_counts(twin, group, ranks, self.rank)
        for name, (dim, part) in group.params.items():
            owner, _, last = name.rpartition(".")
            param = twin.get_submodule(owner)._parameters[last]
            param.data = _own(param.data, dim, group.cut([part], ranks), self.rank)

    def _respond(self, name, stand, x):
        made = self.whole.outputs[name].detach()
        if name in self.rows:
            wanted = _own(self.whole.inputs[name].detach(), -1, self.rows[name], self.rank)
            if x.shape != wanted.shape or not torch.allclose(x, wanted, rtol=1e-4, atol=1e-5):
                self.problem = self.problem or f"'{name}' reads other values than in one process"
        elif stand.in_features is not None:
            wanted = self.whole.inputs[name].detach()
            if x.shape != wanted.shape or not torch.allclose(x, wanted, rtol=1e-4, atol=1e-5):
                self.problem = self.problem or f"'{name}' reads other values than in one process"
        if self.problem:
            raise NotAnalysed(self.problem)
        return _own(made, -1, self.columns[name], self.rank) if name in self.columns else made


def own_units(tensor, dim, group, ranks, rank):
    """A rank's units of an argument; ``dim`` has one index for each unit, or for each sample and unit."""
    start, stop = group.runs(ranks)[rank]
    if tensor.shape[dim] % group.units:
        return tensor
    parts = tensor.unflatten(dim, (-1, group.units)).narrow(dim + 1, start, stop - start)
    return parts.flatten(dim, dim + 1)


def change_counts(block, group, ranks, rank):
    """Gives the modules of a block the integers that they have on one rank."""
    for module, attribute, kind, each in group.counts:
        setattr(block.get_submodule(module), attribute, local_count(group, ranks, rank, kind, each))


def local_count(group, ranks, rank, kind, each):
    """A rank's value of an integer that counts ``kind`` ("units", "shared", units that others read, or "readers" of one
    of these), ``each`` elements of them."""
    start, stop = group.runs(ranks)[rank]
    shared = -(-stop // group.readers) - start // group.readers
    return each * {"units": stop - start, "shared": shared, "readers": -(-(stop - start) // max(shared, 1))}[kind]


def _counts_of(block, group, width):
    """Integers of modules that may count units: ``(module, attribute, kind, elements of one)``, known names first."""
    members = [*group.rows, *group.columns]
    common = members[0].split(".")
    for one in members[1:]:
        parts = one.split(".")
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(common, parts)))
        common = common[:same]
    top = ".".join(common[:-1] if len(members) == 1 else common)
    unit, shared, found = width // group.units, group.units // group.readers, []
    kinds = [("units", 1, group.units), ("units", unit, group.units)]
    if group.readers > 1:
        kinds += [("shared", 1, shared), ("shared", unit, shared), ("readers", 1, group.readers)]
    values = {}
    for kind, each, count in kinds:
        values.setdefault(each * count, (kind, each))
    for name, module in block.get_submodule(top).named_modules(prefix=top):
        if not is_linear(module) and not isinstance(module, nn.Embedding):
            for attribute, value in vars(module).items():
                if type(value) is int and value in values and value > 1:
                    found.append((name, attribute, *values[value]))
    return sorted(found, key=lambda one: not _KNOWN_COUNTS.search(one[1]))


def _find_changes(block, given, whole, group, width, ranks):
    """Fills in ``counts`` and ``arguments`` of a group. Returns None, or what is wrong with each try."""
    counts = _counts_of(block, group, width)
    places = [
        (place, dim)
        for place, one in tensors_in(given)
        for dim, size in enumerate(one.shape[:-1])
        if size and size % group.units == 0 and group.units > 1 and size // group.units in (1, whole.samples)
    ]
    known = [one for one in counts if _KNOWN_COUNTS.search(one[1])]
    tries = [(chosen, at) for at in ([], places) for chosen in ([], known, counts)]
    sets = (
        (list(chosen), list(at))
        for size in range(1, len(counts) + 1)
        for chosen in itertools.combinations(counts, size)
        for at in ([], places)
    )
    def problem_with(chosen, at):
        group.counts, group.arguments = chosen, at
        played = (_Played(block, given, whole, [group], ranks, rank).problem for rank in {0, ranks - 1})
        return next((one for one in played if one), None)

    problem = None
    for chosen, at in itertools.islice(itertools.chain(tries, sets), _TRIES):
        problem = problem_with(chosen, at)
        if problem is None:
            break
    else:
        return _why(group) or problem
    for one in chosen:  # those without which it goes, too, stay as they are
        fewer = [other for other in group.counts if other is not one]
        before = group.counts
        if problem_with(fewer, at) is not None:
            group.counts = before
    return None


def _why(group):
    """Names a layer all of whose outputs each unit reads."""
    parts = ((one, part) for one, parts in group.columns.items() for part in parts)
    mixed = next((one for one, part in parts if part.readers == group.units), None)
    return mixed and f"all of its channels read all of '{mixed}' (behind a norm over all heads, for example)"


# ---- a block --------------------------------------------------------------------------------------------------------
class _Whole(_Run):
    """The first run, with the parameters that it had."""

    def __init__(self, twin, given):
        super().__init__(twin, given, _random_result)
        self.params = {name: one.detach() for name, one in twin.named_parameters()}
        self.samples = next((one.shape[0] for _, one in tensors_in(given) if one.dim() > 1), 1)


def analyse(block, given, ranks, training=True):
    """The ``Analysis`` of ``block`` for ``ranks`` ranks. ``given``: ``(args, kwargs)`` that it is called with."""
    twin = twin_of(block)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            whole = _Whole(twin, given)
        except Exception as error:
            raise NotAnalysed(f"it does not run on the probe: {type(error).__name__}: {error}") from error
        reach = _Reach(twin, whole)
        return _analyse(block, given, ranks, whole, reach, training)


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
        problem = _conflict(rows, columns, sources, shown - tables, taken, whole.twice)
        if problem is None:
            made = _group_of(reach, rows, {one: out.shape[-1] for one, out in whole.outputs.items() if one in columns})
            problem = made if isinstance(made, str) else None
        if problem is None and tables:
            made.results = results_of(reach, made, tensors_in(whole.made), tables)
            problem = f"the block returns what '{min(tables)}' gives" if made.results is None else None
        if problem is None:
            problem = _try(block, given, ranks, whole, made, whole.inputs[name].shape[-1], training)
        if problem is None:
            groups.append(made)
            taken.update({one: made for one in (*rows, *columns)})
        else:
            reasons.update({one: problem for one in rows})
    layers = [one for one, x in whole.inputs.items() if x.is_floating_point() and one not in taken]
    return Analysis(groups, {one: reasons.get(one, "no layer that can be cut reads only its results") for one in layers})


def _try(block, given, ranks, whole, group, width, training):
    if group.units < ranks:
        return f"it has {group.units} heads or channels for {ranks} ranks"
    try:
        for one, parts in group.columns.items():
            cut = group.cut(parts, ranks)
            if training and cut.copied() and not all(cut.holders(rank) for rank in range(ranks)):
                return f"ranks share some heads of '{one}' and have others alone: only inference can cut it"
        return _find_changes(block, given, whole, group, width, ranks)
    except (ValueError, RuntimeError) as error:
        return str(error)


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


def _conflict(rows, columns, sources, shown, taken, twice):
    both = set(rows) & columns
    if both:
        return f"'{sorted(both)[0]}' reads and gives results of the same layers"
    if columns & shown:
        return f"the block returns what '{sorted(columns & shown)[0]}' gives"
    if any(one in taken for one in (*rows, *columns)):
        return "its inputs come from a layer that is cut with others"
    if twice & {*rows, *columns}:
        return f"'{sorted(twice & {*rows, *columns})[0]}' runs several times"
    return None
