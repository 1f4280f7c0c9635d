"""The section ``expert_parallel``: read, completed from a model's own configuration, and judged."""

import dataclasses

from deepspeed._native import DeepSpeedConfigError
from deepspeed.config.errors import config_error
from deepspeed.module_inject.auto_ep_presets.base import _UNSET, AutoEPConfig, MoELayerSpec
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS, preset_name_for_hf_model_type

SECTION = "expert_parallel"


def _wrong(key, text):
    return config_error(f"{SECTION}.{key}: {text}", [f"{SECTION}.{key}"])


def parse_autoep_config(param_dict):
    """``AutoEPConfig`` of the section, or of a whole configuration that has one. Unknown keys are ignored."""
    section = dict((param_dict or {}).get(SECTION, param_dict) or {})
    known = {field.name for field in dataclasses.fields(AutoEPConfig)}
    config = AutoEPConfig(**{key: value for key, value in section.items() if key in known})
    if config.load_balance_coeff is not _UNSET and config.load_balance_coeff is not None:
        raise _wrong(
            "load_balance_coeff",
            f"{config.load_balance_coeff!r}: the model has a load-balancing loss of its own. Set it to null or leave "
            "it out",
        )
    if not isinstance(config.validate_folding_routing, bool):
        raise _wrong("validate_folding_routing", f"{config.validate_folding_routing!r} is neither true nor false")
    for key in ("autoep_size", "expert_tensor_parallel_size", "num_expert_groups", "num_limited_groups", "top_k"):
        value = getattr(config, key)
        if not (value is None or value == "auto" or isinstance(value, int) and value >= 1 and value is not True):
            raise _wrong(key, f"{value!r} is no number of at least 1")
    for key, choices in (
        ("score_apply", ("auto", "pre", "post")),
        ("combine_impl", ("auto", "weighted_sum", "legacy_bmm")),
        ("score_func", ("auto", "softmax", "sigmoid")),
        ("preset_model", (None, *PRESET_MODELS)),
    ):
        if getattr(config, key) not in choices:
            raise _wrong(key, f"{getattr(config, key)!r} is none of {', '.join(map(str, choices))}")
    return config


def preset_of(config, model_config=None):
    """The preset that the section names, or that fits ``model_config.model_type``; None for neither."""
    name = config.preset_model or preset_name_for_hf_model_type(getattr(model_config, "model_type", None))
    return PRESET_MODELS.get(name)


def fill_autoep_config_from_hf(config, model_config):
    """Keys that are "auto" or null get what a configuration of transformers says, where it says it. Returns
    ``config``, which is changed."""
    preset = preset_of(config, model_config)
    if config.top_k == "auto":
        name = config.top_k_attr or (preset.top_k_attr if preset else "num_experts_per_tok")
        config.top_k = getattr(model_config, name, None) or "auto"
    if config.score_func == "auto":
        named = preset.score_func if preset else None
        config.score_func = named or getattr(model_config, "scoring_func", None) or "auto"
    if config.route_norm is None:
        fixed = preset.route_norm if preset else None
        config.route_norm = getattr(model_config, "norm_topk_prob", None) if fixed is None else fixed
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
    """ValueError that names the key where ranks cannot share experts so: ``autoep_size`` of the ranks that hold one
    copy of a stage's dense weights each. Every stage of ZeRO and every kind of offload will do."""
    if not config.enabled:
        return
    if pp_size > 1:
        raise _wrong("enabled", f"the model is a pipeline of {pp_size} stages: use deepspeed.moe.layer.MoE in it")
    if config.expert_tensor_parallel_size > 1:
        raise _wrong("expert_tensor_parallel_size", "experts that are cut among ranks are not built: leave it at 1")
    if tp_size > 1:
        raise _wrong(
            "enabled",
            f"the dense layers are split among tp_size={tp_size} ranks: experts of unchanged models are shared by "
            "data-parallel ranks alone. Leave tensor parallelism out",
        )
    if deepcompile_enabled:
        raise _wrong("enabled", "layers that exchange rows cannot be part of a compiled graph: switch DeepCompile off")
    ranks = world_size // (pp_size * tp_size)
    if ranks % config.autoep_size != 0:
        raise _wrong(
            "autoep_size",
            f"{config.autoep_size} ranks are to share experts, and does not divide the {ranks} ranks with the same "
            f"dense weights (of {world_size})",
        )


def validate_autoep_post_detection(config, specs):
    """The same for the layers that were found: there are some, and their experts can be shared evenly."""
    if not specs:
        raise _wrong(
            "preset_model",
            "no layer of the model fits. Name a preset_model "
            f"({', '.join(PRESET_MODELS)}), or give moe_layer_pattern, router_pattern and expert_pattern",
        )
    for spec in specs:
        _validate_spec(config, spec)


def _validate_spec(config, spec: MoELayerSpec):
    where = f"layer '{spec.moe_module_name}' has {spec.num_experts} experts"
    if spec.num_experts % config.autoep_size != 0:
        raise _wrong("autoep_size", f"{where}, which {config.autoep_size} ranks cannot share evenly")
    if not 1 <= spec.top_k <= spec.num_experts:
        raise _wrong("top_k", f"{where}, and a token chooses {spec.top_k} of them")
    groups = spec.num_expert_groups
    if groups is not None and spec.num_experts % groups != 0:
        raise _wrong("num_expert_groups", f"{where}, which do not make {groups} groups of one size")
    if groups is not None and spec.num_limited_groups is None:
        raise _wrong("num_limited_groups", f"must be set with num_expert_groups={groups}")
    if spec.unsupported_router_bias_names:
        names = ", ".join(spec.unsupported_router_bias_names)
        raise _wrong("router_pattern", f"{where}, and its router has {names}, of which nothing is known")


__all__ = [
    "PRESET_MODELS", "AutoEPConfig", "DeepSpeedConfigError", "MoELayerSpec", "fill_autoep_config_from_hf",
    "parse_autoep_config", "preset_of", "validate_autoep_config", "validate_autoep_post_detection",
]  # fmt: skip
