"""Puts the weights and buffers of a ``SavedState`` into an engine's module, sharded or not."""

import os
import random

import numpy
import torch

from deepspeed._compat import named_parameters
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.saved_state import eager, read_into
from deepspeed.checkpoint.read import storage
from deepspeed.log import logger
from deepspeed.zero.core import writing
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.param_ranks import SavedNames, differs_by_rank, saved_part
from deepspeed.zero.sharded_parameter import is_sharded

# ---- rng -----------------------------------------------------------------------------------------------------------
# The random number generators a training loop draws from.


def capture():
    """State of Python's, numpy's, torch's and the accelerator's generators, as tensors and plain values."""
    kind, keys, *rest = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["accelerator"] = accelerator.get_rng_state()
    return state


def restore(state):
    """Inverse of ``capture``."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.asarray(keys).astype(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if "accelerator" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["accelerator"])


# ---- resume --------------------------------------------------------------------------------------------------------
# What a run needs besides its weights and states to go on: random numbers, the position in the data, micro steps.


def run_states(engine):
    """What this rank saves of it."""
    loads = getattr(engine, "_loads_data", None)  # stages in the middle of a pipeline do not
    loader = engine.training_dataloader if loads is None or loads() else None
    return {
        "rng": capture(),
        "dataloader": loader.state_dict() if hasattr(loader, "state_dict") else None,
        "micro_steps": engine.micro_steps,
        "world_size": engine.world_size,
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "zero_stage": engine.zero_optimization_stage(),
        "learned_fires": engine.core.learned_fires() if engine.core is not None else [],
        "step_strategy": engine.core.strategy_counters() if engine.core is not None else {},
        # Model files of stage 0 do not say which parameters the optimizer's groups have.
        "group_names": names_of_groups(engine),
    }


def names_of_groups(engine):
    """Names of the parameters of each group of the engine's optimizer; [] without one."""
    if engine.stepping is None:
        return []
    called = iter(engine.stepping.names)
    return [[next(called) for _ in group] for group in engine.trained_groups]


def _pickled(folder, rank):
    """What rank ``rank`` saved, else what rank 0 did, and whether it was the first; (None, False) where none has."""
    path = names.run_states_path(folder, rank)
    own = os.path.exists(path)
    path = path if own else names.run_states_path(folder, 0)
    return (storage.read(path) if os.path.exists(path) else None), own


def restore_strategy(engine, counters):
    """What steps have put by (zenflow) goes on where it was saved; without ``counters`` it begins anew. Every rank
    calls it."""
    if engine.core is not None and engine.core.strategy_states():
        engine.core.restore_strategy(counters or {})


def resume_run(engine, folder, saved):
    """Goes on where ``run_states`` stood. Another number of ranks goes on with the next samples that none has seen;
    ranks that did not exist keep their random numbers."""
    run, own = saved.run_states(engine.global_rank) or _pickled(folder, engine.global_rank)
    restore_strategy(engine, (run or {}).get("step_strategy"))
    if run is None:
        logger.warning(
            f"{folder} has no run states (the checkpoint is of another implementation): random numbers and the "
            "position in the data are not resumed"
        )
        return
    same = run.get("world_size") == engine.world_size
    if hasattr(engine.training_dataloader, "load_state_dict"):
        data = run["dataloader"]
        if data is None:  # that rank had none to load; positions mean the same on all ranks
            data = ((saved.run_states(0) or _pickled(folder, 0))[0] or {}).get("dataloader")
        if data is not None:
            engine.training_dataloader.load_state_dict(data)
    accumulation = run.get("gradient_accumulation_steps", engine.gradient_accumulation_steps())
    if same and accumulation == engine.gradient_accumulation_steps():
        engine.micro_steps = run["micro_steps"]
    learned = run.get("learned_fires") or []
    alike = same and run.get("zero_stage") == engine.zero_optimization_stage()
    alike = alike and run.get("group_names", names_of_groups(engine)) == names_of_groups(engine)
    if own and alike and len(learned) == len(engine.stepping.names):
        engine.core.set_learned_fires(learned)
    if own:
        restore(run["rng"])
    else:
        logger.warning(
            f"[Rank {engine.global_rank}] keeps its random numbers: {run.get('world_size')} ranks have saved, and this "
            "one was not among them"
        )


# ---- weights -------------------------------------------------------------------------------------------------------


def names_elsewhere(engine, ranks):
    """Names in checkpoints of all that any rank's module has, where ranks have different ones; else nothing. Every rank
    calls it."""
    if not differs_by_rank(engine.module):
        return frozenset()
    named = SavedNames(engine.module)
    return frozenset().union(*ranks.gather([named(name) for name in engine.module.state_dict()]))


def load_weights(engine, saved, strict, custom_load_fn=None, later=(), elsewhere=()):
    """Every rank calls it. ``later``: names of parameters that need no value now: their masters follow. ``elsewhere``:
    names that may be in the checkpoint and not in this rank's module, since another rank has them.

    Below stage 3 every rank reads whole parameters, at stage 3 its slices; ``custom_load_fn(src=, dst=)`` gets whole
    ones and the gathered module at every stage. Raises RuntimeError where shapes do not fit, or keys (``strict``), and
    ValueError where files are incomplete.
    """
    named = SavedNames(engine.module)
    keys = {named(name): name for name in engine.module.state_dict()}
    params = dict(named_parameters(engine.module))
    module = saved.module()
    saved_keys = (saved.model.get("module") or {}).keys() | saved.shapes().keys() | module.keys()
    if custom_load_fn is not None:
        _load_by(custom_load_fn, engine, saved, saved_keys - (elsewhere - keys.keys() if elsewhere else set()), keys)
        return
    missing, unexpected = _differences(engine, keys, saved_keys, elsewhere)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{saved.origin()} does not fit the model: missing {missing}, unexpected {unexpected}. Build the model as "
            "it was saved, or pass load_module_strict=False"
        )
    _check_shapes(engine.module, params, saved, named)
    given = saved.model.get("module") or {}
    whole = type(given)()
    for name, value in module.items():
        param = params.get(keys.get(name))
        if name in keys and (param is None or not (is_sharded(param) or saved_part(param)[1] != param.shape)):
            whole[keys[name]] = eager(value)
    if hasattr(given, "_metadata"):  # versions of modules
        whole._metadata = given._metadata
    engine.load_module_state_dict({"module": whole}, strict=False)
    rest = {named(name): p for name, p in engine.module.named_parameters() if name not in whole}
    _load_pieces(engine, saved, rest, later)


def _differences(engine, keys, saved_keys, elsewhere):
    """``(missing, unexpected)``. Frozen weights may be missing where a checkpoint was saved without all of them."""
    frozen = {name for name, p in named_parameters(engine.module) if not p.requires_grad}
    without = not any(name in saved_keys for name in keys if keys[name] in frozen)
    missing = [name for name in keys if name not in saved_keys and not (without and keys[name] in frozen)]
    return missing, [name for name in saved_keys if name not in keys and name not in elsewhere]


def _check_shapes(module, params, saved, named):
    wrong = []
    here = {named(name): saved_part(param)[1] for name, param in params.items()}
    here.update((named(name), buffer.shape) for name, buffer in module.named_buffers())
    for name, shape in here.items():
        known = saved.weight_shape(saved.aliases().get(name, name))
        if known is not None and tuple(known) != tuple(shape):
            wrong.append(f"'{name}' was saved with shape {tuple(known)}, the model has {tuple(shape)}")
    if wrong:
        raise RuntimeError(
            f"{saved.origin()} does not fit the model: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            + ". Build the model as it was saved, or take its weights over with custom_load_fn="
        )


@torch.no_grad()
def _load_pieces(engine, saved, params, later):
    """Parameters that lie in the files in pieces, or on this rank as one."""
    with writing(engine.core):
        _read_pieces(saved, params, later)
    if engine.core is not None:
        engine.core.refresh_master()


def _read_pieces(saved, params, later):
    for name, param in params.items():
        known = name if saved.weight_shape(name) is not None else saved.aliases().get(name, name)
        shape = saved.weight_shape(known)
        if shape is None or known in later or name in later:
            continue
        pieces, begin = saved.pieces(known, "weight"), saved_part(param)[0]
        if is_sharded(param):
            handle = param.ds_handle
            numel = min(handle.slice_numel, max(0, handle.numel - handle.own_begin))
            own = handle.shard
            _filled(read_into(own[:numel], pieces, begin + handle.own_begin), numel, name, saved)
            handle.set_slice(own)
        elif param.is_contiguous():
            _filled(read_into(param.data, pieces, begin), param.numel(), name, saved)
        else:
            value = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            _filled(read_into(value, pieces, begin), param.numel(), name, saved)
            param.data.copy_(value)


def _filled(found, wanted, name, saved):
    if found != wanted:
        raise ValueError(
            f"{saved.origin()}: parameter '{name}' has {found} of the {wanted} elements that this rank needs; files "
            "are missing, or it is of another model"
        )


def _load_by(custom_load_fn, engine, saved, saved_keys, keys):
    """``keys``: names in checkpoints -> in this rank's module, by which the function gets what the module has."""
    state = {name: eager(value) for name, value in saved.module().items() if name in saved_keys}
    for name in saved_keys - state.keys():
        known = saved.aliases().get(name, name)
        shape = saved.weight_shape(known)
        if shape is None:
            continue
        pieces = saved.pieces(known, "weight")
        state[name] = torch.empty(shape, dtype=pieces[0][2].read_range(0, 0).dtype if pieces else torch.float32)
        _filled(read_into(state[name], pieces, 0), shape.numel(), name, saved)
    sharded = [p for p in engine.module.parameters() if is_sharded(p)]
    with GatheredParameters(sharded, modifier_rank=0 if sharded else None):
        custom_load_fn(src={keys.get(name, name): value for name, value in state.items()}, dst=engine.module)
    if engine.core is not None:
        engine.core.refresh_master()


def plain(value):
    """``value`` with all lazy tensors in it read."""
    if isinstance(value, dict):
        if not any(_holds_lazy(item) for item in value.values()):
            return value
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple) and any(_holds_lazy(item) for item in value):
        return type(value)(plain(item) for item in value)
    return eager(value)


def _holds_lazy(value):
    if isinstance(value, dict):
        return any(_holds_lazy(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_lazy(item) for item in value)
    return hasattr(value, "read_range")
