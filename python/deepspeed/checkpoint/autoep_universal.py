"""Experts that lie on different ranks, put together for a universal checkpoint.

A model file says under ``ds_autoep_layers`` what each such layer is: a list (or dict) of dicts with ``moe_layer_id``,
``module_path`` (the module that holds the experts), ``num_experts``, ``ep_size``, and ``expert_params`` (names of its
parameters below that module, which have one row for each expert).
"""

import os
import re

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import storage
from deepspeed.checkpoint.folding_metadata import make_folding_metadata, validate_folding_metadata  # noqa: F401
from deepspeed.checkpoint.saved_universal import STEP, ZERO_FOLDER
from deepspeed.checkpoint.universal_shards import shard_path

_LAYER_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")


def layers_of(metadata):
    """The layers' dicts, whether they came as a list or by name."""
    return list(metadata.values()) if isinstance(metadata, dict) else list(metadata or ())


def metadata_of(model):
    """What a model file says, under the current key or the older one; None without."""
    found = model.get(keys.AUTOEP_LAYERS_KEY)
    return found if found is not None else model.get(keys.AUTOEP_LAYERS_KEY_LEGACY)


def expert_names_of(layer):
    """Full names of the parameters of a layer that have one row for each expert."""
    prefix = layer.get("module_path", "")
    return [f"{prefix}.{name}" if prefix else name for name in layer.get("expert_params", ())]


def _uses_zero3_partitioned_autoep_metadata(autoep_metadata):
    """Whether any layer's experts were saved as slices of ZeRO stage 3."""
    return any(
        layer.get(keys.AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY) == keys.AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT
        for layer in layers_of(autoep_metadata)
        if isinstance(layer, dict)
    )


def _aggregate_autoep_zero12_metadata(model_state_metadata):
    """One list of layers of what all model files say. Raises ValueError where two say different things of a layer."""
    found = {}
    for metadata in model_state_metadata:
        for layer in layers_of(metadata):
            place = (layer.get("module_path"), layer.get("moe_layer_id"))
            if place in found and found[place] != layer:
                raise ValueError(
                    f"two model files describe the expert layer {place[0]} differently: {found[place]} and {layer}. "
                    "They are of different checkpoints"
                )
            found[place] = layer
    return list(found.values())


def _autoep_expert_param_names_by_rank(model_files):
    """For each model file the set of names of its parameters that have one row for each expert."""
    return [
        {name for layer in layers_of(metadata_of(storage.read(path, lazy=True))) for name in expert_names_of(layer)}
        for path in model_files
    ]


def _zero12_fragment_path(temp_dir, param_name, state_name, dp_rank):
    """Where the shard of a data-parallel rank of stage 1 or 2 waits."""
    return shard_path(temp_dir, param_name, 0, state_name, dp_rank)


def _save(output_dir, name, state, value, experts):
    folder = os.path.join(output_dir, ZERO_FOLDER, name)
    os.makedirs(folder, exist_ok=True)
    hints = {keys.CAT_DIM: 0, keys.EP_IS_EXPERT_PARAM: True, keys.EP_NUM_EXPERTS: experts}
    storage.write({keys.PARAM: storage.compact(value), **hints}, os.path.join(folder, f"{state}.pt"))


def consolidate_autoep_expert_files(checkpoint_dir, output_dir, autoep_layers_metadata):
    """Joins ``layer_L_expert_E_mp_rank_RR_model_states.pt`` into ``zero/<parameter>/fp32.pt`` below ``output_dir``, one
    row for each expert. Raises FileNotFoundError that names the experts without a file."""
    files = {}
    for name in os.listdir(checkpoint_dir):
        match = _LAYER_EXPERT.fullmatch(name)
        if match and int(match.group(3)) == 0:
            files[int(match.group(1)), int(match.group(2))] = os.path.join(checkpoint_dir, name)
    for layer in layers_of(autoep_layers_metadata):
        number, count = layer["moe_layer_id"], layer["num_experts"]
        missing = [expert for expert in range(count) if (number, expert) not in files]
        if missing:
            raise FileNotFoundError(
                f"{checkpoint_dir} has no files of the experts {missing} of MoE layer {number} "
                f"({layer.get('module_path')})"
            )
        states = [storage.read(files[number, expert], lazy=True) for expert in range(count)]
        for name in _keys_of(states, layer):
            rows = [_read(_value(state, name)) for state in states]
            _save(output_dir, name, keys.FP32_WEIGHT_KEY, torch.stack(rows).float(), count)


def _keys_of(states, layer):
    return expert_names_of(layer) or [name for name, value in states[0].items() if hasattr(value, "shape")]


def _value(state, name):
    """An expert's tensor: under the parameter's name, or under its last part."""
    for key in (name, name.rsplit(".", 1)[-1]):
        if key in state:
            return state[key]
    raise ValueError(f"an expert's file has no '{name}'; it has {sorted(state)}")


def _read(value):
    return value.read() if hasattr(value, "read_range") else value


def consolidate_autoep_zero12_expert_states(
    temp_dir, output_dir, expert_param_info, slice_shapes, dp_degree, tp_degree, use_data_before_expert_parallel
):
    """Joins the shards of parameters with experts: first of the ranks that share an expert, then of the experts.

    ``expert_param_info``: name -> dict with ``ep_size`` and ``num_experts``; ``slice_shapes``: name -> shape of what one
    expert-parallel rank has. ``use_data_before_expert_parallel``: ranks of one expert lie side by side, instead of
    ``ep_size`` apart. Raises ValueError for shards that do not add up.
    """
    for name, info in expert_param_info.items():
        ep_size = info.get("ep_size", 1)
        if dp_degree % ep_size:
            raise ValueError(f"parameter '{name}': {dp_degree} data-parallel ranks do not hold {ep_size} parts of experts")
        for state in _states_of(temp_dir, name, dp_degree):
            parts = []
            for ep_rank in range(ep_size):
                ranks = _ranks_of(ep_rank, ep_size, dp_degree, use_data_before_expert_parallel)
                paths = [_zero12_fragment_path(temp_dir, name, state, rank) for rank in ranks]
                parts.append([storage.read(path) for path in paths if os.path.exists(path)])
            if state == STEP:
                folder = os.path.join(output_dir, ZERO_FOLDER, name)
                os.makedirs(folder, exist_ok=True)
                storage.write(parts[0][0], os.path.join(folder, f"{STEP}.pt"))
                continue
            whole = [_joined(name, state, part, slice_shapes[name]) for part in parts]
            _save(output_dir, name, state, torch.cat(whole), info.get("num_experts", whole[0].shape[0] * ep_size))


def _ranks_of(ep_rank, ep_size, dp_degree, data_before_expert):
    copies = dp_degree // ep_size
    return range(ep_rank * copies, (ep_rank + 1) * copies) if data_before_expert else range(ep_rank, dp_degree, ep_size)


def _states_of(temp_dir, name, dp_degree):
    folder = os.path.dirname(_zero12_fragment_path(temp_dir, name, STEP, 0))
    found = {file.rsplit(".", 1)[0] for file in os.listdir(folder) if file.rsplit(".", 1)[-1].isdigit()}
    return sorted(found)


def _joined(name, state, shards, shape):
    flat = torch.cat([shard.reshape(-1) for shard in shards]) if shards else torch.zeros(0)
    if flat.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"the shards of {state} of parameter '{name}' have {flat.numel()} elements, a rank's part has "
            f"{torch.Size(shape).numel()}: shards are missing"
        )
    return flat.reshape(tuple(shape))
