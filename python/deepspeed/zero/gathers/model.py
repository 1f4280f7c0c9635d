"""A whole model at ZeRO stage 3: sharding it, moving it, and the link between its parameters and the engine."""

import contextlib
import typing
import weakref

import torch

from deepspeed import comm as dist
from deepspeed.zero.parameters import sharded_parameter as sharding
from deepspeed.zero.parameters.loading import follow_loading
from deepspeed.zero.parameters.param_ranks import broadcast_own_buffers, ranks_of


class ModelAccess:
    """The parameters of one model after ``shard_model``. ``own``: how those with ranks of their own are gathered, by
    the id of their group."""

    def __init__(self, access, own):
        self.access, self.own = access, own

    def of(self, param):
        """The ``ShardAccess`` of a parameter."""
        ranks = ranks_of(param)
        return self.access if ranks is None else self.own[id(ranks.copies)]

    def attach(self, module, core, give_up=None, checks_writes=False):
        """From now on the engine's core gathers them. ``give_up``: a method of an engine that does not train; another
        engine for the model calls it first, see ``take_over``. ``checks_writes``: see ``ShardAccess``."""
        attached = {id(plain): plain.through(core) for plain in [self.access, *self.own.values()]}
        for access in attached.values():
            access.checks_writes = checks_writes
            access.give_up = weakref.WeakMethod(give_up) if give_up is not None else None
        for name, param in module.named_parameters():
            param.ds_handle.name = name
            param.ds_access = attached[id(self.of(param))]


def take_over(module):
    """Takes an engine that only runs the model off it, so that a new one may gather its parameters: their slices are
    about to move. trl computes a reference that way before it trains the same model. The old engine can still be
    called."""
    for access in {id(p.ds_access): p.ds_access for p in module.parameters() if sharding.is_sharded(p)}.values():
        if access.give_up is not None and (give_up := access.give_up()) is not None:
            give_up()


def detach(module, group, copies):
    """The engine is going: parameters stay sharded and are gathered by collectives again."""
    sharded = [param for param in module.parameters() if sharding.is_sharded(param)]
    if sharded:
        plain = ModelAccess(sharding.ShardAccess.of_group(group, copies), _own_accesses(sharded))
        for param in sharded:
            param.ds_access = plain.of(param)


def _own_accesses(params):
    groups = {id(r.copies): r.copies for r in map(ranks_of, params) if r is not None}
    return {key: sharding.ShardAccess.of_group(group, group) for key, group in groups.items()}


class _Wishes(typing.NamedTuple):
    """ZeRO++ as ``zero.Init`` was told: ``size`` of the groups with a second copy (0: none was named), and whether
    parameters, or the frozen ones, are coded."""

    size: int = 0
    codes_weights: bool = False
    codes_frozen: bool = False


def wishes_of(module):
    """Returns what ``zero.Init`` was told about the parameters of ``module``."""
    accesses = {id(p.ds_access): p.ds_access for p in module.parameters() if sharding.is_sharded(p)}.values()
    groups = [access.second_group for access in accesses if access.second_group is not None]
    return _Wishes(
        dist.get_world_size(groups[0]) if groups else 0,
        any(access.codes_weights for access in accesses),
        any(access.codes_frozen for access in accesses),
    )


@torch.no_grad()
def shard_model(module, parallel, group, device=None):
    """Shards every parameter that is not sharded yet over ``group``, all from the data-parallel rank 0's values.

    Buffers are made equal to rank 0's. Raises ValueError for a parameter that is sharded over other ranks, and for one
    that rests elsewhere than on ``device``.
    """
    made = ModelAccess(sharding.ShardAccess.of_group(group, parallel.dp_group), _own_accesses(module.parameters()))
    for buffer in broadcast_own_buffers(module):
        made.access.broadcast(buffer)
    for name, param in module.named_parameters():
        access = made.of(param)
        if sharding.is_sharded(param):
            if param.ds_world_size != access.world:
                raise ValueError(
                    f"parameter '{name}' is sharded over {param.ds_world_size} ranks, the engine shards over "
                    f"{access.world}; pass the same group to zero.Init (data_parallel_group=, or mpu=; MiCS_Init)"
                )
            continue
        if device is not None and param.device.type != device.type:
            raise ValueError(
                f"parameter '{name}' rests on {param.device.type}, and the engine trains on {device.type}: ZeRO stage 3 "
                "has a placement of its own. Leave LoRAConfig.offload out, and use zero_optimization.offload_param"
            )
        access.broadcast(param)
        sharding.shard(param, access, name)
    for sub in module.modules():
        follow_loading(sub)
    return made


def _keep_parameters(module, device):
    """A context in which ``module.to(device)`` changes parameters in place on every device. On some devices torch makes
    new ones, so that tied weights become separate and an optimizer of the caller has the old ones."""
    if torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)):
        return contextlib.nullcontext()
    if not hasattr(torch.__future__, "set_swap_module_params_on_conversion"):
        raise RuntimeError(
            f"torch {torch.__version__} makes new parameters when a model moves to {device}, which separates tied "
            f"weights and optimizers from the model: use torch 2.3 or later, or build the model on that device"
        )
    return _swapping(list(module.parameters()))


@contextlib.contextmanager
def _swapping(params):
    attributes = [dict(vars(param)) for param in params]  # torch gives them to the other tensor
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        for param, own in zip(params, attributes):
            vars(param).update(own)


def move_module(module, device):
    """``module.to(device)`` that leaves sharded parameters where their slices are. Every parameter stays the same
    object. Raises ValueError for a tensor on the meta device, which has no values, unless all are there and stay there:
    a step is planned."""
    if device.type == "meta" and all(one.is_meta for one in (*module.parameters(), *module.buffers())):
        return
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise ValueError(
                    f"{kind} '{name}' {tuple(tensor.shape)} is on the meta device and has no values: call "
                    f"module.to_empty(device=...) and load or initialise it"
                    + (", or build the model inside deepspeed.zero.Init" if kind == "parameter" else "")
                )
    with _keep_parameters(module, device):
        if any(sharding.is_sharded(param) for param in module.parameters()):
            module._apply(lambda tensor: tensor if sharding.is_sharded(tensor) else tensor.to(device))
        else:
            module.to(device)
