"""What a checkpoint in the native format holds of an engine: tensors in safetensors files, all else in JSON.

A rank's files are made from what it owns; the only collective is the agreement that every value can be written.
"""

import json
import math
import types

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import native_names, plain_json, zero_states
from deepspeed.checkpoint.counters import counters_of
from deepspeed.checkpoint.file_writer import SAFETENSORS_NAMES, PreparedBytes, PreparedSafetensors
from deepspeed.checkpoint.native_files import Digest, FrozenFile
from deepspeed.checkpoint.native_tensors import (
    kept_params,
    others_of_module,
    owned,
    shape_of,
    trained_params,
    untrained,
)
from deepspeed.checkpoint.plain_json import NotPlain
from deepspeed.checkpoint.ranks import Ranks, failure_of, raise_together
from deepspeed.checkpoint.resume import names_of_groups, run_states
from deepspeed.checkpoint.torch_pickler import is_plain
from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.version import __version__
from deepspeed.zero.wrapped_optimizer import WrappedOptimizer

_METADATA = {"format": "pt", "written_by": f"{native_names.FORMAT} {native_names.VERSION}"}
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
        files[native_names.checkpoint_json(engine.mp_rank_for_files())] = PreparedBytes(_text(about))
    tensors.update(values.tensors)
    _check(tensors)
    _check(frozen)
    rank = engine.global_rank
    made = {native_names.rank_tensors(rank): PreparedSafetensors(tensors, _METADATA)} if tensors else {}
    if frozen:
        kept = engine.__dict__.setdefault("_frozen_files", {"digest": Digest(), "sound": set()})
        digest = kept["digest"].of(frozen, f"{native_names.VERSION} {engine.mp_rank_for_files()}")
        made[native_names.frozen_tensors(digest)] = FrozenFile(frozen, _METADATA, kept["sound"])
    about_rank["files"] = list(made)
    return {**files, **made, native_names.rank_json(rank): PreparedBytes(_text(about_rank))}


def _text(value):
    found = {"format": native_names.FORMAT, "version": native_names.VERSION, **value}
    return json.dumps(found, indent=1, allow_nan=False).encode() + b"\n"


class _Values:
    """Encodes values; tensors in them go into the rank's file."""

    def __init__(self):
        self._places = {}

    def encode(self, value, where):
        return plain_json.encode(value, self._places, where)

    @property
    def tensors(self):
        return {native_names.key_of(native_names.VALUES, place): t for place, t in self._places.items()}


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
        "tied": zero_states.shared_params(engine.module),
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
