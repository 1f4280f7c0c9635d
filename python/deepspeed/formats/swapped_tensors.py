"""Optimizer states that a run on NVMe has saved beside its optimizer files: ``<tag>/offloaded_tensors/rank<N>/``.

Other implementations copy their swap files there, without gradients. Each file has the fp32 elements of one sub-group
of a rank's slices, and may be longer by a few sectors: ``<first>_<last>.tensor.swp`` the masters,
``<state>-<first>_<last>.tensor.swp`` a state; first and last number the sub-group's parameters in the order of the
module. The optimizer file has empty tensors instead, without their lengths, which follow from
``sub_group_size`` and the shapes.
"""

import os
import re

import torch

from deepspeed.formats.byte_ranges import FileRange, file_identity
from deepspeed.formats.lazy_tensor import LazyTensor, StoredMemory

_SWAP_FILE = re.compile(r"(?:([A-Za-z]\w*)-)?(\d+)_(\d+)\.tensor\.swp")
_RANKS = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MOST_PADDING = 1 << 20  # bytes
_ITEM = 4
_SUB_GROUP_SIZE = 1_000_000_000  # where the configuration does not say


def with_swapped(path, whole, load):
    """``optimizer_state_dict`` of ``whole``, the contents of the optimizer file at ``path``, with the tensors of swap
    files instead of empty ones. ``load(path, lazy=True)`` reads the model file beside it, if there are any.

    FileNotFoundError and ValueError name the folder or file that is missing or does not fit.
    """
    part = whole["optimizer_state_dict"]
    flats = part.get("fp32_flat_groups") or () if isinstance(part, dict) else ()
    empty = [unit for unit, flat in enumerate(flats) if flat.numel() == 0]
    above, match = os.path.join(os.path.dirname(path), "offloaded_tensors"), _RANKS.search(os.path.basename(path))
    if not empty or match is None or not os.path.isdir(above):
        return part
    rank, mp_rank = int(match[1]), int(match[2])
    own = os.path.join(os.path.dirname(path), match[0].replace("optim", "model"))
    first = own.replace(f"zero_pp_rank_{rank}_", "zero_pp_rank_0_")  # alone says which parameters are tied
    model = load(first if os.path.exists(first) else own, lazy=True)
    folder = os.path.join(above, f"rank{rank * int(model.get('mp_world_size') or 1) + mp_rank}")
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{path} was saved with its states on NVMe, and its copies of them, {folder}, are not there: copy the "
            "whole folder of the tag, or load an older one"
        )
    zero = (whole.get("ds_config") or {}).get("zero_optimization") or {}
    size = zero.get("sub_group_size", _SUB_GROUP_SIZE)
    planned = _sub_groups(model.get("param_shapes") or [], int(part.get("partition_count", 1)), size)
    if [n for u, (_, _, n) in enumerate(planned) if u not in empty] != [flat.numel() for flat in flats if flat.numel()]:
        raise ValueError(
            f"{path} has {len(flats)} sub-groups of {[flat.numel() for flat in flats]} elements, and sub_group_size "
            f"{size} makes {[n for _, _, n in planned]}: it is damaged, or of another kind of run"
        )
    files = _files_of(folder, {unit: planned[unit] for unit in empty}, _numbers(model))
    masters, inner = list(flats), dict(part.get("optimizer_state_dict") or {})
    states = inner["state"] = dict(inner.get("state") or {})
    for unit, kinds in files.items():
        tensors = {kind: _tensor(file, planned[unit][2]) for kind, file in kinds.items()}
        if None not in tensors:
            raise FileNotFoundError(
                f"{folder} has no file of the masters beside {min(kinds.values())}: load an older tag"
            )
        masters[unit] = tensors.pop(None)
        states[unit] = {**states.get(unit, {}), **tensors}
    return {**part, "fp32_flat_groups": masters, "optimizer_state_dict": inner}


def _sub_groups(param_shapes, ranks, size):
    """``[(parameter group, names, elements of a rank)]``: slices follow each other until there are ``size``."""
    made = []
    for group, shapes in enumerate(param_shapes):
        names, held = [], 0
        for number, (name, shape) in enumerate(shapes.items(), 1):
            names.append(name)
            held += -(-torch.Size(shape).numel() // ranks)
            if held >= size or number == len(shapes):
                made.append((group, names, held))
                names, held = [], 0
    return made


def _numbers(model):
    """name -> index among the module's parameters."""
    others = {*(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
    return {name: i for i, name in enumerate(name for name in model.get("module") or {} if name not in others)}


def _files_of(folder, units, numbers):
    """unit -> {state, None for masters: path}. ``units``: number -> an entry of ``_sub_groups``."""
    found = {}
    for name in sorted(os.listdir(folder)):
        match = _SWAP_FILE.fullmatch(name)
        if match:
            found.setdefault((int(match[2]), int(match[3])), {})[match[1]] = os.path.join(folder, name)
    if len(found) != len(units):
        raise ValueError(
            f"{folder} has files of {len(found)} sub-groups, {len(units)} are wanted: files are missing, or are of "
            "another tag; copy the whole folder of the tag, or load an older one"
        )
    indices = {unit: (numbers.get(names[0], -1), numbers.get(names[-1], -1)) for unit, (_, names, _) in units.items()}
    in_order = dict(zip(sorted(units, key=indices.get), sorted(found)))
    if len({own - index for unit, key in in_order.items() for own, index in zip(key, indices[unit])}) == 1:
        return {unit: found[key] for unit, key in in_order.items()}
    # Numbered in another order than the module's: by how long they are, else one group's one after the other.
    fitting = {key: [unit for unit in units if _fits(found[key], units[unit][2])] for key in found}
    if sorted(fit for fits in fitting.values() for fit in fits) == sorted(units):
        return {fits[0]: found[key] for key, fits in fitting.items()}
    if len({group for group, _, _ in units.values()}) > 1:
        raise ValueError(
            f"{folder}: which of its files are of which sub-group cannot be told: their numbers {sorted(found)} are "
            f"not those of the model's parameters, {sorted(indices.values())}, and several are equally long. Load the "
            "checkpoint with the model that saved it and save it again"
        )
    return {unit: found[key] for unit, key in zip(sorted(units), sorted(found))}


def _fits(files, numel):
    spare = [os.path.getsize(path) - numel * _ITEM for path in files.values()]
    return all(0 <= bytes_ < _MOST_PADDING for bytes_ in spare)


def _tensor(path, numel):
    with open(path, "rb") as file:
        size, identity = os.fstat(file.fileno()).st_size, file_identity(file.fileno())
    if not numel * _ITEM <= size < numel * _ITEM + _MOST_PADDING:
        raise ValueError(
            f"{path} has {size} bytes, its sub-group's {numel} elements take {numel * _ITEM}: it was cut, or is of "
            "another tag; load an older one"
        )
    return LazyTensor(StoredMemory(FileRange(path, 0, size, identity), torch.float32), 0, (numel,), (1,))
