"""Finds parameters of experts, and makes groups of them for optimizers.

Optimizers do not need such groups here, because the engine finds experts itself. Scripts that make them still work.
"""

import torch

from deepspeed.moe.layer import MoE
from deepspeed.utils.norms import is_moe_param
from deepspeed.utils.runs import runs_of


def has_moe_layers(m):
    """``(whether m has MoE layers, experts of the first one)``."""
    experts = [module.num_experts for module in m.modules() if isinstance(module, MoE)]
    return bool(experts), experts[0] if experts else 0


def split_params_into_shared_and_expert_params(params):
    """``(shared, experts')`` parameters, in their order."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group):
    """The same of gradients; parameters without one are left out."""
    shared, experts = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return [p.grad.to(p.dtype) for p in shared], [p.grad.to(p.dtype) for p in experts]


def split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=178956971):
    """``param_groups`` (one, or a list or tuple of them) without experts' parameters, and behind them groups of these
    alone: for each given group and each ``ep_size`` one with the given one's values, ``"moe": True``, ``"name"``:
    ``"ep_size_<ep_size>"``, or several where one would have more than ``max_group_size`` elements (None: no bound).

    Groups that are given lose their experts' parameters. Returns a list. Raises ValueError for another type.
    """
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    elif isinstance(param_groups, (list, tuple)):
        param_groups = list(param_groups)
    else:
        raise ValueError(f"Unknown param group type of {type(param_groups)}; it is a dict, or a list of dicts")
    made = []
    for group in param_groups:
        group["params"], experts = split_params_into_shared_and_expert_params(_listed(group["params"]))
        for name in dict.fromkeys(param.group_name for param in experts):
            mine = [param for param in experts if param.group_name == name]
            runs = runs_of(mine, max_group_size, lambda param: getattr(param, "ds_numel", param.numel()))
            made += [{**group, "name": name, "moe": True, "params": run} for run in runs]
    return param_groups + made


def _listed(params):
    return [params] if isinstance(params, torch.Tensor) else list(params)


def is_moe_param_group(param_group):
    """Whether a group is one of experts' parameters."""
    return param_group.get("moe", False)


def configure_moe_param_groups(model_parameters):
    """A list of parameters, or of groups of them, as groups with experts' parameters apart."""
    assert isinstance(model_parameters, list), "model_parameters must be a list"
    if model_parameters and not isinstance(model_parameters[0], dict):
        model_parameters = [{"params": model_parameters, "name": "params"}]
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
