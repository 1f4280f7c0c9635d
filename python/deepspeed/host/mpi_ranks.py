"""The rank and the number of ranks of a process of MPI or Slurm, in its job and on its host."""

# A row per MPI: rank, size, rank on the host, ranks of the host. The first that knows a value says it.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)
_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def said_by_mpi(environment):
    """``{RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE}``, as numbers, as far as variables of MPI say them."""
    rows = [_row(row, environment) for row in _VARIABLES]
    return {name: number for row in reversed(rows) for name, number in row.items()}


def said(environment):
    """As ``said_by_mpi``; what is missing there srun says, unless it started only what started the rank (a proxy of
    mpirun on each node, or the script of a batch job)."""
    found, by_srun = said_by_mpi(environment), _row(_SRUN, environment)
    return {**by_srun, **found} if found.get("RANK", by_srun.get("RANK")) == by_srun.get("RANK") else found


def _row(row, environment):
    return {name: int(environment[var]) for name, var in zip(NAMES, row) if environment.get(var, "").isdigit()}


def ranks_of(environment, world=None):
    """``{RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE}`` as numbers, by the variables of MPI.

    ``world``: ``{host: ranks}`` in the order of ranks, which fills in what MPI does not say. ValueError where neither
    does.
    """
    found = said(environment)
    if "RANK" not in found:
        looked = ", ".join(row[0] for row in (*_VARIABLES, _SRUN))
        raise ValueError(f"no variable of MPI says which rank this process is ({looked}): start it by mpirun.")
    if world:
        _by_layout(found, list(world.values()))
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise ValueError(f"MPI does not say {' and '.join(missing)} of rank {found['RANK']}: set it, or --world_info.")
    if not 0 <= found["RANK"] < found["WORLD_SIZE"]:
        raise ValueError(f"MPI says that this is rank {found['RANK']} of {found['WORLD_SIZE']}.")
    found.setdefault("CROSS_RANK", found["RANK"] // found["LOCAL_SIZE"])
    found.setdefault("CROSS_SIZE", -(-found["WORLD_SIZE"] // found["LOCAL_SIZE"]))
    return found


def _by_layout(found, counts):
    # Ranks fill host after host, unless MPI was told to spread them otherwise.
    found.setdefault("WORLD_SIZE", sum(counts))
    first = 0
    for host, count in enumerate(counts):
        local = found["RANK"] - first
        if 0 <= local < count and found.get("LOCAL_RANK", local) == local:
            found.setdefault("LOCAL_RANK", local)
            found.setdefault("LOCAL_SIZE", count)
            found["CROSS_RANK"] = host
        first += count
    found["CROSS_SIZE"] = len(counts)
