"""Arguments of ``deepspeed.tp_model_init``, kept for the next call of ``deepspeed.initialize``."""

from collections import namedtuple

from deepspeed import comm as dist
from deepspeed.config.errors import config_error
from deepspeed.config.getters import load_ds_config
from deepspeed.config.inference import as_dtype
from deepspeed.module_inject.layers import set_autotp_mode

_Arguments = namedtuple("_Arguments", "tp_size dtype tp_group")
_recorded = None


def tp_model_init(model, tp_size, dtype, config=None, **kwargs):
    """Announces that ``tp_size`` ranks will share the layers of ``model``, and returns it; the next
    ``deepspeed.initialize`` cuts it.

    Args:
        dtype: the type of the parameters, for the section ``tensor_parallel``; None leaves that to the configuration.
        config: the configuration that ``initialize`` will get: a dict, a path, or base64 of JSON. What its section
            ``tensor_parallel`` says is compared at once.
        tp_group: the ranks that share the model; by default neighbours do.

    ValueError where the arguments disagree with each other, with ``config`` or with an earlier call.
    """
    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise TypeError(f"tp_model_init got unknown arguments {sorted(kwargs)}: tp_group is the only one known")
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise config_error(f"tp_model_init: tp_size is {tp_size!r}, and it must be a whole number >= 1", ["tp_size"])
    _check_world(tp_size)
    record_tp_model_init_args(tp_size, dtype, group, dist)
    if config is not None:
        merged_with(_recorded, load_ds_config(config))
    set_autotp_mode(training=True)
    return model


def _check_world(tp_size):
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % tp_size and dist.is_initialized():
        raise ValueError(f"tp_model_init: tp_size = {tp_size} does not divide the {world} ranks of this job")


def record_tp_model_init_args(tp_size, dtype, tp_group, dist_module):
    """Keeps the arguments of ``tp_model_init``.

    Args:
        tp_group: the ranks that share the model, or None where the library makes the groups.
        dist_module: ``deepspeed.comm``, or a module with the same functions.

    ValueError for a group that does not have ``tp_size`` ranks, and where an earlier call had other arguments.
    """
    global _recorded
    given = _Arguments(tp_size, dtype, tp_group)
    _check_group(given, dist_module)
    for name, earlier, now in zip(given._fields, _recorded or given, given):
        if earlier is not now and earlier != now:
            raise ValueError(
                f"tp_model_init was called with {name}={earlier!r} before, and now with {name}={now!r}: "
                "use the same arguments until deepspeed.initialize is called"
            )
    _recorded = given


def merge_tp_model_init_into_config(config_dict, mpu, mesh_param, dist_module):
    """A configuration with what the last ``tp_model_init`` said in its section ``tensor_parallel``; ``config_dict``
    itself where there was no such call. The arguments of that call are forgotten, also when this raises.

    ValueError where the configuration says something else, and for a ``tp_group`` beside an ``mpu`` or a
    ``mesh_param``, which make groups of their own.
    """
    global _recorded
    given, _recorded = _recorded, None
    if given is None:
        return config_dict
    other = "mpu" if mpu is not None else "mesh_param" if mesh_param is not None else None
    if given.tp_group is not None and other is not None:
        raise ValueError(f"tp_model_init has a tp_group, and initialize got {other}: pass one of them")
    _check_group(given, dist_module)
    return merged_with(given, load_ds_config(config_dict))


def merged_with(given, config):
    """The dict ``config`` with the recorded arguments ``given`` in its section ``tensor_parallel``."""
    section = config.get("tensor_parallel") or {}
    if not isinstance(section, dict):
        return config
    section = dict(section)
    size, dtype = section.get("autotp_size"), section.get("dtype")
    _merge(section, "autotp_size", "tp_size", given.tp_size, size == 0 and given.tp_size == 1)
    if given.dtype is not None:
        _merge(section, "dtype", "dtype", given.dtype, dtype not in (None, "auto") and as_dtype(dtype) is given.dtype)
    if given.tp_group is not None:
        groups = "tensor_parallel" if "tensor_parallel" in section else "tp"
        section[groups] = dict(section.get(groups) or {})
        _merge(section[groups], "tp_group", "tp_group", given.tp_group)
    return {**config, "tensor_parallel": section}


def _merge(section, key, argument, value, same=False):
    """Sets ``key`` to the value of an argument; ValueError where it has another one that does not mean the ``same``."""
    there = section.get(key)
    if there not in (None, "auto", value) and not same:
        raise ValueError(
            f"tp_model_init was called with {argument}={value!r}, and the section tensor_parallel of the configuration "
            f"has {key}={there!r}: make them equal, or leave the key out of the configuration"
        )
    section[key] = value


def _check_group(given, dist_module):
    if given.tp_group is None or not dist_module.is_initialized():
        return
    ranks = dist_module.get_world_size(group=given.tp_group)
    if ranks != given.tp_size:
        raise ValueError(f"tp_model_init: tp_group has {ranks} ranks, and tp_size is {given.tp_size}: make them equal")
