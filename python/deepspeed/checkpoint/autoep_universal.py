"""Experts that lie on different ranks, put together for a universal checkpoint.

A model file says under ``ds_autoep_layers`` what each such layer is: a list (or dict) of dicts with ``moe_layer_id``,
``module_path`` (the module that holds the experts), ``num_experts``, ``ep_size``, and ``expert_params`` (names of its
parameters below that module, which have one row for each expert).
"""

import glob
import os

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.layouts.names import (
    EXPERT_STATES,
    STEP,
    ZERO_FOLDER,
    natural_key,
    shard_path,
    state_path,
)
from deepspeed.checkpoint.layouts.saved_state import eager
from deepspeed.checkpoint.read.loading import listed
from deepspeed.checkpoint.write.file_writer import PreparedTorch, WriterOptions, replace_file

# ---- folding metadata ----------------------------------------------------------------------------------------------
# The ``folding`` key of an optimizer file: the grid of a run whose experts are on other ranks than its dense layers.
# It is compared before such a file is loaded.

SHARED_EXPERTS_ON_TP_RANKS = "tensor_parallel"
DISPATCH_ALL_TO_ALL = "all_to_all"


def make_folding_metadata(
    *,
    tp_size,
    tp_rank,
    ep_size,
    ep_rank,
    zero_partition_group,
    zero_partition_rank,
    zero_partition_count,
    family,
    param_families=None,
):
    """The dict that is saved. ``zero_partition_*``: the ranks that share the file's states, and which one wrote it;
    ``family``: which kind of parameters it has; ``param_families``: dict name of a parameter -> its kind."""
    return {
        keys.FOLDING_TP_SIZE: tp_size,
        keys.FOLDING_TP_RANK: tp_rank,
        keys.FOLDING_EP_SIZE: ep_size,
        keys.FOLDING_EP_RANK: ep_rank,
        keys.FOLDING_ETP_SIZE: 1,
        keys.FOLDING_ETP_RANK: 0,
        keys.FOLDING_ZERO_PARTITION_GROUP: list(zero_partition_group)
        if isinstance(zero_partition_group, (list, tuple))
        else zero_partition_group,
        keys.FOLDING_ZERO_PARTITION_RANK: zero_partition_rank,
        keys.FOLDING_ZERO_PARTITION_COUNT: zero_partition_count,
        keys.FOLDING_FAMILY: family,
        keys.FOLDING_PARAM_FAMILIES: dict(param_families or {}),
        keys.FOLDING_SHARED_EXPERT_PLACEMENT: SHARED_EXPERTS_ON_TP_RANKS,
        keys.FOLDING_DISPATCH_STRATEGY: DISPATCH_ALL_TO_ALL,
    }


def validate_folding_metadata(
    metadata,
    *,
    tp_size,
    ep_size,
    etp_size=1,
    tp_rank=None,
    ep_rank=None,
    etp_rank=None,
    zero_partition_group=None,
    zero_partition_rank=None,
    zero_partition_count=None,
    family=None,
    param_families=None,
    shared_expert_placement=None,
    dispatch_strategy=None,
):
    """Raises ValueError that names every key in which ``metadata`` differs from the arguments; None is not compared."""
    if not isinstance(metadata, dict):
        raise ValueError(f"the optimizer file has no '{keys.FOLDING_METADATA_KEY}': its grid of ranks is not known")
    wanted = {
        keys.FOLDING_TP_SIZE: tp_size,
        keys.FOLDING_EP_SIZE: ep_size,
        keys.FOLDING_ETP_SIZE: etp_size,
        keys.FOLDING_TP_RANK: tp_rank,
        keys.FOLDING_EP_RANK: ep_rank,
        keys.FOLDING_ETP_RANK: etp_rank,
        keys.FOLDING_ZERO_PARTITION_GROUP: zero_partition_group,
        keys.FOLDING_ZERO_PARTITION_RANK: zero_partition_rank,
        keys.FOLDING_ZERO_PARTITION_COUNT: zero_partition_count,
        keys.FOLDING_FAMILY: family,
        keys.FOLDING_PARAM_FAMILIES: param_families,
        keys.FOLDING_SHARED_EXPERT_PLACEMENT: shared_expert_placement,
        keys.FOLDING_DISPATCH_STRATEGY: dispatch_strategy,
    }
    problems = [
        f"{key} is {repr(metadata[key]) if key in metadata else 'missing'}, this run has {value!r}"
        for key, value in wanted.items()
        if value is not None and listed(metadata.get(key)) != listed(value)
    ]
    if problems:
        raise ValueError(f"the optimizer file was saved by another grid of ranks: {'; '.join(problems)}")


# ---- universal shards ----------------------------------------------------------------------------------------------
# The shards that a conversion to a universal checkpoint puts down below ``tmp/``: written one by one, joined later.
# Values are flat.


def save_state(zero_dir, name, state, value):
    """Writes the whole ``state`` of the parameter ``name``. Returns its record."""
    path = state_path(zero_dir, name, state)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return replace_file(PreparedTorch(value), path)


def write_shard(temp_dir, name, tp_index, state, dp_index, value):
    """``value``: a tensor, which is flattened, or a number."""
    path = shard_path(temp_dir, name, tp_index, state, dp_index)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    value = value.detach().reshape(-1) if torch.is_tensor(value) and value.dim() else value
    # Shards are small, and are removed when the conversion is done.
    replace_file(PreparedTorch(value), path, WriterOptions(threads=1, direct=False, sync=False))


def states_below(*folders):
    """Names of the states of which there are shards in any of these folders."""
    found = (file.rsplit(".", 1) for folder in folders for file in os.listdir(folder))
    return sorted({state for state, *number in found if number and number[0].isdigit()})


def _shape_of(slice_shapes, tp_index):
    """``slice_shapes``: one shape for all ranks, a list with one for each, or None."""
    is_one = slice_shapes is None or all(isinstance(size, int) for size in slice_shapes)
    found = slice_shapes if is_one else slice_shapes[tp_index]
    return None if found is None else torch.Size(found)


def merge_zero_shards(param_base_path, state, tp_degree, slice_shapes=None):
    """The slices of a parameter's ``state``, one for each tensor-parallel rank that has shards of it.

    They are flat without ``slice_shapes``. Numbers (steps) must be the same in all shards. Raises ValueError where
    shards do not add up to the shape.
    """
    slices = []
    for tp_index in range(tp_degree):
        found = glob.glob(os.path.join(glob.escape(os.path.join(param_base_path, str(tp_index), state)) + ".*"))
        paths = sorted((path for path in found if path.rsplit(".", 1)[1].isdigit()), key=natural_key)
        if not paths:
            continue
        shards = [storage.read(path) for path in paths]
        if state == STEP or not torch.is_tensor(shards[0]) or not shards[0].dim():
            first = shards[0]
            for value, path in zip(shards, paths, strict=True):
                if not bool(torch.all(torch.as_tensor(value) == torch.as_tensor(first))):
                    raise ValueError(f"{path} has {value}, {paths[0]} has {first}: ranks of one run have equal ones")
            slices.append(first)
            continue
        shape = _shape_of(slice_shapes, tp_index)
        what = f"the {len(shards)} shards {os.path.join(param_base_path, str(tp_index), state)}.*"
        has = shape and f"the parameter has {shape.numel()}, shape {tuple(shape)}"
        slices.append(_joined(shards, shape, what, has))
    return slices


def _joined(shards, shape, what, has):
    """Shards end to end in ``shape``, flat where that is None. ``what`` says of which shards, ``has`` the shape."""
    flats = [shard.reshape(-1) for shard in shards] or [torch.zeros(0)]
    flat = flats[0] if len(flats) == 1 else torch.cat(flats)
    if shape is not None and torch.Size(shape).numel() != flat.numel():
        raise ValueError(f"{what} have {flat.numel()} elements, {has}: shards are missing")
    return flat if shape is None else flat.reshape(tuple(shape))


# ---- autoep universal ----------------------------------------------------------------------------------------------


def layers_of(metadata):
    """The layers' dicts, whether they came as a list or by name."""
    return list(metadata.values()) if isinstance(metadata, dict) else list(metadata or ())


def metadata_of(model):
    """The value in a model file under the current key or the older one; None without."""
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
            key = (layer.get("module_path"), layer.get("moe_layer_id"))
            if key in found and found[key] != layer:
                raise ValueError(
                    f"two model files describe the expert layer {key[0]} differently: {found[key]} and {layer}. "
                    "They are of different checkpoints"
                )
            found[key] = layer
    return list(found.values())


def _autoep_expert_param_names_by_rank(model_files):
    """For each model file the set of names of its parameters that have one row for each expert."""
    return [
        {name for layer in layers_of(metadata_of(storage.read(path, lazy=True))) for name in expert_names_of(layer)}
        for path in model_files
    ]


def _zero12_fragment_path(temp_dir, param_name, state_name, dp_rank):
    """The path at which the shard of a data-parallel rank of stage 1 or 2 waits."""
    return shard_path(temp_dir, param_name, 0, state_name, dp_rank)


def _save(output_dir, name, state, value, experts):
    hints = {keys.CAT_DIM: 0, keys.EP_IS_EXPERT_PARAM: True, keys.EP_NUM_EXPERTS: experts}
    save_state(os.path.join(output_dir, ZERO_FOLDER), name, state, {keys.PARAM: value, **hints})


def consolidate_autoep_expert_files(checkpoint_dir, output_dir, autoep_layers_metadata):
    """Joins ``layer_L_expert_E_mp_rank_RR_model_states.pt`` into ``zero/<parameter>/fp32.pt`` below ``output_dir``, one
    row for each expert. Raises FileNotFoundError that names the experts without a file."""
    files = {
        (known["layer"], known["expert"]): os.path.join(checkpoint_dir, name)
        for name, known in EXPERT_STATES.found_in(checkpoint_dir).items()
        if known["mp_rank"] == 0
    }
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
            rows = [eager(_value(state, name)) for state in states]
            _save(output_dir, name, keys.FP32_WEIGHT_KEY, torch.stack(rows).float(), count)


def _keys_of(states, layer):
    return expert_names_of(layer) or [name for name, value in states[0].items() if hasattr(value, "shape")]


def _value(state, name):
    """An expert's tensor: under the parameter's name, or under its last part."""
    for key in (name, name.rsplit(".", 1)[-1]):
        if key in state:
            return state[key]
    raise ValueError(f"an expert's file has no '{name}'; it has {sorted(state)}")


def consolidate_autoep_zero12_expert_states(
    temp_dir, output_dir, expert_param_info, slice_shapes, dp_degree, tp_degree, use_data_before_expert_parallel
):
    """Joins the shards of parameters with experts: first of the ranks that share an expert, then of the experts.

    ``expert_param_info``: name -> dict with ``ep_size`` and ``num_experts``; ``slice_shapes``: name -> shape of what
    one expert-parallel rank has. ``use_data_before_expert_parallel``: ranks of one expert lie side by side, instead of
    ``ep_size`` apart. Raises ValueError for shards that do not add up.
    """
    for name, info in expert_param_info.items():
        ep_size = info.get("ep_size", 1)
        if dp_degree % ep_size:
            raise ValueError(f"parameter '{name}': {dp_degree} data-parallel ranks do not hold {ep_size} parts")
        for state in states_below(os.path.dirname(shard_path(temp_dir, name, 0, STEP, 0))):
            parts = []
            for ep_rank in range(ep_size):
                ranks = _ranks_of(ep_rank, ep_size, dp_degree, use_data_before_expert_parallel)
                paths = [_zero12_fragment_path(temp_dir, name, state, rank) for rank in ranks]
                parts.append([storage.read(path) for path in paths if os.path.exists(path)])
            if state == STEP:
                save_state(os.path.join(output_dir, ZERO_FOLDER), name, STEP, parts[0][0])
                continue
            what, has = f"the shards of {state} of parameter '{name}'", torch.Size(slice_shapes[name]).numel()
            whole = [_joined(part, slice_shapes[name], what, f"a rank's part has {has}") for part in parts]
            _save(output_dir, name, state, torch.cat(whole), info.get("num_experts", whole[0].shape[0] * ep_size))


def _ranks_of(ep_rank, ep_size, dp_degree, data_before_expert):
    copies = dp_degree // ep_size
    return range(ep_rank * copies, (ep_rank + 1) * copies) if data_before_expert else range(ep_rank, dp_degree, ep_size)
