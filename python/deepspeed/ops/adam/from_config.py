"""Builds the optimizer of a config section ``{"type": "Adam" | "AdamW", "params": {...}}``."""

import torch

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam


def _take_apart(name, params):
    """``(the other params, whether the decay is decoupled, whether torch's own class is asked for)``."""
    params = dict(params)
    torch_adam = params.pop("torch_adam", False)
    return params, params.pop("adam_w_mode", True) or name == "adamw", torch_adam


def build_adam(name, parameters, params):
    """``name`` is ``adam`` or ``adamw``. Adam decouples the decay too unless ``adam_w_mode`` is false; ``torch_adam``
    asks for torch's own class."""
    params, adam_w_mode, torch_adam = _take_apart(name, params)
    if torch_adam:
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(parameters, **params)
    params.pop("fp32_optimizer_states", None)  # an engine's masters, and with them the states, are fp32 anyhow
    return FusedAdam(parameters, adam_w_mode=adam_w_mode, **params)


def build_cpu_adam(name, parameters, params):
    """The same where the step is offloaded to the host."""
    others, adam_w_mode, torch_adam = _take_apart(name, params)
    if torch_adam:
        return build_adam(name, parameters, params)
    return DeepSpeedCPUAdam(parameters, adamw_mode=adam_w_mode, **others)
