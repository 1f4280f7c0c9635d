"""Which tensors a rank saves in the native format. No collective: what a rank owns is known, and views of it are handed
out. Where several ranks own the same (stage 0, MiCS), they share the writing, by bytes."""

import dataclasses

import torch

from deepspeed._compat import named_parameters
from deepspeed.checkpoint import native_names
from deepspeed.checkpoint.native_names import key_of
from deepspeed.checkpoint.plain_json import NotPlain
from deepspeed.zero.saved_flat import per_element
from deepspeed.zero.sharded_parameter import is_sharded


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
        for kind, tensor in {native_names.MASTER: master, **states}.items():
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
        if not isinstance(kind, str) or "/" in kind or kind in native_names.RESERVED:
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
        (changing if param.requires_grad else frozen)[key_of(native_names.MODULE, name, offset)] = value
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
            tensors[key_of(native_names.MODULE, name)] = value.detach()
        else:
            values[name] = value
    return tensors, values, list(state), dict(getattr(state, "_metadata", {}))
