"""Rendezvous of the ranks: by the environment of a launcher, of MPI, of a cloud, or a process on its own.

Everything ends in the five variables that torch's ``env://`` reads: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT.
"""

import importlib
import os
import re

from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.host.mpi_ranks import ranks_of, said, said_by_mpi
from deepspeed.host.packages import is_installed
from deepspeed.host.ports import free_port
from deepspeed.log import log_dist, logger

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prepare_environment(auto_mpi_discovery, distributed_port, verbose, rank=-1, world_size=-1):
    """Fills in what is missing of the variables that ``env://`` reads.

    Args:
        auto_mpi_discovery: under mpirun, take rank and size from MPI.
        distributed_port: where the ranks meet when nothing names a port.
        verbose: say which way was found.
        rank, world_size: the caller's own, -1 for "find out".

    Raises:
        RuntimeError: some of the variables are set and others are not.
    """
    if rank >= 0:
        os.environ["RANK"] = str(rank)
    if world_size >= 0:
        os.environ["WORLD_SIZE"] = str(world_size)
    if all(os.environ.get(name) for name in _NEEDED):
        os.environ.setdefault("LOCAL_RANK", "0" if os.environ["WORLD_SIZE"] == "1" else _local_rank_guess())
        return
    if auto_mpi_discovery and under_slurm() and not _mpi_in_slurm():
        slurm_discovery(distributed_port=distributed_port, verbose=verbose)
        return
    if auto_mpi_discovery and under_mpi():
        if in_aml() and not in_dlts():
            patch_aml_env_for_torch_nccl_backend(verbose=verbose)
        elif in_aws_sm():
            patch_aws_sm_env_for_torch_nccl_backend(verbose=verbose)
        else:
            mpi_discovery(distributed_port=distributed_port, verbose=verbose)
        if all(os.environ.get(name) for name in _NEEDED):
            return
    if os.environ.get("RANK", "0") == "0" and os.environ.get("WORLD_SIZE", "1") == "1":
        _alone(verbose)
        return
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    present = [f"{name}={os.environ[name]}" for name in _NEEDED if os.environ.get(name)]
    raise RuntimeError(
        f"the ranks cannot find each other: {', '.join(present)} is set but {', '.join(missing)} is not. Start the "
        f"script with `deepspeed script.py` (or torchrun, or mpirun), or set all of {', '.join(_NEEDED)}."
    )


def under_mpi():
    """True when mpirun (Open MPI, MPICH, Intel MPI, MVAPICH) started this process."""
    return any(os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"))


def under_slurm():
    """True when srun started this process as one of several. The script of sbatch and a shell of salloc are not."""
    return os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in os.environ


def _mpi_in_slurm():
    # Whether srun started what started us: mpirun's proxies, one per node. srun itself sets variables of PMI, too.
    environ, found = os.environ, said_by_mpi(os.environ)
    tasks = {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"]}
    differs = any(name in found and str(found[name]) != number for name, number in tasks.items())
    return differs or bool(environ.get("OMPI_COMM_WORLD_SIZE"))


def slurm_discovery(distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT, verbose=True):
    """Sets the five variables from those of srun.

    The ranks meet on the first node of the step, at MASTER_ADDR and MASTER_PORT where those are set. Without a port
    from anybody it comes from the number of the job, so that two jobs that share a node do not meet.
    """
    environ = os.environ
    environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", environ["RANK"])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not nodes and not environ.get("MASTER_ADDR"):
        raise RuntimeError(
            "srun started this process, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST says on which nodes: "
            "set MASTER_ADDR to the address of the first one"
        )
    environ.setdefault("MASTER_ADDR", first_node(nodes))
    environ.setdefault("MASTER_PORT", str(_slurm_port(distributed_port)))
    if verbose:
        logger.info("Found the ranks through SLURM: rank %s of %s meets at %s:%s", *_meeting())


def _slurm_port(asked):
    # The one that was asked for, or else one of this step.
    if asked != TORCH_DISTRIBUTED_DEFAULT_PORT:
        return asked
    job, step = int(os.environ.get("SLURM_JOB_ID", 0)), int(os.environ.get("SLURM_STEP_ID", 0))
    return 20000 + (job * 31 + step) % 12000


def first_node(nodes):
    """The first name in SLURM's short form of a list of nodes: ``gpu[003-007,9],login1`` starts with ``gpu003``."""
    first = re.match(r"[^,\[]*(\[[^\]]*\])?[^,\[]*", nodes).group(0)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def mpi_discovery(distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT, verbose=True):
    """Sets the five variables from MPI.

    mpi4py is asked, where it is installed and belongs to the MPI that started us: rank 0 tells the others its address,
    and on one node a port that is free. Else MPI's variables say who we are, and MASTER_ADDR where several nodes meet.
    RuntimeError when nobody says it. Hydra's proxies under Slurm: its variables and Slurm's say everything.
    """
    asks = _mpi4py_installed() and not _proxied_by_slurm()  # that of Open MPI would take it for srun, and abort
    known = _from_mpi4py(distributed_port) if asks else None
    if known is None:
        known = _from_variables(distributed_port)
    meeting = {name: os.environ.get(name, known[name]) for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ.update({**known, **meeting})  # the user's own word on where to meet goes first
    if verbose:
        logger.info(
            "Found the ranks through MPI: RANK=%s, LOCAL_RANK=%s, WORLD_SIZE=%s, MASTER_ADDR=%s, MASTER_PORT=%s",
            *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        )


def _mpi4py_installed():
    return is_installed("mpi4py")


def _proxied_by_slurm():
    # Whether a proxy of Hydra, which srun started, started us; all ranks of such a job are in one step of Slurm.
    complete = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"} <= said_by_mpi(os.environ).keys()
    return complete and "SLURM_STEP_NODELIST" in os.environ and not os.environ.get("OMPI_COMM_WORLD_SIZE")


def _from_variables(distributed_port):
    other = "the one that is installed belongs to another MPI" if _mpi4py_installed() else "it is not installed"
    get = "apt install python3-mpi4py for Open MPI, pip install mpi4py for the MPI whose mpicc is on PATH"
    try:
        found = ranks_of(os.environ)
    except ValueError as error:
        raise RuntimeError(
            f"this process was started by MPI, and {error} The Python package mpi4py could ask MPI, but {other} "
            f"({get}). Or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        ) from None
    known = {name: str(found[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")}
    if _proxied_by_slurm():
        address, port = first_node(os.environ["SLURM_STEP_NODELIST"]), _slurm_port(distributed_port)
        return {**known, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if found["LOCAL_SIZE"] != found["WORLD_SIZE"] and not os.environ.get("MASTER_ADDR"):
        raise RuntimeError(
            f"{found['WORLD_SIZE']} MPI ranks run on several nodes, and nothing says where they meet. The Python "
            f"package mpi4py could ask MPI, but {other} ({get}). Or pass the address of rank 0's node (Open MPI: "
            f"mpirun -x MASTER_ADDR=<address>, others: mpirun -genv MASTER_ADDR <address>)."
        )
    return {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed_port)}


def _from_mpi4py(distributed_port):
    # At call: importing it initialises MPI, which must happen only in processes that MPI started.
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    if world.Get_size() != said(os.environ).get("WORLD_SIZE", world.Get_size()):
        return None  # that of another MPI, which takes every process for a job of its own
    local, meeting = world.Split_type(mpi.COMM_TYPE_SHARED), None
    one_node = local.Get_size() == world.Get_size()
    if world.Get_rank() == 0:
        address = "127.0.0.1" if one_node else mpi.Get_processor_name()
        # The default port may be taken by another job on this node; MPI can pass on one that is not.
        port = free_port() if one_node and distributed_port == TORCH_DISTRIBUTED_DEFAULT_PORT else distributed_port
        meeting = (address, str(port))
    address, port = world.bcast(meeting, root=0)
    return {
        "RANK": str(world.Get_rank()),
        "WORLD_SIZE": str(world.Get_size()),
        "LOCAL_RANK": str(local.Get_rank()),
        "LOCAL_SIZE": str(local.Get_size()),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def _local_rank_guess():
    # Schedulers that set RANK but not LOCAL_RANK name the rank on the node otherwise.
    return str(said(os.environ).get("LOCAL_RANK", os.environ["RANK"]))


def _alone(verbose):
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),  # nobody else has to know it
    )  # fmt: skip
    if verbose:
        log_dist("No launcher found: this process is a job of one rank.", ranks=[0])


def in_aml():
    """True on Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm():
    """True on AWS SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts():
    """True on a DLTS cluster."""
    return "DLTS_JOB_ID" in os.environ


def patch_aml_env_for_torch_nccl_backend(master_port=6105, verbose=True):
    """Sets the five variables on Azure ML, which starts ranks through MPI and names the first node itself."""
    environ = os.environ
    if _patch_ranks():
        address = environ.get("AZ_BATCHAI_MPI_MASTER_NODE", "127.0.0.1")
        environ.update(MASTER_ADDR=address, MASTER_PORT=str(master_port))
    else:
        names = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE", "MASTER_ADDR")
        named = next(filter(None, map(environ.get, names)), "")
        if not named:
            raise RuntimeError(
                "this job of Azure ML runs on several nodes, and AZ_BATCH_MASTER_NODE does not say which is the first: "
                "set MASTER_ADDR to its address (environment_variables of the job)."
            )
        address, _, port = named.partition(":")
        environ["MASTER_ADDR"] = address
        environ.setdefault("MASTER_PORT", port or str(master_port))
    if verbose:
        logger.info("Azure ML: rank %s of %s meets at %s:%s", *_meeting())


def patch_aws_sm_env_for_torch_nccl_backend(verbose=True):
    """Sets RANK, LOCAL_RANK and WORLD_SIZE on SageMaker, which starts ranks through MPI and sets the address."""
    _patch_ranks()
    if verbose:
        logger.info("SageMaker: rank %s of %s meets at %s:%s", *_meeting())


def _patch_ranks():
    # Sets RANK, LOCAL_RANK and WORLD_SIZE; returns whether all ranks are on this node.
    found = ranks_of(os.environ)
    os.environ.update({name: str(found[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")})
    return found["LOCAL_SIZE"] == found["WORLD_SIZE"]


def _meeting():
    return [os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
