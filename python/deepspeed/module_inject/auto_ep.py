"""Models whose layers with experts are replaced, so that ranks share the experts: the section ``expert_parallel``."""

import ast
import copy
import inspect
import re
import textwrap

import torch

from deepspeed.config.errors import config_error
from deepspeed.module_inject.auto_ep_config import (
    SECTION,
    fill_autoep_config_from_hf,
    preset_of,
    validate_autoep_post_detection,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets.base import _UNSET, MoELayerSpec, MoEModelPreset
from deepspeed.module_inject.auto_ep_presets.registry import (
    PRESET_MODELS,
    get_preset_adapter,
    unsupported_preset_for_hf_model_type,
)
from deepspeed.moe.ep_repack import weight_of
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.zero.gathers.gathered import GatheredParameters


def _resolve_route_scale(config, model_config):
    """The factor on a token's scores: ``route_scale`` times ``routed_scaling_factor``, which may be the model's."""
    factor = config.routed_scaling_factor
    if factor == "auto":
        factor = getattr(model_config, "routed_scaling_factor", None)
    return float(config.route_scale) * (1.0 if factor is None else float(factor))


def _shape(param):
    return tuple(getattr(param, "ds_shape", param.shape))


def _returns_two(module):
    """Whether the forward of ``module`` ends by returning a pair; None if its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):  # no source: a model that was traced, or typed in
        return None
    last = [node for node in ast.walk(tree) if isinstance(node, ast.Return)][-1:]
    return bool(last) and isinstance(last[0].value, ast.Tuple) and len(last[0].value.elts) == 2


class AutoEP:
    """Finds the layers with experts of ``model`` and replaces them. ``config``: an ``AutoEPConfig``.

    The preset is the one that ``preset_model`` names, or that fits ``model.config.model_type``; keys of the section go
    before it, and with a ``moe_layer_pattern`` no preset is needed.
    """

    def __init__(self, model, config):
        self.model, self.model_config = model, getattr(model, "config", None)
        self.config = fill_autoep_config_from_hf(copy.copy(config), self.model_config)
        self.preset = preset_of(config, self.model_config)
        if self.preset is None and config.moe_layer_pattern is None:
            kind = getattr(self.model_config, "model_type", None)
            why = unsupported_preset_for_hf_model_type(kind)
            if why is not None:
                known = ", ".join(name for preset in PRESET_MODELS.values() for name in preset.hf_model_types)
                raise config_error(
                    f"{SECTION}: AutoEP does not support model_type {kind!r}: {why}; supported: {known}", [SECTION]
                )
        self.preset = self.preset or MoEModelPreset()

    # ---- finding -----------------------------------------------------------------------------------------------------
    def ep_parser(self):
        """A ``MoELayerSpec`` for each layer with experts, in the order of ``named_modules()``."""
        pattern = re.compile(self.config.moe_layer_pattern or self.preset.moe_layer_pattern)
        specs = [self._spec(name, module) for name, module in self.model.named_modules() if pattern.search(name)]
        specs = [spec for spec in specs if spec is not None]
        validate_autoep_post_detection(self.config, specs)
        return specs

    def _child(self, module, pattern):
        found = [name for name, _ in module.named_children() if pattern and re.fullmatch(pattern, name)]
        return found[0] if found else None

    def _spec(self, name, module):
        config, preset = self.config, self.preset
        router_name = self._child(module, config.router_pattern or preset.router_pattern)
        experts_name = self._child(module, config.expert_pattern or preset.expert_pattern)
        if router_name is None or experts_name is None:  # a dense layer among those with experts
            return None
        router, experts = getattr(module, router_name), getattr(module, experts_name)
        listed = isinstance(experts, torch.nn.ModuleList)
        names = list(preset.listed if listed else preset.stacked)
        for index, given in enumerate((config.expert_w1, config.expert_w2)):
            names[index] = given or names[index]
        names[2] = names[2] if config.expert_w3 is _UNSET else config.expert_w3
        self._check_experts(name, experts, listed, names)
        if getattr(module, "jitter_noise", 0):
            raise config_error(
                f"{SECTION}: layer '{name}' multiplies tokens by noise in training (router_jitter_noise="
                f"{module.jitter_noise}), which is not built: set it to 0 in the model's configuration",
                [SECTION],
            )
        storage = "module_list" if listed else "fused_3d"
        count, hidden, ffn, layout = self._sizes(experts, storage, names)
        own_router = type(router) is not torch.nn.Linear
        has_logits = _returns_two(module)
        has_logits = preset.returns_logits and not own_router if has_logits is None else has_logits
        target = "moe_block" if has_logits else "router" if own_router else "none"
        shared = self._child(module, config.shared_experts_pattern or preset.shared_experts_pattern)
        shared = None if config.has_shared_experts is False else shared
        if config.has_shared_experts and shared is None:
            raise config_error(
                f"{SECTION}.has_shared_experts: layer '{name}' has no child that shared_experts_pattern "
                f"{config.shared_experts_pattern or preset.shared_experts_pattern!r} matches",
                [f"{SECTION}.has_shared_experts"],
            )
        gate = self._child(module, config.shared_experts_gate_pattern or preset.shared_experts_gate_pattern)
        return MoELayerSpec(
            moe_module_name=name,
            model_family=config.preset_model or getattr(self.model_config, "model_type", None) or "custom",
            router_name=router_name,
            experts_name=experts_name,
            expert_storage=storage,
            expert_w1_name=names[0],
            expert_w2_name=names[1],
            expert_w3_name=names[2],
            num_experts=count,
            top_k=self._top_k(name, module, router),
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            score_func="softmax" if config.score_func == "auto" else config.score_func,
            score_apply="post" if config.score_apply == "auto" else config.score_apply,
            route_norm=bool(config.route_norm),
            gate_bias=getattr(router, "bias", None) is not None,
            return_router_logits=has_logits,
            router_logits_capture_target=target,
            router_logits_capture_index={"moe_block": 1, "router": 0}.get(target),
            router_logits_capture_layer_name=router_name if target == "router" else None,
            has_shared_experts=shared is not None,
            shared_experts_name=shared or "",
            shared_experts_gate_name=gate or "" if shared else "",
            route_scale=_resolve_route_scale(config, self.model_config),
            num_expert_groups=config.num_expert_groups,
            num_limited_groups=config.num_limited_groups,
            group_score_func=preset.group_score_func,
            unsupported_router_bias_names=self._other_tensors(router),
            preset_adapter=preset.adapter,
            fused_layout=layout,
        )

    def _top_k(self, name, module, router):
        if self.config.top_k != "auto":
            return int(self.config.top_k)
        for holder in (module, router):
            for attribute in (self.config.top_k_attr, self.preset.top_k_attr, "top_k"):
                if isinstance(getattr(holder, attribute or "", None), int):
                    return getattr(holder, attribute)
        raise config_error(
            f"{SECTION}.top_k: how many experts a token of layer '{name}' chooses is not known: set it, or top_k_attr",
            [f"{SECTION}.top_k"],
        )

    def _other_tensors(self, router):
        """Tensors of a router beside its weight, its bias and the numbers that are known."""
        known = {"weight", "bias", "e_score_correction_bias"}
        named = [*router.named_parameters(), *router.named_buffers()]
        return tuple(sorted(name for name, _ in named if name not in known))

    def _sizes(self, experts, storage, names):
        """Experts, width of a token, width inside of an expert, layout of stacked ones."""
        if storage == "module_list":
            first = getattr(experts[0], names[0])
            ffn, hidden = _shape(first if torch.is_tensor(first) else first.weight)
            return len(experts), hidden, ffn, "out_in"
        first, second = (_shape(getattr(experts, name)) for name in names[:2])
        if names[2] is not None:
            return first[0], first[2], first[1], "out_in"
        layout = classify_fused_gate_up_layout(first, second)
        return (first[0], *((first[1], second[1]) if layout == "in_out" else (first[2], second[2])), layout)

    def _check_experts(self, name, experts, listed, names):
        example = experts[0] if listed else experts
        missing = [one for one in names if one is not None and not hasattr(example, one)]
        if missing:
            raise config_error(
                f"{SECTION}.expert_w1: experts of layer '{name}' have no {missing[0]!r}; they have "
                f"{', '.join(n for n, _ in example.named_parameters())}. Set expert_w1, expert_w2 and expert_w3",
                [f"{SECTION}.expert_w1"],
            )
        held = {id(weight_of(example, one)) for one in names if one is not None}
        others = [n for n, param in example.named_parameters() if id(param) not in held]
        if others:
            raise config_error(
                f"{SECTION}: experts of layer '{name}' have more than w1, w2 and w3: {', '.join(others)}", [SECTION]
            )
        act = getattr(example, "act_fn", None)
        kind = act if isinstance(act, str) else getattr(self.model_config, "hidden_act", None)
        probe = torch.linspace(-2, 2, 5)
        if not (act is None or isinstance(act, str)):
            same = torch.allclose(act(probe), torch.nn.functional.silu(probe))
        else:
            same = kind in (None, "silu", "swish")
        if not same:
            raise config_error(f"{SECTION}: experts of layer '{name}' use {kind or act}; silu is built", [SECTION])

    # ---- replacing ---------------------------------------------------------------------------------------------------
    def replace_moe_layer(self, spec, ep_size, ep_rank):
        """Replaces the layer by an ``AutoEPMoELayer`` with the experts of rank ``ep_rank`` of ``ep_size``, and
        returns it. The experts' parameters are new ones; the old ones know them (``ds_replaced_by``)."""
        parent, _, child = spec.moe_module_name.rpartition(".")
        parent = self.model.get_submodule(parent)
        source = getattr(parent, child)
        with GatheredParameters(list(source.parameters())):
            made = AutoEPMoELayer(spec, source, ep_size, ep_rank, self.config)
        made.train(source.training)
        setattr(parent, child, made)
        return made

    def replace_moe_layers(self, specs, ep_size, ep_rank):
        """The same for all ``specs``. Returns the layers by name."""
        return {spec.moe_module_name: self.replace_moe_layer(spec, ep_size, ep_rank) for spec in specs}


def source_state_dict(state_dict, specs):
    """``state_dict``, of a model whose layers were replaced and with all experts, under the names and in the shapes
    that the model had before: ``from_pretrained`` and ``load_state_dict`` of the unchanged one take it.

    ``specs``: what ``AutoEP(unchanged model, AutoEPConfig()).ep_parser()`` finds, or the ``spec`` of each layer.
    """
    state = dict(state_dict)
    for spec in specs:
        layer = f"{spec.moe_module_name}."
        router = f"{layer}{spec.router_name}."
        bias = get_preset_adapter(spec.preset_adapter).expert_bias_name
        renamed = {"router.gate.weight": "weight", "router.gate.bias": "bias", "expert_bias": bias}
        for name, old in renamed.items():
            if layer + name in state:
                state[router + old] = state.pop(layer + name)
        w1, w2, w3 = (state.pop(f"{layer}experts.w{number}", None) for number in (1, 2, 3))
        experts = f"{layer}{spec.experts_name}."
        names = (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name)
        if spec.expert_storage == "module_list":
            for name, weight in zip(names, (w1, w2, w3), strict=True):
                for number, one in enumerate(() if name is None else weight):
                    state[f"{experts}{number}.{name}.weight"] = one.clone()
            continue
        kinds = [torch.cat([w1, w3], dim=1), w2] if names[2] is None else [w1, w2, w3]
        for name, weight in zip(names, kinds, strict=False):
            in_out = spec.fused_layout == "in_out"
            state[experts + name] = weight.transpose(1, 2).contiguous() if in_out else weight
    return state
