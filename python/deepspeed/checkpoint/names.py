"""Names of the files in a checkpoint folder, and which keys of the model file are whose."""

import os
import re

from deepspeed.checkpoint.constants import (
    BUFFER_NAMES,
    CHECKPOINT_PARALLEL_DIMS,
    DS_VERSION,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    PARAM_SHAPES,
    ZERO_FILE_PREFIX,
)
from deepspeed.checkpoint.native_names import is_native_file

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
SCRIPT = "zero_to_fp32.py"  # beside the tags; standalone.py has its text
_MP_RANK = MODEL_FILE_PREFIX + "{mp_rank:02d}"
MODEL_STATES = _MP_RANK + MODEL_FILE_SUFFIX
SHARDED_MODEL_STATES = ZERO_FILE_PREFIX + "{dp_rank}_" + MODEL_STATES
EXPERT_OPTIM_STATES = "expp_rank_{expp_rank}_" + _MP_RANK + OPTIM_FILE_SUFFIX
OPTIM_STATES = "{prefix}" + ZERO_FILE_PREFIX + "{dp_rank}_" + _MP_RANK + OPTIM_FILE_SUFFIX
# Ours, one for each rank: what a resumed run needs to go on bit by bit and no other tool reads.
RUN_STATES = "run_rank_{rank:05d}_state.pt"

# Whatever a save of any kind, of this or another implementation, puts at the top of the tag's folder; and nothing else:
# files with these names may be removed when the tag is saved again.
_CHECKPOINT_FILE = re.compile(
    r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt"
    r"|((bf16_|fp16_)?zero_pp_rank_\d+|expp_rank_\d+)_mp_rank_\d+_optim_states\.pt"
    r"|(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
    r"|layer_\d+(-[A-Za-z]+_\d+)*-model_states\.pt"
    r"|run_rank_\d{5,}_state\.pt"
)

# Keys of the model file that load_checkpoint keeps for itself; every other one is handed back in client_state.
ENGINE_KEYS = (
    "module",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
)
RESERVED_KEY = CHECKPOINT_PARALLEL_DIMS
# Keys of the engine that load_checkpoint hands back all the same, as callers expect.
OWN_KEYS = (
    BUFFER_NAMES,
    "optimizer",
    PARAM_SHAPES,
    FROZEN_PARAM_SHAPES,
    "shared_params",
    FROZEN_PARAM_FRAGMENTS,
    "lr_scheduler",
    "global_samples",
    RESERVED_KEY,
    "ds_config",
    DS_VERSION,
)


def is_published_file(name):
    """Whether a save in the published layout makes files of this name at the top of a tag."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


def is_checkpoint_file(name):
    return is_published_file(name) or is_native_file(name)


def latest_tag(save_dir, pointer=LATEST):
    """The tag that ``save_dir/latest`` names, or None."""
    try:
        with open(os.path.join(save_dir, pointer)) as file:
            return file.read().strip()
    except FileNotFoundError:
        return None


def model_states(mp_rank=0):
    return MODEL_STATES.format(mp_rank=mp_rank)


def sharded_model_states(dp_rank, mp_rank=0):
    """At ZeRO stage 3 every data-parallel rank writes one."""
    return SHARDED_MODEL_STATES.format(dp_rank=dp_rank, mp_rank=mp_rank)


def optim_states(dp_rank, mp_rank=0, bf16=False, prefix=None):
    """At ZeRO stages 1 to 3 every data-parallel rank writes one. ``prefix`` goes before ``bf16``."""
    prefix = prefix if prefix is not None else "bf16_" if bf16 else ""
    return OPTIM_STATES.format(prefix=prefix, dp_rank=dp_rank, mp_rank=mp_rank)


def run_states(rank):
    return RUN_STATES.format(rank=rank)


def model_states_path(folder, mp_rank=0):
    return os.path.join(folder, model_states(mp_rank))


def sharded_model_states_path(folder, dp_rank, mp_rank=0):
    return os.path.join(folder, sharded_model_states(dp_rank, mp_rank))


def optim_states_path(folder, dp_rank, mp_rank=0, bf16=False):
    return os.path.join(folder, optim_states(dp_rank, mp_rank, bf16))


def expert_optim_states_path(folder, expp_rank, mp_rank=0):
    """Experts' optimizer states without ZeRO: every expert-parallel rank writes one."""
    return os.path.join(folder, EXPERT_OPTIM_STATES.format(expp_rank=expp_rank, mp_rank=mp_rank))


def run_states_path(folder, rank):
    return os.path.join(folder, run_states(rank))
