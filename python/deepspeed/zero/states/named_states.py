"""The pieces of masters and optimizer states that a rank owns, by the names of the parameters: how checkpoints without
a layout by ranks have them, and in the others parameters that only some ranks train."""

import dataclasses

import torch

from deepspeed.utils.forwarding import answers_from
from deepspeed.utils.param_access import shape_of
from deepspeed.zero.parameters.param_ranks import lies_in_rows, numel_of, ranks_of, saved_part
from deepspeed.zero.parameters.tensor_of_pieces import TensorOfPieces
from deepspeed.zero.states.states_in_files import split_states

OWN_PARAMS = "own_params"  # key of an optimizer's saved state: parameters that only some ranks train


@dataclasses.dataclass
class NamedStates:
    """``tensors``: (kind, name, offset) -> values, offset None for a whole parameter. ``scalars``: name -> states that
    have no value for each element. ``strides``: name -> strides of a parameter whose pieces are in memory order."""

    tensors: dict
    scalars: dict
    strides: dict


def positioned(param, offset, tensor):
    """Offset and tensor of a piece. A whole parameter has its shape and row-major meaning, whatever its strides."""
    begin, whole = saved_part(param)
    if tensor.numel() < numel_of(param):
        return begin + offset, tensor.reshape(-1)
    shape = shape_of(param)
    if tensor.shape != shape:
        flat = tensor.reshape(-1)
        tensor = flat.view(shape) if lies_in_rows(param) else flat.as_strided(shape, param.stride())
    return (None, tensor) if tensor.numel() == whole.numel() else (begin, tensor.reshape(-1))


def groups_of_params(optimizer_groups):
    """The number of its group for each parameter, end to end."""
    return [number for number, group in enumerate(optimizer_groups) for _ in group]


@answers_from({"hold": "_stepping.core.hold_states()", "let_go": "_stepping.core.release_states()"})
class OwnedStates:
    """Leases of what this rank owns of masters and optimizer states: saving reads them. From ``hold()`` on calls that
    would change the memory wait for ``let_go()``.

    ``groups``: lists of the trained parameters. ``made_by``: the name of the optimizer's class.
    """

    def __init__(self, stepping, groups):
        self._stepping, self._groups, self.made_by = stepping, groups, type(stepping.optimizer).__name__
        self._params = [param for group in groups for param in group]

    def named(self, takes, in_pieces=True):
        """``NamedStates`` of the parameters for whose number ``takes`` is true, views of what is trained.
        ``in_pieces``: what rests in files is a ``TensorOfPieces``, and not a copy."""
        found, stepping, core = NamedStates({}, {}, {}), self._stepping, self._stepping.core
        in_files = in_pieces and core.rest_in_files()
        kept = {kind: at for kind, at in stepping.kept().items() if kind != "grad"}
        for number, (index, offset, numel) in enumerate(core.pieces()):
            if not numel or not takes(index):
                continue
            name, param, master = stepping.names[index], self._params[index], stepping.masters[number]
            for kind, at in kept.items():
                meta = core.piece_in_file(*at, number) if in_files else None
                begin, value = None, None
                if meta is not None and meta.dtype == torch.float32:
                    begin, value = positioned(param, offset, meta)
                if value is not None and value.is_contiguous():
                    source = core.piece_source(*at, number)
                    value = TensorOfPieces(value.numel(), value.dtype, source=source, shape=value.shape)
                elif (tensor := core.piece_tensor(*at, number)) is not None:
                    begin, value = positioned(param, offset, tensor.detach())
                if value is not None:
                    found.tensors[kind, name, begin] = value
            if not stepping.fused:
                states = stepping.optimizer.state.get(master, {})
                names, scalars = split_states(states, master)
                for kind in names:
                    begin, value = positioned(param, offset, states[kind].detach())
                    found.tensors[kind, name, begin] = value
                if scalars:
                    found.scalars[name] = scalars
            if numel < numel_of(param) and not lies_in_rows(param):
                found.strides[name] = list(param.stride())
        return found

    def by_name(self, takes=None, in_pieces=True):
        """The value of ``OWN_PARAMS``: parameters with ranks of their own, or those for whose number ``takes`` is true.

        None without any. ``in_pieces``: ``TensorOfPieces`` over the memory of what is trained instead of copies.
        """
        params, group_of, names = self._params, groups_of_params(self._groups), self._stepping.names
        takes = takes or (lambda index: ranks_of(params[index]) is not None)
        taken = list(filter(takes, range(len(params))))
        if not taken:
            return None
        found, steps, tensors = self.named(takes, in_pieces), self.steps(), {}
        for (kind, name, offset), value in found.tensors.items():
            kept = value
            if torch.is_tensor(value):
                flat = value.reshape(-1)
                kept = TensorOfPieces(flat.numel(), flat.dtype, [(0, flat)]) if in_pieces else flat.to("cpu", copy=True)
            tensors.setdefault(kind, {}).setdefault(name, []).append((offset or 0, kept))
        return {
            "parameters": {
                names[index]: {
                    "shape": saved_part(params[index])[1],
                    "group": group_of[index],
                    **({"step": steps[index]} if steps is not None else {}),
                }
                for index in taken
            },
            "tensors": tensors,
            "scalars": found.scalars,
            "strides": found.strides,
        }

    def steps(self):
        """Updates of each parameter where the core counts them; None where an optimizer keeps them among its states."""
        return [int(step) for step in self._stepping.core.steps()] if self._stepping.fused else None

    def expected_bytes(self):
        """About the bytes of all of it, rather too many than too few."""
        core, kinds = self._stepping.core, 0 if self._stepping.fused else 2
        return 4 * sum(numel for _, _, numel in core.pieces()) * (1 + max(len(core.slot_names()), kinds))

    def tensors(self):
        """Masters and states as they are in memory; None for one that is elsewhere. Masters that are the memory of
        parameters of a sharded model with one rank are left out: programs write to them."""
        core = self._stepping.core
        slots = (core.slots(number) for number in range(len(core.slot_names())))
        are_weights = core.gatherer is not None and core.gatherer.has_all and not core.planes("master")
        return [*([] if are_weights else core.masters()), *(tensor for slot in slots for tensor in slot)]


# ---- what is saved by name, without opening it ---------------------------------------------------------------------


def table_of(saved):
    """name -> what is known without opening it of a parameter in ``saved`` (of ``OwnedStates.by_name``), for JSON."""
    if not saved:
        return {}
    return {
        name: {
            "shape": list(about["shape"]),
            "group": about["group"],
            "kinds": [kind for kind, named in saved["tensors"].items() if name in named],
        }
        for name, about in saved["parameters"].items()
    }


def joined_tables(tables):
    """One table of those of all ranks; ``ranks`` of an entry: numbers of the ranks that have elements of it."""
    joined = {}
    for rank, table in enumerate(tables):
        for name, about in (table or {}).items():
            entry = joined.setdefault(name, {**about, "kinds": [], "ranks": []})
            if about["shape"] != entry["shape"]:
                raise ValueError(
                    f"parameter '{name}' has shape {tuple(entry['shape'])} on rank {entry['ranks'][0]} and "
                    f"{tuple(about['shape'])} on rank {rank}: ranks that train different tensors must give them "
                    "different names in checkpoints (ds_expert_numbers)"
                )
            entry["kinds"] = list(dict.fromkeys([*entry["kinds"], *about["kinds"]]))
            entry["ranks"] += [rank]
    return joined
