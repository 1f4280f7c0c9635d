"""Puts the weights and buffers of a ``SavedState`` into an engine's module, sharded or not."""

import torch

from deepspeed._compat import named_parameters
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.saved_state import read_into
from deepspeed.zero.sharded_parameter import is_sharded


def load_weights(engine, saved, strict, custom_load_fn=None, later=()):
    """Every rank calls it. ``later``: names of parameters that need no value now: their masters follow.

    Below stage 3 every rank reads whole parameters, at stage 3 its slices; ``custom_load_fn(src=, dst=)`` gets whole
    ones and the gathered module at every stage. Raises RuntimeError where keys do not fit (``strict``) and ValueError
    where shapes do not.
    """
    keys = engine.module.state_dict().keys()
    params = dict(named_parameters(engine.module))
    saved_keys = (saved.model.get("module") or {}).keys() | saved.shapes().keys()
    if custom_load_fn is not None:
        _load_by(custom_load_fn, engine, saved, saved_keys)
        return
    missing, unexpected = _differences(engine, keys, saved_keys, saved)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{saved.origin()} does not fit the model: missing {missing}, unexpected {unexpected}. Build the model as "
            "it was saved, or pass load_module_strict=False"
        )
    given = saved.model.get("module") or {}
    whole = type(given)()
    for name, value in saved.module().items():
        if name in keys and not (name in params and is_sharded(params[name])):
            whole[name] = eager(value)
    if hasattr(given, "_metadata"):  # versions of modules
        whole._metadata = given._metadata
    engine.load_module_state_dict({"module": whole}, strict=False)
    _load_pieces(engine, saved, {name: p for name, p in engine.module.named_parameters() if name not in whole}, later)


def _differences(engine, keys, saved_keys, saved):
    """``(missing, unexpected)``. Frozen weights may be missing where a checkpoint was saved without all of them."""
    frozen = {name for name, p in named_parameters(engine.module) if not p.requires_grad}
    without = not any(name in saved_keys for name in frozen)
    missing = [name for name in keys if name not in saved_keys and not (without and name in frozen)]
    return missing, [name for name in saved_keys if name not in keys]


@torch.no_grad()
def _load_pieces(engine, saved, params, later):
    """Parameters that lie in the files in pieces, or on this rank as one."""
    if engine.core is not None:
        engine.core.begin_write()
    for name, param in params.items():
        known = name if saved.weight_shape(name) is not None else saved.aliases().get(name, name)
        shape = saved.weight_shape(known)
        if shape is None or known in later or name in later:
            continue
        here = param.ds_shape if is_sharded(param) else param.shape
        if tuple(shape) != tuple(here):
            raise ValueError(
                f"{saved.origin()} does not fit the model: parameter '{name}' was saved with shape {tuple(shape)}, the "
                f"model has {tuple(here)}. Build the model as it was saved"
            )
        pieces = saved.pieces(known, "weight")
        if is_sharded(param):
            handle = param.ds_handle
            numel = min(handle.slice_numel, max(0, handle.numel - handle.own_begin))
            _filled(read_into(handle.shard[:numel], pieces, handle.own_begin), numel, name, saved)
        elif param.is_contiguous():
            _filled(read_into(param.data, pieces, 0), param.numel(), name, saved)
        else:
            value = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            _filled(read_into(value, pieces, 0), param.numel(), name, saved)
            param.data.copy_(value)
    if engine.core is not None:
        engine.core.end_write()
        engine.core.refresh_master()


def _filled(found, wanted, name, saved):
    if found != wanted:
        raise ValueError(
            f"{saved.origin()}: parameter '{name}' has {found} of the {wanted} elements that this rank needs; files "
            "are missing, or it is of another model"
        )


def _load_by(custom_load_fn, engine, saved, saved_keys):
    state = {name: eager(value) for name, value in saved.module().items()}
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
        custom_load_fn(src=state, dst=engine.module)
    if engine.core is not None:
        engine.core.refresh_master()


def eager(value):
    """A lazy tensor's values; anything else as it is."""
    return value.read() if hasattr(value, "read_range") else value


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
