"""Turns the ``optimizer`` section, or what the caller passed, into a torch optimizer over the trainable parameters."""

import torch

from deepspeed.ops.by_name import optimizer_named


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


def _stays_as_it_is(param):
    """Whether ``param`` is a frozen weight that its layer manages (``deepspeed.linear``), or codes."""
    frozen = getattr(param, "ds_optim_param", False) or not param.is_floating_point()
    return frozen and not param.requires_grad


def build_optimizer(config, model, model_parameters, client_optimizer, on_host=False):
    """Returns a ``torch.optim.Optimizer`` or None: ``_built`` with these arguments. Its groups lose the frozen weights
    of ``deepspeed.linear``: no step would change them, and masters of them would take up memory."""
    optimizer = _built(config, model, model_parameters, client_optimizer, on_host)
    for group in optimizer.param_groups if optimizer is not None else ():
        if any(map(_stays_as_it_is, group["params"])):
            group["params"] = [param for param in group["params"] if not _stays_as_it_is(param)]
    return optimizer


def _built(config, model, model_parameters, client_optimizer, on_host=False):
    """The caller's object, or what the caller's callable makes of the parameters, goes before the configuration.
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
    return optimizer_named(name, parameters, config.optimizer_params, on_host)
