"""DeepSpeedConfig: the resolved configuration as attributes."""

import functools
import json
import operator
import os

from deepspeed._native import _C, DeepSpeedConfigError
from deepspeed.config import elasticity, sections
from deepspeed.config.errors import DeepSpeedConfigAssertionError, raise_if_broken
from deepspeed.config.model import ConfigSection, layout
from deepspeed.config.read import read
from deepspeed.config.secrets import shown
from deepspeed.config.world import (
    ENVIRONMENT,
    UNKNOWN,
    check_data_parallel_size,
    data_parallel_size,
    sequence_size,
    total_ranks,
)
from deepspeed.log import logger

LEFT_TO_TRAINER = _C.config.LEFT_TO_TRAINER  # the code of issues about values that a trainer fills in
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BUILTIN_OPTIMIZERS = "Adam AdamW Adagrad Lamb OneBitAdam ZeroOneAdam OneBitLamb Lion Muon MuAdam MuAdamW MuSGD".split()

# Attributes that are a key of the top level under its own name.
PLAIN = BATCH_KEYS + (
    "managed_gradient_accumulation",
    "disable_python_gc",
    "keep_in_fp32_modules",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "gradient_clipping",
    "dataloader_drop_last",
    "max_train_tokens",
    "disable_allgather",
    "graph_harvesting",
    "vocabulary_size",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "sequence_parallel_size",
    "data_parallel_size",
)

# Attribute -> section, and the class of the section object where scripts know one.
SECTIONS = {
    "float16_config": ("fp16", sections.DeepSpeedFP16Config),
    "bfloat16_config": ("bf16", sections.DeepSpeedBF16Config),
    "torch_autocast_config": ("torch_autocast", sections.DeepSpeedTorchAutocastConfig),
    "data_types_config": ("data_types", ConfigSection),
    "zero_config": ("zero_optimization", sections.DeepSpeedZeroConfig),
    "activation_checkpointing_config": ("activation_checkpointing", sections.DeepSpeedActivationCheckpointingConfig),
    "aio_config": ("aio", ConfigSection),
    "flops_profiler_config": ("flops_profiler", sections.DeepSpeedFlopsProfilerConfig),
    "comms_config": ("comms_logger", sections.CommsConfig),
    "comm_config": ("comm", ConfigSection),
    "step_log_config": ("step_log", ConfigSection),
    "trace_config": ("trace", ConfigSection),
    "report_config": ("report", ConfigSection),
    "postmortem_config": ("postmortem", ConfigSection),
    "checkpoint_config": ("checkpoint", ConfigSection),
    "nebula_config": ("nebula", sections.DeepSpeedNebulaConfig),
    "datastates_config": ("datastates_ckpt", ConfigSection),
    "elasticity_config": ("elasticity", ConfigSection),
    "autotuning_config": ("autotuning", ConfigSection),
    "weight_quantization_config": ("weight_quantization", sections.WeightQuantConfig),
    "hybrid_engine": ("hybrid_engine", sections.HybridEngineConfig),
    "compile_config": ("compile", sections.CompileConfig),
    "tensor_parallel_config": ("tensor_parallel", sections.TPTrainingConfig),
    "expert_parallel_config": ("expert_parallel", ConfigSection),
    "moe_config": ("moe", ConfigSection),
    "sequence_parallel_config": ("sequence_parallel", ConfigSection),
}

# Attributes that stay dicts, because scripts index them: attribute -> section.
DICTS = {
    "compression_config": "compression_training",
    "data_efficiency_config": "data_efficiency",
    "curriculum_params_legacy": "curriculum_learning",
    "pld_params": "progressive_layer_drop",
    "sparse_attention": "sparse_attention",
    "pipeline": "pipeline",
}

# Attributes that are a single value: attribute -> path.
VALUES = {
    "sparse_gradients_enabled": "sparse_gradients",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "param_dtype": "data_types.param_dtype",
    "buffer_dtype": "data_types.buffer_dtype",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "amp_enabled": "amp.enabled",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
    "elasticity_enabled": "elasticity.enabled",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "pld_enabled": "progressive_layer_drop.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
}


def resolve(config, mpu=None, mesh_device=None, world_size=None, given_as="world_size="):
    """``(native, world, source)``: ``config`` with its batch sizes worked out. What is wrong: ``native.issues()``.

    ``given_as``: the source of ``world_size`` in messages.
    """
    native = read(config)
    values = native.values()
    try:
        shared, told_by = sequence_size(values["sequence_parallel_size"], mpu, mesh_device)
        if told_by:
            native.derive("sequence_parallel_size", shared, told_by, False)
        world, source = data_parallel_size(mpu, mesh_device, world_size, shared, given_as)
        if (shared or 1) > 1:
            check_data_parallel_size(values["data_parallel_size"], world, source)
    except DeepSpeedConfigError as error:
        native.add_error("world_size", ["sequence_parallel_size"], str(error), False)
        return native, 1, "unknown"
    if elasticity.elasticity_enabled(values):
        _elastic_batch(native, mpu is not None or mesh_device is not None, world, source, world_size, given_as)
    elif not any(issue["severity"] == "error" and set(issue["paths"]) & set(BATCH_KEYS) for issue in native.issues()):
        _plan_batch(native, [values[key] for key in BATCH_KEYS], world, source)
    return native, world, source


def _elastic_batch(native, is_split, world, source, world_size, given_as):
    """The batch sizes by the section elasticity; ``is_split``: an mpu or a mesh says which ranks are data-parallel."""
    ranks, known_from = total_ranks(world_size, given_as)
    is_known = known_from != UNKNOWN
    section = [issue for issue in native.issues() if any(path.startswith("elasticity") for path in issue["paths"])]
    if is_known and not any(issue["severity"] == "error" for issue in section):
        elasticity.tell_worlds(native, ranks, world)
    fits = elasticity.check_ranks(native, ranks, known_from if is_known and not is_split else None)
    if not fits or any(issue["severity"] == "error" for issue in section):
        return
    shared = native.values()["elasticity"]["model_parallel_size"]
    total = world * shared if is_split else ranks
    known = is_known or is_split
    sizes = elasticity.choose_sizes(native, total if known else None, world if known else None)
    if sizes is None:
        return
    why = "the section elasticity" + (f" and {world} data-parallel ranks ({source})" if sizes.micro else "")
    for key, value in zip(BATCH_KEYS, (sizes.batch, sizes.micro, None)):
        native.derive(key, value, why, source == ENVIRONMENT)
    if sizes.micro is not None:
        _plan_batch(native, [sizes.batch, sizes.micro, None], world, source)


def _plan_batch(native, sizes, world, source):
    try:
        planned = _C.config.plan_batch(*sizes, world, source)
    except DeepSpeedConfigAssertionError as error:
        lines = [f"{key} on line {native.line(key)}" for key in BATCH_KEYS if native.line(key)]
        where = f" ({', '.join(lines)})" if lines else ""
        causes = [key for key in BATCH_KEYS if native.line(key)] or list(BATCH_KEYS)
        left = sizes[0] is None and sizes[1] is None  # as in files that transformers or accelerate complete
        native.add_error(LEFT_TO_TRAINER if left else "batch", causes, f"{error}{where}", True)
        return
    for key, given, value in zip(BATCH_KEYS, sizes, planned):
        if given is None:
            why = f"the other batch sizes and {world} data-parallel rank{'' if world == 1 else 's'} ({source})"
            native.derive(key, value, why, source == ENVIRONMENT)


class DeepSpeedConfig:
    """The configuration of one engine.

    ``config``: dict, path of a JSON file, or url-safe base64 of JSON. ``mpu``, ``mesh_device``: tell the number of
    data-parallel ranks; without them it is ``world_size``, the process group's, WORLD_SIZE, or 1.

    ``warnings``: texts about values that are probably not meant; ``without_effect``: about values that the user has set
    and that change nothing here. Rank 0 logs both.

    Raises DeepSpeedConfigError (a ValueError) with all that is wrong; for batch sizes, fp16 with bf16 and a ZeRO stage
    above 3 it is an AssertionError as well. Values that only a program can hold (dtypes, groups, callables) may stand
    in a dict; they come back as they are.
    """

    def __init__(self, config, mpu=None, mesh_device=None, world_size=None):
        native, self.world_size, self.world_size_source = resolve(config, mpu, mesh_device, world_size)
        raise_if_broken(native)
        self._param_dict = config if isinstance(config, dict) else native.raw()
        self._native = native
        self._values = native.values()
        self._non_default = native.non_default()
        issues = native.issues()
        self.warnings = [issue["text"] for issue in issues if issue["severity"] == "warning"]
        self.without_effect = [issue["text"] for issue in issues if issue["code"] == "no_effect"]
        self._set_attributes(self._values)
        if os.environ.get("RANK", "0") == "0":
            for text in self.warnings:
                logger.warning("Configuration: %s", text)
            for text in self.without_effect:
                logger.info("Configuration: %s", text)

    @property
    def native(self):
        """The configuration as csrc/config has resolved it, for the native core."""
        if self._native is None:  # this object has come from another process
            self._native = read(self._param_dict)
            self.change("another process", **{key: getattr(self, key) for key in BATCH_KEYS})
        return self._native

    def change(self, why, **values):
        """Gives keys of the top level other values, here and in what the native core reads. ``why``: their origin."""
        for key, value in values.items():
            setattr(self, key, value)
            self.native.derive(key, value, why, False)

    def __getstate__(self):
        return {**vars(self), "_native": None}

    def _configure_train_batch_size(self):
        """Works out those of the three batch sizes that are None from the others and ``world_size``. AssertionError
        where they contradict each other."""
        given = [getattr(self, key) for key in BATCH_KEYS]
        planned = _C.config.plan_batch(*given, self.world_size, self.world_size_source)
        self.change("the other batch sizes", **dict(zip(BATCH_KEYS, planned)))

    def _set_attributes(self, values):
        fields = layout("training")
        for attribute, (key, kind) in SECTIONS.items():
            value = values[key]
            made = value if value is None else kind.from_values(value, fields[key]["fields"])
            setattr(self, attribute, made)
        for attribute, path in (*zip(PLAIN, PLAIN), *DICTS.items(), *VALUES.items()):
            setattr(self, attribute, functools.reduce(operator.getitem, path.split("."), values))
        for key, value in values["quantize_training"]["eigenvalue"].items():
            setattr(self, "eigenvalue_" + key, value)
        self.gradient_clipping = float(self.gradient_clipping)
        self.gradient_predivide_factor = float(self.gradient_predivide_factor)
        self.amp_params = {key: value for key, value in values["amp"].items() if key != "enabled"}
        self.zero_optimization_stage = int(self.zero_config.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        if self.optimizer_name in BUILTIN_OPTIMIZERS:
            self.optimizer_name = self.optimizer_name.lower()
        self.checkpoint_tag_validation_enabled = self.checkpoint_config.tag_validation != "IGNORE"
        self.checkpoint_tag_validation_fail = self.checkpoint_config.tag_validation == "FAIL"
        self.monitor_config = sections.DeepSpeedMonitorConfig.from_values(values, fields)
        self.timers_config = sections.DeepSpeedThroughputTimerConfig.from_values(
            values["timers"]["throughput"], layout("training", "timers.throughput")
        )
        self.comms_logger_enabled = self._param_dict.get("comms_logger") is not None

    def print_user_config(self):
        """Logs the configuration as the user gave it."""
        logger.info("  json = %s", json.dumps(shown(self._param_dict), indent=4, default=repr))

    def print(self, name):
        """Logs every attribute under the heading ``name``, then the user's configuration."""
        logger.info("%s:", name)
        for key in sorted(vars(self)):
            if not key.startswith("_"):
                logger.info("  %s %s", f"{key} ".ljust(32, "."), getattr(self, key))
        self.print_user_config()


def changed_values(config):
    """``{key: value}`` of a DeepSpeedConfig as far as it does not have its defaults; keys below sections with dots."""
    found, values = {}, shown(config.native.values())
    for line in config._non_default.splitlines():
        path, _, text = line.partition(" = ")
        try:
            found[path] = functools.reduce(operator.getitem, path.split("."), values)
        except (KeyError, TypeError):  # a key of the user's own, with dots
            found[path] = text
    return found


def non_default_values(config):
    """One line per key of a DeepSpeedConfig that does not have its default, with its origin; "" when all have."""
    return config._non_default
