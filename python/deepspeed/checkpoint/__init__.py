"""Saving and loading of a training run: file names and keys that outside tools depend on, and what writes them.

Classes and functions for scripts are imported on first use.
"""

import importlib

from deepspeed.checkpoint.constants import *  # noqa: F403

_WHERE = {
    "DeepSpeedCheckpoint": "deepspeed.checkpoint.deepspeed_checkpoint",
    "ZeROCheckpoint": "deepspeed.checkpoint.zero_checkpoint",
    "SubparamShape": "deepspeed.checkpoint.universal_checkpoint",
    "enable_universal_checkpoint": "deepspeed.checkpoint.universal_checkpoint",
    "get_layer_ckpt_name_for_rank": "deepspeed.checkpoint.utils",
    "get_model_ckpt_name_for_rank": "deepspeed.checkpoint.utils",
    "get_zero_ckpt_name_for_rank": "deepspeed.checkpoint.utils",
    "get_model_3d_descriptor": "deepspeed.checkpoint.reshape_3d_utils",
    "model_3d_desc": "deepspeed.checkpoint.reshape_3d_utils",
    "merge_state": "deepspeed.checkpoint.reshape_utils",
    "partition_data": "deepspeed.checkpoint.reshape_utils",
    "get_files": "deepspeed.checkpoint.reshape_utils",
    "get_files_with_prefix": "deepspeed.checkpoint.reshape_utils",
    "meg_2d_parallel_map": "deepspeed.checkpoint.reshape_meg_2d",
    "reshape_meg_2d_parallel": "deepspeed.checkpoint.reshape_meg_2d",
}


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module 'deepspeed.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_WHERE))
