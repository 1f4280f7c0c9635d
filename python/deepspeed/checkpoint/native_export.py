"""Weights of a checkpoint as files that every library reads: model.safetensors or pytorch_model.bin, in shards.

No engine, and no more memory than one chunk: elements go from the checkpoint's files to the new ones. Works for the
native format and for every other one that says the names of its parameters.
"""

import torch

from deepspeed.checkpoint.difference import open_any
from deepspeed.checkpoint.saved_state import Range
from deepspeed.utils.weight_files import StoredWeight, write_weight_files

_CHUNK_NUMEL = 4 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SavedWeight(StoredWeight):
    """``pieces``: (reader, first element, numel) with readers of a ``SavedState``."""

    def _parts(self):
        for reader, start, numel in self.pieces:
            if callable(getattr(reader, "source", None)):
                reader = Range(reader.source(), reader.base)  # once for all chunks
            for at in range(start, start + numel, _CHUNK_NUMEL):
                yield reader.read_range(at, min(_CHUNK_NUMEL, start + numel - at))


def weights_of(saved, dtype=torch.float32, exclude_frozen_parameters=False):
    """``{name: SavedWeight}`` of a ``SavedState``, in the order of the module's state; tied names with the same object.

    Trained parameters come from the fp32 masters where there are some; parameters become ``dtype``. Buffers stay what
    they are; those of fewer bits become fp32 if ``dtype`` is that. ValueError for a parameter that is not there whole.
    """
    trained, aliases, module = saved.shapes(), saved.aliases(), saved.module()
    buffers = set(saved.model.get("buffer_names") or ())
    made, found = {}, {}
    for name in dict.fromkeys([*(saved.model.get("module") or ()), *trained]):
        known = aliases.get(name, name)
        if exclude_frozen_parameters and known not in trained and known not in buffers:
            continue
        shape = saved.weight_shape(known)
        if known not in made and shape is not None:
            pieces = (saved.pieces(known, "fp32") if known in trained else ()) or saved.pieces(known, "weight")
            made[known] = _weight(saved, known, shape, pieces, dtype, known in buffers, module)
        if known in made:
            found[name] = made[known]
    return found


def _weight(saved, name, shape, pieces, dtype, is_buffer, module):
    if name in module:
        own = module[name].dtype
    else:
        own = pieces[0][2].read_range(0, 0).dtype if pieces else torch.float32
    if not own.is_floating_point or (is_buffer and dtype != torch.float32):
        dtype = own
    if is_buffer and own == torch.float64:
        dtype = own
    end = 0
    for begin, numel, _ in pieces:
        if begin != end:
            break
        end += numel
    if end != torch.Size(shape).numel():
        raise ValueError(
            f"{saved.origin()} has {end} of the {torch.Size(shape).numel()} elements of '{name}' in one run: files are "
            "missing"
        )
    return SavedWeight([(reader, 0, numel) for _, numel, reader in pieces], shape, dtype)


def export(
    checkpoint_dir,
    output_dir,
    tag=None,
    dtype="fp32",
    max_shard_size="5GB",
    safe_serialization=True,
    exclude_frozen_parameters=False,
):
    """Writes the weights of a checkpoint to ``output_dir`` and returns the files: model.safetensors, or numbered ones
    and an index when that is larger than ``max_shard_size``; pytorch_model.bin without ``safe_serialization``.

    checkpoint_dir: what save_checkpoint was given, or the folder of a tag. tag: by default what ``latest`` says.
    dtype: "fp32", "bf16" or "fp16", of the parameters.
    Raises FileNotFoundError without a checkpoint, ValueError for one whose weights are slices of model-parallel ranks.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} is none of {', '.join(DTYPES)}")
    saved = open_any(checkpoint_dir, tag)
    ranks = saved.model.get("mp_world_size", 1)
    if ranks > 1:
        raise ValueError(
            f"{saved.origin()} holds slices of {ranks} model-parallel ranks: join them with ds_to_universal first, "
            "which knows the rules, and export its result"
        )
    weights = weights_of(saved, DTYPES[dtype], exclude_frozen_parameters)
    if not weights:
        raise ValueError(f"{saved.origin()} has no weights to export")
    return write_weight_files(weights, output_dir, max_shard_size, safe_serialization)
