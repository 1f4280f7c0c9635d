"""Finds what else of a block has to change with a cut: integers of its modules, and its arguments.

A run of the block's copy plays one rank: the layers return this rank's channels, and the inputs that reach the next
layer have to be this rank's channels of the whole run. Integers that count heads or channels, and arguments with
something for each head, are changed until they are.
"""

import itertools
import re

import torch
from torch import nn

from deepspeed.module_inject.block_twin import NotAnalysed, Run, is_linear, tensors_in, twin_of, with_tensors
from deepspeed.module_inject.cut_group import Part, change_counts, own_units
from deepspeed.utils import tensor_slices

# Names that models have for what changes with a cut. They are tried first; the run decides.
_KNOWN_COUNTS = re.compile(r"(heads|_kv|_dim|_size|d_model|groups|_partition|n_embd)$|^(num|n)_")
_TRIES = 4096  # sets of integers and arguments that are tried at most


class _Guarded(torch.overrides.TorchFunctionMode):
    """Refuses attention without heads, which a wrong number of heads makes: torch divides by their number."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        attends = getattr(function, "__name__", "") == "scaled_dot_product_attention"
        if attends and any(not one.numel() for _, one in tensors_in((args, kwargs))):
            raise NotAnalysed("its attention has no heads")
        return function(*args, **(kwargs or {}))


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
        self.rows = {
            one: group.cut([Part(whole.inputs[one].shape[-1])], ranks) for group in groups for one in group.rows
        }
        self.rank = rank
        for group in groups:
            self._change(twin, group, ranks)
        arguments = {place: (dim, group, ranks) for group in groups for place, dim in group.arguments}
        given = with_tensors(
            given, lambda place, one: own_units(one, *arguments[place], rank) if place in arguments else one
        )
        try:
            with _Guarded():
                Run(twin, given, self._respond)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _change(self, twin, group, ranks):
        change_counts(twin, group, ranks, self.rank)
        for name, (dim, part) in group.params.items():
            owner, _, last = name.rpartition(".")
            param = twin.get_submodule(owner)._parameters[last]
            param.data = tensor_slices.narrow(param.data, dim, group.cut([part], ranks), self.rank)

    def _respond(self, name, stand, x):
        made = self.whole.outputs[name].detach()
        wanted = self.whole.inputs[name].detach()
        if name in self.rows:
            wanted = tensor_slices.narrow(wanted, -1, self.rows[name], self.rank)
        if x.shape != wanted.shape or x.is_floating_point() and not torch.allclose(x, wanted, rtol=1e-4, atol=1e-5):
            self.problem = self.problem or f"'{name}' reads other values than in one process"
        if self.problem:
            raise NotAnalysed(self.problem)
        return tensor_slices.narrow(made, -1, self.columns[name], self.rank) if name in self.columns else made


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
    kinds = [("units", each, group.units) for each in (1, unit, group.heads)]
    if group.readers > 1:
        kinds += [("shared", 1, shared), ("shared", unit, shared), ("readers", 1, group.readers)]
    values = {}
    for kind, each, count in kinds:
        values.setdefault(each * count, (kind, each))
    for name, module in block.get_submodule(top).named_modules(prefix=top):
        if not is_linear(module) and not isinstance(module, nn.Embedding):
            # Newer models ask their configuration, of which the module then gets a copy.
            settings = getattr(vars(module).get("config"), "__dict__", {})
            named = [*vars(module).items(), *((f"config.{key}", value) for key, value in settings.items())]
            for attribute, value in named:
                if type(value) is int and value in values and value > 1:
                    found.append((name, attribute, *values[value]))
    return sorted(found, key=lambda one: (one[1].startswith("config."), not _KNOWN_COUNTS.search(one[1])))


def find_changes(block, given, whole, group, width, ranks):
    """Fills in ``counts`` and ``arguments`` of a group. Returns None, or what is wrong with each try."""
    counts = _counts_of(block, group, width)
    places = [
        (place, dim)
        for place, one in tensors_in(given)
        if place in group.shared or not one.is_floating_point()
        for dim, size in enumerate(one.shape[:-1])
        if size and size % group.units == 0 and group.units > 1 and size // group.units in (1, whole.samples)
    ]
    own = [one for one in counts if not one[1].startswith("config.")]
    known = [one for one in own if _KNOWN_COUNTS.search(one[1])]
    tries = [(chosen, at) for at in ([], places) for chosen in ([], known, own, counts)]
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
