"""Where a process of MPI or Slurm stands in its job: rank, size, and the same on its host."""

# A row per starter: rank, size, rank on the host, ranks of the host. The first that knows a value says it.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def place_of(environment, world=None):
    """``{RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE}`` as numbers, by the variables of MPI.

    ``world``: ``{host: ranks}`` in the order of ranks, which fills in what MPI does not say. ValueError where neither
    does.
    """
    found = {}
    for row in _VARIABLES:
        for name, variable in zip(NAMES, row):
            if name not in found and environment.get(variable, "").isdigit():
                found[name] = int(environment[variable])
    if "RANK" not in found:
        looked = ", ".join(row[0] for row in _VARIABLES)
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
    # Ranks fill host after host, unless MPI was told to place them otherwise.
    found.setdefault("WORLD_SIZE", sum(counts))
    first = 0
    for host, count in enumerate(counts):
        place = found["RANK"] - first
        if 0 <= place < count and found.get("LOCAL_RANK", place) == place:
            found.setdefault("LOCAL_RANK", place)
            found.setdefault("LOCAL_SIZE", count)
            found["CROSS_RANK"] = host
        first += count
    found["CROSS_SIZE"] = len(counts)
