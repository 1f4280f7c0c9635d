"""What the ranks of one node find in their environment."""

import os

from deepspeed.host.cpu import openblas_coretype, physical_cores, usable_cores

# Variables of another launcher around us that would contradict ours, or make rank 0 wait for a store of theirs.
_FOREIGN_PREFIXES = ("TORCHELASTIC_",)

ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")


def read_environment_files():
    """``{name: value}`` of ``.deepspeed_env`` (or ``DS_ENV_FILE``) in the home folder, then in the current one.

    The current folder's file wins over the home folder's, and both over the environment of the shell. ValueError for
    a line without ``=``; blank lines and lines that start with ``#`` are skipped.
    """
    found = {}
    for folder in (os.path.expanduser("~"), "."):
        path = os.path.join(folder, ENVIRONMENT_FILE)
        if not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.strip()
                if not text or text.startswith("#"):
                    continue
                name, equals, value = text.partition("=")
                if not equals or not name.strip():
                    raise ValueError(f"{path} line {number} is {text!r}; each line must read NAME=VALUE.")
                found[name.strip()] = value
    return found


def default_threads(local_size):
    """Threads for each of ``local_size`` ranks: an equal share of the physical cores, at least one."""
    return max(1, len(physical_cores(usable_cores())) // local_size)


def node_environment(base, local_size, master_addr, master_port, device_ids):
    """``(environment shared by the ranks, notes for the user)``.

    Args:
        base: the environment to start from; not modified.
        local_size: ranks on this node, which is all of them.
        device_ids: what to put into CUDA_VISIBLE_DEVICES, or None to leave it alone.
    """
    env = {name: value for name, value in base.items() if not name.startswith(_FOREIGN_PREFIXES)}
    notes = []
    env.update(
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
        WORLD_SIZE=str(local_size),
        LOCAL_SIZE=str(local_size),
        CROSS_RANK="0",
        CROSS_SIZE="1",
    )
    if device_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, device_ids))
    if not env.get("OMP_NUM_THREADS"):
        threads = default_threads(local_size)
        env["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"OMP_NUM_THREADS is not set; each of the {local_size} process(es) gets {threads} thread(s), its share of "
            f"the cores. Set it to choose otherwise."
        )
    coretype = openblas_coretype()
    if coretype:
        env["OPENBLAS_CORETYPE"] = coretype
    return env, notes


def rank_environment(shared, rank):
    """The environment of one rank."""
    return {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
