"""DeepSpeed: train and serve large models, with a C++ core.

``import deepspeed`` is light: what a name needs is imported when the name is first used.
"""

import importlib

from deepspeed.registry import lazy_package
from deepspeed.version import __version__

__version_major__, __version_minor__, __version_patch__ = (
    int(part) for part in __version__.split("+")[0].split(".")[:3]
)
version = __version__

# Public name -> where it lives. A row here is all it takes to export something.
_NAMES = {
    "initialize": "deepspeed.engine.initialize",
    "add_config_arguments": "deepspeed.engine.arguments",
    "DeepSpeedEngine": "deepspeed.engine.engine",
    "DeepSpeedOptimizerCallable": "deepspeed.engine.engine",
    "DeepSpeedSchedulerCallable": "deepspeed.engine.engine",
    "tp_model_init": "deepspeed.module_inject.tp_init",
    "record_tp_model_init_args": "deepspeed.module_inject.tp_init",
    "merge_tp_model_init_into_config": "deepspeed.module_inject.tp_init",
    "set_autotp_mode": "deepspeed.module_inject.layers",
    "init_inference": "deepspeed.inference.engine",
    "InferenceEngine": "deepspeed.inference.engine",
    "is_compile_supported": "deepspeed.engine.parts.compiling",
    "DeepSpeedConfig": "deepspeed.config",
    "DeepSpeedConfigError": "deepspeed._native",
    "DeepSpeedConfigAssertionError": "deepspeed.config",
    "DeepSpeedInferenceConfig": "deepspeed.config.inference",
    "default_inference_config": "deepspeed.config.inference",
    "load_ds_config": "deepspeed.config.getters",
    "DeepSpeedTransformerConfig": "deepspeed.ops.transformer",
    "DeepSpeedTransformerLayer": "deepspeed.ops.transformer",
    "DeepSpeedOptimizer": "deepspeed.zero.optimizers.base_optimizer",
    "DeepSpeedDataLoader": "deepspeed.published.dataloader",
    "PipelineModule": "deepspeed.pipe.module",
    "PipelineEngine": "deepspeed.engine.pipeline_engine",
    "DualPipeVModule": "deepspeed.pipe.module",
    "DualPipeVEngine": "deepspeed.engine.pipeline_engine",
    "plan": "deepspeed.planner.plans",
    "offload_plan": "deepspeed.planner.tiers",
    "init_distributed": "deepspeed.comm",
    "get_accelerator": "deepspeed.accelerator",
    "add_tuning_arguments": "deepspeed.optim.lr_arguments",
    "log_dist": "deepspeed.log",
    "logger": "deepspeed.log",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": "deepspeed.constants",
    "set_optimizer_flags": "deepspeed.ops.muon",
    "OnDevice": "deepspeed.utils.init_on_device",
    "git_hash": "deepspeed.git_version_info",
    "git_branch": "deepspeed.git_version_info",
}
_MODULES = {"checkpointing": "deepspeed.activation_checkpointing.checkpointing"}
_RENAMED = {"__git_hash__": "git_hash", "__git_branch__": "git_branch"}
_CONSTANTS = {
    "ADAM_OPTIMIZER": "adam",
    "LAMB_OPTIMIZER": "lamb",
    "MUON_OPTIMIZER": "muon",
    "dist": None,
    "HAS_TRITON": False,
}
# Names that are published and not built yet, by module. A row goes when the feature comes.
_LATER = {
    "inference": ("replace_transformer_layer", "revert_transformer_layer"),
    "the hybrid engine": ("DeepSpeedHybridEngine",),
}


def _other(name):
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    for feature, names in _LATER.items():
        if name in names:
            raise AttributeError(f"deepspeed.{name}: {feature} is not in this build yet; CHANGELOG.md says what is")
    raise AttributeError(f"module 'deepspeed' has no attribute {name!r}")


_find, _ = lazy_package(__name__, _NAMES, otherwise=_other)


def __getattr__(name):
    return _find(_RENAMED.get(name, name))


def __dir__():
    return sorted([*globals(), *_NAMES, *_MODULES, *_CONSTANTS])
