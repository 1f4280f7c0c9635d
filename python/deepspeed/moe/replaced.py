"""Parameters of experts that replace others after it is known which ranks share the experts. The attribute
``ds_replaced_by`` of a replaced parameter is the tuple of its replacements."""

import torch

from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters import sharded_parameter as sharding
from deepspeed.zero.parameters.param_ranks import ranks_of


@torch.no_grad()
def whole_copy(old):
    """A parameter with the whole value of the sharded one ``old``, and with its attributes that are not about shards.
    Every rank that has a shard calls it."""
    with GatheredParameters([old]):
        new = torch.nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    for key, value in vars(old).items():
        if not key.lstrip("_").startswith("ds_") or key == "ds_z3_leaf_count":
            setattr(new, key, value)
    return new


@torch.no_grad()
def share_anew(experts, copies):
    """Parameters of the module ``experts`` that ``zero.Init`` has sharded over all ranks become shards over the ranks
    of the group ``copies``, which have the same experts. Every rank calls it."""
    held = [
        (module, name)
        for module in experts.modules()
        for name, param in module._parameters.items()
        if param is not None and sharding.is_sharded(param) and ranks_of(param) is None
    ]
    if not held:
        return
    access = sharding.ShardAccess.of_group(copies, copies)
    for module, name in held:
        old = module._parameters[name]
        if not hasattr(old, "ds_replaced_by"):  # modules may share it
            new = whole_copy(old)
            sharding.shard(new, access, old.ds_handle.name)
            access.gatherer.acquire([new.ds_handle])
            access.gatherer.release([new.ds_handle])
            old.ds_replaced_by = (new,)
        module._parameters[name] = old.ds_replaced_by[0]


def trained_instead(model_parameters):
    """The parameters or groups that a script gives to be optimised, with replaced parameters exchanged for their
    replacements. ValueError if one parameter replaces parameters of two groups."""
    if not isinstance(model_parameters, (list, tuple)):
        return model_parameters  # a generator asks the model when it is asked
    seen = {}
    if model_parameters and isinstance(model_parameters[0], dict):
        numbered = enumerate(model_parameters)
        return [{**group, "params": _instead(group["params"], seen, number)} for number, group in numbered]
    return _instead(model_parameters, seen, 0)


def replace_in_optimizer(optimizer):
    """The same in the groups of an optimizer, which must not have made a step."""
    seen = {}
    for number, group in enumerate(optimizer.param_groups):
        gone = [param for param in group["params"] if hasattr(param, "ds_replaced_by")]
        if any(param in optimizer.state for param in gone):
            raise ValueError(
                "the optimizer has states of experts' parameters that others have replaced (expert_parallel, "
                "zero.Init): pass one that has made no step, and load a checkpoint afterwards"
            )
        if gone:
            group["params"] = _instead(group["params"], seen, number)


def _instead(params, seen, number):
    found = []
    for given in [params] if torch.is_tensor(params) else params:
        old = given[1] if isinstance(given, tuple) else given
        new = getattr(old, "ds_replaced_by", None)
        if new is None:
            found.append(given)
            continue
        for param in new:
            if id(param) not in seen:
                found.append(param)
            if seen.setdefault(id(param), number) != number:
                raise ValueError(
                    f"experts of one layer are in the parameter groups {seen[id(param)]} and {number}; with "
                    "expert_parallel they are one parameter for each of their weights: put them into one group"
                )
    return found
