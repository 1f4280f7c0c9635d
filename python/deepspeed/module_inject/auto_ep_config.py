"""The section ``expert_parallel``: read, completed from a model's own configuration, and judged."""

import dataclasses

from deepspeed._native import DeepSpeedConfigError
from deepspeed.config.errors import config_error
from deepspeed.module_inject.auto_ep_presets.base import _UNSET, AutoEPConfig, MoELayerSpec, MoEModelPreset
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS, preset_name_for_hf_model_type

SECTION = "expert_parallel"


def _refuse(*rules):
    """ValueError for the first of ``(whether it is broken, key of the section, text)`` that is broken."""
    for broken, key, text in rules:
        if broken:
            raise config_error(f"{SECTION}.{key}: {text}", [f"{SECTION}.{key}"])


def parse_autoep_config(param_dict):
    """``AutoEPConfig`` of the section, or of a whole configuration that has one. Unknown keys are ignored."""
    section = dict((param_dict or {}).get(SECTION, param_dict) or {})
    known = {field.name for field in dataclasses.fields(AutoEPConfig)}
    config = AutoEPConfig(**{key: value for key, value in section.items() if key in known})
    values = vars(config)
    numbers = ("autoep_size", "expert_tensor_parallel_size", "num_expert_groups", "num_limited_groups", "top_k")
    choices = {
        "score_apply": ("auto", "pre", "post"),
        "combine_impl": ("auto", "weighted_sum", "legacy_bmm"),
        "score_func": ("auto", "softmax", "sigmoid"),
        "preset_model": (None, *PRESET_MODELS),
    }
    _refuse(
        (
            config.load_balance_coeff is not _UNSET and config.load_balance_coeff is not None,
            "load_balance_coeff",
            f"{config.load_balance_coeff!r}: the model has a load-balancing loss of its own. Set it to null or leave "
            "it out",
        ),
        (
            not isinstance(config.validate_folding_routing, bool),
            "validate_folding_routing",
            f"{config.validate_folding_routing!r} is neither true nor false",
        ),
        *((not _is_count(values[key]), key, f"{values[key]!r} is not a number of at least 1") for key in numbers),
        *(
            (values[key] not in known, key, f"{values[key]!r} is none of {', '.join(map(str, known))}")
            for key, known in choices.items()
        ),
    )
    return config


def _is_count(value):
    return value is None or value == "auto" or isinstance(value, int) and value >= 1 and value is not True


def preset_of(config, model_config=None):
    """The preset that the section names, or that fits ``model_config.model_type``; None for neither."""
    name = config.preset_model or preset_name_for_hf_model_type(getattr(model_config, "model_type", None))
    return PRESET_MODELS.get(name)


def fill_autoep_config_from_hf(config, model_config):
    """Keys that are "auto" or null get what a configuration of transformers says, where it says it. Returns
    ``config``, which is changed."""
    preset = preset_of(config, model_config) or MoEModelPreset()
    if config.top_k == "auto":
        config.top_k = getattr(model_config, config.top_k_attr or preset.top_k_attr, None) or "auto"
    if config.score_func == "auto":
        config.score_func = preset.score_func or getattr(model_config, "scoring_func", None) or "auto"
    if config.route_norm is None:
        given = getattr(model_config, "norm_topk_prob", None)
        config.route_norm = given if preset.route_norm is None else preset.route_norm
    if config.num_expert_groups is None and getattr(model_config, "topk_method", None) != "greedy":
        groups = getattr(model_config, "n_group", None)
        if groups is not None and groups > 1:
            config.num_expert_groups = groups
            config.num_limited_groups = config.num_limited_groups or getattr(model_config, "topk_group", None)
    if config.routed_scaling_factor == "auto":
        factor = getattr(model_config, "routed_scaling_factor", None)
        config.routed_scaling_factor = "auto" if factor is None else float(factor)
    return config


def validate_autoep_config(
    config,
    world_size,
    pp_size,
    tp_size,
    sp_size,
    *,
    zero_stage=0,
    deepcompile_enabled=False,
    tp_preset_model=None,
    use_data_before_expert_parallel=False,
    mpu=None,
    zero_offload_optimizer=False,
    zero_offload_param=False,
):
    """ValueError that names the key where ranks cannot share experts so: ``autoep_size`` of the ranks of a stage, also
    of those that cut its dense weights. Every stage of ZeRO and every kind of offload will do."""
    if not config.enabled:
        return
    ranks = world_size // pp_size
    _refuse(
        (pp_size > 1, "enabled", f"the model is a pipeline of {pp_size} stages: use deepspeed.moe.layer.MoE in it"),
        (
            config.expert_tensor_parallel_size > 1,
            "expert_tensor_parallel_size",
            f"{config.expert_tensor_parallel_size} ranks cannot share one expert: leave it at 1, and raise "
            f"autoep_size, which may be any divisor of the {ranks} ranks, tensor-parallel ones included",
        ),
        (
            tp_size > 1 and use_data_before_expert_parallel,
            "enabled",
            f"use_data_before_expert_parallelism is true beside tensor_parallel.autotp_size={tp_size}, where holders "
            "of different experts are neighbours: leave it out",
        ),
        (
            deepcompile_enabled,
            "enabled",
            "layers that exchange rows cannot be part of a compiled graph: switch DeepCompile off",
        ),
        (
            ranks % config.autoep_size != 0,
            "autoep_size",
            f"{config.autoep_size} ranks are to share experts, and does not divide the {ranks} ranks of a stage (of "
            f"{world_size})",
        ),
    )


def validate_autoep_post_detection(config, specs):
    """The same for the layers that were found: there are some, and their experts can be shared evenly."""
    known = ", ".join(PRESET_MODELS)
    advice = f"Name a preset_model ({known}), or give moe_layer_pattern, router_pattern and expert_pattern"
    _refuse((not specs, "preset_model", f"no layer of the model fits. {advice}"))
    for spec in specs:
        count, groups, others = spec.num_experts, spec.num_expert_groups, ", ".join(spec.unsupported_router_bias_names)
        where = f"layer '{spec.moe_module_name}' has {count} experts"
        _refuse(
            (
                count % config.autoep_size != 0,
                "autoep_size",
                f"{where}, which {config.autoep_size} ranks cannot share evenly",
            ),
            (not 1 <= spec.top_k <= count, "top_k", f"{where}, and a token chooses {spec.top_k} of them"),
            (
                groups is not None and count % groups != 0,
                "num_expert_groups",
                f"{where}, which do not make {groups} groups of one size",
            ),
            (
                groups is not None and spec.num_limited_groups is None,
                "num_limited_groups",
                f"must be set with num_expert_groups={groups}",
            ),
            (others, "router_pattern", f"{where}, and its router has {others}, of which nothing is known"),
        )


__all__ = [
    "PRESET_MODELS", "AutoEPConfig", "DeepSpeedConfigError", "MoELayerSpec", "fill_autoep_config_from_hf",
    "parse_autoep_config", "preset_of", "validate_autoep_config", "validate_autoep_post_detection",
]  # fmt: skip
