"""Files of a checkpoint folder by kind, and states of several ranks put together."""

import os

import torch

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.names import natural_key


def get_files(dir):
    """Paths of all files below ``dir``, sorted by name with numbers as numbers."""
    found = [os.path.join(root, name) for root, _, files in os.walk(dir) for name in files]
    return sorted(found, key=natural_key)


def get_files_with_prefix(all_files, prefix):
    """Those of ``all_files`` whose base name starts with ``prefix``, sorted."""
    return sorted((path for path in all_files if os.path.basename(path).startswith(prefix)), key=natural_key)


def get_zero_files(dir):
    """The optimizer files of ``dir`` in the order of their ranks, whichever of the three prefixes they have."""
    found = {"": [], "fp16_": [], "bf16_": []}
    for name, known in names.OPTIM_STATES.found_in(dir).items():
        found[known["prefix"]].append(os.path.join(dir, name))
    return next(filter(None, found.values()), [])


def get_model_files(dir):
    """``mp_rank_RR_model_states.pt`` of all model-parallel ranks, in their order."""
    return [os.path.join(dir, name) for name in names.MODEL_STATES.found_in(dir)]


def get_layer_files(dir):
    """``{(layer, tensor-parallel rank): path}`` of the layer files of a pipeline; rank 0 where the name has none."""
    found = {}
    for name, known in names.LAYER_STATES.found_in(dir).items():
        rank = known["slices"].removeprefix("-model_") or "0"
        if rank.isdecimal():
            found[known["layer"], int(rank)] = os.path.join(dir, name)
    return found


def partition_data(data_list, num_partitions):
    """``data_list`` cut into ``num_partitions`` runs of equal length. Raises ValueError where there is a rest."""
    if num_partitions < 1 or len(data_list) % num_partitions:
        raise ValueError(f"{len(data_list)} items do not make {num_partitions} equal parts")
    size = len(data_list) // num_partitions
    return [data_list[start : start + size] for start in range(0, size * num_partitions, size)] if size else []


def merge_state(state_a, state_b, key_list=[]):  # noqa: B006 (published; never changed)
    """Two ranks' states as one: tensors end to end along dimension 0 (0-dimensional ones: the first), lists item
    by item, dicts key by key (a key of one of them stays), anything else from ``state_a``.

    ``key_list`` names where we are, for errors. Raises ValueError when types or lengths differ.
    """
    where = ".".join(key_list) or "the top level"
    if type(state_a) is not type(state_b):
        raise ValueError(
            f"cannot merge {type(state_a).__name__} with {type(state_b).__name__} at {where}: the files do not belong "
            "together"
        )
    if isinstance(state_a, dict):
        both = {
            key: merge_state(value, state_b[key], [*key_list, str(key)])
            for key, value in state_a.items()
            if key in state_b
        }
        merged = {**state_a, **state_b, **both}
        return merged if type(state_a) is dict else type(state_a)(merged)
    if isinstance(state_a, (list, tuple)) and not isinstance(state_a, torch.Size) and not hasattr(state_a, "_fields"):
        if len(state_a) != len(state_b):
            raise ValueError(
                f"cannot merge lists of {len(state_a)} and {len(state_b)} items at {where}: the files do not belong "
                "together"
            )
        items = [merge_state(a, b, [*key_list, str(i)]) for i, (a, b) in enumerate(zip(state_a, state_b, strict=True))]
        return type(state_a)(items)
    return torch.cat([state_a, state_b], dim=0) if torch.is_tensor(state_a) and state_a.dim() else state_a
