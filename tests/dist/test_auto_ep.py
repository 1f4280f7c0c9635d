"""Models that know nothing of ranks, whose experts ranks share by the section ``expert_parallel``: against the same
model in one process."""

import copy
import inspect
import math
import types

import pytest
import torch
from torch import nn

import deepspeed
from auto_ep_runs import ADAM, batch, config, follows, frozen_model_of, steps_of, train_one
from deepspeed.module_inject import auto_ep_layer as layers
from deepspeed.module_inject.auto_ep import AutoEP, source_state_dict
from deepspeed.module_inject.auto_ep_config import (
    PRESET_MODELS,
    AutoEPConfig,
    MoELayerSpec,
    parse_autoep_config,
    validate_autoep_config,
    validate_autoep_post_detection,
)
from deepspeed.module_inject.auto_ep_preset_adapters import get_preset_adapter
from deepspeed.module_inject.auto_ep_presets import registry
from deepspeed.moe.ep_repack import repack_expert_weights
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from harness import on_ranks, run_ranks
from hf_like_moe import CONFIGS, EXPERTS, FORMS, INNER, WIDTH, Model, TopKRouter, model_of
from moe_models import values
from refusals import refused
from runs import NATIVE, engine_of, load_into
from sampling import every_case


# ---- training --------------------------------------------------------------------------------------------------------
def training_body(rank, world, cases, expected):
    for family, form, stage, ep_size, more in cases:
        model = model_of(family, form=form)
        engine = engine_of(model, config(world, stage, ep_size, **more))
        follows(engine, rank, expected[family, form], (family, form, stage, ep_size))
        figures = engine.moe_statistics()
        assert len(figures) == 2 - model.dense_first == len(engine.num_experts)
        assert all(sum(one["tokens_per_expert"]) == 2 * 8 * world for one in figures.values())
        assert all(0 < one["router_entropy"] <= math.log(EXPERTS) + 1e-6 for one in figures.values())
        crossing = [one["exchange_bytes"] > 0 for one in figures.values()]
        assert all(crossing) if ep_size > 1 else not any(crossing)
        engine.destroy()


CASES = [
    ("mixtral", "listed", 3, 4, {}),
    ("mixtral", "stacked", 0, 2, {"moe": {"overlap_chunks": 2}}),
    ("qwen2_moe", "stacked", 1, 4, {}),
    ("qwen2_moe", "listed", 2, 2, {"use_data_before_expert_parallelism": True}),
    ("qwen3_moe", "stacked", 3, 4, {}),
    ("deepseek_v2", "listed", 2, 1, {}),
    ("deepseek_v2", "stacked", 1, 2, {}),
    ("deepseek_v3", "stacked", 3, 2, {}),
]
MODELS = [(family, form) for family in CONFIGS for form in FORMS]
MORE = [(*model, stage, size, {}) for model in MODELS for stage in range(4) for size in (1, 2, 4)]


def test_training_equals_the_unchanged_model_in_one_process():
    cases = CASES + MORE * every_case()
    expected = {case[:2]: train_one(case[0], 4, 2, form=case[1]) for case in cases}
    run_ranks(4, training_body, cases, expected, init=True)


@on_ranks(2, init=True)
def test_whatever_the_script_gives_to_be_optimised(rank, world):
    expected = train_one("mixtral", 2, 2)
    for how in ("optimizer", "groups", "list", "pre", "off"):
        model, settings, more = model_of("mixtral"), config(world, 2, 2), {}
        if how == "optimizer":
            del settings["optimizer"]
            more = {"optimizer": torch.optim.AdamW(model.parameters(), **ADAM)}
        elif how == "groups":
            given = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters())})
            more = {"model_parameters": given}
        elif how == "list":
            more = {"model_parameters": list(model.named_parameters())}
        elif how == "pre":
            settings["expert_parallel"]["use_grouped_mm"] = False
        else:
            settings["expert_parallel"] = {"enabled": False, "autoep_size": 2}
        engine = deepspeed.initialize(model=model, config=settings, **more)[0]
        follows(engine, rank, expected, how)
        assert bool(engine._experts.layers) == (how != "off")
        assert any(map(is_moe_param, engine.module.parameters())) == (how != "off")
        engine.destroy()


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def checkpoint_body(rank, world, folder, expected, earlier):
    family = "deepseek_v3"
    engine = engine_of(model_of(family), config(world, 2, 4))
    steps_of(engine, rank, 2)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "whole.bin")
    for stage, ep_size in ((3, 2), (0, 1), (1, 4)):
        engine = engine_of(model_of(family), config(world, stage, ep_size))
        with torch.no_grad():
            engine.module.model.layers[1].mlp.expert_bias.zero_()
        follows(load_into(engine, folder), rank, expected, (stage, ep_size), first=2)
        engine.destroy()
    at_two, whole = model_of(family), f"{folder}/whole{rank}.pt"
    at_two.load_state_dict(earlier)
    torch.save(at_two.state_dict(), whole)
    for ep_size, checkpoint in ((1, folder), (2, folder), (4, whole)):
        served = deepspeed.init_inference(model_of(family), dtype="fp32", ep_size=ep_size, checkpoint=checkpoint)
        torch.testing.assert_close(served(batch(9, rank)), at_two(batch(9, rank)), rtol=1e-4, atol=5e-6)
        assert len(served.module.model.layers[1].mlp.experts.w1) == EXPERTS // ep_size


def test_checkpoints_load_at_any_degree_and_become_files_of_the_unchanged_model(tmp_path):
    expected = train_one("deepseek_v3", 4, 3)
    at_two = train_one("deepseek_v3", 4, 2)[1]
    run_ranks(4, checkpoint_body, str(tmp_path), expected, at_two, init=True)
    whole = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    model = model_of("deepseek_v3")
    specs = AutoEP(model, AutoEPConfig(enabled=True)).ep_parser()
    for state in (whole, torch.load(tmp_path / "whole.bin")):
        found = source_state_dict(state, specs)
        assert set(found) == set(at_two)
        for name, value in at_two.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6)
        model.load_state_dict(found)


@on_ranks(4, init=True)
def test_models_built_inside_of_zero_init(rank, world):
    """As from_pretrained does at stage 3."""
    for family in ("mixtral", "deepseek_v3"):
        settings = config(world, 3, 2)
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Model(family)
        named = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0):
            for name, param in model_of(family).named_parameters():
                named[name].data.copy_(param.data)
        given = list(model.parameters()) if family == "mixtral" else None
        engine = engine_of(model, settings, model_parameters=given)
        follows(engine, rank, train_one(family, 4, 2), family)
        engine.destroy()


SPEC = types.SimpleNamespace(
    expert_storage="module_list", expert_w1_name="w1", expert_w2_name="w2", expert_w3_name="w3"
)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("checkpoint", [{}, NATIVE], ids=["torch", "native"])
@on_ranks(2, init=True)
def test_frozen_experts(rank, world, stage, checkpoint, folder):
    def build(ep_size):
        return engine_of(frozen_model_of("mixtral"), config(world, stage, ep_size, checkpoint=checkpoint))

    whole = repack_expert_weights(model_of("mixtral").model.layers[0].block_sparse_moe.experts, SPEC, 0, 1)
    engine = build(2)
    steps_of(engine, rank, 1)
    engine.save_checkpoint(folder)
    other = build(1)
    first = other.module.model.layers[0].block_sparse_moe.experts.w1
    with deepspeed.zero.GatheredParameters([first], modifier_rank=0):
        first.data.zero_()
    other.load_checkpoint(folder)
    with deepspeed.zero.GatheredParameters([first]):
        assert torch.equal(first, whole[0])
    assert steps_of(engine, rank, 1, first=1) == pytest.approx(steps_of(other, rank, 1, first=1), abs=1e-6)


# ---- one process -----------------------------------------------------------------------------------------------------
def replaced(family, settings=None, **more):
    model = model_of(family, **more)
    auto = AutoEP(model, settings or AutoEPConfig(enabled=True))
    return model, auto.ep_parser(), auto


@pytest.mark.parametrize("family, form", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_computes_what_the_models_own_does(family, form, dtype):
    model, specs, auto = replaced(family, form=form)
    own = copy.deepcopy(model).to(dtype)
    model.to(dtype)
    made = auto.replace_moe_layers(specs, 1, 0)
    assert all(type(one) is not type(own.get_submodule(name)) for name, one in made.items())
    name = specs[-1].moe_module_name
    x = values(4, 2, 5, WIDTH).to(dtype).requires_grad_()
    y = x.detach().clone().requires_grad_()
    a, b = made[name](x), own.get_submodule(name)(y)
    a, b = (one if isinstance(one, tuple) else (one,) for one in (a, b))
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    sum(one.square().sum() for one in a).backward()
    sum(one.square().sum() for one in b).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert isinstance(made[name], type(own.get_submodule(name))) == (len(a) == 2)
    state = source_state_dict(model.state_dict(), specs)
    assert set(state) == set(own.state_dict()) and all(torch.equal(state[n], v) for n, v in own.state_dict().items())


def recorded(model):
    """The outputs of routers in a forward, as transformers listens."""
    seen = []
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _, given, out: seen.append(out))
    model(batch(0, 0))
    return seen


def test_logits_are_where_transformers_records_them():
    for family in CONFIGS:
        model, specs, auto = replaced(family, form="stacked")
        own = recorded(copy.deepcopy(model))
        auto.replace_moe_layers(specs, 1, 0)
        assert {spec.router_logits_capture_index for spec in specs} == {0}
        torch.testing.assert_close(recorded(model), own, rtol=1e-5, atol=1e-6)
        assert len(own) == len(specs)


class OfProbs(TopKRouter):
    """A router of 5.0: what it calls logits has been through the softmax."""

    def forward(self, x):
        logits, weights, chosen = super().forward(x)
        return logits.softmax(-1), weights, chosen


def test_what_a_router_records_is_asked_of_it():
    model = model_of("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = OfProbs
    before = model(batch(0, 0))
    auto = AutoEP(model, AutoEPConfig(enabled=True))
    made = auto.replace_moe_layers(auto.ep_parser(), 1, 0)
    assert [one.spec.router_logits_capture_mode for one in made.values()] == ["post_score"] * 2
    model.hooked = False
    torch.testing.assert_close(model(batch(0, 0)), before)


class OfTwo(TopKRouter):
    """A router that its owner calls with one more argument."""

    def forward(self, x, tokens):
        return super().forward(x)


class OfRows(TopKRouter):
    """A router that takes [tokens, width] alone."""

    def forward(self, x):
        tokens, width = x.shape
        return super().forward(x.view(tokens, width))


class Broken(TopKRouter):
    def forward(self, x):
        return self.no_such_part(x)


@pytest.mark.parametrize("kind, error", [(OfTwo, "TypeError"), (OfRows, "ValueError"), (Broken, None)])
def test_a_router_that_cannot_be_asked_is_named(kind, error, monkeypatch):
    model = model_of("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = kind
    auto = AutoEP(model, AutoEPConfig(enabled=True))
    specs = auto.ep_parser()
    told = []
    monkeypatch.setattr("deepspeed.log.logger.warning", lambda text, *args, **kwargs: told.append(text % args))
    if error is None:  # a mistake of its own is nobody's secret
        refused(AttributeError, "no_such_part", auto.replace_moe_layers, specs, 1, 0)
        return
    made = auto.replace_moe_layers(specs, 1, 0)
    assert {one.spec.router_logits_capture_mode for one in made.values()} == {specs[0].router_logits_capture_mode}
    assert len(told) == 1  # of two layers
    assert (
        f"'model.layers.0.mlp': could not call its router {kind.__name__} with" in told[0] and f"({error}: " in told[0]
    )


def test_names_and_patterns_of_ones_own():
    odd = nn.Module()
    odd.blocks = nn.ModuleList([model_of("mixtral").model.layers[0].block_sparse_moe for _ in range(2)])
    for block in odd.blocks:
        block.choose, block.mlps = block.gate, block.experts
        del block.gate, block.experts
    section = {
        "enabled": True, "moe_layer_pattern": r"blocks\.1", "router_pattern": "choose", "expert_pattern": "mlps",
        "expert_w1": "w1", "expert_w2": "w2", "expert_w3": "w3", "route_scale": 2.0,
    }  # fmt: skip
    specs = AutoEP(odd, parse_autoep_config({"expert_parallel": section})).ep_parser()
    assert [spec.moe_module_name for spec in specs] == ["blocks.1"] and specs[0].top_k == 2
    assert (specs[0].num_experts, specs[0].hidden_size, specs[0].ffn_hidden_size) == (EXPERTS, WIDTH, INNER)
    assert specs[0].route_scale == 2.0 and not specs[0].route_norm and specs[0].model_family == "custom"


def test_what_cannot_be_replaced():
    model, specs, auto = replaced("mixtral")
    model.model.layers[0].block_sparse_moe.experts[1].w1.weight.requires_grad_(False)
    refused(
        ValueError, "layers.0.block_sparse_moe.*some of its experts are frozen", auto.replace_moe_layers, specs, 1, 0
    )
    refused(
        ValueError,
        "4 experts cannot be shared by ep_size=3",
        repack_expert_weights,
        model.model.layers[1].block_sparse_moe.experts,
        specs[1],
        0,
        3,
    )
    model = model_of("mixtral")
    for block in model.model.layers:
        block.block_sparse_moe.experts[0].w2 = nn.Linear(INNER, WIDTH)
    refused(
        ValueError,
        "layers.0.block_sparse_moe' have more than w1, w2 and w3: w2.bias",
        AutoEP(model, AutoEPConfig()).ep_parser,
    )
    model, _, _ = replaced("mixtral")
    for block in model.model.layers:
        block.block_sparse_moe.experts[0].act_fn = nn.GELU()
    refused(ValueError, "silu is built", AutoEP(model, AutoEPConfig()).ep_parser)
    noisy = model_of("mixtral")
    noisy.model.layers[1].block_sparse_moe.jitter_noise = 0.1
    refused(
        ValueError, "layers.1.block_sparse_moe' multiplies tokens by noise", AutoEP(noisy, AutoEPConfig()).ep_parser
    )
    model.config.model_type = "gpt_oss"
    words = "not support model_type 'gpt_oss': its experts have biases.*; supported: mixtral"
    refused(ValueError, words, AutoEP, model, AutoEPConfig())
    refused(
        ValueError, "no layer of the model fits. Name a preset_model", AutoEP(nn.Linear(2, 2), AutoEPConfig()).ep_parser
    )
    refused(
        ValueError,
        "have no 'first'; they have w1.weight",
        AutoEP(model_of("mixtral"), AutoEPConfig(expert_w1="first")).ep_parser,
    )
    refused(
        ValueError,
        "has_shared_experts: layer 'model.layers.0.block_sparse_moe'",
        AutoEP(model_of("mixtral"), AutoEPConfig(has_shared_experts=True)).ep_parser,
    )
    nan = model_of("mixtral")
    AutoEP(nan, AutoEPConfig()).replace_moe_layer(specs[0], 1, 0)
    refused(
        ValueError,
        "layers.0.block_sparse_moe.*token 1 are not numbers",
        nan.model.layers[0].block_sparse_moe,
        torch.tensor([[1.0] * WIDTH, [float("nan")] * WIDTH]),
    )
    refused(
        ValueError,
        "ep_size=2, and no groups",
        AutoEP(model_of("mixtral"), AutoEPConfig()).replace_moe_layer(specs[0], 2, 0),
        torch.zeros(1, WIDTH),
    )


@pytest.mark.parametrize(
    "section, text",
    [
        ({"load_balance_coeff": 0.1}, "load_balance_coeff: 0.1"),
        ({"validate_folding_routing": "x"}, "neither true nor false"),
        ({"autoep_size": 0}, "autoep_size: 0 is not a number of at least 1"),
        ({"preset_model": "llama"}, "preset_model: 'llama' is none of None, mixtral"),
        ({"score_func": "tanh"}, "score_func: 'tanh'"),
    ],
)
def test_sections_that_are_wrong(section, text):
    refused(ValueError, text, parse_autoep_config, section)


def test_ranks_that_cannot_share_experts_so():
    made = parse_autoep_config({"enabled": True, "autoep_size": 4, "unknown": 1})
    validate_autoep_config(made, 8, 1, 1, 1, zero_stage=3, zero_offload_optimizer=True)
    validate_autoep_config(AutoEPConfig(autoep_size=3), 8, 1, 1, 1)  # not enabled
    for sizes, more, text in (
        ((6, 1, 1, 1), {}, "4 ranks are to share experts, and does not divide the 6 ranks"),
        ((8, 2, 1, 1), {}, "pipeline of 2 stages"),
        ((8, 1, 2, 1), {"use_data_before_expert_parallel": True}, "beside tensor_parallel.autotp_size=2"),
        ((8, 1, 1, 1), {"deepcompile_enabled": True}, "DeepCompile"),
    ):
        refused(ValueError, text, validate_autoep_config, made, *sizes, **more)
    validate_autoep_config(parse_autoep_config({"enabled": True, "autoep_size": 8}), 8, 1, 2, 1)
    sliced = parse_autoep_config({"enabled": True, "autoep_size": 2, "expert_tensor_parallel_size": 2})
    refused(
        ValueError, "expert_tensor_parallel_size: 2 .*raise autoep_size", validate_autoep_config, sliced, 8, 1, 2, 1
    )
    spec = replaced("mixtral")[1][0]
    for change, text in (
        ({"num_experts": 6}, "6 experts, which 4 ranks cannot share evenly"),
        ({"top_k": 5}, "a token chooses 5"),
        ({"num_expert_groups": 3}, "do not make 3 groups"),
        ({"num_expert_groups": 2}, "num_limited_groups: must be set"),
        ({"unsupported_router_bias_names": ("b",)}, "its router has b"),
    ):
        refused(
            ValueError, text, validate_autoep_post_detection, made, [types.SimpleNamespace(**{**vars(spec), **change})]
        )


def test_published_functions():
    top = torch.tensor([[0.25, 0.75], [1.0, 0.5]])
    chosen = torch.tensor([[1, 0], [1, 2]])
    plan = layers.compute_split_plan(chosen, 3, 1, 3, None)
    assert plan.input_splits == plan.output_splits == [4] and plan.local_counts.tolist() == [1, 2, 1]
    same = layers.compute_split_plan_from_expert_indices(chosen.reshape(-1), 3, 1, 3, None)
    assert same.local_counts_by_source.tolist() == [[1, 2, 1]]
    order = chosen.reshape(-1).argsort(stable=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = x[order // 2]
    for impl in ("weighted_sum", "legacy_bmm"):
        out = layers.combine_from_routed(rows, top, order, 2, "post", impl, (1, 2, 2))
        torch.testing.assert_close(out, (x * top.sum(1, keepdim=True)).view(1, 2, 2))
    scaled = layers.apply_scores_before_experts_if_enabled(rows, top.reshape(-1)[order], "pre")
    assert layers.apply_scores_before_experts_if_enabled(rows, top, "post") is rows
    torch.testing.assert_close(layers.combine_from_routed(scaled, top, order, 2, "pre", "weighted_sum", (1, 2, 2)), out)
    spec = types.SimpleNamespace(score_apply="pre")
    assert layers.resolve_score_apply_mode(spec, "auto") == "pre"
    assert layers.resolve_score_apply_mode(spec, "post") == "post"
    model = model_of("mixtral")
    assert AutoEP(model, AutoEPConfig()).ep_parser()[0].route_scale == 1.0
    model.config.routed_scaling_factor = 2.5
    assert AutoEP(model, AutoEPConfig()).ep_parser()[0].route_scale == 2.5
    assert AutoEP(model, AutoEPConfig(routed_scaling_factor=3.0)).ep_parser()[0].route_scale == 3.0
    assert classify_fused_gate_up_layout((4, 10, 6), (4, 6, 5)) == "out_in"
    assert classify_fused_gate_up_layout((4, 6, 10), (4, 5, 6)) == "in_out"
    refused(ValueError, "are neither", classify_fused_gate_up_layout, (4, 6, 10), (4, 6, 10))
    assert set(PRESET_MODELS) == {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"}
    assert registry.preset_name_for_hf_model_type("deepseek_v3") == "deepseek_v3"
    assert registry.preset_name_for_hf_model_type("llama") is registry.unsupported_preset_for_hf_model_type("llama")
    refused(ValueError, "no preset adapter 'x'", get_preset_adapter, "x")
    for found, wanted in (
        (AutoEP, "(model, config)"),
        (AutoEP.replace_moe_layer, "(self, spec, ep_size, ep_rank)"),
        (layers.AutoEPMoELayer, "(spec, source_module, ep_size, ep_rank, config)"),
        (
            layers.AutoEPMoELayer.set_deepspeed_parallelism,
            "(self, use_data_before_expert_parallel_=False, folding_group_handles=None)",
        ),
        (repack_expert_weights, "(experts_source, spec, ep_rank, ep_size)"),
    ):
        assert str(inspect.signature(found)) == wanted
    assert "moe_output_shape" in MoELayerSpec.__dataclass_fields__
