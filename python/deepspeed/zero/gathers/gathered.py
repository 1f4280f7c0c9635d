"""``GatheredParameters``: the whole values of sharded parameters, for a while."""

import hashlib

import torch

from deepspeed import comm as dist
from deepspeed.comm.timed import suppress_logging
from deepspeed.zero.parameters import sharded_parameter as sharding
from deepspeed.zero.parameters.param_ranks import ranks_of


class GatheredParameters:
    """Inside the context the parameters of ZeRO stage 3 among ``params`` have their values and shapes.

    ``params``: a parameter, or an iterable of them (nested ones too). ``modifier_rank``: the rank, counted in the
    parameters' group, whose values count when the context ends: every rank gets them, and the optimizer's masters as
    well, also of parameters that are whole on every rank (stages 0 to 2). None: what all ranks have written alike into
    sharded parameters is kept. The engine compares it when it next reduces gradients or saves, and a difference is an
    error on all ranks; with ``zero_optimization.enable_sanity_checks`` any such write is an error here.
    Parameters of no engine that are not sharded are left alone. ``fwd_module``: the module whose forward uses them
    although another one owns them. ``enabled=False`` does nothing. Contexts may be nested.

    With a ``modifier_rank`` every rank must enter; without one a single rank may, once the engine exists.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self.enabled = bool(enabled)
        self.modifier_rank = modifier_rank
        given = list(dict.fromkeys(_flatten(params))) if self.enabled else []
        # A set has another order on each rank, gathers need the same.
        self.params = sorted(filter(sharding.is_sharded, given), key=lambda param: param.ds_id)
        # Those that have a core and are whole on every rank.
        self._whole = [param for param in given if not sharding.is_sharded(param) and hasattr(param, "_ds_core")]
        for param in self.params if fwd_module is not None else ():
            register_external_parameter(fwd_module, param)
        if modifier_rank is not None and self.params:
            copies = self.params[0].ds_access.copies
            world = dist.get_world_size(copies) if copies is not None else 1
            if not 0 <= modifier_rank < world:
                raise ValueError(f"modifier_rank {modifier_rank} is not a rank of a group of {world}")

    def __enter__(self):
        sharding._acquire(self.params)
        self._announce(1)
        return self.params

    def _announce(self, change):
        """Copies of a parameter have its values from here on. load_state_dict, which may run on the modifier's rank
        alone, learns that the end of the context keeps what it writes."""
        for param in self.params:
            param._ds_gathered = getattr(param, "_ds_gathered", 0) + change
            if self.modifier_rank is not None:
                param._ds_kept_later = getattr(param, "_ds_kept_later", 0) + change

    def __exit__(self, *exc):
        self._announce(-1)
        try:
            if exc[0] is None:
                self._keep_changes()
        finally:
            sharding._release(self.params)

    @torch.no_grad()
    def _keep_changes(self):
        if self.modifier_rank is None:
            sharding.write_back([param for param in self.params if param.ds_handle.reshaped()])
            for access, own in sharding._by_access(self.params):
                _keep_writes(access, own)
            return
        _spread_whole(self._whole, self.modifier_rank)
        for param in self.params:
            param.ds_access.broadcast(param, self.modifier_rank)
        sharding.write_back(self.params)


def _keep_writes(access, params):
    """Keeps values that were written into ``params`` without a ``modifier_rank``. The gatherer of an engine keeps it;
    all ranks that share parameters of no engine are here, and compare it."""
    if access.core is not None and not access.checks_writes:
        return
    written = {n: param for n, param in enumerate(params) if access.gatherer.written(param.ds_handle)}
    if access.core is not None:
        for param in written.values():
            access.gatherer.forget_written(param.ds_handle)
        for param in written.values():
            raise RuntimeError(
                f"parameter '{param.ds_handle.name}' {tuple(param.shape)} was written inside "
                "deepspeed.zero.GatheredParameters without a modifier_rank, and "
                "zero_optimization.enable_sanity_checks is true: pass modifier_rank=0 to change it on all ranks"
            )
        return
    _refuse_different(access, params, {n: _digest(param) for n, param in written.items()})
    sharding.write_back(list(written.values()))


def _refuse_different(access, params, digests):
    if access.world == 1:
        return
    found = [None] * access.world
    with suppress_logging():
        dist.all_gather_object(found, digests, group=access.group)
    for n in sorted({n for one in found for n in one}):
        if any(one.get(n) != found[0].get(n) for one in found):
            raise RuntimeError(
                f"parameter '{params[n].ds_handle.name}' was written inside deepspeed.zero.GatheredParameters without "
                "a modifier_rank, and ranks have written different values. Pass modifier_rank=0, or write the same on "
                "every rank"
            )


def _digest(param):
    values = param.detach().reshape(-1).contiguous().cpu()
    return hashlib.sha256(values.view(torch.uint8).numpy()).hexdigest()


def _spread_whole(params, rank):
    """Every rank gets that rank's values of parameters that lie whole on all of them."""
    living = [(param, param._ds_core) for param in params if param._ds_core and param._ds_core.target]
    values, cores = [], {}
    for param, link in living:
        values.append(param.detach().clone(memory_format=torch.contiguous_format))
        if ranks_of(param) is not None:
            copies = ranks_of(param).copies
            dist.broadcast(values[-1], dist.get_global_rank(copies, rank), group=copies)
        else:
            cores.setdefault(link.target, []).append(values[-1])
    for core, tensors in cores.items():
        core.broadcast(tensors, rank)
    for (param, _), value in zip(living, values):
        param.detach().copy_(value)


def _flatten(params):
    if torch.is_tensor(params):
        yield params
    elif params is not None:
        for param in params.values() if isinstance(params, dict) else params:
            yield from _flatten(param)


def register_external_parameter(module, parameter):
    """``module``'s forward uses ``parameter``, which another module owns: it is gathered with the module's own.

    Needed only to gather it earlier: a sharded parameter that a running module touches is found by itself.
    Raises RuntimeError for what is not a parameter.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter needs a torch.nn.Parameter, got {type(parameter).__name__}")
    external = module.__dict__.setdefault("_external_params", {})
    external[id(parameter)] = parameter
    unit = module.__dict__.get("_ds_hook_unit")  # a link to the core that gathers the module's parameters together
    if unit is not None and unit.target is not None and sharding.is_sharded(parameter):
        unit.target.gatherer.extend_unit(unit.index, parameter.ds_handle)


def unregister_external_parameter(module, parameter):
    """Undoes ``register_external_parameter``; raises RuntimeError when it was not registered."""
    external = module.__dict__.get("_external_params", {})
    if id(parameter) not in external:
        raise RuntimeError("the parameter is not registered with this module")
    del external[id(parameter)]
