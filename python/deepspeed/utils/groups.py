"""Which ranks share what: the data-parallel and model-parallel groups of this process.

With an ``mpu`` (an object with Megatron's ``get_data_parallel_group()`` and so on) its groups are the truth. Without
one, all ranks are data-parallel and each is its own model-parallel group. Expert and sequence groups are asked for by
the same names as ever; a build without those features says so.
"""

from deepspeed import comm as dist

# The model-parallel unit that `deepspeed.initialize(mpu=...)` was given.
mpu = None

_DEVICE_MESH_SPLIT_UNSUPPORTED = "No backend for the parent process group or its backend does not support splitting"

_own_group = None
_tensor_rank = None
_tensor_world_size = None


def initialize(ep_size=1, mpu=None):
    """Announces the model-parallel unit. ``ep_size`` above 1 needs expert parallelism, which this build lacks."""
    if ep_size > 1:
        raise _not_built("expert parallelism (ep_size > 1)", "pass ep_size=1")
    set_mpu(mpu)


def set_mpu(unit):
    """Makes ``unit`` (None: nobody) the source of the groups."""
    globals()["mpu"] = unit


def _not_built(what, instead):
    return NotImplementedError(f"this build of deepspeed has no {what} yet: {instead}.")


def _ask(*names, default):
    # mpus differ: Megatron's older ones say model_parallel, newer ones tensor_model_parallel.
    for name in names:
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return default()


def _alone():
    # torch wants every rank to take part in creating each group, so all ranks' own groups are made at once.
    global _own_group
    if _own_group is None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _own_group = groups[dist.get_rank()]
    return _own_group


def clear():
    """Forgets groups and mpu; for a process that leaves one job and joins another."""
    global _own_group, _tensor_rank, _tensor_world_size
    _own_group = _tensor_rank = _tensor_world_size = None
    set_mpu(None)


# ---- data parallel ------------------------------------------------------------------------------------------------
def get_data_parallel_group():
    """The ranks that hold the same part of the model and see different data."""
    return _ask("get_data_parallel_group", default=dist.get_world_group)


_get_data_parallel_group = get_data_parallel_group


def get_data_parallel_rank():
    """This rank's place in its data-parallel group."""
    return dist.get_rank(group=get_data_parallel_group())


def get_data_parallel_world_size():
    """Size of the data-parallel group."""
    return _ask("get_data_parallel_world_size", default=lambda: dist.get_world_size(group=get_data_parallel_group()))


# ---- model (tensor) parallel --------------------------------------------------------------------------------------
def get_model_parallel_group():
    """The ranks that together hold one copy of the model; this rank alone without an mpu."""
    return _ask("get_model_parallel_group", "get_tensor_model_parallel_group", default=_alone)


def get_model_parallel_rank():
    """This rank's place in its model-parallel group."""
    return _ask("get_model_parallel_rank", "get_tensor_model_parallel_rank", default=lambda: 0)


def get_model_parallel_world_size():
    """Size of the model-parallel group."""
    return _ask("get_model_parallel_world_size", "get_tensor_model_parallel_world_size", default=lambda: 1)


def get_tensor_model_parallel_group():
    """The ranks that split single weights among them; this rank alone without an mpu."""
    return _ask("get_tensor_model_parallel_group", "get_model_parallel_group", default=_alone)


def set_tensor_model_parallel_world_size(world_size):
    """Overrides the size of the tensor-parallel group (None: no override)."""
    global _tensor_world_size
    _tensor_world_size = world_size


def set_tensor_model_parallel_rank(rank):
    """Overrides this rank's place in the tensor-parallel group (None: no override)."""
    global _tensor_rank
    _tensor_rank = rank


def get_tensor_model_parallel_world_size():
    """Size of the tensor-parallel group."""
    if _tensor_world_size is not None:
        return _tensor_world_size
    return _ask("get_tensor_model_parallel_world_size", "get_model_parallel_world_size", default=lambda: 1)


def get_tensor_model_parallel_rank():
    """This rank's place in the tensor-parallel group."""
    if _tensor_rank is not None:
        return _tensor_rank
    return _ask("get_tensor_model_parallel_rank", "get_model_parallel_rank", default=lambda: 0)


def get_tensor_model_parallel_src_rank():
    """The global rank of the first member of this rank's tensor-parallel group."""
    return dist.get_global_rank(get_tensor_model_parallel_group(), 0)


def _init_tp_mesh_device(tensor_model_parallel_size=1, data_parallel_size=None):
    raise _not_built("tensor parallelism of its own", "pass an mpu with the groups")


# ---- sequence parallel --------------------------------------------------------------------------------------------
def _get_sequence_parallel_world_size():
    """Size of the mpu's sequence-parallel group; 1 without one."""
    return _ask("get_sequence_parallel_world_size", default=lambda: 1)


def _get_sequence_parallel_rank():
    """This rank's place in the mpu's sequence-parallel group; 0 without one."""
    return _ask("get_sequence_parallel_rank", default=lambda: 0)


def _get_sequence_parallel_group():
    """The mpu's sequence-parallel group."""

    def missing():
        raise _not_built("sequence parallelism of its own", "pass an mpu with get_sequence_parallel_group()")

    return _ask("get_sequence_parallel_group", default=missing)


# ---- expert parallel ----------------------------------------------------------------------------------------------
def _experts_missing(*args, **kwargs):
    raise _not_built("expert parallelism", "train a model without MoE layers")


_create_expert_and_data_parallel = _experts_missing
_get_expert_parallel_group = _experts_missing
_get_expert_parallel_ranks = _experts_missing
_get_expert_model_parallel_world_size = _experts_missing
