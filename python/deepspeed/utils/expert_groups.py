"""Groups of experts: who holds other experts of a layer, who holds the same ones. ``utils.groups`` exports the names.

A layer's groups have a name, ``ep_size_<number of ranks that share its experts>``.
"""

from deepspeed import comm as dist
from deepspeed.comm import mesh_views as views
from deepspeed.config.world import job_grid

_MAKERS = "groups._create_expert_and_data_parallel (an MoE layer calls it)"
_EXPERT, _COPIES = "expert-parallel", "expert-data-parallel"
_state = {"model_parallel_size": 1}


def _get_expert_parallel_ranks(
    world_size,
    tensor_parallel_size_,
    expert_parallel_size_,
    pipeline_parallel_size_=1,
    use_data_before_expert_parallel_=False,
):
    """``(expert-parallel groups, expert-data-parallel groups)`` as lists of ranks.

    16 ranks, tensor 2, expert 4: experts [0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15] and data
    [0, 8], [2, 10], ... Raises ValueError for sizes that do not divide the ranks.
    """
    sizes = tensor_parallel_size_, expert_parallel_size_, pipeline_parallel_size_
    grid = _grid(world_size, *sizes, use_data_before_expert_parallel_)
    return grid.lists(["experts.ep"]), grid.lists(["experts.edp"])


def _grid(world_size, tensor_size, expert_size, pipeline_size, data_before_expert, folded=("dp",)):
    """The axes ``folded`` of a job's grid, folded into ``experts.ep`` and ``experts.edp``."""
    pipe, tensor = (pipeline_size, "pipeline_parallel_size"), (tensor_size, "tensor_parallel_size")
    grid = job_grid(world_size, pp=pipe, tp=tensor)
    axes = [("edp", 0, ""), ("ep", expert_size, "expert_parallel_size")]
    grid.fold("experts", list(folded), axes[::-1] if data_before_expert else axes)
    return grid


def folded_grid(spec):
    """The grid of a ``ParallelFoldingSpec``: the ranks of a stage, data- and tensor-parallel ones, share experts."""
    return _grid(spec.world_size, spec.tp_size, spec.ep_size, spec.pp_size, False, ("dp", "tp"))


def _create_expert_and_data_parallel(
    expert_parallel_size_,
    mp_size=None,
    pp_size=None,
    mp_mode="tp",
    use_data_before_expert_parallel_=False,
    folding_spec=None,
):
    """Makes the groups ``ep_size_<expert_parallel_size_>``, once; every rank of the job calls it.

    mp_size: ranks that split single weights among them (None: none do), pp_size: pipeline stages. mp_mode "tp":
    those ranks split the experts, too; "sp": they split sequences and hold experts of their own.
    use_data_before_expert_parallel_: holders of the same experts are neighbours. folding_spec: a
    ``ParallelFoldingSpec`` (``deepspeed.module_inject.auto_ep_folding``); then all ranks of a stage share the experts.
    ValueError where another argument or the job contradicts it.
    """
    if mp_mode not in ("tp", "sp"):
        raise ValueError(f"mp_mode is 'tp' or 'sp', not {mp_mode!r}")
    if folding_spec is not None:
        _check_spec(folding_spec, expert_parallel_size_, mp_size, pp_size)
        if use_data_before_expert_parallel_:
            raise ValueError(
                "use_data_before_expert_parallel_ is true, and with a folding_spec holders of different "
                "experts are neighbours: leave one of them out"
            )
        _make(expert_parallel_size_, folded_grid(folding_spec))
    else:
        tensor_size = 1 if mp_size is None or mp_mode == "sp" else mp_size
        sizes = tensor_size, expert_parallel_size_, 1 if pp_size is None else pp_size
        _make(expert_parallel_size_, _grid(dist.get_world_size(), *sizes, use_data_before_expert_parallel_))
    _state["model_parallel_size"] = 1


def _check_spec(spec, expert_size, tensor_size, pipeline_size):
    given = {
        "expert_parallel_size_": (expert_size, spec.ep_size),
        "mp_size": (tensor_size, spec.tp_size),
        "pp_size": (pipeline_size, spec.pp_size),
        "the number of ranks": (dist.get_world_size(), spec.world_size),
    }
    for name, (size, wanted) in given.items():
        if size is not None and size != wanted:
            raise ValueError(f"{name} is {size}, and folding_spec says {wanted}: make them equal")


def _create_expert_data_and_model_parallel(expert_parallel_size_, mpu, use_data_before_expert_parallel_=False):
    """The same where experts are split over the model-parallel ranks of ``mpu``."""
    tensor_size = views.ask_mpu(mpu, "world_size", ("tensor_model", "model"))
    if tensor_size is None:
        raise ValueError("the mpu has neither get_tensor_model_parallel_world_size nor get_model_parallel_world_size")
    pipeline = views.ask_mpu(mpu, "world_size", ("pipeline_model",))
    sizes = tensor_size, expert_parallel_size_, 1 if pipeline is None else pipeline
    _make(expert_parallel_size_, _grid(dist.get_world_size(), *sizes, use_data_before_expert_parallel_))
    _state["model_parallel_size"] = tensor_size


def _make(expert_size, grid):
    name, mesh = f"ep_size_{expert_size}", views.numbered(grid)
    views.make((_EXPERT, name), mesh, ["experts.ep"])
    views.make((_COPIES, name), mesh, ["experts.edp"])


def _view(kind, what):
    """A function of the group's name."""
    return lambda group_name: views.getter((kind, group_name), what, _MAKERS)()


# The ranks that hold the other experts of a layer.
_get_expert_parallel_group = _view(_EXPERT, "group")
_get_expert_parallel_group_ranks = _view(_EXPERT, "ranks")
_get_expert_parallel_rank = _view(_EXPERT, "rank")
_get_expert_parallel_world_size = _view(_EXPERT, "size")
_get_expert_parallel_src_rank = _view(_EXPERT, "first")
# The ranks that hold the same experts.
_get_expert_data_parallel_group = _view(_COPIES, "group")
_get_expert_data_parallel_group_ranks = _view(_COPIES, "ranks")
_get_expert_data_parallel_rank = _view(_COPIES, "rank")
_get_expert_data_parallel_world_size = _view(_COPIES, "size")


def _get_expert_parallel_group_dict():
    """name -> process group."""
    return {name: _get_expert_parallel_group(name) for name in views.names(_EXPERT)}


def _get_expert_data_parallel_group_dict():
    return {name: _get_expert_data_parallel_group(name) for name in views.names(_COPIES)}


def _get_max_expert_size():
    """The largest number of ranks that share experts."""
    names = views.names(_EXPERT)
    if not names:
        raise RuntimeError(f"there are no expert groups yet: {_MAKERS} makes them")
    return max(int(name.rsplit("_", 1)[1]) for name in names)


def _get_max_expert_size_name():
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group():
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size():
    """Ranks that split a single expert; 1 unless the experts are split with an mpu."""
    return _state["model_parallel_size"]


def clear():
    _state["model_parallel_size"] = 1
