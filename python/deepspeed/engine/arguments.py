"""Command-line arguments that every DeepSpeed script understands, and what an engine reads of them; configurations of
engines that only train."""

import argparse
import copy
import os

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.rendezvous import under_mpi
from deepspeed.log import warning_once

MPI_FLAG, HPU_FLAG = "--deepspeed_mpi", "--use_hpu"

# Sections of what only watches a run or writes files about it.
_WATCHING = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "trace", "report", "comms_logger",
             "wall_clock_breakdown", "memory_breakdown", "dump_state", "autotuning", "postmortem")  # fmt: skip


def add_config_arguments(parser):
    """Adds ``--deepspeed`` and ``--deepspeed_config FILE`` to an argparse parser and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configuration")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="train with DeepSpeed (for scripts that can do without)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed configuration file (JSON)")
    # Spellings of the first releases; they reach initialize() under the new names.
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    # Flags that launchers of other releases took behind the name of the script.
    for flag in (MPI_FLAG, HPU_FLAG):
        if flag not in parser._option_string_actions:
            group.add_argument(flag, default=False, action="store_true", help=argparse.SUPPRESS)
    return parser


def check_flags(args):
    """Raises RuntimeError for ``--deepspeed_mpi`` outside of mpirun; warns of ``--use_hpu`` on another accelerator."""
    if getattr(args, "deepspeed_mpi", False) is True and not under_mpi():
        raise RuntimeError(
            f"{MPI_FLAG}: mpirun has not started this process. Start it with mpirun, or leave the flag out: ranks are "
            "found without it"
        )
    name = get_accelerator()._name
    if getattr(args, "use_hpu", False) is True and name != "hpu":
        warning_once(
            f"{HPU_FLAG} is given, and the accelerator here is {name!r}, which is used: Gaudi's needs the package "
            "habana_frameworks, and DS_ACCELERATOR=hpu asks for it"
        )


def find_local_rank(args):
    """This process's rank on its host: ``LOCAL_RANK`` where it is set, else ``args.local_rank``, else 0.

    ``args.local_rank``, where ``args`` has it, holds the answer afterwards: scripts read it after ``initialize``.
    AssertionError when it is another one than ``LOCAL_RANK``.
    """
    given = getattr(args, "local_rank", None)
    assert given is None or isinstance(given, int), (
        f"args.local_rank is {given!r}, a {type(given).__name__}: it must be a number; declare it with type=int"
    )
    told = given is not None and given >= 0
    if "LOCAL_RANK" in os.environ:
        found = int(os.environ["LOCAL_RANK"])
        assert not told or given == found, (
            f"args.local_rank={given}, but the environment has LOCAL_RANK={found}: which device is meant? Leave "
            "args.local_rank at -1, or correct one of them"
        )
    else:
        found = given if told else 0
    if hasattr(args, "local_rank"):
        args.local_rank = found
    return found


def find_device_index(args, local_rank):
    """The index of this process's accelerator: ``args.device_rank`` (Lightning passes it) where it is given, else its
    rank on its host."""
    given = getattr(args, "device_rank", None)
    return local_rank if given is None or given < 0 else int(given)


def only_training(config):
    """The configuration without what watches a run or writes about it."""
    made = {key: value for key, value in copy.deepcopy(config).items() if key not in _WATCHING}
    return {**made, "step_log": {"enabled": False}, "steps_per_print": None}
