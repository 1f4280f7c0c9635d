"""The environment variables of the ranks of a host, and those that other hosts get from the head."""

import os
import sys

from deepspeed.host.cpu import openblas_coretype, physical_cores, quota_cores, usable_cores
from deepspeed.host.vendors import VENDORS
from deepspeed.launcher.resources import meant_lines

# Variables of another launcher around us that would contradict ours, or make rank 0 wait for a store of theirs.
_FOREIGN_PREFIXES = ("TORCHELASTIC_",)

ENVIRONMENT_FILE = os.getenv("DS_ENV_FILE", ".deepspeed_env")

# Prefixes of the variables that other hosts get from the head. Each accelerator adds some (host/vendors.py).
EXPORT_PREFIXES = (
    "MLFLOW", "PYTHON", "GLOO", "MV2", "UCX", "DS_", "DEEPSPEED_",
    # Nebula and Azure ML
    "NEBULA_", "AZUREML_", "AML_RUN_ID", "DLTS_", "FC_TASK", "MASTER_HOST", "LOCAL_HOST",
)  # fmt: skip


def visible_variable(environment):
    """The variable that chooses among the devices of a host, by DS_ACCELERATOR in ``environment``."""
    row = VENDORS.get(environment.get("DS_ACCELERATOR") or "cuda")
    return row.visible if row is not None and row.visible else VENDORS["cuda"].visible


def exports(environment, files):
    """``{name: value}`` of what other hosts get: variables with one of the prefixes, and ``files``, which win. Without
    DS_ACCELERATOR the ranks choose a device by themselves, so the prefixes are those of all devices."""
    accelerator = files.get("DS_ACCELERATOR") or environment.get("DS_ACCELERATOR", "")
    rows = [row for name, row in VENDORS.items() if accelerator in ("", name)]
    prefixes = EXPORT_PREFIXES + tuple(prefix for row in rows for prefix in row.prefixes)
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
    for path in (os.path.join(folder, ENVIRONMENT_FILE) for folder in _folders()):
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as lines:
                for number, text in meant_lines(lines):
                    name, equals, value = text.partition("=")
                    if not equals or not name.strip():
                        raise ValueError(f"{path} line {number} is {text!r}; each line must read NAME=VALUE.")
                    found[name.strip()] = value
    return found


def within_quota(threads, local_size):
    """``threads`` of each of ``local_size`` ranks, or fewer where a container may use less time than the cores have."""
    quota = quota_cores()
    return threads if quota is None else max(1, min(threads, int(quota / local_size)))


def host_environment(base, share, device_ids, notes):
    """The environment that the ranks of a host share, made of ``base``. ``share``: the host's part of the job;
    ``device_ids``: what the variable of visible devices gets, none to leave it alone."""
    env = {name: value for name, value in base.items() if not name.startswith(_FOREIGN_PREFIXES)}
    local_size = len(share.slots)
    env.update(
        MASTER_ADDR=share.master_addr, MASTER_PORT=str(share.master_port), WORLD_SIZE=str(sum(share.counts)),
        LOCAL_SIZE=str(local_size), CROSS_RANK=str(share.node), CROSS_SIZE=str(len(share.counts)),
    )  # fmt: skip
    if device_ids:
        env[visible_variable(base)] = ",".join(map(str, device_ids))
    if not env.get("OMP_NUM_THREADS"):
        threads = within_quota(max(1, len(physical_cores(usable_cores())) // local_size), local_size)
        env["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"OMP_NUM_THREADS is not set; each of the {local_size} process(es) gets {threads} thread(s), its share of "
            f"the cores. Set it to choose otherwise."
        )
    coretype = openblas_coretype()
    return {**env, "OPENBLAS_CORETYPE": coretype} if coretype else env


def script_command(args, local_rank=None, user_args=None):
    """The program and arguments of a rank; ``local_rank``: what the script is told, None: nothing."""
    command = [args.user_script]
    if not args.no_python:
        # Unbuffered, so that output is visible at once and is not lost if the rank is killed.
        command = [sys.executable or "python3", "-u", *(["-m"] if args.module else []), *command]
    if local_rank is not None and not args.no_local_rank:
        command.append(f"--local_rank={local_rank}")
    return command + (args.user_args if user_args is None else user_args)
