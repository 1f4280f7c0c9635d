"""Builds the optimizer of a config section ``{"type": "Adam" | "AdamW", "params": {...}}``."""

import torch

from deepspeed.ops.adam.fused_adam import FusedAdam


def build_adam(name, parameters, params):
    """``name`` is ``adam`` or ``adamw``. Adam decouples the decay too unless ``adam_w_mode`` is false; ``torch_adam``
    asks for torch's own class."""
    params = dict(params)
    torch_adam = params.pop("torch_adam", False)
    adam_w_mode = params.pop("adam_w_mode", True) or name == "adamw"
    if torch_adam:
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(parameters, **params)
    params.pop("fp32_optimizer_states", None)  # an engine's masters, and with them the states, are fp32 anyhow
    return FusedAdam(parameters, adam_w_mode=adam_w_mode, **params)
