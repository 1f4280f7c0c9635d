"""The environment variables of the ranks of a host, and those that other hosts get from the head."""

import os

from deepspeed.host.cpu import openblas_coretype, physical_cores, quota_cores, usable_cores

# Variables of another launcher around us that would contradict ours, or make rank 0 wait for a store of theirs.
_FOREIGN_PREFIXES = ("TORCHELASTIC_",)

ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")

# Prefixes of the variables that other hosts get from the head. Each accelerator adds some (_ACCELERATOR_PREFIXES).
EXPORT_PREFIXES = (
    "MLFLOW", "PYTHON", "MV2", "UCX", "DS_", "DEEPSPEED_",
    # Nebula and Azure ML
    "NEBULA_", "AZUREML_", "AML_RUN_ID", "DLTS_", "FC_TASK", "MASTER_HOST", "LOCAL_HOST",
)  # fmt: skip
_ACCELERATOR_PREFIXES = {
    "cuda": ("NCCL", "GLOO"), "cpu": ("GLOO",), "hpu": ("HCCL", "PT_HPU", "HABANA"), "npu": ("ASCEND", "HCCL"),
    "xpu": ("CCL", "ZE_"), "mlu": ("NEUWARE", "CNCL"),
}  # fmt: skip
# The variable that chooses among the devices of a host.
_VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES", "mlu": "MLU_VISIBLE_DEVICES", "sdaa": "SDAA_VISIBLE_DEVICES",
    "supa": "SUPA_VISIBLE_DEVICES",
}  # fmt: skip


def visible_devices_variable(accelerator):
    """The variable that chooses among the devices of the accelerator named so, or None."""
    return _VISIBLE_DEVICES.get(accelerator or "cuda")


def exports(environment, files):
    """``{name: value}`` of what other hosts get: variables with one of the prefixes, and ``files``, which win."""
    accelerator = files.get("DS_ACCELERATOR") or environment.get("DS_ACCELERATOR", "")
    prefixes = EXPORT_PREFIXES + _ACCELERATOR_PREFIXES.get(accelerator or "cuda", ())
    return {**{name: value for name, value in environment.items() if name.startswith(prefixes)}, **files}


def missing_environment_file():
    """The value of DS_ENV_FILE if no such file exists, else an empty text."""
    found = any(os.path.isfile(os.path.join(folder, ENVIRONMENT_FILE)) for folder in _folders())
    return ENVIRONMENT_FILE if os.environ.get("DS_ENV_FILE") and not found else ""


def _folders():
    return os.path.expanduser("~"), "."


def read_environment_files():
    """``{name: value}`` of ``.deepspeed_env`` (or ``DS_ENV_FILE``) in the home folder, then in the current one.

    The current folder's file wins over the home folder's, and both over the environment of the shell. ValueError for
    a line without ``=``; blank lines and lines that start with ``#`` are skipped.
    """
    found = {}
    for folder in _folders():
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
    return within_quota(max(1, len(physical_cores(usable_cores())) // local_size), local_size)


def within_quota(threads, local_size):
    """``threads`` of each of ``local_size`` ranks, or fewer where a container may use less time than the cores have."""
    quota = quota_cores()
    return threads if quota is None else max(1, min(threads, int(quota / local_size)))


def node_environment(base, local_size, master_addr, master_port, device_ids, world=None, cross=(0, 1), variable=None):
    """``(environment shared by the ranks, notes for the user)``.

    Args:
        base: the environment to start from; not modified.
        local_size: ranks on this host; ``world``: ranks of the job, default all of them are here.
        device_ids: what to put into the variable of visible devices, or None to leave it alone.
        cross: number of this host, and number of hosts.
        variable: the variable of visible devices, default CUDA_VISIBLE_DEVICES.
    """
    env = {name: value for name, value in base.items() if not name.startswith(_FOREIGN_PREFIXES)}
    notes = []
    env.update(
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
        WORLD_SIZE=str(local_size if world is None else world),
        LOCAL_SIZE=str(local_size),
        CROSS_RANK=str(cross[0]),
        CROSS_SIZE=str(cross[1]),
    )
    if device_ids is not None:
        env[variable or "CUDA_VISIBLE_DEVICES"] = ",".join(map(str, device_ids))
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


def rank_environment(shared, rank, local_rank=None):
    """The environment of one rank; ``local_rank``: its number on its host, default ``rank``."""
    return {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank if local_rank is None else local_rank)}
