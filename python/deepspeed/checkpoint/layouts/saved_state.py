"""The content of a checkpoint of any layout, ZeRO stage and number of ranks: the base class of all layouts.

Its users ask for ranges of one parameter and do not know how the files are cut.
"""

import collections
import itertools
import os

import torch

from deepspeed.checkpoint.layouts import names, storage
from deepspeed.zero.nested import replace

# Saved values of an optimizer as a whole: see ``SavedState.extra``.
EXTRA_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


class Range:
    """Elements of ``source``, counted from ``base`` on: of a tensor, of whatever has ``read_range(start, numel)``, or
    of what a function without arguments gives, called when elements are wanted: files stay closed till then. With a
    ``shape``, a torch.Size, it is a lazy tensor of these elements, of type ``dtype`` where that is known."""

    def __init__(self, source, base=0, shape=None, dtype=None):
        self.source, self.base, self.shape, self.dtype = source, base, shape, dtype

    def read(self):
        """The tensor, in memory of its own."""
        return self.read_range(0, self.shape.numel()).view(self.shape).clone()

    def read_range(self, start, numel):
        """``numel`` elements from ``start`` on, a 1-D tensor in row-major order; may share memory with the source.
        IndexError outside of it."""
        source = self.source() if callable(self.source) else self.source
        begin, end = self.base + start, self.base + start + numel
        if not torch.is_tensor(source):
            return source.read_range(begin, numel)
        if end > source.numel():
            raise IndexError(f"elements {begin} to {end} of a tensor of {source.numel()} elements")
        return source.detach().reshape(-1)[begin:end]

    def fill(self, target, start):
        """Reads the elements from ``start`` on straight into ``target``, 1-D; False where the source cannot."""
        source = self.source() if callable(self.source) else self.source
        return hasattr(source, "fill") and source.fill(target, self.base + start)


class Latest:
    """Keeps one value, that of the key that was asked for last. Threads may ask for several keys at a time: each one
    gets the value of its own key."""

    def __init__(self):
        self._kept = (None, None)

    def value(self, key, make):
        """The value of ``key``: the kept one, else what ``make()`` returns, which is kept."""
        kept, value = self._kept
        if kept != key:
            value = make()
            self._kept = (key, value)
        return value


class SavedState:
    """One checkpoint. Parameters are known by their names in the module; tied ones by the first of their names.

    A layout sets the facts below, and has three methods of its own:

    state_names():            names of optimizer states that have a value for each element of a parameter, e.g.
                              ``exp_avg``.
    scalars(name):            dict of a parameter's other states: ``step``, a number or a tensor of one element, and the
                              like.
    state_pieces(name, kind): as ``pieces`` for ``kind`` "fp32" or the name of a state of a trained parameter.

    folder:        where it lies; None in memory.
    model:         the model file: dict; tensors may be lazy (``read()``, ``read_range(start, numel)``).
    model_path:    path of the model file.
    zero_stage:    of the run that saved it.
    dp_world_size: data-parallel ranks that saved it.
    ranks:         numbers of the ranks that saved it among all ranks, where the layout says them.
    masters_only:  weights of trained parameters are saved as fp32 masters only.
    is_whole:      the stages of a pipeline are joined, and no parameter is a slice of a tensor-parallel rank.
    shapes:        name of a trained parameter -> its torch.Size, end to end over the parameter groups.
    frozen_shapes: name -> torch.Size of parameters that are not trained and are not in the model file in one piece.
    aliases:       alias -> name, for tied parameters.
    param_groups:  one dict of hyperparameters for each parameter group of the optimizer; its ``names`` are the
                   parameters'.
    extra:         values of the optimizer as a whole, as far as they were saved: ``loss_scaler`` (an object or a dict
                   of its attributes), ``dynamic_loss_scale``, ``overflow``, ``clip_grad``.
    """

    model_path = None
    zero_stage = 0
    dp_world_size = 1
    ranks = ()
    masters_only = False
    is_whole = False

    def __init__(self, model=None, folder=None):
        self.model, self.folder = model or {}, folder
        self.shapes, self.frozen_shapes, self.param_groups, self.extra = {}, {}, [], {}
        self.aliases = dict(self.model.get("shared_params") or {})

    def frozen_pieces(self, name):
        """As ``pieces`` for the value of a parameter that is not trained and is not in the model file in one piece."""
        return []

    def has_optimizer(self):
        """Whether there are optimizer states at all."""
        return bool(self.param_groups)

    def run_states(self, rank):
        """``(the state with which rank rank resumes, whether it saved that itself)``: else that of rank 0, which is
        None if there is none."""
        own, other = (names.RUN_STATES.path(self.folder or "", rank=number) for number in (rank, 0))
        path = own if os.path.exists(own) else other
        return (storage.read(path) if os.path.exists(path) else None), path == own

    def module(self):
        """dict: name -> tensor or lazy tensor of the module's state that the checkpoint has whole, aliases included."""
        return dict(self.model.get("module") or {})

    def step(self, name):
        """Updates that a parameter has seen, or None where that was not saved."""
        step = eager(self.scalars(name).get("step"))
        return None if step is None else int(step.item() if torch.is_tensor(step) else step)

    def pieces(self, name, kind):
        """``[(param_offset, numel, reader)]``: where the elements of ``kind`` of a parameter are, in row-major order.

        ``kind``: "fp32" for the masters, the name of a state, or "weight" for the value whatever it was saved as. []
        where the checkpoint has none; ``reader.read_range(start, numel)`` counts from the piece's first element.
        """
        value = self.module().get(name) if kind == "weight" else None
        if value is not None:
            return [(0, numel_of(value), Range(value))]
        if name in self.shapes:
            return self.state_pieces(name, "fp32" if kind == "weight" else kind)
        return self.frozen_pieces(name) if kind == "weight" else []

    def weight_shape(self, name):
        """torch.Size of a parameter as it was saved, or None where it is not in the checkpoint."""
        value = self.module().get(name)
        if value is None:
            return self.shapes.get(name, self.frozen_shapes.get(name))
        return torch.Size(value.shape) if hasattr(value, "shape") else None

    def whole(self, name, kind):
        """All of ``kind`` of a parameter, a tensor. ValueError where elements of it are not there."""
        pieces = self.pieces(name, kind)
        dtype = pieces[0][2].read_range(0, 0).dtype if pieces else torch.float32
        found = torch.empty(self.weight_shape(name), dtype=dtype)
        self.read_into(found, pieces, 0, f"{kind} of parameter '{name}'")
        return found

    def read_into(self, target, pieces, offset, what):
        """Fills ``target``, any shape, with the elements from ``offset`` on of the parameter that ``pieces`` describe.

        Of a ``target`` that is a number of elements it only opens the files: their errors are raised, and IndexError
        for a tensor that is too short. ValueError, which names ``what``, where the pieces do not cover it.
        """
        flat = None if isinstance(target, int) else target.detach().view(-1)
        wanted = target if flat is None else flat.numel()
        filled = 0
        for begin, numel, reader in pieces:
            low, high = max(begin, offset), min(begin + numel, offset + wanted)
            if low >= high:
                continue
            filled += high - low
            if flat is None:
                reader.read_range(high - begin, 0)
            elif not (hasattr(reader, "fill") and reader.fill(flat[low - offset : high - offset], low - begin)):
                flat[low - offset : high - offset].copy_(reader.read_range(low - begin, high - low))
        if filled != wanted:
            raise ValueError(
                f"{self.origin()}: {what} has {filled} of the {wanted} elements from {offset} on; files are missing, "
                "or it is of another model"
            )

    def origin(self):
        """The origin of the state, for messages."""
        shown = os.fspath(self.folder).encode("utf-8", "backslashreplace").decode() if self.folder else ""
        return f"the checkpoint {shown}" if shown else "the saved optimizer"


class Joined(SavedState):
    """Several ``states`` of one checkpoint as one. Of what more than one have (tied weights), the first one's counts.
    ``weights``: name -> lazy tensor of weights and buffers in files of their own, which win over those of the model
    files. ``own``: the state whose facts are taken."""

    def __init__(self, states, model, weights=None, own=0):
        super().__init__(model, states[own].folder)
        self.zero_stage, self.dp_world_size = states[own].zero_stage, states[own].dp_world_size
        self.model_path = states[own].model_path
        self.ranks = [rank for state in states for rank in state.ranks]
        self.masters_only = all(state.masters_only for state in states)
        self._states, self._weights, self._owner = states, weights or {}, {}
        for state in states:
            for name, shape in state.shapes.items():
                self._owner.setdefault(name, state)
                self.shapes.setdefault(name, shape)
        self.frozen_shapes = dict(collections.ChainMap(*(state.frozen_shapes for state in states)))
        self.aliases = dict(collections.ChainMap(*(state.aliases for state in states)))
        for parts in itertools.zip_longest(*(state.param_groups for state in states), fillvalue={}):
            found = dict.fromkeys(name for part in parts for name in part.get("names", ()))
            self.param_groups.append({**collections.ChainMap(*parts), "names": list(found)})
        self.extra = next((state.extra for state in states if state.extra), {})

    def state_names(self):
        return list(dict.fromkeys(kind for state in self._states for kind in state.state_names()))

    def scalars(self, name):
        return self._owner[name].scalars(name)

    def state_pieces(self, name, kind):
        return self._owner[name].state_pieces(name, kind)

    def frozen_pieces(self, name):
        return next(filter(None, (state.frozen_pieces(name) for state in self._states)), [])

    def has_optimizer(self):
        return any(state.has_optimizer() for state in self._states)

    def run_states(self, rank):
        found = [state.run_states(rank) for state in self._states]
        return next((one for one in found if one[1]), found[0])

    def module(self):
        return {**collections.ChainMap(*(state.module() for state in self._states)), **self._weights}

    def weight_shape(self, name):
        shapes = itertools.chain([super().weight_shape(name)], (state.weight_shape(name) for state in self._states))
        return next((shape for shape in shapes if shape is not None), None)


def with_names(groups, named):
    """Hyperparameters of saved parameter groups beside the names of their parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "names": list(names)}
        for group, names in zip(groups or [{} for _ in named], named)
    ]


def eager(value):
    """A lazy tensor's values; anything else as it is."""
    return value.read() if hasattr(value, "read_range") else value


def plain(value):
    """``value`` with all lazy tensors in it read."""
    return replace(value, lambda item: hasattr(item, "read_range"), eager)


def numel_of(value):
    """Elements of a tensor, lazy or not."""
    return torch.Size(value.shape).numel()
