#!/usr/bin/env python
"""Consolidates a ZeRO checkpoint (stage 1, 2 or 3) into fp32 weights, on the CPU, without a configuration.

    python zero_to_fp32.py <checkpoint_dir> <output_dir> [--max_shard_size 5GB] [--safe_serialization]
                           [-t TAG] [--exclude_frozen_parameters] [-d]

The weights are streamed: memory does not grow with the model. Files are read without running code that they may hold.
"""

import argparse
import dataclasses
import itertools
import math
import os
import re

import torch

from deepspeed.formats.coded_weight import decoded_weights
from deepspeed.formats.joined_weight import join_weights
from deepspeed.formats.lazy_tensor import LazyTensor
from deepspeed.formats.swapped_tensors import with_swapped
from deepspeed.formats.torch_archive import load
from deepspeed.formats.weight_files import StoredWeight, write_weight_files
from deepspeed.utils.zero_files import (  # noqa: F401 (scripts import them from here)
    _tag_folder,
    atoi,
    get_checkpoint_files,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
    natural_keys,
)

debug = 0
device = torch.device("cpu")


@dataclasses.dataclass
class zero_model_state:
    """The contents of one model file. buffers and frozen_param_fragments: name -> tensor; param_shapes: a list of dicts
    name -> shape, one for each group; shared_params: list of [alias, name]; frozen_param_shapes: name -> shape."""

    buffers: dict()
    param_shapes: dict()
    shared_params: list
    ds_version: int
    frozen_param_shapes: dict()
    frozen_param_fragments: dict()
    plain_params: dict = dataclasses.field(default_factory=dict)


class GatheredTensor(StoredWeight):
    """A parameter of stage 3, in a slice of ``partitioned_numel`` elements per rank.

    flat_groups: for each rank its flat tensors. flat_groups_offset: where each of them begins in the rank's
    concatenation, and the end. offset: of the slice in that concatenation. shape: of the whole parameter.
    """

    def __init__(self, flat_groups, flat_groups_offset, offset, partitioned_numel, shape):
        self.flat_groups, self.flat_groups_offset = flat_groups, flat_groups_offset
        self.offset, self.partitioned_numel = offset, partitioned_numel
        pieces, left = [], torch.Size(shape).numel()
        for groups in flat_groups:
            pieces += _cut(groups, offset, min(partitioned_numel, left))
            left -= min(partitioned_numel, left)
        super().__init__(pieces, shape, flat_groups[0][0].dtype)


def _cut(tensors, offset, numel):
    """The pieces of a ``StoredWeight``, ``numel`` elements from ``offset`` on in the concatenation of ``tensors``."""
    pieces, first = [], 0
    for tensor in tensors:
        low, high = max(offset, first), min(offset + numel, first + tensor.numel())
        if low < high:
            pieces.append((tensor, low - first, high - low))
        first += tensor.numel()
    return pieces


NAMES_OF_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


# ---- what they say -------------------------------------------------------------------------------------------------
def _real(value):
    return value.read() if isinstance(value, LazyTensor) else value


def _parse_model_file(path):
    state = load(path, lazy=True)
    if not isinstance(state, dict) or "buffer_names" not in state:
        raise ValueError(f"{path} is not a model state checkpoint")
    module, shapes = state.get("module") or {}, state.get("param_shapes") or []
    shapes = [shapes] if isinstance(shapes, dict) else list(shapes)
    buffers = {name: module[name] for name in state["buffer_names"] if name in module}
    shared = dict(state.get("shared_params") or {})
    trained = {name for group in shapes for name in group}
    rest = {
        name: value
        for name, value in module.items()
        if isinstance(value, LazyTensor) and name not in buffers and name not in trained and name not in shared
    }
    return zero_model_state(
        buffers=buffers,
        param_shapes=shapes,
        shared_params=[[alias, name] for alias, name in shared.items()],
        ds_version=state.get("ds_version"),
        frozen_param_shapes=state.get("frozen_param_shapes"),
        frozen_param_fragments=state.get("frozen_param_fragments"),
        plain_params=rest,
    )


def parse_model_states(files):
    """A ``zero_model_state`` for each file. ValueError for a file that is no model file."""
    states = [_parse_model_file(path) for path in files]
    for state in states:
        for values in (state.buffers, state.frozen_param_fragments or {}, state.plain_params):
            values.update({name: _real(value) for name, value in values.items()})
    return states


def _parse_optim_files(files, ds_checkpoint_dir):
    """(stage, ranks, for each rank its flat LazyTensors, for each rank what it has by name)."""
    parts = []
    for path in files:
        state = load(path, lazy=True)
        part = state.get("optimizer_state_dict") if isinstance(state, dict) else None
        if not isinstance(part, dict) or "zero_stage" not in part:
            raise ValueError(f"{path} is not a zero checkpoint: it has no key zero_stage")
        parts.append(with_swapped(path, state, load))
    stage, ranks = int(parts[0]["zero_stage"]), parts[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, (list, tuple)) else ranks
    if ranks != len(files):
        raise ValueError(
            f"Expected {ranks} of '*_optim_states.pt' under '{ds_checkpoint_dir}' but found {len(files)} files. "
            "Possibly due to an overwrite of an old checkpoint, or a checkpoint didn't get saved by one or more "
            "processes."
        )
    if stage not in (1, 2, 3):
        raise ValueError(f"unknown zero stage {stage}: 1, 2 and 3 can be consolidated")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for path, part in zip(files, parts):
        if key not in part:
            raise ValueError(f"{path} has no key {key}, which a checkpoint of stage {stage} has")
    return stage, ranks, [list(part[key]) for part in parts], [part.get("own_params") for part in parts]


def parse_optim_states(files, ds_checkpoint_dir):
    """(ZeRO stage, number of ranks, for each rank the list of its flat fp32 tensors). ValueError for other files, or
    when there are not as many as ranks."""
    stage, ranks, flats, _ = _parse_optim_files(files, ds_checkpoint_dir)
    return stage, ranks, [[_real(flat) for flat in rank] for rank in flats]


def _raise_if_autoep_zero3_partitioned_checkpoint(model_files):
    for path in model_files:
        state = load(path, lazy=True)
        if isinstance(state, dict) and (state.get("ds_autoep_layers") or state.get("autoep_layers")):
            raise NotImplementedError(
                f"{path} is of a model with AutoEP layers at ZeRO stage 3: their experts are partitioned among groups "
                "of ranks, which zero_to_fp32 cannot consolidate; load the checkpoint into an engine and save it there"
            )


# ---- the weights ---------------------------------------------------------------------------------------------------
def _fp32(runs, shape, dtype):  # numbers that are not floating point (counters, masks) stay what they are
    return StoredWeight(runs, shape, torch.float32 if dtype.is_floating_point else dtype)


def _of_one_piece(value):
    return _fp32([(value, 0, value.numel())], value.shape, value.dtype)


def _frozen(states, stage):
    """name -> weight of parameters that are not trained."""
    first, found = states[0], {}
    shapes, fragments = first.frozen_param_shapes or {}, first.frozen_param_fragments or {}
    if stage == 3:
        for name, shape in shapes.items():
            parts = [(state.frozen_param_fragments or {})[name] for state in states]
            found[name] = _fp32(_cut(parts, 0, torch.Size(shape).numel()), shape, parts[0].dtype)
        return found
    for name in shapes:
        if name not in fragments:
            raise ValueError(f"the frozen parameter '{name}' has a shape in the model file, but no values")
        found[name] = _of_one_piece(fragments[name])
    for name, value in first.plain_params.items():  # stage 1 has them in the module only
        found.setdefault(name, _of_one_piece(value))
    return found


def _flat_weights(param_shapes, ranks, flats):
    """Stages 1 and 2: a group is one flat tensor, cut into a shard per rank wherever the cut falls."""
    found = {}
    for group, shapes in enumerate(param_shapes):
        shards = [rank[group] for rank in flats]
        held, offset = sum(shard.numel() for shard in shards), 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            if offset + numel > held:
                raise ValueError(f"group {group} has {held} elements, too few for parameter '{name}' at {offset}")
            found[name] = StoredWeight(_cut(shards, offset, numel), shape, torch.float32)
            offset += numel
        unit = 2 * ranks  # older versions padded the group to it
        if math.ceil(offset / unit) != math.ceil(held / unit):
            raise ValueError(f"consumed {offset} numels out of {held} - something is wrong")
    return found


def zero3_partitioned_param_info(unpartitioned_numel, world_size):
    """(elements of each rank's slice, padding of the last ones together)."""
    partitioned_numel = math.ceil(unpartitioned_numel / world_size)
    return partitioned_numel, (world_size - unpartitioned_numel % world_size) % world_size


def _sliced_weights(param_shapes, ranks, flats):
    """Stage 3: every parameter is cut into a slice per rank; a rank's slices follow each other in its flat tensors."""
    begins, found, offset = list(itertools.accumulate((flat.numel() for flat in flats[0]), initial=0)), {}, 0
    for rank, groups in enumerate(flats):
        if [g.numel() for g in groups] != [g.numel() for g in flats[0]]:
            raise ValueError(f"the flat groups of rank {rank} are not as long as those of rank 0")
    for shapes in param_shapes:
        for name, shape in shapes.items():
            numel = zero3_partitioned_param_info(torch.Size(shape).numel(), ranks)[0]
            if offset + numel > begins[-1]:
                raise ValueError(
                    f"the ranks have {begins[-1]} elements each, too few for parameter '{name}' at {offset}"
                )
            found[name] = GatheredTensor(flats, begins, offset, numel, shape)
            offset += numel
    if offset != begins[-1]:
        raise ValueError(f"consumed {offset * ranks} numels out of {begins[-1] * ranks} - something is wrong")
    return found


def _named_weights(parts, takes):
    """Parameters that only some ranks train, experts: every rank has pieces of its own, by name and first element.
    Those for whose name ``takes`` is true."""
    found, shapes, strides, weights = {}, {}, {}, {}
    for part in filter(None, parts):
        pieces = part["tensors"].get("fp32") or {}
        for name in filter(takes, pieces):
            shapes[name] = torch.Size(part["parameters"][name]["shape"])
            found.setdefault(name, {}).update(pieces[name])
        strides.update(part["strides"])
    for name, pieces in found.items():
        runs = [(pieces[begin], 0, pieces[begin].numel()) for begin in sorted(pieces)]
        held = sum(numel for _, _, numel in runs)
        if held != shapes[name].numel():
            raise ValueError(f"the files have {held} of the {shapes[name].numel()} elements of parameter '{name}'")
        if name in strides:  # pieces in the order of memory
            flat = torch.cat([tensor.read() for tensor, _, _ in runs])
            runs = [(flat.as_strided(shapes[name], strides[name]), 0, held)]
        weights[name] = StoredWeight(runs, shapes[name], torch.float32)
    return weights


def _weights(checkpoint_dir, tag, exclude_frozen_parameters):
    """{name: StoredWeight} of a checkpoint, tied names with the same object."""
    folder = _tag_folder(checkpoint_dir, tag)
    print(f"Processing zero checkpoint '{folder}'")
    try:
        optim_files = get_optim_files(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}: it is not a ZeRO checkpoint (no optimizer file says its zero_stage). Saved without ZeRO, the "
            "weights are whole under the key 'module' of mp_rank_00_model_states.pt, or in slices under that of all "
            "mp_rank_* files: 'ds_ckpt export' writes whole ones"
        ) from error
    files = get_model_state_files(folder)
    experts = [path for path in files if re.search("expert_|frozen_rows_", os.path.basename(path))]
    files = [path for path in files if path not in experts]
    tables, coded = map(load(files[0], lazy=True).get, ("tensor_cuts", "quantized_params"))
    optims, models, experts = _by_stage(optim_files), _by_stage(files), _by_stage(experts)
    if tables is None and len(models) > 1 and not _is_pipeline(files[0]):
        raise ValueError(
            f"'{folder}' holds slices of {len(models)} model-parallel ranks and does not say how they are put "
            "together: convert it with ds_to_universal, which takes rules for that, or save the weights from the run "
            "with save_16bit_model"
        )
    tables, parsed = tables or {}, {rank: _parse_optim_files(optims[rank], folder) for rank in optims if rank in models}
    # Parts of experts that are not cut may lie on any rank.
    named = _named_weights([part for *_, parts in parsed.values() for part in parts], lambda name: name not in tables)
    found = []
    for rank, (stage, ranks, flats, parts) in parsed.items():
        own = {**named, **_named_weights(parts, tables.__contains__)}
        own = {name: own[name] for part in parts if part for name in part["parameters"]}
        files = models[rank], experts.get(rank, ())
        found.append(_weights_of(folder, stage, ranks, flats, own, *files, exclude_frozen_parameters))
    return decoded_weights(join_weights(found, tables, folder), coded, torch.float32)


def _is_pipeline(path):
    """Whether its model file says that stages of a pipeline, whose layers are no slices, have saved."""
    state = load(path, lazy=True)
    degrees, by_rank = (state.get(key) or {} for key in ("checkpoint_parallel_dimensions", "params_by_rank"))
    return degrees.get("tp_degree", 1) == 1 and "layers" in by_rank


def _by_stage(paths):
    """``{model-parallel rank: its files}``, in the order of the ranks."""
    found = {}
    for path in paths:
        found.setdefault(int(re.search(r"mp_rank_(\d+)_", os.path.basename(path))[1]), []).append(path)
    return dict(sorted(found.items()))


def _layer_files(folder, model_file):
    """name -> LazyTensor of what the files of a stage's layers have."""
    state = load(model_file, lazy=True)
    layers = (state.get("params_by_rank") or {}).get("layers") or {}
    ranks = (state.get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1)
    own = int(re.search(r"mp_rank_(\d+)_", os.path.basename(model_file))[1]) % ranks if layers else 0
    end = f"-model_{own:02d}-model_states.pt" if ranks > 1 else "-model_states.pt"
    return {
        f"{path}.{name}": value
        for layer, path in layers.items()
        for name, value in load(os.path.join(folder, f"layer_{layer:02d}{end}"), lazy=True).items()
    }


def _weights_of(folder, stage, ranks, flats, named, files, experts, exclude_frozen_parameters):
    """As ``_weights``, of one stage. ``named``: weights that its ranks have by name."""
    print(f"Detected checkpoint of type zero stage {stage}, world_size: {ranks}")
    if stage == 3:
        _raise_if_autoep_zero3_partitioned_checkpoint(files)
        if len(files) != ranks:
            raise ValueError(f"Expected {ranks} of '*_model_states.pt' under '{folder}' but found {len(files)} files")
    first, *_ = states = [_parse_model_file(path) for path in files]
    print(f"Parsing checkpoint created by deepspeed=={first.ds_version}")
    found = {name: _of_one_piece(value) for name, value in first.buffers.items()}
    if not exclude_frozen_parameters:
        found.update(_frozen(states, stage))
    merge = _sliced_weights if stage == 3 else _flat_weights
    trained = {**merge(first.param_shapes, ranks, flats), **named}
    found.update(trained)
    buffers = set(load(files[0], lazy=True)["buffer_names"])
    for state in [*(load(path, lazy=True) for path in experts), _layer_files(folder, files[0])]:
        for name in state.keys() if not exclude_frozen_parameters else state.keys() & buffers:
            if isinstance(state[name], LazyTensor):
                found.setdefault(name, _of_one_piece(state[name]))
    for alias, name in first.shared_params:
        if name in found:
            found[alias] = found[name]
    numel = sum(weight.numel() for weight in trained.values())
    print(f"Reconstructed fp32 state dict with {len(trained)} params {numel} elements")
    if debug:
        for name, weight in found.items():
            print(f"{name} full shape: {tuple(weight.shape)}, pieces: {len(weight.pieces)}")
    return found


def to_torch_tensor(state_dict, return_empty_tensor=False):
    """The tensors of a lazy state dict; tied names keep one tensor. ``return_empty_tensor``: shapes and dtypes only."""
    made = {}
    for weight in state_dict.values():
        if id(weight) not in made:
            made[id(weight)] = (
                torch.empty(weight.shape, dtype=weight.dtype) if return_empty_tensor else weight.contiguous()
            )
    return {name: made[id(weight)] for name, weight in state_dict.items()}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False
):
    """fp32 state dict of a checkpoint, on the CPU. ``tag``: the folder, by default what the file ``latest`` says.

    With ``lazy_mode`` the values stay in the files; ``value.contiguous()`` makes the tensor of one.
    Raises ValueError without tag and ``latest`` and for files that do not fit, FileNotFoundError without the folder.
    """
    weights = _weights(checkpoint_dir, tag, exclude_frozen_parameters)
    return weights if lazy_mode else to_torch_tensor(weights)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir,
    output_dir,
    max_shard_size="5GB",
    safe_serialization=False,
    tag=None,
    exclude_frozen_parameters=False,
):
    """Writes the fp32 weights of a checkpoint to ``output_dir``: pytorch_model.bin, or model.safetensors with
    ``safe_serialization``, or numbered files and an index when they are larger than ``max_shard_size``
    (None: one file).
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir,
    output_dir,
    dtype=torch.float32,
    max_shard_size="5GB",
    safe_serialization=False,
    tag=None,
    exclude_frozen_parameters=False,
):
    """As ``convert_zero_checkpoint_to_fp32_state_dict``, with floating-point weights in ``dtype``, a torch.dtype.
    Numbers that are not floating point (counters, masks) stay as they are."""
    if not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}: weights are written in a floating-point type such as torch.bfloat16")
    weights = _weights(checkpoint_dir, tag, exclude_frozen_parameters)
    for weight in weights.values():
        weight.dtype = dtype if weight.dtype.is_floating_point else weight.dtype
    for path in write_weight_files(weights, output_dir, max_shard_size, safe_serialization):
        print(f"Saved {NAMES_OF_DTYPES.get(dtype, dtype)} state dict to {path}")


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Puts the fp32 weights of a checkpoint into ``model``, which moves to the CPU and is returned. It is then no
    longer fit for the engine that trained it."""
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state_dict, strict=False)
    return model


def add_arguments(parser):
    """The command line of this script and of ``zero_to_torch``."""
    parser.add_argument("checkpoint_dir", help="the folder given to save_checkpoint, e.g. path/checkpoint-12")
    parser.add_argument("output_dir", help="where the weights go: pytorch_model.bin or model.safetensors, or shards")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file, like 5GB or 500MB (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of torch's format")
    parser.add_argument("-t", "--tag", default=None, help="e.g. global_step1; by default what the file 'latest' says")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="say more")
    return parser


def main(args=None):
    parser = argparse.ArgumentParser(description="Consolidates a ZeRO checkpoint into fp32 weights.")
    args = add_arguments(parser).parse_args(args)
    globals()["debug"] = int(args.debug)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
