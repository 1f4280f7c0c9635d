"""The groups of ranks that share something: data-, tensor-, sequence-, expert-parallel groups and the small groups of
ZeRO++.

With an ``mpu`` (an object with Megatron's ``get_data_parallel_group()`` and so on) its groups are the truth. Else the
groups are those that ``_init_tp_mesh_device``, ``_create_model_parallel`` and ``_create_sequence_parallel`` have made;
without any, all ranks are data-parallel and each is a model-parallel group of its own. Every rank of the job calls what
makes groups, in one order. All of it is names for axes of native meshes: see ``comm/mesh_views.py``.
"""

from deepspeed import comm as dist
from deepspeed.comm import mesh_views as views
from deepspeed.utils import expert_groups
from deepspeed.utils.expert_groups import (  # noqa: F401
    _create_expert_and_data_parallel,
    _create_expert_data_and_model_parallel,
    _get_expert_data_parallel_group,
    _get_expert_data_parallel_group_dict,
    _get_expert_data_parallel_group_ranks,
    _get_expert_data_parallel_rank,
    _get_expert_data_parallel_world_size,
    _get_expert_model_parallel_world_size,
    _get_expert_parallel_group,
    _get_expert_parallel_group_dict,
    _get_expert_parallel_group_ranks,
    _get_expert_parallel_rank,
    _get_expert_parallel_ranks,
    _get_expert_parallel_src_rank,
    _get_expert_parallel_world_size,
    _get_max_expert_parallel_group,
    _get_max_expert_size,
    _get_max_expert_size_name,
)

# The model-parallel unit that `deepspeed.initialize(mpu=...)` was given.
mpu = None
# The device mesh that the groups were taken from, where there is one.
mesh_device = None

_DEVICE_MESH_SPLIT_UNSUPPORTED = "No backend for the parent process group or its backend does not support splitting"

_DATA, _TENSOR, _SEQUENCE, _SEQUENCE_DATA = "data-parallel", "tensor-parallel", "sequence-parallel", "sequence-data"
_SEQUENCE_PEERS = "sequence peers"
_ZERO_PARAM = "ZeRO secondary partition"

_overrides = {}  # of this rank's position in its tensor-parallel group ("rank"), and of the group's "size"


def initialize(ep_size=1, mpu=None):
    """Announces the model-parallel unit and makes the groups of experts that ``ep_size`` ranks share.

    Not needed: MoE layers make their groups.
    """
    set_mpu(mpu)
    if ep_size > 1:
        if mpu is None:
            _create_expert_and_data_parallel(ep_size)
        else:
            _create_expert_data_and_model_parallel(ep_size, mpu)


def set_mpu(unit):
    """Makes ``unit`` (None: nobody) the source of the groups."""
    globals()["mpu"] = unit


def clear():
    """Forgets groups and mpu; for a process that leaves one job and joins another."""
    global mesh_device
    mesh_device = None
    _overrides.clear()
    views.clear()
    expert_groups.clear()
    set_mpu(None)


def _view(*names, own):
    """A function that asks the mpu for the first of ``names`` that it has, and ``own`` where it has none. mpus differ:
    Megatron's older ones say model_parallel, newer ones tensor_model_parallel."""

    def view():
        for name in names:
            if hasattr(mpu, name):
                return getattr(mpu, name)()
        return own()

    return view


def _members(name):
    """The ``Members`` called ``name``; this rank alone where nobody has made them."""
    return views.get(name) if views.known(name) else views.alone()


# ---- data parallel: the ranks that hold the same part of the model and see different data ---------------------------
get_data_parallel_group = _view(
    "get_data_parallel_group", own=lambda: views.get(_DATA).group if views.known(_DATA) else dist.get_world_group()
)
get_data_parallel_world_size = _view(
    "get_data_parallel_world_size", own=lambda: dist.get_world_size(group=get_data_parallel_group())
)


def get_data_parallel_rank():
    """This rank's position in its data-parallel group."""
    return dist.get_rank(group=get_data_parallel_group())


def _get_data_parallel_group_ranks():
    """The global ranks of this rank's data-parallel group."""
    return dist.get_all_ranks_from_group(get_data_parallel_group())


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size


# ---- model (tensor) parallel: the ranks that split single weights among them ----------------------------------------
def _init_tp_mesh_device(tensor_model_parallel_size=1, data_parallel_size=None):
    """Makes tensor-parallel groups of neighbours and the data-parallel groups across them, once.

    ``data_parallel_size``: None for what is left of the ranks. Returns ``(data-parallel group, tensor-parallel group)``
    of this rank. Raises ValueError where the product is not the number of ranks.
    """
    if not views.known(_TENSOR):
        data = (0 if data_parallel_size is None else data_parallel_size, "data_parallel_size")
        tensor = (tensor_model_parallel_size, "tensor_model_parallel_size")
        _use_tensor_ranks(views.numbered(views.of_job(dp=data, tp=tensor)))
    return get_data_parallel_group(), get_tensor_model_parallel_group()


def _use_tensor_ranks(mesh):
    """Takes the tensor-parallel and data-parallel groups from a native mesh, where there are none yet."""
    views.make(_TENSOR, mesh, ["tp"])
    views.make(_DATA, mesh, ["dp"])


def _create_model_parallel(model_parallel_size_):
    """The same under an older name."""
    return _init_tp_mesh_device(model_parallel_size_)


def _of_tensor(what):
    """Two views of the tensor-parallel ``Members``: what the mpu has under its older and its newer name."""
    older, newer = f"get_model_parallel_{what}", f"get_tensor_model_parallel_{what}"
    name = {"world_size": "size"}.get(what, what)

    def own():
        return getattr(_members(_TENSOR), name)

    return _view(older, newer, own=own), _view(newer, older, own=own)


get_model_parallel_group, get_tensor_model_parallel_group = _of_tensor("group")
get_model_parallel_rank, _tensor_rank_of_groups = _of_tensor("rank")
get_model_parallel_world_size, _tensor_world_size_of_groups = _of_tensor("world_size")


def set_tensor_model_parallel_world_size(world_size):
    """Overrides the size of the tensor-parallel group (None: no override)."""
    _overrides["size"] = world_size


def set_tensor_model_parallel_rank(rank):
    """Overrides this rank's position in the tensor-parallel group (None: no override)."""
    _overrides["rank"] = rank


def get_tensor_model_parallel_world_size():
    """Size of the tensor-parallel group."""
    return _tensor_world_size_of_groups() if _overrides.get("size") is None else _overrides["size"]


def get_tensor_model_parallel_rank():
    """This rank's position in the tensor-parallel group."""
    return _tensor_rank_of_groups() if _overrides.get("rank") is None else _overrides["rank"]


def get_tensor_model_parallel_src_rank():
    """The global rank of the first member of this rank's tensor-parallel group."""
    return dist.get_global_rank(get_tensor_model_parallel_group(), 0)


# ---- sequence parallel --------------------------------------------------------------------------------------------
def _create_sequence_parallel(sequence_parallel_size):
    """Makes groups of ``sequence_parallel_size`` neighbours that split sequences, once.

    Returns this rank's group. Ranks at the same position of different groups see different data: they are the
    data-parallel groups, unless tensor parallelism or an mpu has made others. ValueError where a job that shares
    sequences among another number of ranks has made its groups.
    """
    if views.known(_SEQUENCE) and views.get(_SEQUENCE).size != sequence_parallel_size:
        raise ValueError(
            f"sequence_parallel_size is {sequence_parallel_size}, but this job has made groups of "
            f"{views.get(_SEQUENCE).size} ranks that share sequences. One job has one size; "
            "deepspeed.utils.groups.clear() forgets the groups"
        )
    mesh = views.numbered(views.of_job(sp=(sequence_parallel_size, "sequence_parallel_size")))
    views.make(_SEQUENCE_DATA, mesh, ["dp", "sp"])
    for name in (_DATA, _SEQUENCE_PEERS):  # the first may be there: of tensor parallelism
        views.make(name, mesh, ["dp"])
    return views.make(_SEQUENCE, mesh, ["sp"]).group


def _use_mesh(mesh):
    """Takes data- and sequence-parallel groups from a torch ``DeviceMesh`` with those dimensions."""
    global mesh_device
    mesh_device = mesh
    shape = {name: mesh.size(index) for index, name in enumerate(mesh.mesh_dim_names)}
    if set(shape) != {"data_parallel", "sequence_parallel"}:
        raise ValueError(f"the mesh has the dimensions {list(shape)}; 'data_parallel', 'sequence_parallel' are needed")
    if mesh.mesh_dim_names[0] != "data_parallel":
        raise ValueError("the mesh must have the dimension 'data_parallel' first: neighbours split sequences")
    _create_sequence_parallel(shape["sequence_parallel"])


# The ranks that split a sequence; this rank alone where nobody does.
_get_sequence_parallel_group = _view("get_sequence_parallel_group", own=lambda: _members(_SEQUENCE).group)
_get_sequence_parallel_rank = _view("get_sequence_parallel_rank", own=lambda: _members(_SEQUENCE).rank)
_get_sequence_parallel_world_size = _view("get_sequence_parallel_world_size", own=lambda: _members(_SEQUENCE).size)

# All ranks that hold the same weights, whether they see other data or another part of a sequence.
_get_sequence_data_parallel_group = _view(
    "get_sequence_data_parallel_group",
    own=lambda: views.get(_SEQUENCE_DATA).group if views.known(_SEQUENCE_DATA) else get_data_parallel_group(),
)
_get_sequence_data_parallel_world_size = _view(
    "get_sequence_data_parallel_world_size", own=lambda: dist.get_world_size(group=_get_sequence_data_parallel_group())
)
_get_sequence_data_parallel_rank = _view(
    "get_sequence_data_parallel_rank", own=lambda: dist.get_rank(group=_get_sequence_data_parallel_group())
)


# ---- ZeRO++: a second copy of the weights inside small groups -------------------------------------------------------
def _create_zero_param_parallel_group(group_size):
    """Makes groups of ``group_size`` neighbours that hold a second partition of the weights (hpZ), once.

    Raises ValueError when the size does not divide the ranks.
    """
    mesh = views.numbered(views.of_job())
    mesh.fold("dp", ["dp"], [("hpz_groups", 0, ""), ("hpz", group_size, "zero_hpz_partition_size")])
    return views.make(_ZERO_PARAM, mesh, ["dp.hpz"]).group


def _zero_param_parallel_is_initialized():
    return views.known(_ZERO_PARAM)


def _get_zero_param_intra_parallel_group():
    """This rank's group; None before it was made."""
    return views.get(_ZERO_PARAM).group if _zero_param_parallel_is_initialized() else None


(
    _get_zero_param_intra_parallel_rank_in_mygroup,
    _get_zero_param_intra_parallel_group_world_size,
    _get_zero_param_intra_parallel_group_ranks,
) = (
    views.getter(_ZERO_PARAM, what, "groups._create_zero_param_parallel_group(group_size)")
    for what in ("rank", "size", "ranks")
)
