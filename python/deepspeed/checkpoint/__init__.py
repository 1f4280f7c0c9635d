"""Saving and loading of a training run: file names and keys that outside tools depend on, and what writes them.

Classes and functions for scripts are imported on first use.
"""

from deepspeed.checkpoint.constants import *  # noqa: F403
from deepspeed.registry import lazy_package

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

__getattr__, __dir__ = lazy_package(__name__, _WHERE)
