"""The section tensor_parallel.partition_config: rules by name, what they say about a parameter, and known models."""

import pytest

from deepspeed._native import DeepSpeedConfigError
from deepspeed.module_inject.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from refusals import refused

COLUMN, ROW, SKIP = PartitionType.COLUMN, PartitionType.ROW, PartitionType.SKIP


@pytest.mark.parametrize("pattern", [r".*\.self_attn\.o_proj\.weight$", r".*\.self_attn\.o_proj$"])
def test_a_pattern_fits_a_name_with_weight_and_one_without(pattern):
    spec = TPLayerSpec(patterns=["never", pattern], partition_type=ROW)
    assert spec.matches("model.layers.0.self_attn.o_proj.weight")
    assert spec.matches("model.layers.0.self_attn.o_proj")
    assert not spec.matches("model.layers.0.self_attn.o_proj.bias")
    assert not spec.matches("model.layers.0.self_attn.o_proj_b.weight")


def test_a_pattern_begins_at_the_first_letter():
    assert not TPLayerSpec(patterns=["o_proj"]).matches("self_attn.o_proj.weight")


@pytest.mark.parametrize(
    "model_types,model_type,fits",
    [(None, None, True), (None, "llama", True), (["llama"], "llama", True), (["Llama"], "LLAMA", True),
     (["bloom", "llama"], "llama", True), (["bloom"], "llama", False), (["bloom"], None, False)],
)  # fmt: skip
def test_model_types_restrict_a_rule(model_types, model_type, fits):
    assert TPLayerSpec(patterns=["a"], model_types=model_types).matches("a", model_type) is fits


@pytest.mark.parametrize("kind,given,dim", [(COLUMN, None, 0), (ROW, None, 1), (SKIP, None, None), (COLUMN, 1, 1)])
def test_the_dimension_that_is_cut(kind, given, dim):
    assert TPLayerSpec(patterns=["a"], partition_type=kind, partition_dim=given).get_partition_dim() == dim


@pytest.mark.parametrize(
    "shape,dim,sizes,count",
    [(None, 0, None, 1), ((3, -1), 0, None, 3), ([2, -1], 0, None, 2), (((8, 2, 2), -1), 0, (8, 2, 2), 3),
     ([[8, 2], 64], 0, (8, 2), 2), ((-1, 4), 1, None, 4), ((3, -1), 1, None, 1), ((-1, (4, 4)), 1, (4, 4), 2)],
)  # fmt: skip
def test_a_shape_says_which_sub_parameters_there_are(shape, dim, sizes, count):
    spec = TPLayerSpec(patterns=["a"], shape=shape, partition_dim=dim)
    assert spec.get_sub_param_sizes() == sizes and spec.get_num_sub_params() == count
    assert spec.has_unequal_sub_params() is (sizes is not None)


def test_lists_of_a_shape_become_tuples():
    assert TPLayerSpec(patterns=["a"], shape=[[8, 2, 2], -1]).shape == ((8, 2, 2), -1)


@pytest.mark.parametrize(
    "words,options",
    [(r"patterns: '\(' is not a regular", {"patterns": ["a", "("]}), ("sizes of at least 1", {"shape": (3, 0)}),
     ("sizes of at least 1", {"shape": (3, "x")}), ("-1 once", {"shape": (-1, -1)}),
     ("has no dimension 2", {"shape": (3, -1), "partition_dim": 2})],
)  # fmt: skip
def test_a_rule_that_cannot_hold_is_refused(words, options):
    refused(ValueError, words, TPLayerSpec, **{"patterns": ["a"], **options})


def test_a_dict_becomes_a_configuration():
    rule = {
        "patterns": [".*q"],
        "partition_type": "Row",
        "shape": [[4, 2], -1],
        "partition_dim": 0,
        "gather_output": True,
    }
    made = AutoTPConfig.from_dict({"tp_size": 4, "strict_mode": True, "layer_specs": [rule, {"patterns": ["b"]}]})
    first = TPLayerSpec([".*q"], ROW, shape=((4, 2), -1), partition_dim=0, gather_output=True)
    assert made == AutoTPConfig(4, [first, TPLayerSpec(["b"])], strict_mode=True)
    assert AutoTPConfig.from_dict({}) == AutoTPConfig(1, [], 1, ["lm_head", "embed_out"], True, False)


@pytest.mark.parametrize(
    "words,section",
    [
        ("layers is not a key", {"layers": []}),
        ("tp_size", {"tp_size": 0}),
        (r"\[0\].pattern is not a key.*patterns", {"layer_specs": [{"pattern": []}]}),
        ('"rows" must be one of "column", "row", "skip"', {"layer_specs": [{"partition_type": "rows"}]}),
        (r"layer_specs\[1\].patterns: '\('", {"layer_specs": [{"patterns": ["a"]}, {"patterns": ["("]}]}),
        (r"layer_specs\[0\].shape: \(0,\)", {"layer_specs": [{"patterns": ["a"], "shape": [0]}]}),
    ],
)
def test_a_wrong_key_or_value_is_named(words, section):
    refused(DeepSpeedConfigError, words, AutoTPConfig.from_dict, section)


def test_the_first_rule_that_fits_decides():
    rules = [TPLayerSpec(["a"], ROW, model_types=["bloom"]), TPLayerSpec(["a.*"], SKIP), TPLayerSpec(["ab"], COLUMN)]
    config = AutoTPConfig(layer_specs=rules)
    assert config.find_matching_spec("ab") is rules[1]
    assert config.find_matching_spec("a", "bloom") is rules[0]
    assert config.find_matching_spec("b") is None


def test_strict_mode_refuses_a_parameter_without_a_rule():
    config = AutoTPConfig(layer_specs=[TPLayerSpec(["a"])], strict_mode=True)
    assert config.find_matching_spec("a") is config.layer_specs[0]
    refused(ValueError, "layer_specs fits the parameter 'b.weight'", config.find_matching_spec, "b.weight")


def test_rules_of_the_override_come_first_and_its_values_win():
    mine, known = TPLayerSpec(["a"], SKIP), TPLayerSpec(["a"], ROW)
    base = AutoTPConfig(2, [known], 0, ["head"], True, True)
    override = AutoTPConfig(4, [mine], use_default_specs=False)
    assert merge_autotp_configs(base, override) == AutoTPConfig(4, [mine, known], 1, use_default_specs=False)
    assert override.layer_specs == [mine] and base.layer_specs == [known]


LLAMA = {"self_attn.q_proj": COLUMN, "self_attn.k_proj": COLUMN, "self_attn.v_proj": COLUMN, "self_attn.o_proj": ROW,
         "mlp.gate_proj": COLUMN, "mlp.up_proj": COLUMN, "mlp.down_proj": ROW, "input_layernorm": None}  # fmt: skip
GLM = {"self_attention.query_key_value": COLUMN, "self_attention.dense": ROW, "mlp.dense_h_to_4h": COLUMN,
       "mlp.dense_4h_to_h": ROW, "input_layernorm": None}  # fmt: skip
PRESETS = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "bloom": GLM,
    "chatglm": {**GLM, "mlp.dense_h_to_4h": (COLUMN, (2, -1))},
    "mixtral": {
        **{name: kind for name, kind in LLAMA.items() if name.startswith("self_attn")},
        **{f"block_sparse_moe.experts.7.{name}": kind for name, kind in zip(("w1", "w2", "w3"), (COLUMN, ROW, COLUMN))},
        "block_sparse_moe.gate": SKIP,
    },
    "deepseek_v2": {
        "self_attn.q_proj": COLUMN, "self_attn.q_b_proj": COLUMN, "self_attn.kv_b_proj": COLUMN,
        "self_attn.q_a_proj": SKIP, "self_attn.kv_a_proj_with_mqa": SKIP, "self_attn.o_proj": ROW,
        "mlp.gate": SKIP, "mlp.gate_proj": COLUMN, "mlp.down_proj": ROW, "mlp.experts.3.up_proj": COLUMN,
        "mlp.experts.3.down_proj": ROW, "mlp.shared_experts.gate_proj": COLUMN, "mlp.shared_experts.down_proj": ROW,
    },  # fmt: skip
    "phi3": {"self_attn.qkv_proj": (COLUMN, (3, -1)), "self_attn.o_proj": ROW,
             "mlp.gate_up_proj": (COLUMN, (2, -1)), "mlp.down_proj": ROW},
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_known_model_has_a_rule_for_each_of_its_layers(name):
    preset = AutoTPPresets.get_preset(name.upper())
    assert preset == getattr(AutoTPPresets, name)()
    for layer, wanted in PRESETS[name].items():
        kind, shape = wanted if isinstance(wanted, tuple) else (wanted, None)
        spec = preset.find_matching_spec(f"model.layers.11.{layer}.weight", name)
        assert spec is preset.find_matching_spec(layer)
        assert (spec and (spec.partition_type, spec.shape)) == (kind and (kind, shape))


@pytest.mark.parametrize("name", ["gpt2", "", None, "llama_gqa", "get_preset"])
def test_an_unknown_model_has_no_rules(name):
    assert AutoTPPresets.get_preset(name) is None


def test_grouped_queries_of_llama_have_sizes_of_their_own():
    preset = AutoTPPresets.llama_gqa(num_heads=8, num_kv_heads=2, head_dim=16)
    spec = preset.find_matching_spec("model.layers.0.self_attn.qkv_proj.weight")
    assert spec.get_sub_param_sizes() == (128, 32, 32) and spec.get_partition_dim() == 0
    assert preset.find_matching_spec("model.layers.0.self_attn.o_proj.weight").partition_type is ROW


def test_partition_types_are_the_published_words():
    assert {kind.name: kind.value for kind in PartitionType} == {"COLUMN": "column", "ROW": "row", "SKIP": "skip"}
