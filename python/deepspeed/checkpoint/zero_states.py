"""What a checkpoint holds of an engine with ZeRO: shapes, shards, and the whole weights when asked for."""

import collections

import torch

from deepspeed._compat import named_parameters
from deepspeed.checkpoint import storage
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.sharded_parameter import is_sharded


def _shape(param):
    return param.ds_shape if is_sharded(param) else param.shape


def sharded_names(module):
    """All names of sharded parameters, tied ones under each of their names."""
    return {name for name, param in named_parameters(module) if is_sharded(param)}


def param_shapes(engine):
    """One ordered dict name -> torch.Size for each parameter group of the optimizer, in its order."""
    if engine.basic_optimizer is None:
        return []
    called = {id(param): name for name, param in engine.module.named_parameters()}
    return [
        collections.OrderedDict((called.get(id(p), engine.optimizer.param_names.get(p)), _shape(p)) for p in group)
        for group in engine.optimizer.bit16_groups
    ]


def _frozen(engine):
    """Parameters that no file of optimizer states has: frozen ones, and those the optimizer was not given."""
    trained = {id(param) for group in engine.trained_groups for param in group}
    return [(name, param) for name, param in engine.module.named_parameters() if id(param) not in trained]


def frozen_shapes(engine):
    """Ordered dict name -> torch.Size of parameters that are not trained."""
    return collections.OrderedDict((name, _shape(param)) for name, param in _frozen(engine))


def frozen_fragments(engine):
    """Ordered dict name -> values of parameters that are not trained: this rank's slice at stage 3, else the whole."""
    return collections.OrderedDict(
        (name, storage.compact(p.ds_tensor if is_sharded(p) else p.data)) for name, p in _frozen(engine)
    )


def shared_params(module):
    """dict alias -> first name of the same parameter, for tied weights."""
    first, found = {}, {}
    for name, param in named_parameters(module):
        if id(param) in first:
            found[name] = first[id(param)]
        first.setdefault(id(param), name)
    return found


@torch.no_grad()
def whole_state_dict(engine, exclude_frozen_parameters=False):
    """Rank 0: the module's state dict with whole parameters on the CPU, tied ones as one tensor; None elsewhere.

    Parameters are gathered one at a time. Every rank calls it.
    """
    module, keep = engine.module, engine.global_rank == 0
    state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
    by_name = dict(named_parameters(module))
    made, found = {}, type(state)()
    for name, value in state.items():
        param = by_name.get(name)
        if param is None or not is_sharded(param):
            if keep:
                found[name] = value.detach().cpu().clone() if torch.is_tensor(value) else value
            continue
        if id(param) not in made:
            with GatheredParameters([param]):
                made[id(param)] = param.detach().cpu().clone() if keep else None
        found[name] = made[id(param)]
    if hasattr(state, "_metadata"):
        found._metadata = state._metadata
    if engine.core is not None:
        engine.core.gatherer.drain()
    return found if keep else None
