"""What a checkpoint in the native format holds of an engine: tensors in safetensors files, all else in JSON.

A rank's files are made from what it owns; the only collective is the agreement that every value can be written.
"""

import dataclasses
import json
import math
import types

import torch

from deepspeed import comm as dist
from deepspeed._compat import named_parameters
from deepspeed.checkpoint.layouts import names, saved_native
from deepspeed.checkpoint.layouts.names import key_of
from deepspeed.checkpoint.layouts.saved_native import NotPlain
from deepspeed.checkpoint.read.weights import names_of_groups, run_states
from deepspeed.checkpoint.write import engine_states
from deepspeed.checkpoint.write.engine_states import counters_of
from deepspeed.checkpoint.write.file_writer import SAFETENSORS_NAMES, PreparedBytes, PreparedSafetensors, is_plain
from deepspeed.checkpoint.write.ranks import Ranks, failure_of, raise_together
from deepspeed.checkpoint.write.shared_file import Digest, FrozenFile
from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.version import __version__
from deepspeed.zero.flat_layout import per_element
from deepspeed.zero.sharded_parameter import is_sharded
from deepspeed.zero.wrapped_optimizer import WrappedOptimizer

# ---- native tensors ------------------------------------------------------------------------------------------------
# Which tensors a rank saves in the native format. No collective: what a rank owns is known, and views of it are
# handed out. Where several ranks own the same (stage 0, MiCS), they share the writing, by bytes.


@dataclasses.dataclass
class Owned:
    """What this rank saves of what is trained. ``tensors``: by key. ``scalars``: name of a parameter -> its states that
    have no value for each element. ``strides``: name -> strides of a parameter whose pieces are in memory order."""

    tensors: dict
    scalars: dict
    strides: dict


def share(sizes, count):
    """Which of ``count`` ranks takes each of ``sizes``: about the same sum for each, neighbours together."""
    total, at, taken = sum(sizes), 0, []
    for size in sizes:
        taken.append(min(count - 1, (2 * at + size) * count // (2 * total)) if total else 0)
        at += size
    return taken


def copies(engine):
    """``(number, count)``: this rank is the ``number``-th of ``count`` that own the same masters and states."""
    dp_rank, dp_world, policy = engine.parallel.dp_rank, engine.dp_world_size, engine._stage_policy
    if not policy.shards_states:
        return dp_rank, dp_world
    if policy.shards_params:
        shards = engine._access.access.world
        return dp_rank // shards, dp_world // shards
    return 0, 1


def shape_of(param):
    return param.ds_shape if is_sharded(param) else param.shape


def trained_params(engine):
    """``[(name, parameter)]`` in the order of the optimizer's groups, as pieces count them."""
    if engine.stepping is None:
        return []
    return list(zip(engine.stepping.names, (p for group in engine.trained_groups for p in group), strict=True))


def owned(engine):
    """``Owned`` of this rank: masters and states."""
    found = Owned({}, {}, {})
    if engine.stepping is None:
        return found
    trained, stepping = trained_params(engine), engine.stepping
    number, count = copies(engine)
    taker = share([shape_of(param).numel() for _, param in trained], count)
    for place, (index, offset, numel) in enumerate(engine.core.pieces()):
        name, param = trained[index]
        if taker[index] != number or not numel:
            continue
        master = stepping.masters[place]
        states, scalars = _states(stepping, place, master)
        if scalars:
            found.scalars[name] = scalars
        for kind, tensor in {names.MASTER: master, **states}.items():
            key, value = _keyed(kind, name, param, offset, tensor.detach())
            found.tensors[key] = value
        if numel < shape_of(param).numel() and not is_sharded(param) and not param.is_contiguous():
            found.strides[name] = list(param.stride())
    return found


def _states(stepping, place, master):
    """``(states with a value for each element, others)`` of a piece, by name."""
    if stepping.fused is not None:
        core = stepping.core
        slots = {kind: core.slots(number)[place] for number, kind in enumerate(core.slot_names())}
        return {kind: tensor for kind, tensor in slots.items() if tensor is not None}, {}
    states, scalars = {}, {}
    for kind, value in stepping.optimizer.state.get(master, {}).items():
        whole = torch.is_tensor(value) and value.shape == master.shape and per_element(value)
        (states if whole else scalars)[kind] = value
    for kind in states:
        if not isinstance(kind, str) or "/" in kind or kind in names.RESERVED:
            raise NotPlain(
                f"the optimizer {type(stepping.optimizer).__name__} has a state called {kind!r}, a name that a "
                'checkpoint in the native format cannot use: set "checkpoint": {"writer": {"format": "torch"}}'
            )
    return states, scalars


def _keyed(kind, name, param, offset, tensor):
    """Key and tensor of a piece. A whole parameter has its shape and row-major meaning, whatever its strides."""
    shape = shape_of(param)
    if tensor.numel() < shape.numel():
        return key_of(kind, name, offset), tensor.reshape(-1)
    if tensor.shape != shape:
        flat = tensor.reshape(-1)
        in_rows = is_sharded(param) or param.is_contiguous()
        tensor = flat.view(shape) if in_rows else flat.as_strided(shape, param.stride())
    return key_of(kind, name), tensor


def kept_params(engine, exclude_frozen):
    """``[(name, parameter)]`` of the module, tied ones once, without those that want no gradient if asked so."""
    trained = {id(param) for _, param in trained_params(engine)}
    return [
        (name, param)
        for name, param in engine.module.named_parameters()
        if not exclude_frozen or param.requires_grad or id(param) in trained
    ]


def untrained(engine, exclude_frozen):
    """``(tensors, frozen tensors)`` by key: what this rank saves of parameters that no master covers; frozen are those
    that want no gradient. At stage 3 a rank has slices."""
    trained = {id(param) for _, param in trained_params(engine)}
    params = [(name, param) for name, param in kept_params(engine, exclude_frozen) if id(param) not in trained]
    sharded = engine._stage_policy.shards_params
    number, count = copies(engine) if sharded else (engine.parallel.dp_rank, engine.dp_world_size)
    taker = share([shape_of(param).numel() for _, param in params], count)
    changing, frozen = {}, {}
    for (name, param), takes in zip(params, taker):
        if takes != number:
            continue
        offset, value = None, param.detach()
        if is_sharded(param):
            handle = param.ds_handle
            numel = min(handle.slice_numel, max(0, handle.numel - handle.own_begin))
            whole = numel == handle.numel
            offset, value = (None if whole else handle.own_begin), handle.shard[:numel].detach()
            value = value.view(param.ds_shape) if whole else value
            if not numel and handle.numel:
                continue
        (changing if param.requires_grad else frozen)[key_of(names.MODULE, name, offset)] = value
    return changing, frozen


def others_of_module(engine, exclude_frozen):
    """``(tensors, values, keys, metadata)``: entries of the module's state dict that are no parameters, tensors by key
    and values by name; all its names; the versions of its modules."""
    state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
    params = {name for name, _ in named_parameters(engine.module)}
    tensors, values = {}, {}
    for name, value in state.items():
        if name in params:
            continue
        if torch.is_tensor(value):
            tensors[key_of(names.MODULE, name)] = value.detach()
        else:
            values[name] = value
    return tensors, values, list(state), dict(getattr(state, "_metadata", {}))


# ---- native contents -----------------------------------------------------------------------------------------------

_METADATA = {"format": "pt", "written_by": f"{names.FORMAT} {names.VERSION}"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def is_wanted(engine):
    """Whether the configuration asks for this format."""
    writer = engine._config.checkpoint_config.writer
    return writer is not None and writer.format == "safetensors"


def files_of(engine, client_state, exclude_frozen_parameters=False):
    """dict: name of a file -> function that gives its value, for the files of this rank. Every rank calls it.

    Raises ``NotPlain`` on all ranks for a value that JSON cannot hold; nothing has been written then.
    """
    made, error = None, None
    try:
        made = _files(engine, client_state, exclude_frozen_parameters)
    except Exception as caught:
        error = caught
    _agree(Ranks(engine, False), error)
    return {name: lambda file=file: file for name, file in made.items()}


def _agree(ranks, error):
    found = ranks.gather((failure_of(ranks.rank, error), isinstance(error, NotPlain), str(error)))
    for failure, not_plain, text in found:
        if failure is not None and not_plain:
            raise NotPlain(f"nothing is saved: rank {failure[0]}: {text}") from error
    raise_together([failure for failure, _, _ in found], "nothing is saved", error)


def _files(engine, client_state, exclude_frozen):
    writer = engine.checkpoint_engine
    if getattr(writer, "makes_files", True) and not hasattr(writer, "write_file"):
        raise ValueError(
            f"the checkpoint engine {type(writer).__name__} writes whole objects, not safetensors: take one of this "
            'library\'s for "checkpoint": {"writer": {"format": "safetensors"}}, or set the format to "torch"'
        )
    states = getattr(engine.optimizer, "states", None)
    if hasattr(states, "need"):
        states.need(OffloadStateTypeEnum, "save_checkpoint()")
    values = _Values()
    mine = owned(engine)
    changing, frozen = untrained(engine, exclude_frozen)
    others = others_of_module(engine, exclude_frozen)
    leads = engine.parallel.dp_rank == 0
    tensors = {**mine.tensors, **changing}
    if leads or engine._stage_policy.shards_params:  # at stage 3 a rank gets back its own buffers
        tensors.update(others[0])
    run = {key: value for key, value in run_states(engine).items() if key != "group_names"}
    about_rank = {
        "run": values.encode(run, "run"),
        "scalars": values.encode(mine.scalars, "optimizer state"),
        "strides": mine.strides,
    }
    files = {}
    if leads:
        about = _checkpoint(engine, client_state, exclude_frozen, others, values)
        files[names.checkpoint_json(engine.mp_rank_for_files())] = PreparedBytes(_text(about))
    tensors.update(values.tensors)
    _check(tensors)
    _check(frozen)
    rank = engine.global_rank
    made = {names.rank_tensors(rank): PreparedSafetensors(tensors, _METADATA)} if tensors else {}
    if frozen:
        kept = engine.__dict__.setdefault("_frozen_files", {"digest": Digest(), "sound": set()})
        digest = kept["digest"].of(frozen, f"{names.VERSION} {engine.mp_rank_for_files()}")
        made[names.frozen_tensors(digest)] = FrozenFile(frozen, _METADATA, kept["sound"])
    about_rank["files"] = list(made)
    return {**files, **made, names.rank_json(rank): PreparedBytes(_text(about_rank))}


def _text(value):
    found = {"format": names.FORMAT, "version": names.VERSION, **value}
    return json.dumps(found, indent=1, allow_nan=False).encode() + b"\n"


class _Values:
    """Encodes values; tensors in them go into the rank's file."""

    def __init__(self):
        self._places = {}

    def encode(self, value, where):
        return saved_native.encode(value, self._places, where)

    @property
    def tensors(self):
        return {names.key_of(names.VALUES, place): t for place, t in self._places.items()}


def _check(tensors):
    for key, tensor in tensors.items():
        dtype = str(tensor.dtype).split(".")[-1]
        if not is_plain(tensor) or dtype not in SAFETENSORS_NAMES:
            raise NotPlain(
                f"{key.partition('/')[2]} is a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}, which a "
                "safetensors file cannot hold: make it dense and of a plain dtype, or set "
                '"checkpoint": {"writer": {"format": "torch"}}'
            )


def _checkpoint(engine, client_state, exclude_frozen, others, values):
    """What is the same on all data-parallel ranks."""
    _, module_values, keys, metadata = others
    encode = values.encode
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "mp_rank": engine.mp_rank_for_files(),
        "ranks": _global_ranks(engine),
        "parameters": _parameters(engine, exclude_frozen),
        "tied": engine_states.shared_params(engine.module),
        "groups": [
            {"names": called, "options": encode(options, f"optimizer.param_groups.{number}")}
            for number, (called, options) in enumerate(_groups(engine))
        ],
        "optimizer": encode(_extra(engine), "optimizer"),
        "module": {
            "keys": keys,
            "buffers": [name for name, _ in engine.module.named_buffers()],
            "values": encode(module_values, "module"),
            "metadata": encode(metadata, "module metadata"),
        },
        "engine": {key: encode(value, key) for key, value in _engine_state(engine).items()},
        "ds_config": _described(engine.config),
        "client_state": encode(client_state, "client_state"),
    }


def _global_ranks(engine):
    """Of the data-parallel ranks, in order: their files together are the checkpoint."""
    if engine.dp_world_size == 1:
        return [engine.global_rank]
    group = engine.parallel.dp_group
    return [dist.get_global_rank(group, rank) for rank in range(engine.dp_world_size)]


def _parameters(engine, exclude_frozen):
    """name -> what is known of a parameter without its values."""
    trained = trained_params(engine)
    params = [*kept_params(engine, exclude_frozen), *trained]  # trained ones may belong to no module
    found = {name: {**_kind_of(param), "trained": False} for name, param in params}
    steps = engine.core.steps().tolist() if engine.stepping is not None and engine.stepping.fused is not None else None
    for index, (name, _) in enumerate(trained):
        found[name]["trained"] = True
        if steps is not None:
            found[name]["step"] = int(steps[index])
    return found


def _kind_of(param):
    return {"shape": list(shape_of(param)), "dtype": str(param.dtype).removeprefix("torch.")}


def _groups(engine):
    """``[(names of the parameters, hyperparameters)]``."""
    if engine.stepping is None:
        return []
    return [
        (called, {key: value for key, value in group.items() if key != "params"})
        for group, called in zip(engine.basic_optimizer.param_groups, names_of_groups(engine), strict=True)
    ]


def _extra(engine):
    stepping = engine.stepping
    if stepping is None:
        return {}
    found = {"overflow": bool(stepping.overflow)}
    if stepping.scaler is not None:
        found["loss_scaler"] = dict(vars(stepping.scaler))
        found["dynamic_loss_scale"] = bool(stepping.scaler.dynamic)
    if isinstance(engine.optimizer, WrappedOptimizer) and not engine._stage_policy.shards_params:
        found["clip_grad"] = engine.optimizer.clip_grad
    return found


def _engine_state(engine):
    return {
        "lr_scheduler": _scheduler_state(engine.lr_scheduler),
        **counters_of(engine),
        "ds_version": __version__,
    }


def _scheduler_state(scheduler):
    """Schedulers of torch keep functions among their values: made again by the script, they need not be saved."""
    if not hasattr(scheduler, "state_dict"):
        return None
    state = scheduler.state_dict()
    of_torch = getattr(torch.optim.lr_scheduler, "LRScheduler", torch.optim.lr_scheduler._LRScheduler)
    if not isinstance(scheduler, of_torch):
        return state
    return {key: value for key, value in state.items() if not isinstance(value, _FUNCTIONS)}


def _described(value):
    """A configuration as JSON: dtypes, groups and callables in it become text. It is there to be read by people."""
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    is_json = value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
    return value if is_json else str(value)
