"""Files of a checkpoint folder by kind, and states of several ranks put together."""

import os
import re

import torch

from deepspeed.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX,
    FP16_ZERO_FILE_PREFIX,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    ZERO_FILE_PREFIX,
)

_LAYER = re.compile(rf"{LAYER_FILE_PREFIX}(\d+)(?:-model_(\d+))?[-_]model_states\.pt")


def natural_key(text):
    """Sorts ``rank_10`` after ``rank_9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def get_files(dir):
    """Paths of all files below ``dir``, sorted by name with numbers as numbers."""
    found = [os.path.join(root, name) for root, _, names in os.walk(dir) for name in names]
    return sorted(found, key=natural_key)


def get_files_with_prefix(all_files, prefix):
    """Those of ``all_files`` whose base name starts with ``prefix``, sorted."""
    return sorted((path for path in all_files if os.path.basename(path).startswith(prefix)), key=natural_key)


def sort_zero_files(files):
    """By data-parallel rank, then by model-parallel rank."""
    return sorted(files, key=lambda path: natural_key(os.path.basename(path)))


def _files_in(dir):
    """The files of a tag's folder itself: what lies deeper is of other kinds."""
    return sorted((os.path.join(dir, name) for name in os.listdir(dir)), key=natural_key)


def get_zero_files(dir):
    """The optimizer files of ``dir`` in the order of their ranks, whichever of the three prefixes they have."""
    files = [path for path in _files_in(dir) if path.endswith(OPTIM_FILE_SUFFIX)]
    for prefix in (ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX):
        found = get_files_with_prefix(files, prefix)
        if found:
            return sort_zero_files(found)
    return []


def get_model_files(dir):
    """``mp_rank_RR_model_states.pt`` of all model-parallel ranks, in their order."""
    pattern = re.compile(rf"{MODEL_FILE_PREFIX}\d+{re.escape(MODEL_FILE_SUFFIX)}")
    return [path for path in _files_in(dir) if pattern.fullmatch(os.path.basename(path))]


def get_layer_files(dir):
    """``{(layer, tensor-parallel rank): path}`` of the layer files of a pipeline; rank 0 where the name has none."""
    found = {}
    for path in _files_in(dir):
        match = _LAYER.fullmatch(os.path.basename(path))
        if match:
            found[int(match.group(1)), int(match.group(2) or 0)] = path
    return found


def partition_data(data_list, num_partitions):
    """``data_list`` cut into ``num_partitions`` runs of equal length. Raises ValueError where there is a rest."""
    if num_partitions < 1 or len(data_list) % num_partitions:
        raise ValueError(f"{len(data_list)} items do not make {num_partitions} equal parts")
    size = len(data_list) // num_partitions
    return [data_list[start : start + size] for start in range(0, size * num_partitions, size)] if size else []


def _merge_dicts(state_a, state_b, key_list):
    merged = {
        key: merge_state(value, state_b[key], key_list=[*key_list, str(key)]) if key in state_b else value
        for key, value in state_a.items()
    }
    merged.update({key: value for key, value in state_b.items() if key not in state_a})
    return merged if type(state_a) is dict else type(state_a)(merged)


def _where(key_list):
    return ".".join(key_list) or "the top level"


def merge_state(state_a, state_b, key_list=[]):  # noqa: B006 (published; never changed)
    """Two ranks' states as one: tensors end to end along dimension 0 (0-dimensional ones: the first), lists item
    by item, dicts key by key (a key of one of them stays), anything else from ``state_a``.

    ``key_list`` names where we are, for errors. Raises ValueError when types or lengths differ.
    """
    if type(state_a) is not type(state_b):
        raise ValueError(
            f"cannot merge {type(state_a).__name__} with {type(state_b).__name__} at {_where(key_list)}: the files do "
            "not belong together"
        )
    if isinstance(state_a, dict):
        return _merge_dicts(state_a, state_b, key_list)
    if isinstance(state_a, (list, tuple)) and not isinstance(state_a, torch.Size) and not hasattr(state_a, "_fields"):
        if len(state_a) != len(state_b):
            raise ValueError(
                f"cannot merge lists of {len(state_a)} and {len(state_b)} items at {_where(key_list)}: the files do "
                "not belong together"
            )
        items = [merge_state(a, b, [*key_list, str(i)]) for i, (a, b) in enumerate(zip(state_a, state_b, strict=True))]
        return type(state_a)(items)
    if torch.is_tensor(state_a):
        return torch.cat([state_a, state_b], dim=0) if state_a.dim() else state_a
    return state_a
