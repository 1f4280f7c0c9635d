"""Names of the files in a checkpoint folder, and which keys of the model file are whose."""

import os

LATEST = "latest"
MODEL_STATES = "mp_rank_{mp_rank:02d}_model_states.pt"
SHARDED_MODEL_STATES = "zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt"
EXPERT_OPTIM_STATES = "expp_rank_{expp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
OPTIM_STATES = "{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
# Ours, one for each rank: what a resumed run needs to go on bit by bit and no other tool reads.
RUN_STATES = "run_rank_{rank:05d}_state.pt"

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
RESERVED_KEY = "checkpoint_parallel_dimensions"
# Keys of the engine that load_checkpoint hands back all the same, as callers expect.
OWN_KEYS = (
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "global_samples",
    RESERVED_KEY,
    "ds_config",
    "ds_version",
)


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
