"""The shards that a conversion to a universal checkpoint puts down below ``tmp/``: written one by one, joined later.

``<parameter>/<tensor-parallel rank>/<state>.<data-parallel rank>``; values are flat.
"""

import glob
import os

import torch

from deepspeed.checkpoint import storage
from deepspeed.checkpoint.reshape_utils import natural_key
from deepspeed.checkpoint.saved_universal import STEP


def shard_path(temp_dir, name, tp_index, state, dp_index):
    return os.path.join(temp_dir, name, str(tp_index), f"{state}.{dp_index:02d}")


def write_shard(temp_dir, name, tp_index, state, dp_index, value):
    """``value``: a tensor, which is flattened, or a number."""
    path = shard_path(temp_dir, name, tp_index, state, dp_index)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    storage.write(storage.compact(value.reshape(-1)) if torch.is_tensor(value) and value.dim() else value, path)


def shards_of(param_base_path, state, tp_index):
    """Paths of the shards of a slice in the order of their ranks."""
    found = glob.glob(os.path.join(glob.escape(os.path.join(param_base_path, str(tp_index), state)) + ".*"))
    return sorted((path for path in found if path.rsplit(".", 1)[1].isdigit()), key=natural_key)


def _shape_of(slice_shapes, tp_index):
    """``slice_shapes``: one shape for all ranks, a list with one for each, or None."""
    if slice_shapes is None or isinstance(slice_shapes, torch.Size):
        return slice_shapes
    if all(isinstance(size, int) for size in slice_shapes):
        return torch.Size(slice_shapes)
    return torch.Size(slice_shapes[tp_index])


def merge_zero_shards(param_base_path, state, tp_degree, slice_shapes=None):
    """The slices of a parameter's ``state``, one for each tensor-parallel rank that has shards of it.

    They are flat without ``slice_shapes``. Numbers (steps) must be the same in all shards. Raises ValueError where
    shards do not add up to the shape.
    """
    slices = []
    for tp_index in range(tp_degree):
        paths = shards_of(param_base_path, state, tp_index)
        if not paths:
            continue
        shards = [storage.read(path) for path in paths]
        if state == STEP or not torch.is_tensor(shards[0]) or not shards[0].dim():
            _check_equal(shards, paths)
            slices.append(shards[0])
            continue
        flat = shards[0].reshape(-1) if len(shards) == 1 else torch.cat([shard.reshape(-1) for shard in shards])
        shape = _shape_of(slice_shapes, tp_index)
        if shape is not None and shape.numel() != flat.numel():
            raise ValueError(
                f"the {len(shards)} shards {os.path.join(param_base_path, str(tp_index), state)}.* have {flat.numel()} "
                f"elements, the parameter has {shape.numel()}, shape {tuple(shape)}: shards are missing"
            )
        slices.append(flat if shape is None else flat.reshape(shape))
    return slices


def _check_equal(values, paths):
    for value, path in zip(values, paths, strict=True):
        if not bool(torch.all(torch.as_tensor(value) == torch.as_tensor(values[0]))):
            raise ValueError(f"{path} has {value}, {paths[0]} has {values[0]}: ranks of one run have equal ones")
