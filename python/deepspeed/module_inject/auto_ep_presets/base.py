"""The section ``expert_parallel``, what a layer with experts looks like, and what is known of a family of models."""

import dataclasses
from typing import Literal

_UNSET = object()  # a key that was left out, where None means something


@dataclasses.dataclass
class AutoEPConfig:
    """The section ``expert_parallel``; docs/config.md says what each key means."""

    enabled: bool = False
    autoep_size: int = 1
    expert_tensor_parallel_size: int = 1
    validate_folding_routing: bool = False
    preset_model: str | None = None
    moe_layer_pattern: str | None = None
    expert_pattern: str | None = None
    router_pattern: str | None = None
    use_grouped_mm: bool = True
    disable_triton_grouped_mm: bool = False
    route_norm: bool | None = None
    route_scale: float = 1.0
    score_apply: Literal["auto", "pre", "post"] = "auto"
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = "auto"
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    top_k: int | str = "auto"
    load_balance_coeff: float | None | object = _UNSET
    routed_scaling_factor: float | str = "auto"
    expert_w1: str | None = None
    expert_w2: str | None = None
    expert_w3: object = _UNSET
    num_experts_attr: str | None = None
    top_k_attr: str | None = None
    has_shared_experts: bool | None = None
    shared_experts_pattern: str | None = None
    shared_experts_gate_pattern: str | None = None


@dataclasses.dataclass
class MoELayerSpec:
    """One layer with experts of a model, as it was found.

    ``expert_storage``: experts are modules in a list, or rows of three-dimensional parameters. ``expert_w1_name`` makes
    the gated half (with ``expert_w3_name`` None, in rows: both halves, one after the other), ``expert_w3_name`` the
    other half, ``expert_w2_name`` the output. ``return_router_logits``: forward returns them behind the output.
    ``router_logits_capture_*``: whose output transformers records them from, and at which index. ``fused_layout`` is
    ours: how rows lie (``classify_fused_gate_up_layout``).
    """

    moe_module_name: str
    model_family: str
    router_name: str
    experts_name: str
    expert_storage: Literal["fused_3d", "module_list"]
    expert_w1_name: str
    expert_w2_name: str
    expert_w3_name: str | None
    num_experts: int
    top_k: int
    hidden_size: int
    ffn_hidden_size: int
    score_func: Literal["softmax", "sigmoid"]
    score_apply: Literal["pre", "post"]
    route_norm: bool
    gate_bias: bool
    return_router_logits: bool
    router_logits_capture_target: Literal["moe_block", "router", "none"]
    router_logits_capture_index: int | None
    router_logits_capture_layer_name: str | None
    has_shared_experts: bool
    shared_experts_name: str
    shared_experts_gate_name: str = ""
    route_scale: float = 1.0
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    group_score_func: Literal["max", "top2_sum"] = "top2_sum"
    supports_expert_bias: bool = True
    unsupported_router_bias_names: tuple[str, ...] = ()
    preset_adapter: str = "default"
    router_logits_capture_mode: Literal["raw", "post_score"] = "post_score"
    moe_output_shape: Literal["batched", "flat"] = "batched"
    fused_layout: Literal["out_in", "in_out"] = "out_in"


@dataclasses.dataclass(frozen=True)
class MoEModelPreset:
    """A family of models. Patterns are regular expressions: of the layers, found in their full names; of the router,
    the experts and what all tokens use, of the whole name of a child of the layer.

    ``listed`` and ``stacked``: names of w1, w2, w3 where experts are modules in a list, and where they are rows.
    ``route_norm``, ``score_func``: None: as the model's configuration says (``norm_topk_prob``, ``scoring_func``).
    ``returns_logits``: layers whose router is a linear layer return the logits, too; asked where there is no source.
    """

    hf_model_types: tuple = ()
    moe_layer_pattern: str = r"layers\.\d+\.mlp$"
    router_pattern: str = "gate|router"
    expert_pattern: str = "experts"
    listed: tuple = ("gate_proj", "down_proj", "up_proj")
    stacked: tuple = ("gate_up_proj", "down_proj", None)
    num_experts_attr: str = "num_experts"
    top_k_attr: str = "num_experts_per_tok"
    score_func: str | None = None
    route_norm: bool | None = None
    group_score_func: str = "top2_sum"
    shared_experts_pattern: str = ""
    shared_experts_gate_pattern: str = ""
    returns_logits: bool = False
    adapter: str = "default"
