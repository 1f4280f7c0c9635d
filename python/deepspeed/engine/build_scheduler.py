"""Turns the ``scheduler`` section, or what the caller passed, into a learning-rate scheduler."""

import torch

from deepspeed._native import DeepSpeedConfigError
from deepspeed.optim import lr_schedules
from deepspeed.optim.lr_arguments import VALID_LR_SCHEDULES


def build_scheduler(config, optimizer, client_scheduler):
    """``optimizer`` is the torch optimizer whose ``param_groups`` hold the rates. A callable is called with it."""
    if client_scheduler is not None:
        makes_one = isinstance(client_scheduler, type) or not hasattr(client_scheduler, "step")
        return client_scheduler(optimizer) if callable(client_scheduler) and makes_one else client_scheduler
    name = config.scheduler_name
    if name is None:
        return None
    if optimizer is None:
        raise DeepSpeedConfigError(
            f"scheduler.type {name!r} needs an optimizer: add an optimizer section or pass one to initialize"
        )
    ours = name in VALID_LR_SCHEDULES
    scheduler_class = getattr(lr_schedules if ours else torch.optim.lr_scheduler, name, None)
    if scheduler_class is None:
        raise DeepSpeedConfigError(
            f"scheduler.type {name!r} is unknown: it is neither one of {', '.join(VALID_LR_SCHEDULES)} "
            "nor a class of torch.optim.lr_scheduler"
        )
    try:
        return scheduler_class(optimizer, **(config.scheduler_params or {}))
    except TypeError as error:
        raise DeepSpeedConfigError(f"scheduler.params do not fit {name}: {error}") from error
