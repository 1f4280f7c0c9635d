"""Views of the mesh: named groups of ``deepspeed.utils.groups``, and the ranks along the axes of an engine's mesh."""

import functools

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import mesh
from deepspeed.comm import process_group as dist
from deepspeed.comm.hosts import hosts_of, runs_of_hosts
from deepspeed.config.world import job_grid, sequence_ranks


class Members:
    """Ranks that share something, this one among them: its position there, and torch's group over them when it is asked
    for."""

    def __init__(self, ranks, me):
        self.ranks, self.size, self.first = list(ranks), len(ranks), ranks[0]
        self.rank = self.ranks.index(me)

    @functools.cached_property
    def group(self):
        return mesh.group_over(self.ranks)


def alone():
    """This rank by itself."""
    me = dist.get_rank() if dist.is_initialized() else 0
    return Members([me], me)


# ---- by name: the groups that this process knows. They go when it leaves its job -------------------------------------
def known(name):
    return name in mesh.made_here().views


def make(name, native, axes):
    """The ``Members`` called ``name``, with their group: where there are none yet, the ranks along ``axes`` of the mesh
    ``native``."""
    views = mesh.made_here().views
    if name not in views:
        ranks = native.ranks(axes)
        mesh.group_over(ranks)  # now, when all members are here
        views[name] = Members(ranks, dist.get_rank())
    return views[name]


def get(name, makers=""):
    """RuntimeError with ``makers``, who makes it, where there is none."""
    if not known(name):
        raise RuntimeError(f"there is no {name} group: {makers} makes it, and every rank has to call that")
    return mesh.made_here().views[name]


def getter(name, what, makers=""):
    """A function that returns ``what`` ("group", "size", "rank", "ranks" ...) of the ``Members`` called ``name``."""
    return lambda: getattr(get(name, makers), what)


def names(kind):
    """Names of ``(kind, name)`` entries, in the order in which they were made."""
    return [entry[1] for entry in mesh.made_here().views if isinstance(entry, tuple) and entry[0] == kind]


def take_over():
    """See ``mesh.take_over_groups``: with the names of groups."""
    me, earlier = dist.get_rank(), mesh.take_over_groups().views.items()
    mesh.made_here().views.update((name, Members(one.ranks, me)) for name, one in earlier if me in one.ranks)


def clear():
    mesh.made_here().views.clear()


def of_job(**axes):
    """The native ``ProcessGrid`` over all ranks: see ``config.world.job_grid``."""
    return job_grid(dist.get_world_size(), **axes)


def numbered(made, ranks=(), group=None):
    """Returns the native mesh of ``ranks`` (none: all of the job) arranged as the grid ``made``. Its communicators use
    the backend of torch's ``group`` (None: all ranks)."""
    return _native._C.ProcessMesh(made, mesh.job(dist.get_world_group() if group is None else group), list(ranks))


# ---- an engine's -----------------------------------------------------------------------------------------------------
Purpose = _native._C.Purpose
SAME_WEIGHTS = ["dp", "sp"]  # axes of the ranks that train the same parameters
REPLICAS = ["dp.replicas"]  # axes of the ranks that hold the same shards under MiCS


def adopted(group, **others):
    """Builds a native mesh from an mpu's groups: ``group`` is the data-parallel one (None: this rank alone), ``others``
    maps more axes to groups, "dp,sp" among them. An axis without a group has size 1."""
    alone = [dist.get_rank() if dist.is_initialized() else 0]
    own = {axis: dist.get_all_ranks_from_group(of) for axis, of in others.items() if of is not None}
    own["dp"] = alone if group is None else dist.get_all_ranks_from_group(group)
    known = next((of for of in (group, *others.values()) if of is not None), None)
    return _native._C.ProcessMesh(own, mesh.job(known))


def over(native, ranks, purpose):
    """A native communicator of these ranks of the job, this one among them, opened by the mesh ``native``."""
    ranks = list(ranks)
    return native.over(ranks, ranks.index(dist.get_rank() if dist.is_initialized() else 0), purpose)


def adopted_by_all():
    """A native communicator over all ranks of the job, for small messages. Made by all of them."""
    return numbered(of_job()).communicator(["dp"], Purpose.CONTROL)


def gathers(group):
    """A native communicator over torch's ``group``, for the parameters of all models of this job that are cut over it.
    Made by all its ranks at the first call; later ones need nobody."""
    ranks, made = tuple(dist.get_all_ranks_from_group(group)), mesh.made_here().gathers
    if ranks not in made:
        made[ranks] = adopted(group).communicator(["dp"], Purpose.GATHER)
    return made[ranks]


def tensor_ranks(group=None):
    """A native communicator over torch's ``group`` (None: this rank alone), for layers that are cut over it. Made by
    all its ranks at the first call."""
    alone = (dist.get_rank() if dist.is_initialized() else 0,)
    ranks = alone if group is None else tuple(dist.get_all_ranks_from_group(group))
    made = mesh.made_here().tensors
    if ranks not in made:
        on_host = get_accelerator().device_name() == "cpu"  # the ranks of a host exchange through its memory
        made[ranks] = adopted(group).communicator(["dp"], Purpose.TENSOR, in_memory=on_host)
    return made[ranks]


def cut_for_mics(native, size):
    """Runs of ``size`` data-parallel ranks share one copy of the model. Returns torch's group of them."""
    to = [("replicas", 0, ""), ("mics", size, "zero_optimization.mics_shard_size")]
    native.fold("dp", SAME_WEIGHTS, to)
    return mesh.group_over(native.ranks(["dp.mics"]))


def cut_for_second_copy(native, size, sharing=0):
    """Runs of ``size`` data-parallel ranks have a second copy of the model together (hpZ). Returns torch's group of
    them. ``sharing``: under MiCS, the ranks that share one copy of the model; ``size`` divides it. Raises ValueError
    where the size does not divide the ranks."""
    inner = ("inner", size, "zero_optimization.zero_hpz_partition_size")
    to = [("copies", 0, ""), ("groups", sharing // size, ""), inner] if sharing else [("groups", 0, ""), inner]
    native.fold("hpz", SAME_WEIGHTS, to)
    return mesh.group_over(native.ranks(["hpz.inner"]))


def cut_by_host(native, group, sharing):
    """Runs of ranks of one host have a second copy of the model together (hierarchical gathers of MiCS). All ranks of
    ``group``, which train the same parameters, call it. ``sharing``: the ranks that share one copy of the model.
    Returns torch's group of a run; None where all that share a copy are on one host, or none of them are."""
    size = runs_of_hosts(hosts_of(group), sharing)
    return cut_for_second_copy(native, size, sharing) if 1 < size < sharing else None


PIPELINE = "pipeline_model", "pipe"  # the names that mpus have for stages


def ask_mpu(mpu, what, kinds=("tensor_model", "model", "slice")):
    """``mpu.get_<kind>_parallel_<what>()`` for the first of ``kinds`` that the object knows; None where it knows none.
    ``deepspeed.sequence.parallel_state`` has no slices of weights: there "model" is another word for the sequence."""
    kinds = () if "slice" in kinds and hasattr(mpu, "initialize_sequence_parallel") else kinds
    methods = (getattr(mpu, f"get_{kind}_parallel_{what}", None) for kind in kinds)
    return next((method() for method in methods if method is not None), None)


def _ask_all(mpu, kind):
    """``(group, size, rank)`` of the ranks that ``mpu`` calls ``<kind>_parallel``."""
    names = [f"get_{kind}_parallel_{what}" for what in ("group", "world_size", "rank")]
    missing = [name for name in names if not hasattr(mpu, name)]
    if missing:
        raise AttributeError(
            f"the mpu has sequence-parallel ranks, but no {', '.join(missing)}(): ZeRO has to know the ranks with the "
            "same weights, which see other data or another part of a sequence; add it, or pass "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu"
        )
    return [getattr(mpu, name)() for name in names]


class EngineMesh:
    """The mesh of an engine, and torch's groups along its axes: those of ``mpu`` where the caller brings one; else all
    ranks of the job in a grid with these ``axes`` (``config.world.job_grid``).

    ``dp_*``: group, size and rank of the ranks that train the same parameters. ``data_*``: those of them that see
    different data, which are fewer where ranks share sequences: ``sp_*``. ``mp_*``: the ranks with other slices of the
    same layers. A group of one rank may be None.
    """

    def __init__(self, mpu=None, **axes):
        self.mpu = mpu
        joined = dist.is_initialized()
        self.world_size, self.rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
        if mpu is None and joined:
            self.mesh = numbered(of_job(**axes))
        along = self._along if mpu is None else functools.partial(_along_mpu, mpu)
        for name in ("dp", "data", "sp", "mp"):
            group, size, rank = along(name)
            vars(self).update({f"{name}_group": group, f"{name}_world_size": size, f"{name}_rank": rank})

    def _along(self, name):
        axes = {"dp": SAME_WEIGHTS, "data": ["dp"], "sp": ["sp"], "mp": ["tp"]}[name]
        ranks = self.mesh.ranks(axes)
        if len(ranks) == 1 and (name in ("sp", "mp") or not dist.is_initialized()):
            return None, 1, 0
        whole = self.mesh.size(["dp"]) == self.world_size
        return dist.get_world_group() if whole else mesh.group_over(ranks), len(ranks), ranks.index(self.rank)

    @functools.cached_property
    def mesh(self):
        """The native ``ProcessMesh``, of this engine alone, with the axes pp, dp, sp and tp; made by all its ranks."""
        if self.mpu is None:
            return adopted(None)
        data = self.data_group if self.dp_world_size > 1 else None
        shared = {} if self.sp_group is None else {"sp": self.sp_group, "dp,sp": self.dp_group}
        return adopted(data, tp=self.mp_group, **shared)

    def copied_along(self, param):
        """The axis along which an earlier rank trains a copy of ``param``, as Megatron and layers that are cut mark
        weights; "" for none."""
        if getattr(param, "ds_tensor_copies", False):
            return "tp"
        split = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
        return "" if self.mp_rank == 0 or split else "tp"


def tensor_ranks_of(mpu):
    """``(group, size, rank)`` of the ranks that share layers, as ``mpu`` knows them; the group of one rank is None."""
    size = ask_mpu(mpu, "world_size") or 1
    return ask_mpu(mpu, "group") if size > 1 else None, size, ask_mpu(mpu, "rank") or 0


def _along_mpu(mpu, name):
    """``(group, size, rank)`` of ``mpu`` by the names that they have in ``EngineMesh``."""
    if name == "mp":
        return tensor_ranks_of(mpu)
    shares = (sequence_ranks(mpu) or 1) > 1
    if name == "sp":
        return _ask_all(mpu, "sequence") if shares else (None, 1, 0)
    if name == "dp" and shares:
        return _ask_all(mpu, "sequence_data")
    return mpu.get_data_parallel_group(), mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
