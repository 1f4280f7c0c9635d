"""``module.load_state_dict`` with whole tensors into sharded parameters."""

from deepspeed.zero.parameters import sharded_parameter as sharding

_FLAG = "_ds_loads_shards"


def follow_loading(module):
    """Makes ``load_state_dict`` work for a module with sharded parameters of its own: they are gathered while it
    loads, and their slices (and the optimizer's masters) take the new values. Every rank must load the same values, but
    inside ``GatheredParameters(..., modifier_rank=r)`` rank r may load alone: the end of that context keeps the values.
    """
    if _FLAG in module.__dict__ or not any(True for _ in module.parameters(recurse=False)):
        return
    module.__dict__[_FLAG] = True
    module._register_load_state_dict_pre_hook(_gather, with_module=True)
    module.register_load_state_dict_post_hook(_keep)


def _gather(module, state_dict, prefix, *_):
    """Own parameters that the state dict has in full size and that nobody has gathered."""
    wanted = []
    for name, param in module._parameters.items():
        given = state_dict.get(prefix + name)
        if param is None or given is None or not sharding.is_sharded(param):
            continue
        if param.ds_status != sharding.ZeroParamStatus.AVAILABLE and tuple(given.shape) != (0,):
            wanted.append(param)
    sharding._acquire(wanted)
    module.__dict__["_ds_loading"] = wanted


def _keep(module, incompatible_keys):
    own = [p for p in module._parameters.values() if p is not None and sharding.is_sharded(p)]
    loaded = [
        p for p in own if p.ds_status == sharding.ZeroParamStatus.AVAILABLE and not getattr(p, "_ds_kept_later", 0)
    ]
    sharding.write_back(loaded)
    sharding._release(module.__dict__.pop("_ds_loading", []))
