"""The constraints that the published schema states in words, one row each: what is refused, and how."""

import os
import re

import config_facts
import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.config import resolve
from deepspeed.elasticity.config import ElasticityConfigError
from places import ROOT
from refusals import refused

ELASTIC = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2]}


def zero(**keys):
    return {"zero_optimization": keys}


def compression(method, **keys):
    return {"compression_training": {method: keys}}


def sampling(**keys):
    return {"data_efficiency": {"data_sampling": keys}}


# (key that states the constraint, its first words, what breaks it, class, words of the message)
REFUSED = [
    ("optimizer", "params.max_grad_norm is rejected", {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
     ValueError, "gradient_clipping"),
    ("optimizer", "OneBitAdam", {"optimizer": {"type": "OneBitAdam"}, **zero(stage=1)}, ValueError, "1-bit"),
    ("communication_data_type", "case-insensitive", {"communication_data_type": "int8"}, ValueError, "fp32"),
    ("gradient_allreduce_op", "case-insensitive", {"gradient_allreduce_op": "max"}, ValueError,
     "Invalid gradient_allreduce_op"),
    ("gradient_allreduce_op", "'sum' refused", {"gradient_allreduce_op": "SUM", **zero(stage=3)}, ValueError,
     "not supported with ZeRO stage 3"),
    ("gradient_allreduce_op", "'sum' refused", {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}},
     ValueError, "not supported with DeepCompile"),
    ("gradient_allreduce_op", "'sum' refused", {"gradient_allreduce_op": "sum", **zero(stage=2, zenflow={})},
     ValueError, "not supported with ZenFlow"),
    ("fp16", "loss_scale: number", {"fp16": {"enabled": True, "loss_scale": True}}, ValueError, "loss_scale = true"),
    ("fp16", "loss_scale: number", {"fp16": {"enabled": True, "loss_scale": float("inf")}}, ValueError, "finite"),
    ("fp16", "loss_scale_window and", {"fp16": {"enabled": True, "loss_scale_window": True}}, ValueError, "integer"),
    ("fp16", "loss_scale_window and", {"fp16": {"enabled": True, "min_loss_scale": 0}}, ValueError, "greater than 0"),
    ("fp16", "mutually exclusive", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, AssertionError, "bf16"),
    ("fp16", "fp16_master_weights", {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, ValueError,
     "needs ZeRO stage 1, 2 or 3"),
    ("bf16", "bf16_master_weights", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ValueError,
     "needs ZeRO stage 1, 2 or 3"),
    ("bf16", "bf16_optimizer_states", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ValueError,
     "the first needs the second"),
    ("torch_autocast", "list items", {"torch_autocast": {"lower_precision_safe_modules": [1]}}, ValueError, "item 1"),
    ("torch_autocast", "not together", {"torch_autocast": {"enabled": True}, **zero(zero_quantized_weights=True)},
     ValueError, "exclude each other"),
    ("zero_optimization", "unknown keys", zero(stag=0), ValueError, "stage"),
    ("zero_optimization", "cpu_offload", zero(cpu_offload=True, offload_optimizer={"device": "cpu", "ratio": 1.0}),
     ValueError, "both are given"),
    ("zero_optimization.offload_optimizer", "ratio < 1.0", zero(stage=2, offload_optimizer={"ratio": 0.5}), ValueError,
     "stage 3"),
    ("zero_optimization.zeropp_loco_param.err_beta", "0..1", zero(zeropp_loco_param={"err_beta": 1.5}), ValueError,
     "at most 1"),
    ("checkpoint.tag_validation", "case-insensitive", {"checkpoint": {"tag_validation": "no"}}, DeepSpeedConfigError,
     "IGNORE"),
    ("checkpoint.parallel_write.pipeline_stage", "must be a bool",
     {"checkpoint": {"parallel_write": {"pipeline_stage": "on"}}}, DeepSpeedConfigError, "true or false"),
    ("elasticity", "batch keys", {"elasticity": ELASTIC}, ElasticityConfigError, "chooses the batch sizes"),
    ("elasticity.max_train_batch_size", "required", {"elasticity": {"enabled": True, "micro_batch_sizes": [2]}},
     ElasticityConfigError, "max_train_batch_size"),
    ("elasticity.micro_batch_sizes", "list of positive", {"elasticity": {**ELASTIC, "micro_batch_sizes": [-1]}},
     ElasticityConfigError, "at least 1"),
    ("elasticity.max_gpus", ">= min_gpus", {"elasticity": {"min_gpus": 4, "max_gpus": 2}}, ElasticityConfigError,
     "fewer than the fewest"),
    ("autotuning.results_dir", "non-empty", {"autotuning": {"results_dir": ""}}, ValueError, "empty"),
    ("autotuning.exps_dir", "non-empty", {"autotuning": {"exps_dir": ""}}, ValueError, "empty"),
    *[
        (f"compression_training.{method}", "different_groups required",
         compression(method, shared_parameters={"enabled": True}), ValueError, "different_groups")
        for method in ("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning",
                       "head_pruning", "channel_pruning")
    ],
    ("compression_training.head_pruning.shared_parameters.num_heads", "required",
     compression("head_pruning", shared_parameters={"enabled": True}), ValueError, "num_heads"),
    ("compression_training.weight_quantization.different_groups.<group name>.params.start_bits", "required",
     compression("weight_quantization", different_groups={"a": {"params": {"target_bits": 4}}}), ValueError,
     "start_bits is missing"),
    ("compression_training.row_pruning.different_groups.<group name>.params.dense_ratio", "required",
     compression("row_pruning", different_groups={"a": {"params": {}}}), ValueError, "dense_ratio is missing"),
    ("quantize_training.eigenvalue.enabled", "true is refused",
     {"quantize_training": {"eigenvalue": {"enabled": True}}}, AssertionError, "eigenvalue.enabled"),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", "required",
     sampling(curriculum_learning={"enabled": True}), ValueError, "curriculum_metrics"),
    ("data_efficiency.data_sampling.dynamic_batching.max_tokens", "required",
     sampling(dynamic_batching={"enabled": True}), ValueError, "max_tokens"),
    ("sparse_attention.mode", "other modes", {"sparse_attention": {"mode": "strided"}}, NotImplementedError, "bigbird"),
    ("expert_parallel", "load_balance_coeff", {"expert_parallel": {"load_balance_coeff": 0.1}}, ValueError, "null"),
    ("expert_parallel", "validate_folding", {"expert_parallel": {"validate_folding_routing": "x"}}, ValueError, "true"),
    ("compile", "offload_activation", {"compile": {"offload_activation": True, "offload_parameters": True}}, ValueError,
     "exclude each other"),
    ("compile", "offload_activation", {"compile": {"offload_opt_states": True, "offload_parameters": True}}, ValueError,
     "exclude each other"),
]  # fmt: skip

# Judged where it can be: with the world size, at engine creation, on a device, or by a test of its own.
ELSEWHERE = {
    ("zero_optimization", "a bool is accepted (deprecated)"): "test_zero_as_a_bare_boolean",
    ("train_batch_size", "must equal train_micro_batch_size_per_gpu"): "tests/cpp/plan/batch_plan_test.cpp",
    ("optimizer", "a client optimizer other than a known one"): "the engine: a client optimizer is no configuration",
    ("fp16", "enabled on a device without fp16 support"): "the engine: it knows the device",
    ("bf16", "enabled on a device without bf16 support"): "the engine: it knows the device",
    ("bf16", "mutually exclusive with fp16.enabled"): "the row of fp16",
    (
        "zero_optimization",
        "stage 3 with elastic_checkpoint only warns",
    ): "test_stage_3_with_an_elastic_checkpoint_warns",
    (
        "activation_checkpointing",
        "contiguous_memory_optimization needs partition_activations",
    ): "checkpointing.configure: tests/python/activation_checkpointing/test_configure.py",
    ("aio.use_gds", "true needs the cuda accelerator"): "the engine: it knows the device, and whether cuFile is there",
    ("elasticity", "env DEEPSPEED_ELASTICITY_CONFIG"): "test_elasticity.py",
    ("elasticity", "minimum target version 0.3.8"): "test_compute_elastic_config.py",
    ("elasticity.micro_batch_sizes", "required when enabled"): "test_elasticity.py",
    ("checkpoint.writer.type", "case-insensitive"): "test_words_in_any_case",
    ("tensor_parallel", "values that disagree with an earlier tp_model_init"): "the engine: it knows the calls",
    ("tensor_parallel", "autotp_size 0 disables"): "test_deepspeed_config.py: features that are not built",
    ("expert_parallel", "unknown keys ignored"): "test_warnings",
}


@pytest.mark.parametrize("path, constraint, config, kind, words", REFUSED, ids=lambda value: str(value)[:60])
def test_refused(path, constraint, config, kind, words):
    error = refused(kind, re.escape(words), DeepSpeedConfig, {"train_batch_size": 8, **config})
    assert isinstance(error, DeepSpeedConfigError)


def test_no_constraint_is_forgotten():
    told = {(path, words) for path, words, *_ in REFUSED} | set(ELSEWHERE)
    forgotten = []
    for path, facts, _ in config_facts.training_keys():
        for constraint in facts.get("constraints", []):
            is_bound = constraint.split()[0] in (">", ">=", "<=", "ge", "le", "0") and "min_gpus" not in constraint
            is_same = constraint == "required" and path.startswith("compression_training.")
            if is_bound or constraint == "0 < x < 1" or is_same:
                continue  # test_schema_facts.py
            if not any(key == path and constraint.startswith(words) for key, words in told):
                forgotten.append((path, constraint))
    assert forgotten == []


def test_places_named_elsewhere_exist():
    places = [place for place in ELSEWHERE.values() if place.startswith("tests/")]
    assert all(os.path.exists(os.path.join(ROOT, place)) for place in places)


def test_required_keys_of_compression_groups():
    groups = [path for path, facts, _ in config_facts.training_keys() if facts.get("constraints") == ["required"]]
    assert len(groups) >= 7
    for path in groups:
        config = compression(path.split(".")[1], different_groups={"a": {"params": {}}})
        words = f"{path.rsplit('.')[-1]} is missing"
        refused(DeepSpeedConfigError, words, DeepSpeedConfig, {"train_batch_size": 8, **config})


@pytest.mark.parametrize(
    "config, words",
    [
        ({"expert_parallel": {"foo": 1}}, "expert_parallel.foo"),
        ({"aio": {"thread_count": 1}}, "aio.thread_count"),
        ({"vocabulary_size": 13}, "vocabulary_size"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True, "no key": 1}}, "bfloat16 is ignored"),
        ({"allgather_size": 5, "zero_optimization": {"stage": 0}}, "allgather_size = 5: has an effect only when"),
        (zero(stage=2, offload_param={"device": "cpu"}), "parameter offload has no effect below ZeRO stage 3"),
        (zero(stage=0, offload_param={"device": "nvme"}), "parameter offload has no effect below ZeRO stage 3"),
        (zero(stage=1, cpu_offload_param=True), "parameter offload has no effect below ZeRO stage 3"),
        (
            zero(
                stage=2,
                offload_optimizer={"device": "cpu"},
                zenflow={"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            ),
            "select_interval = 2, zero_optimization.zenflow.update_interval = 4: columns are chosen anew every 4 steps",
        ),
    ],
)
def test_warnings(config, words):
    made = DeepSpeedConfig({"train_batch_size": 8, **config})
    assert any(words in text for text in made.warnings)
    assert made.bfloat16_enabled is False and made.zero_config.allgather_bucket_size == 500_000_000


def test_stage_3_with_an_elastic_checkpoint_warns():
    native = resolve({"train_batch_size": 8, **zero(stage=3, elastic_checkpoint=True)})[0]
    about = [issue for issue in native.issues() if "zero_optimization.elastic_checkpoint" in issue["paths"]]
    assert [issue["severity"] for issue in about if issue["code"] != "not_built"] == ["warning"]


@pytest.mark.parametrize("given, stage", [(True, 1), (False, 0)])
def test_zero_as_a_bare_boolean(given, stage):
    native = resolve({"train_batch_size": 8, "zero_optimization": given})[0]
    assert native.values()["zero_optimization"]["stage"] == stage
    assert any(issue["code"] == "bare_bool" for issue in native.issues())


def test_words_in_any_case():
    config = {"gradient_allreduce_op": "Mean", "communication_data_type": "BF16", "log_level": "debug"}
    made = DeepSpeedConfig({"train_batch_size": 8, "checkpoint": {"writer": {"type": "python"}}, **config})
    assert (made.gradient_allreduce_op, made.communication_data_type, made.log_level) == ("mean", "bf16", "DEBUG")
    assert made.checkpoint_config.writer.type == "PYTHON"


def test_lists_of_leaf_modules():
    leaf = {"classes": "a.B", "names": ["x", "y", "x"], "name_suffixes": None}
    made = DeepSpeedConfig({"train_batch_size": 8, **zero(leaf_module=leaf)}).zero_config.leaf_module
    assert (made.classes, made.names, made.name_suffixes) == (["a.B"], ["x", "y"], [])


def test_the_flops_profiler_switches_the_breakdown_on():
    native = resolve({"train_batch_size": 8, "flops_profiler": {"enabled": True}})[0]
    assert native.values()["wall_clock_breakdown"] is True
    assert native.origins()["wall_clock_breakdown"][0] == "derived"
