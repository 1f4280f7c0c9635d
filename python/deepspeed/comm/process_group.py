"""The process group of ``deepspeed.comm``: joining and leaving it, and who is in it."""

import atexit
import ctypes
import importlib
import os
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from deepspeed import _native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import group_communicators, held, mesh, nccl_join, timeouts
from deepspeed.comm.comms_log import configure
from deepspeed.comm.rendezvous import prepare_environment
from deepspeed.comm.torch import TorchBackend
from deepspeed.comm.utils import get_local_rank_from_launcher
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.host.packages import is_installed
from deepspeed.host.vendors import registering_module
from deepspeed.log import log_dist, logger

# The time that gloo's threads have at the end to let go of what they hold.
_LAST_BREATH_S = 0.1
# The backend; None before the first use.
cdb = None
_keeper = None  # of the job's store, which is in the process of rank 0 (csrc/comm/boards/store_keeper.h)


class ProcessGroup:
    """A group as scripts without torch's groups describe it: an id and the global ranks."""

    def __init__(self, comm_id, ranks=[]):  # noqa: B006 (the published signature; never modified)
        self.comm_id, self.ranks = comm_id, ranks
        self.size = len(ranks)


# ---- start and end ------------------------------------------------------------------------------------------------
def init_distributed(
    dist_backend=None,
    auto_mpi_discovery=True,
    distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose=True,
    timeout=default_pg_timeout,
    init_method=None,
    dist_init_required=None,
    config=None,
    rank=-1,
    world_size=-1,
):
    """Joins this process to the job; does nothing when a process group exists already.

    Args:
        dist_backend: torch.distributed's backend; None takes the accelerator's (nccl on GPUs, gloo on CPUs).
        auto_mpi_discovery: under mpirun, take rank and size from MPI.
        distributed_port: where the ranks meet if the environment does not say.
        verbose: log what is done.
        timeout: ``timedelta`` for every collective; by default ``DS_COMM_TIMEOUT_S`` seconds, else ``comm.timeout`` of
            ``config``, else 30 minutes or ``DEEPSPEED_TIMEOUT`` minutes.
        init_method: torch's, e.g. ``tcp://host:port`` or ``file:///path``; None reads the environment, and a process
            that nobody launched becomes a job of one rank.
        dist_init_required: False insists that the caller has created the process group; None and True create it if
            it is missing.
        config: DeepSpeed config whose sections ``comms_logger`` and ``comm`` are applied.
        rank, world_size: -1 to find out.

    Raises:
        RuntimeError: the group is missing though ``dist_init_required`` is False; the environment is incomplete; the
            port is taken; the backend cannot work here.
    """
    global cdb, _keeper
    if config is not None:
        configure(deepspeed_config=config)
        timeouts.configure(config)
    if dist.is_initialized():
        set_backend()
        _keep_store()
        if verbose:
            log_dist(f"The process group exists already ({dist.get_backend()}); it is used as it is.", ranks=[0])
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required is False, but torch.distributed has no process group yet: create it first "
            "(torch.distributed.init_process_group), or leave dist_init_required out."
        )
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}; e.g. timedelta(minutes=60).")
    timeout = timeouts.chosen(timeout)
    backend = dist_backend or get_accelerator().communication_backend_name() or _backend_of_one_rank(world_size)
    _check_backend(backend)
    init_deepspeed_backend(backend, timeout, init_method)
    if init_method is None or init_method == "env://":
        prepare_environment(auto_mpi_discovery, distributed_port, verbose, rank, world_size)
    if verbose and get_local_rank_from_launcher() == 0 and rank <= 0:
        logger.info("Joining the process group: backend %s, init_method %s", backend, init_method or "env://")
    _keeper = None  # of a job before: its port may be that of this one
    try:
        cdb = TorchBackend(backend, timeout, init_method, rank, world_size)
    except (RuntimeError, OSError) as error:
        raise _explained(error) from error
    _keep_store()


def _keep_store():
    global _keeper
    atexit.unregister(_leave)
    atexit.register(_leave)
    if _keeper is None or _keeper.said_goodbye:
        store = dist.distributed_c10d._get_default_store()
        _keeper = _native._C.StoreKeeper(store, dist.get_rank(), dist.get_world_size())
        # Scripts end the job by torch's destroy_process_group, too.
        weakref.finalize(dist.group.WORLD, _keeper.goodbye).atexit = False


def _in_forked_child():
    """A forked child has this process's groups and none of their threads: their end would wait for those for ever, and
    talk to other ranks in the parent's name. So they do not end there; the child may, by ``sys.exit`` too."""
    atexit.unregister(_leave)
    module = dist.distributed_c10d
    groups = module._world.pg_map if hasattr(module, "_world") else module._pg_map
    for kept in [*groups, *group_communicators.known(), _keeper]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    group_communicators.forget()


if dist.is_available():
    os.register_at_fork(after_in_child=_in_forked_child)


def _leave():
    if _keeper is not None:
        _keeper.goodbye()
    # A script that ends without destroy_process_group leaves gloo's threads of torch 2.x running into the end of the
    # process, which now and then aborts it. Not for other backends: nccl's end waits for ranks that may be gone.
    if dist.is_initialized() and dist.get_backend() in ("gloo", "shm"):
        held.leave_all()
        group_communicators.forget()
        mesh.forget()
        dist.destroy_process_group()
        # A group that somebody still holds keeps its threads. One that is just letting go of a tensor needs the
        # interpreter's lock for it, and would end the process if it asked for it any later.
        time.sleep(_LAST_BREATH_S)
    if _keeper is not None:
        _keeper.wait()


def _backend_of_one_rank(world_size):
    """The backend on a device whose ranks cannot communicate; RuntimeError for several ranks."""
    ranks = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1:
        raise RuntimeError(
            f"the accelerator {get_accelerator()._name!r} has no communication backend: it trains with one rank only, "
            f"and the job has {ranks}. Start it with --num_accelerators 1, or on the CPU with DS_ACCELERATOR=cpu."
        )
    return "gloo"


def _check_backend(backend):
    accelerator = get_accelerator()
    if backend == "nccl" and not nccl_join.moves_memory_of(accelerator):
        raise RuntimeError(
            f"dist_backend is 'nccl', which moves GPU tensors only, but the accelerator here is {accelerator._name!r}: "
            f"leave dist_backend out (the accelerator chooses {accelerator.communication_backend_name()!r}), or pass "
            f"dist_backend='gloo'."
        )


def group_refuses(group, device):
    """The reason why the collectives of ``group`` cannot move memory of ``device``, or None. gloo's go through the
    host."""
    backend = dist.get_backend(group)
    if "gloo" in backend:
        return None
    try:
        if hasattr(group, "_get_backend"):
            group._get_backend(device)
        elif not nccl_join.moves(backend, device):
            raise RuntimeError(f"{backend} does not move memory of {device.type}")
    except RuntimeError as error:
        return (
            f"The process group ({backend}) does not carry tensors on {device.type}: {str(error).splitlines()[0]}. "
            f"Call deepspeed.init_distributed() with the backend of the accelerator, or with dist_backend='gloo'"
        )
    return None


def _explained(error):
    text = str(error)
    if "already in use" in text or "EADDRINUSE" in text:
        return RuntimeError(
            f"port {os.environ.get('MASTER_PORT')} of {os.environ.get('MASTER_ADDR')} is taken by another process, "
            f"so that the ranks cannot meet there: choose a free one with `deepspeed --master_port <port> ...`, "
            f"MASTER_PORT, or distributed_port=. (torch says: {text.splitlines()[0]})"
        )
    return error


def init_deepspeed_backend(ds_backend, timeout, init_method):
    """Imports the module that registers a backend beyond torch's own: that of the accelerator (host/vendors.py)."""
    module = registering_module(ds_backend, get_accelerator()._name)
    package = module.partition(".")[0]
    if module and not is_installed(package):
        raise RuntimeError(
            f"dist_backend is {ds_backend!r}, but the Python package {package} is not installed: install it, or pass "
            f"dist_backend='gloo'."
        )
    if module:
        importlib.import_module(module)


def set_backend():
    """Takes over the process group that the program created through torch itself."""
    global cdb
    if cdb is None or not cdb.is_initialized():
        cdb = TorchBackend(dist.get_backend(), default_pg_timeout, None)


def current_backend():
    """The ``TorchBackend`` of this process; RuntimeError before there is a process group."""
    if cdb is None or not cdb.is_initialized():
        group_communicators.all_ranks()
        set_backend()
    return cdb


def is_available():
    """True when this torch was built with torch.distributed."""
    return dist.is_available()


def is_initialized():
    """True when the process group exists."""
    return dist.is_initialized()


def destroy_process_group(group=None):
    """Ends one group, or all of them and the job's connection; nothing without a process group."""
    global cdb
    if dist.is_initialized():
        if _keeper is not None and (group is None or group is dist.group.WORLD):
            _keeper.goodbye()
        current_backend().destroy_process_group(group)
    if not dist.is_initialized():
        cdb = None
        timeouts.forget()


# ---- who and how many ---------------------------------------------------------------------------------------------
def get_rank(group=None):
    """This process's rank in the group; -1 when it is not a member."""
    return current_backend().get_rank(group)


def get_world_size(group=None):
    """Number of ranks in the group; -1 when this process is not a member."""
    return current_backend().get_world_size(group)


def get_local_rank():
    """This process's number on its node."""
    return get_local_rank_from_launcher()


def get_global_rank(group=None, group_rank=0):
    """The rank among all of the group's member ``group_rank``."""
    return current_backend().get_global_rank(group, group_rank)


def get_all_ranks_from_group(group=None):
    """The ranks among all of the group's members, in the group's order."""
    return current_backend().get_all_ranks_from_group(group)


def get_world_group():
    """The group of all ranks."""
    return current_backend().get_world_group()


def new_group(ranks):
    """A group of the given ranks; every rank of the job must call this, members or not."""
    return current_backend().new_group(ranks)


def initialize_mesh_device(mesh_shape, mesh_dim_names):
    """A torch ``DeviceMesh``, e.g. ``((2, 4), ("data_parallel", "sequence_parallel"))``."""
    return current_backend().init_device_mesh(mesh_shape, mesh_dim_names)


def enable_symm_mem_for_group(group_name):
    """Lets kernels of this group reach each other's memory."""
    return current_backend().enable_symm_mem_for_group(group_name)


def has_all_gather_into_tensor():
    return current_backend().has_all_gather_into_tensor()


def has_reduce_scatter_tensor():
    return current_backend().has_reduce_scatter_tensor()


def has_all_reduce_coalesced():
    return True


def has_coalescing_manager():
    """True when torch can batch several collectives into one launch."""
    return hasattr(dist.distributed_c10d, "_coalescing_manager")
