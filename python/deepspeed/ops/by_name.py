"""Builds the optimizer that ``optimizer.type`` of a configuration names, and counts its states of each element."""

import pkgutil

import torch

from deepspeed import ops
from deepspeed._native import DeepSpeedConfigError
from deepspeed.registry import Registry, nearest

# name in lower case -> builder(name, parameters, params of the config). Other built-in types need no row here: they are
# folders of deepspeed.ops whose package has a `from_config` of the same signature.
OPTIMIZERS = Registry("optimizer", "deepspeed.optimizers")
OPTIMIZERS.register("adam", "deepspeed.ops.adam.from_config:build_adam")
OPTIMIZERS.register("adamw", "deepspeed.ops.adam.from_config:build_adam")
OPTIMIZERS.register("onebitadam", "deepspeed.ops.onebit:build")
OPTIMIZERS.register("onebitlamb", "deepspeed.ops.onebit:build")
OPTIMIZERS.register("zerooneadam", "deepspeed.ops.onebit:build")


# The same where the step is offloaded to the host, if that has a class of its own; packages say `from_config_on_host`.
HOST_OPTIMIZERS = Registry("optimizer of the host")
HOST_OPTIMIZERS.register("adam", "deepspeed.ops.adam.from_config:build_cpu_adam")
HOST_OPTIMIZERS.register("adamw", "deepspeed.ops.adam.from_config:build_cpu_adam")


def _builder(name, on_host=False):
    """The builder of a built-in type (in lower case), or None."""
    for registry in (HOST_OPTIMIZERS, OPTIMIZERS) if on_host else (OPTIMIZERS,):
        if name in registry.names():
            return registry.get(name)
    package = getattr(ops, name, None) if name.isidentifier() else None  # None: there is no such folder
    own = getattr(package, "from_config", None)
    return getattr(package, "from_config_on_host", own) if on_host else own


def _names():
    """All built-in types, in lower case."""
    folders = [module.name for module in pkgutil.iter_modules(ops.__path__) if module.ispkg]
    return sorted({*OPTIMIZERS.names(), *(name for name in folders if _builder(name) is not None)})


def optimizer_named(name, parameters, params, on_host=False):
    """An optimizer of the type ``name`` over ``parameters`` (or groups) with ``optimizer.params``. ``on_host``: the
    step is offloaded, so a built-in type is the class for host memory where there is one.

    Raises:
        DeepSpeedConfigError: the type is unknown, or the params do not fit it.
        ValueError: the params have a key that belongs elsewhere.
    """
    params = dict(params or {})
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params.max_grad_norm is not supported; set the top-level key gradient_clipping instead"
        )
    builder = _builder(name.lower(), on_host)
    torch_class = None if builder is not None else getattr(torch.optim, name, None)
    if builder is None and torch_class is None:
        raise DeepSpeedConfigError(
            f"optimizer.type {name!r} is unknown: it is neither built in ({', '.join(_names())}) nor "
            "a class of "
            f"torch.optim.{nearest(name, _names() + dir(torch.optim))}"
        )
    try:
        return torch_class(parameters, **params) if builder is None else builder(name.lower(), parameters, params)
    except TypeError as error:
        raise DeepSpeedConfigError(f"optimizer.params do not fit {name}: {error}") from error


def is_native(optimizer):
    """Whether ``optimizer`` is one of ours: its update is a rule of the native engine."""
    return hasattr(optimizer, "rule_args") and not getattr(optimizer, "states_in_one_piece", False)


def rules_of(optimizer):
    """Returns the name of the native rule of each parameter group, which knows the states (``csrc/optim``); None where
    the optimizer keeps states of its own."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [optimizer.rule_of(group) if is_native(optimizer) else None for group in groups]
