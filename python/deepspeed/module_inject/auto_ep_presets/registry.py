"""Presets for known families of models, and adapters for their routers."""

import dataclasses

from deepspeed.module_inject.auto_ep_presets.base import MoEModelPreset
from deepspeed.moe.errors import fail

PRESET_MODELS = {
    "mixtral": MoEModelPreset(
        hf_model_types=("mixtral",),
        moe_layer_pattern=r"layers\.\d+\.(block_sparse_moe|mlp)$",
        listed=("w1", "w2", "w3"),
        num_experts_attr="num_local_experts",
        score_func="softmax",
        route_norm=True,
        returns_logits=True,
    ),
    "qwen2_moe": MoEModelPreset(
        hf_model_types=("qwen2_moe",),
        score_func="softmax",
        shared_experts_pattern="shared_expert",
        shared_experts_gate_pattern="shared_expert_gate",
        returns_logits=True,
    ),
    "qwen3_moe": MoEModelPreset(hf_model_types=("qwen3_moe",), score_func="softmax", returns_logits=True),
    "deepseek_v2": MoEModelPreset(
        hf_model_types=("deepseek_v2",),
        num_experts_attr="n_routed_experts",
        score_func="softmax",
        route_norm=False,  # what transformers computes, whatever norm_topk_prob says
        group_score_func="max",
        shared_experts_pattern="shared_experts",
        adapter="fp32_router",
    ),
    "deepseek_v3": MoEModelPreset(
        hf_model_types=("deepseek_v3",),
        num_experts_attr="n_routed_experts",
        score_func="sigmoid",
        shared_experts_pattern="shared_experts",
        adapter="fp32_router",
    ),
}

# model_type -> the reason why its experts cannot be stacked.
_UNSUPPORTED = {
    "gpt_oss": "its experts have biases and an activation of their own",
    "llama4": "its router multiplies the inputs of experts by a sigmoid of their own scores",
    "dbrx": "its experts are rows of one two-dimensional parameter",
    "jetmoe": "its attention has experts, too",
    "granitemoe": "its experts are one parallel linear layer",
    "phimoe": "its router chooses by sparse mixing with a noise of its own",
}


def preset_name_for_hf_model_type(model_type):
    """The name of the preset for ``config.model_type`` of transformers; None where there is none."""
    return next((name for name, preset in PRESET_MODELS.items() if model_type in preset.hf_model_types), None)


def unsupported_preset_for_hf_model_type(model_type):
    """The reason why models of this type have no preset, if they are known to have other experts; else None."""
    return _UNSUPPORTED.get(model_type)


@dataclasses.dataclass(frozen=True)
class PresetAdapter:
    """Special features of a router. ``fp32_router``: logits are computed in fp32, whatever type the weights have.
    ``expert_bias_name``: its buffer with a number for each expert that counts only where experts are chosen."""

    fp32_router: bool = False
    expert_bias_name: str = "e_score_correction_bias"

    def expert_bias(self, router):
        """The numbers, or None."""
        return getattr(router, self.expert_bias_name, None)


_ADAPTERS = {"default": PresetAdapter(), "fp32_router": PresetAdapter(fp32_router=True)}


def get_preset_adapter(adapter_name):
    """The ``PresetAdapter`` of this name, as ``MoELayerSpec.preset_adapter`` has it."""
    if adapter_name not in _ADAPTERS:
        fail("", f"there is no preset adapter {adapter_name!r}: there are {', '.join(_ADAPTERS)}")
    return _ADAPTERS[adapter_name]
