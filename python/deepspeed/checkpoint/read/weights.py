"""Puts the weights and buffers of a ``SavedState`` into those of a run, sharded or not."""

import random

import numpy
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.layouts.saved_state import eager, plain
from deepspeed.checkpoint.run_state import Counters
from deepspeed.log import logger
from deepspeed.utils.param_cut import cut_of
from deepspeed.zero.parameters.param_ranks import own_extent, saved_part
from deepspeed.zero.parameters.sharded_parameter import is_sharded

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


def run_states(run):
    """The state of the run that this rank saves. Gradients are not saved: ``micro_steps`` and the position in the data
    are those at the start of the accumulation window, whose first ``window_micro_steps`` are lost."""
    return {
        "rng": capture(),
        "dataloader": run.position(),
        "micro_steps": run.counters.micro_steps,
        "window_micro_steps": run.counters.in_window,
        "consumed_tokens": run.counters.consumed_tokens,
        "world_size": run.ranks.world_size,
        "gradient_accumulation_steps": run.config.gradient_accumulation_steps,
        "zero_stage": run.config.zero_optimization_stage,
        **run.resumed,
        # Model files of stage 0 do not say which parameters the optimizer's groups have.
        "group_names": run.group_names,
    }


def counters_in(run, state):
    """The ``Counters`` that the model file ``state`` has."""
    steps = state["global_steps"]
    return Counters(
        global_steps=steps,
        global_samples=state.get("global_samples", steps * run.config.train_batch_size),
        skipped_steps=state.get("skipped_steps", 0),
        micro_steps=steps * run.config.gradient_accumulation_steps,
        sparse_names=_sparse_names(run, state),
        random_ltd=state.get("random_ltd"),
    )


def add_resumed(run, saved, found):
    """Adds to ``found``, a ``LoadedRun``, what ``run_states`` gave. Another number of ranks goes on with the next
    samples that none has seen; ranks that did not exist keep their random numbers. ValueError for a file of something
    else."""
    before, own = saved.run_states(run.ranks.rank)
    if before is None:
        logger.warning(
            f"{saved.folder} has no run states (the checkpoint is of another implementation): random numbers and the "
            "position in the data are not resumed, but for the state of a curriculum"
        )
        sampler = saved.model.get("data_sampler")
        found.data = None if sampler is None else {"sampler": plain(sampler)}
        return
    missing = {"rng", "dataloader", "micro_steps"} - before.keys() if isinstance(before, dict) else {"everything"}
    if missing:
        raise ValueError(f"{saved.origin()}: its run states lack {', '.join(sorted(missing))}; load an older tag")
    data = before["dataloader"]
    if data is None:  # that rank had none to load; positions mean the same on all ranks
        data = (saved.run_states(0)[0] or {}).get("dataloader")
    same = before.get("world_size") == run.ranks.world_size
    accumulation = before.get("gradient_accumulation_steps", run.config.gradient_accumulation_steps)
    lost, micro_steps = before.get("window_micro_steps"), before["micro_steps"]
    if lost is None:  # saved before windows were known: these are the numbers at the time of saving
        lost = micro_steps % accumulation
        micro_steps -= lost
        if data is not None:
            data = {**data, "batches": max(0, data["batches"] - lost)}
    if lost and run.ranks.rank == 0:
        logger.warning(
            f"{saved.origin()} was saved in the middle of an accumulation window, after {lost} micro-batches of "
            f"{accumulation}, whose gradients are not in it: the window starts anew, with the same data"
        )
    found.strategy, found.data = before.get("step_strategy"), data
    found.counters.consumed_tokens = before.get("consumed_tokens")
    if same and accumulation == run.config.gradient_accumulation_steps:
        found.counters.micro_steps = micro_steps
    learned = before.get("learned_fires") or []
    alike = same and before.get("zero_stage") == run.config.zero_optimization_stage
    alike = alike and before.get("group_names", run.group_names) == run.group_names
    if own and alike and len(learned) == len(run.trained()):
        found.learned_fires = learned
    found.rng = before["rng"] if own else None
    if not own:
        logger.warning(
            f"[Rank {run.ranks.rank}] keeps its random numbers: {before.get('world_size')} ranks have saved, and this "
            "one was not among them"
        )


# ---- weights -------------------------------------------------------------------------------------------------------


def names_elsewhere(run, ranks):
    """Names in checkpoints of all that any rank's module has, where ranks have different ones; else nothing. Every rank
    calls it."""
    if not run.weights.differs:
        return frozenset()
    return frozenset().union(*ranks.gather(list(_keys(run))))


def _keys(run):
    """``{name in checkpoints: name in this rank's module}`` of the entries of the module's state."""
    return {run.weights.named(name): name for name in run.module_state()}


def check_weights(run, saved, strict, custom_load_fn=None, later=(), elsewhere=()):
    """Refuses the weights that ``load_weights`` cannot load. Reads no elements and changes nothing.

    Raises RuntimeError where shapes do not fit, or keys (``strict``), and ValueError where files are incomplete.
    """
    params, keys, saved_keys = run.weights.params, _keys(run), names_saved(saved)
    if custom_load_fn is not None:
        for name in _given_keys(saved_keys, keys, elsewhere) - saved.module().keys():
            known = saved.aliases.get(name, name)
            shape = saved.weight_shape(known)
            if shape is not None:
                saved.read_into(shape.numel(), saved.pieces(known, "weight"), 0, f"parameter '{name}'")
        return
    # Frozen weights may be missing where a checkpoint was saved without all of them.
    frozen = {name for name, own in keys.items() if own in params and not params[own].requires_grad}
    may_lack = () if frozen & saved_keys else frozen
    missing = [name for name in keys if name not in saved_keys and name not in may_lack]
    unexpected = [name for name in saved_keys if name not in keys and name not in elsewhere]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{saved.origin()} does not fit the model: missing {missing}, unexpected {unexpected}. Build the model as "
            "it was saved, or pass load_module_strict=False"
        )
    _check_shapes(run.weights, saved)
    for name, _, pieces, begin, numel in _in_pieces(run, saved, later):
        saved.read_into(numel, pieces, begin, f"parameter '{name}'")


def names_saved(saved):
    """Names of all weights and buffers in a checkpoint."""
    return (saved.model.get("module") or {}).keys() | saved.shapes.keys() | saved.module().keys()


def _given_keys(saved_keys, keys, elsewhere):
    """The saved keys that a function of the user gets: all but those of other ranks."""
    return saved_keys - (elsewhere - keys.keys() if elsewhere else set())


def load_weights(run, target, saved, custom_load_fn=None, later=(), elsewhere=()):
    """After ``check_weights``, through ``target``, a ``LoadTarget``. Every rank calls it. ``later``: names of
    parameters that need no value now: their masters follow. ``elsewhere``: names that may be in the checkpoint and not
    in this rank's module, since another rank has them.

    Below stage 3 every rank reads whole parameters, at stage 3 its slices; ``custom_load_fn(src=, dst=)`` gets whole
    ones and the gathered module at every stage.
    """
    if custom_load_fn is not None:
        keys = _keys(run)
        state = _whole_by(saved, _given_keys(names_saved(saved), keys, elsewhere))
        target.load_by(custom_load_fn, {keys.get(name, name): value for name, value in state.items()})
    else:
        target.load_module(_whole(run, saved))
        with target.writing():
            _load_pieces(run, saved, later)
    target.take_weights()


def _names_whole(run, saved):
    """``{name in the checkpoint: name in this rank's module}`` of what is loaded as it is in the model file."""
    params, module = run.weights.params, saved.module()
    cut = {name for name, param in params.items() if is_sharded(param) or saved_part(param)[1] != param.shape}
    return {known: name for known, name in _keys(run).items() if known in module and name not in cut}


def _whole(run, saved):
    given, keys = saved.model.get("module") or {}, _names_whole(run, saved)
    whole = type(given)()
    whole.update({keys[name]: eager(value) for name, value in saved.module().items() if name in keys})
    if hasattr(given, "_metadata"):  # versions of modules
        whole._metadata = given._metadata
    return whole


def _check_shapes(weights, saved):
    wrong = []
    here = {weights.named(name): saved_part(param)[1] for name, param in weights.params.items()}
    cuts = {weights.named(name): cut_of(param) for name, param in weights.params.items()}
    here.update((weights.named(name), buffer.shape) for name, buffer in weights.buffers.items())
    for name, shape in here.items():
        known = saved.weight_shape(saved.aliases.get(name, name))
        if known is not None and tuple(known) != tuple(shape):
            cut = cuts.get(name)
            of = "" if cut is None else f" on this rank, of {tuple(cut.whole_shape(shape))} in all"
            wrong.append(f"'{name}' was saved with shape {tuple(known)}, the model has {tuple(shape)}{of}")
    if wrong:
        raise RuntimeError(
            f"{saved.origin()} does not fit the model: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            + ". Build the model as it was saved, or take its weights over with custom_load_fn="
        )


def _in_pieces(run, saved, later):
    """``(name, parameter, its pieces, first element, number of elements)`` of the parameters that lie in the files in
    pieces, or on this rank as one."""
    whole = set(_names_whole(run, saved).values())
    for own, param in run.weights.unique():
        if own in whole:
            continue
        name = run.weights.named(own)
        known = name if saved.weight_shape(name) is not None else saved.aliases.get(name, name)
        if saved.weight_shape(known) is None or known in later or name in later:
            continue
        yield name, param, saved.pieces(known, "weight"), *own_extent(param)


@torch.no_grad()
def _load_pieces(run, saved, later):
    for name, param, pieces, begin, numel in _in_pieces(run, saved, later):
        own = param.ds_handle.shard if is_sharded(param) else param.data.contiguous()
        saved.read_into(own.view(-1)[:numel], pieces, begin, f"parameter '{name}'")
        if is_sharded(param):
            param.ds_handle.set_slice(own)
        elif not param.is_contiguous():
            param.data.copy_(own)


def _whole_by(saved, saved_keys):
    """name -> whole value, for a function of the user."""
    state = {name: eager(value) for name, value in saved.module().items() if name in saved_keys}
    for name in saved_keys - state.keys():
        known = saved.aliases.get(name, name)
        if saved.weight_shape(known) is not None:
            state[name] = saved.whole(known, "weight")
    return state


def _sparse_names(run, state):
    """``Counters.sparse_names`` after a load: of parameters that both have, those that the checkpoint
    names; of parameters that the checkpoint lacks, those of the run. The configuration says how gradients travel."""
    saved = state.get("sparse_tensor_module_names", state.get("csr_tensor_module_names"))
    if saved is None:
        return run.counters.sparse_names
    here = run.weights.params.keys()
    there = state.get("module") or {}
    return (set(saved) & here) | {name for name in run.counters.sparse_names if name not in there}
