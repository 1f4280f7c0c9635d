"""Turns the ``scheduler`` section, or what the caller passed, into a learning-rate scheduler."""

import torch

from deepspeed._native import DeepSpeedConfigError
from deepspeed.data.random_ltd import is_on
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
        return scheduler_class(optimizer, **{**(config.scheduler_params or {}), **_by_layer_tokens(config)})
    except TypeError as error:
        raise DeepSpeedConfigError(f"scheduler.params do not fit {name}: {error}") from error


def _by_layer_tokens(config):
    """The parameters of a schedule that counts the tokens of all layers, as the section ``layer_token_lr_schedule`` of
    random-LTD says; {} where it is off."""
    section = config.data_efficiency_config["data_routing"]["random_ltd"]["layer_token_lr_schedule"]
    if not is_on(config.data_efficiency_config) or not section["enabled"]:
        return {}
    kind = {} if section["warmup_type"] is None else {"warmup_type": section["warmup_type"]}
    return {
        "unit": "layer_tokens",
        "warmup_unit": "layer_tokens",
        "total_num_steps": section["total_layer_tokens"],
        "warmup_num_steps": section["warmup_layer_tokens"] or 0,
        **kind,
    }
