"""Keys of the configuration that Python reads are read, and those that are marked as without effect are not.

Which keys reach the native engine is measured by tests/cpp/zero/option_keys_test.cpp: it changes each key and compares
the engine's options. What is left stands in keys_read_in_python.h, and has its proof here: engines are made, trained,
saved and loaded while reads of the configuration are recorded (``test_keys_are_read``). For features that no run of one
rank reaches there is only a look at the sources (``ONLY_SCANNED``): the name is in the file that is named there.
"""

import ast
import json
import os
import pathlib
import re
import sys

import pytest
import torch

import deepspeed
from deepspeed._native import _C
from deepspeed.config import DeepSpeedConfig, model
from deepspeed.config.config import DICTS, PLAIN, SECTIONS
from deepspeed.pipe import LayerSpec, PipelineModule
from harness import on_ranks
from runs import engine_of, take_step

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE = os.path.dirname(os.path.abspath(deepspeed.__file__))
CONFIG_ROOM = os.path.join(PACKAGE, "config", "")
# They hand out values: whoever asks them is who reads.
HANDERS = tuple(os.path.join(PACKAGE, "engine", name) for name in ("members.py", "accessors.py"))

# Attributes of a DeepSpeedConfig that are a key of a section, or have another name than their key.
FLAT = {
    **{name: name for name in PLAIN},
    "sparse_gradients_enabled": "sparse_gradients",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "param_dtype": "data_types.param_dtype",
    "buffer_dtype": "data_types.buffer_dtype",
    "zero_optimization_stage": "zero_optimization.stage",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "checkpoint_tag_validation_enabled": "checkpoint.tag_validation",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    "elasticity_enabled": "elasticity.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "pld_enabled": "progressive_layer_drop.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
}

# Below a section: by file, the keys that it names.
_SCANNED = {
    "autotuning": {
        "autotuning/settings.py": "end_profile_step fast max_train_batch_size max_train_micro_batch_size_per_gpu "
        "metric min_train_batch_size min_train_micro_batch_size_per_gpu mp_size num_tuning_micro_batch_sizes "
        "start_profile_step",
        "autotuning/autotuner.py": "arg_mappings enabled experiment_timeout exps_dir metric_path model_info.num_params "
        "model_info.profile model_info_path overwrite results_dir tuner_early_stopping tuner_num_trials tuner_type",
    },
    "activation_checkpointing": {
        "activation_checkpointing/checkpointing.py": "contiguous_memory_optimization cpu_checkpointing "
        "number_checkpoints partition_activations profile synchronize_checkpoint_boundary",
    },
    "checkpoint": {"checkpoint/engines/built_in.py": "host_cache_size"},
    "comet": {
        "monitor/monitor.py": "enabled",
        "monitor/comet.py": "api_key experiment_key experiment_name mode online project samples_log_interval workspace",
    },
    "comms_logger": {"comm/comms_logger.py": "enabled prof_all prof_ops verbose debug"},
    "csv_monitor": {"monitor/monitor.py": "enabled", "monitor/csv_monitor.py": "job_name output_path"},
    "curriculum_learning": {
        "data/curriculum.py": "min_difficulty max_difficulty schedule_type "
        "schedule_config.total_curriculum_step schedule_config.difficulty_step schedule_config.root_degree "
        "schedule_config.difficulty schedule_config.max_step",
        "engine/parts/sequence_curriculum.py": "curriculum_type truncate",
    },
    "data_efficiency": {
        "data/random_ltd.py": "data_routing.enabled data_routing.random_ltd.enabled "
        "data_routing.random_ltd.global_batch_size data_routing.random_ltd.hidden_state_order "
        "data_routing.random_ltd.model_mask_name data_routing.random_ltd.random_ltd_layer_id "
        "data_routing.random_ltd.random_ltd_layer_num "
        "data_routing.random_ltd.random_ltd_schedule.max_value data_routing.random_ltd.random_ltd_schedule.min_value "
        "data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps "
        "data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step "
        "data_routing.random_ltd.random_ltd_schedule.schedule_type data_routing.random_ltd.total_layer_num",
        "engine/build_scheduler.py": "data_routing.random_ltd.layer_token_lr_schedule.enabled "
        "data_routing.random_ltd.layer_token_lr_schedule.total_layer_tokens "
        "data_routing.random_ltd.layer_token_lr_schedule.warmup_layer_tokens "
        "data_routing.random_ltd.layer_token_lr_schedule.warmup_type",
        "engine/parts/token_dropping.py": "data_routing.random_ltd.micro_batch_size seed",
        "data/dynamic_batches.py": "seed data_sampling.num_workers data_sampling.pin_memory "
        "data_sampling.dynamic_batching.lr_scaling_method data_sampling.dynamic_batching.max_batch_size "
        "data_sampling.dynamic_batching.max_tokens data_sampling.dynamic_batching.metrics_path "
        "data_sampling.dynamic_batching.min_batch_size data_sampling.dynamic_batching.sequence_picking_order "
        "data_sampling.dynamic_batching.verbose",
        "engine/parts/dynamic_batching.py": "data_sampling.dynamic_batching.enabled",
        "engine/parts/training_data.py": "enabled data_sampling.enabled data_sampling.num_workers "
        "data_sampling.pin_memory data_sampling.curriculum_learning.enabled",
        "data/sampler.py": "data_sampling.num_epochs data_sampling.curriculum_learning.data_cluster_path",
        "published/dataloader.py": "seed",
    },
    "datastates_ckpt": {"checkpoint/engines/built_in.py": "host_cache_size"},
    "elasticity": {"engine/parts/memory_copies.py": "snapshot_steps", "config/elasticity.py": "min_time"},
    "expert_parallel": {
        "engine/parts/expert_layers.py": "autoep_size",
        "module_inject/auto_ep_config.py": "expert_tensor_parallel_size load_balance_coeff",
        "module_inject/auto_ep_layer.py": "use_grouped_mm validate_folding_routing",
        "module_inject/auto_ep.py": "expert_pattern expert_w1 expert_w2 expert_w3 has_shared_experts moe_layer_pattern "
        "num_expert_groups num_limited_groups preset_model route_norm route_scale routed_scaling_factor router_pattern "
        "score_apply score_func shared_experts_gate_pattern shared_experts_pattern top_k top_k_attr",
    },
    "moe": {"engine/parts/expert_layers.py": "aux_loss_coeff bias_update_rate idle_steps overlap_chunks"},
    "pipeline": {"engine/pipeline_parts/links.py": "grad_partitioned pipe_partitioned"},
    "sequence_parallel": {"engine/parts/long_sequences.py": "chunk folder method offload tile_loss tile_mlp"},
    "sparse_attention": {
        "ops/sparse_attention/unchanged.py": "mode",
        "ops/sparse_attention/sparsity_config.py": "attention block different_layout_per_head global_block_end_indices "
        "global_block_indices horizontal_global_attention local_window_blocks num_different_global_patterns "
        "num_global_blocks num_local_blocks num_random_blocks num_sliding_window_blocks",
    },
    "postmortem": {"engine/parts/outputs.py": "dir", "engine/parts/postmortem.py": "keep max_bytes spike_factor"},
    "tensor_parallel": {
        "engine/parts/tensor_parallel.py": "autotp_size dtype tp.tp_size tp.mpu tp.tp_group partition_config.tp_size",
        "module_inject/tp_model.py": "verify tp_overlap_comm split_sequence tp.tp_grain_size",
        "module_inject/vocabulary.py": "vocab_parallel_lm_head vocab_parallel_ce_backend",
        "module_inject/cut_sources.py": "injection_policy_tuple preset_model partition_config.layer_specs "
        "partition_config.strict_mode partition_config.use_default_specs",
    },
    "tensorboard": {"monitor/monitor.py": "enabled", "monitor/tensorboard.py": "job_name output_path"},
    "trace": {"engine/parts/outputs.py": "path", "engine/parts/tracing.py": "steps"},
    "wandb": {"monitor/monitor.py": "enabled", "monitor/wandb.py": "group project team"},
    "zero_optimization": {"zero/init/init_context.py": "override_module_apply"},
}
ONLY_SCANNED = {
    f"{section}.{key}": (file, key.rpartition(".")[2])
    for section, files in _SCANNED.items()
    for file, keys in files.items()
    for key in keys.split()
}
# Attributes with another name than the key.
ONLY_SCANNED["use_data_before_expert_parallelism"] = (
    "engine/parts/expert_layers.py",
    "use_data_before_expert_parallel_",
)
ONLY_SCANNED["fp16.auto_cast"] = ("engine/parts/backward.py", "fp16_auto_cast")
ONLY_SCANNED["data_efficiency.data_sampling.enabled"] = ("engine/parts/dynamic_batching.py", "data_sampling_enabled")
ONLY_SCANNED["checkpoint.tag_validation"] = ("checkpoint/save/save.py", "checkpoint_tag_validation_enabled")
ONLY_SCANNED["monitors"] = ("monitor/monitor.py", "monitors")
ONLY_SCANNED["data_parallel_size"] = ("config/config.py", "data_parallel_size")

# Batch sizes, or what is wrong, with another value: (key of the section elasticity, value).
ELASTIC = {"enabled": True, "max_train_batch_size": 18, "micro_batch_sizes": [2, 3], "version": 0.1}
ELASTIC_CHANGES = {
    "enabled": False,
    "max_train_batch_size": 12,
    "micro_batch_sizes": [5],
    "min_gpus": 7,
    "max_gpus": 3,
    "prefer_larger_batch": False,
    "version": 0.2,
    "model_parallel_size": 2,
    "num_gpus_per_node": 4,
    "ignore_non_elastic_batch_info": True,
}

FORWARDED = {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
}


def keys_read_in_python():
    text = pathlib.Path(ROOT, "tests", "cpp", "zero", "keys_read_in_python.h").read_text(encoding="utf-8")
    return set(re.findall(r'^    "([\w.]+)",', text, re.MULTILINE))


def keys_without_effect():
    """``{key: reason}`` of the schema."""
    found = {}

    def walk(node, path):
        node = next((one for one in [node, *node.get("anyOf", [])] if "properties" in one), {})
        for key, below in node.get("properties", {}).items():
            if "x-ds-no-effect" in below:
                found[".".join([*path, key])] = below["x-ds-no-effect"]
            walk(below, [*path, key])

    walk(json.loads(_C.config.json_schema("training")), [])
    return found


class Reads:
    """``found``: ``{key: file of the package that has read it}``, without the room of the configuration itself."""

    def __init__(self, patch):
        self.found, self.paths, self.kept = {}, {}, []
        self.names = {}  # of attributes: (section, attribute) -> key
        reads = self

        def made(self, values):
            set_attributes(self, values)
            reads.register(self)

        def section_value(self, name):
            reads.section(self, name)
            return object.__getattribute__(self, name)

        def flat_value(self, name):
            if name in FLAT:
                reads.note(FLAT[name])
            return object.__getattribute__(self, name)

        set_attributes = DeepSpeedConfig._set_attributes
        patch.setattr(DeepSpeedConfig, "_set_attributes", made)
        patch.setattr(DeepSpeedConfig, "__getattribute__", flat_value)
        patch.setattr(model.DeepSpeedConfigModel, "__getattribute__", section_value)

    def register(self, whole):
        self.kept.append(whole)  # an id is of this object as long as it lives
        for attribute, (key, _) in {**SECTIONS, "timers_config": ("timers.throughput", None)}.items():
            self._section(vars(whole)[attribute], key, model.layout("training", key))
        for attribute, key in DICTS.items():
            vars(whole)[attribute] = Asked(vars(whole)[attribute], self, key)

    def _section(self, section, path, fields):
        if not isinstance(section, model.DeepSpeedConfigModel):
            return
        self.paths[id(section)] = path
        for key, facts in fields.items():
            for name in (key, *facts["aliases"]):
                self.names[path, name] = f"{path}.{key}"
                below = vars(section).get(name)
                if facts["fields"] is not None:
                    self._section(below, f"{path}.{key}", facts["fields"])

    def section(self, section, name):
        path = self.paths.get(id(section))
        if (path, name) in self.names:
            self.note(self.names[path, name], depth=3)

    def note(self, key, depth=2):
        frame = sys._getframe(depth)
        while frame is not None and frame.f_code.co_filename in HANDERS:
            frame = frame.f_back
        file = frame.f_code.co_filename if frame is not None else ""
        if file.startswith(PACKAGE + os.sep) and not file.startswith(CONFIG_ROOM):
            self.found.setdefault(key, os.path.relpath(file, PACKAGE))


class Asked(dict):
    """A section that stays a dict."""

    def __init__(self, values, reads, path):
        super().__init__(values or {})
        self.reads, self.path = reads, path

    def __getitem__(self, key):
        self.reads.note(f"{self.path}.{key}")
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.reads.note(f"{self.path}.{key}")
        return super().get(key, default)


ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def train(engine, dtype=torch.float32):
    for _ in range(2):
        take_step(engine, engine(torch.ones(1, 4, dtype=dtype)).sum())


@on_ranks(1)
def test_keys_are_read(rank, world, folder):
    def made(module=None, **more):
        options = {"train_batch_size": 1, "optimizer": ADAM, "steps_per_print": 1, **more}
        return engine_of(module or net(), options)

    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        whole = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "scheduler": WARM}
        whole["flops_profiler"] = {"enabled": True, "profile_step": 0}
        writer = {"checkpoint": {"writer": {"type": "FAST"}, "keep_last": 2}}
        engine = made(**whole, **writer)
        engine.deepspeed_io([torch.ones(4)] * 4)
        train(engine)
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        patch.setattr(deepspeed.get_accelerator(), "is_fp16_supported", lambda: True)  # nothing is computed in it
        made(fp16={"enabled": True}, **writer)
        made(progressive_layer_drop={"enabled": True})
        for stage in (1, 2, 3):
            offload = {"offload_optimizer": {"device": "cpu"}} if stage == 2 else {}
            engine = made(bf16={"enabled": True}, zero_optimization={"stage": stage, **offload})
            train(engine, torch.bfloat16)
            engine.save_checkpoint(os.path.join(folder, str(stage)))
            engine.load_checkpoint(os.path.join(folder, str(stage)))
            engine.save_16bit_model(folder)
        client = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        client["zero_force_ds_cpu_optimizer"] = False
        module = net()
        deepspeed.initialize(model=module, config=client, optimizer=torch.optim.AdamW(module.parameters()))
        deepspeed.checkpointing.configure(None, deepspeed_config={"train_batch_size": 1})
        pipe = PipelineModule([LayerSpec(torch.nn.Linear, 4, 1)], num_stages=1, loss_fn=lambda a, b: (a - b).sum())
        pipe = engine_of(pipe, {"train_batch_size": 1, "optimizer": ADAM})
        pipe.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 1))]))
    found, keys = reads.found, keys_read_in_python()
    elastic = {f"elasticity.{key}" for key in ELASTIC_CHANGES}
    unproven = keys - set(found) - set(ONLY_SCANNED) - elastic - set(FORWARDED)
    assert not unproven, f"nobody has read {sorted(unproven)}: see option_keys_test.cpp for what to do"
    assert not set(found) & set(keys_without_effect()), "read, though marked no_effect()"
    assert len(set(found) & keys) > 50


def names_in(file):
    for node in ast.walk(ast.parse(pathlib.Path(PACKAGE, file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.keyword):
            yield node.arg


def test_other_keys_are_in_the_sources():
    assert not set(ONLY_SCANNED) - keys_read_in_python()
    for key, (file, name) in ONLY_SCANNED.items():
        assert name in set(names_in(file)), f"{file} does not name {key}"


def sizes(world=6, **more):
    try:
        made = DeepSpeedConfig({"elasticity": ELASTIC, **more}, world_size=world)
    except ValueError as error:
        return str(error)
    return made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps


@pytest.mark.parametrize("key", ELASTIC_CHANGES)
def test_keys_of_elasticity_change_the_batch_sizes(key, monkeypatch):
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    changed, more = {**ELASTIC, key: ELASTIC_CHANGES[key]}, {}
    if key == "num_gpus_per_node":  # of version 0.2
        more["elasticity"], changed["version"] = {**ELASTIC, "version": 0.2}, 0.2
    if key == "ignore_non_elastic_batch_info":
        more["train_batch_size"] = 7
    if key == "version":  # only 0.2 has a batch for these alone
        more["world"] = 5
    assert sizes(**more) != sizes(**{**more, "elasticity": changed})


@pytest.mark.parametrize("key", FORWARDED)
def test_old_names_are_forwarded(key):
    section, _, name = key.partition(".")
    new = FORWARDED[key].partition(".")[2]
    for value in (True, False):
        made = DeepSpeedConfig({"train_batch_size": 1, section: {"stage": 3, name: value}})
        assert made.native.values()[section][new] is value


def test_marks_of_the_issue():
    zero = ("contiguous_gradients use_multi_rank_bucket_allreduce round_robin_gradients log_trace_cache_warnings "
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
            "cpu_offload_use_pin_memory").split()  # fmt: skip
    marked = keys_without_effect()
    assert {f"zero_optimization.{key}" for key in zero} | {"vocabulary_size"} <= set(marked)
    assert all(reason.startswith("because ") for reason in marked.values())


def test_each_value_that_the_user_has_set_is_told_once(capsys):
    # A value that is the default says nothing: 320 of 732 real files have contiguous_gradients true.
    section = {"contiguous_gradients": True, "round_robin_gradients": True, "stage": 1}
    section["cpu_offload_use_pin_memory"] = None
    made = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": section, "datastates_ckpt": {"mine": 3}})
    lines = [line for line in capsys.readouterr().out.splitlines() if "has no effect here" in line]
    assert len(lines) == len(made.without_effect) == 2 and not made.warnings
    assert "[INFO]" in lines[0] and "zero_optimization.round_robin_gradients = true is accepted and" in lines[0]
    assert "datastates_ckpt.mine = 3 is accepted and has no effect here, because" in lines[1]
