"""Turns the ``optimizer`` section, or what the caller passed, into a torch optimizer over the trainable parameters."""

import importlib.util
import pkgutil

import torch

from deepspeed import ops
from deepspeed._native import DeepSpeedConfigError
from deepspeed.registry import Registry, load_target, nearest


def trainable(model, model_parameters):
    """The parameters or groups to optimise: ``model_parameters``, else all of the model that want gradients."""
    if model_parameters is None:
        return [p for p in model.parameters() if p.requires_grad]
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        return [
            {**group, "params": list(group["params"]) if not torch.is_tensor(group["params"]) else [group["params"]]}
            for group in given
        ]
    named = [p[1] if isinstance(p, tuple) else p for p in given]
    return [p for p in named if p.requires_grad]


# name in lower case -> builder(name, parameters, params of the config). Other built-in types need no row here: they are
# folders of deepspeed.ops whose package has a `from_config` of the same signature.
OPTIMIZERS = Registry("optimizer", "deepspeed.optimizers")
OPTIMIZERS.register("adam", "deepspeed.ops.adam.from_config:build_adam")
OPTIMIZERS.register("adamw", "deepspeed.ops.adam.from_config:build_adam")


# The same where the step is offloaded to the host, if that has a class of its own; packages say `from_config_on_host`.
HOST_OPTIMIZERS = Registry("optimizer of the host")
HOST_OPTIMIZERS.register("adam", "deepspeed.ops.adam.from_config:build_cpu_adam")
HOST_OPTIMIZERS.register("adamw", "deepspeed.ops.adam.from_config:build_cpu_adam")


def _builder(name, on_host=False):
    """The builder of a built-in type (in lower case), or None."""
    for registry in (HOST_OPTIMIZERS, OPTIMIZERS) if on_host else (OPTIMIZERS,):
        if name in registry.names():
            return registry.get(name)
    if not name.isidentifier() or importlib.util.find_spec(f"deepspeed.ops.{name}") is None:
        return None
    for attribute in ("from_config_on_host", "from_config") if on_host else ("from_config",):
        try:
            return load_target(f"deepspeed.ops.{name}:{attribute}")
        except AttributeError:  # a folder of something else, or no class of its own
            continue
    return None


def _names():
    """All built-in types, in lower case."""
    folders = [module.name for module in pkgutil.iter_modules(ops.__path__) if module.ispkg]
    return sorted({*OPTIMIZERS.names(), *(name for name in folders if _builder(name) is not None)})


def build_optimizer(config, model, model_parameters, client_optimizer, on_host=False):
    """Returns a ``torch.optim.Optimizer`` or None. The caller's object, or callable of the parameters, goes first.
    ``on_host``: the step is offloaded, so a built-in type is the class for host memory where there is one."""
    if client_optimizer is not None:
        if isinstance(client_optimizer, torch.optim.Optimizer):
            return client_optimizer
        if callable(client_optimizer):
            made = client_optimizer(trainable(model, model_parameters))
            if not isinstance(made, torch.optim.Optimizer):
                raise TypeError(
                    f"the optimizer callable returned {type(made).__name__}; it must return a torch.optim.Optimizer"
                )
            return made
        raise TypeError(
            f"optimizer is a {type(client_optimizer).__name__}; pass a torch.optim.Optimizer or a callable that "
            "makes one from parameters"
        )
    name = config.optimizer_name
    if name is None:
        return None
    parameters = trainable(model, model_parameters)
    if not parameters:
        raise ValueError("there is nothing to optimise: the model has no parameter with requires_grad=True")
    params = dict(config.optimizer_params or {})
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
        if builder is not None:
            return builder(name.lower(), parameters, params)
        return torch_class(parameters, **params)
    except TypeError as error:
        raise DeepSpeedConfigError(f"optimizer.params do not fit {name}: {error}") from error
