"""Layers of a block that are cut together, and which of their channels each rank has."""

import copy
import dataclasses

from deepspeed._native import _C


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
    """Layers that are cut together, by their names in the block. ``units``: of the inputs of ``rows``; ``columns``:
    layer -> parts of its outputs; ``params``: parameter outside of linear layers -> ``(dimension, part)``; ``partial``:
    parameters that every rank has whole, of which each sees a part of the gradient; ``counts``: integers of modules,
    ``(module, attribute, units of one, elements of one)``; ``arguments``: places of the block's arguments and results
    that are cut, ``(place, dimension)``; ``shared``: places of arguments that only reach the layers through what lies
    between them, so that each rank sees a part of their gradient; ``draws``: the last of ``columns`` and of ``rows``
    that run, where random numbers are drawn between them in training; ``results``: ``(place, dimension)`` of results
    of the block that have something for each unit (``cut_results``); ``grain``: of ``grained_runs``; ``reads``: the
    number of tensors that ``columns`` read, each of which has an all-reduce in backward; ``heads``: in a unit, where
    these are groups of heads."""

    rows: list
    units: int
    columns: dict
    params: dict = dataclasses.field(default_factory=dict)
    partial: list = dataclasses.field(default_factory=list)
    counts: list = dataclasses.field(default_factory=list)
    arguments: list = dataclasses.field(default_factory=list)
    shared: list = dataclasses.field(default_factory=list)
    draws: tuple = ()
    results: list = dataclasses.field(default_factory=list)
    grain: int = 1
    reads: int = 1
    heads: int = 1

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
        owner, value = block.get_submodule(module), local_count(group, ranks, rank, kind, each)
        if attribute.startswith("config."):
            owner.config, attribute = copy.copy(owner.config), attribute.partition(".")[2]
            owner = owner.config
        setattr(owner, attribute, value)


def local_count(group, ranks, rank, kind, each):
    """A rank's value of an integer that counts ``kind`` ("units", "shared", units that others read, or "readers" of one
    of these), ``each`` elements of them."""
    start, stop = group.runs(ranks)[rank]
    shared = -(-stop // group.readers) - start // group.readers
    return each * {"units": stop - start, "shared": shared, "readers": -(-(stop - start) // max(shared, 1))}[kind]
