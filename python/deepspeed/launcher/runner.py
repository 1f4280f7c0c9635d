"""The program ``deepspeed``: from the command line to the exit code of the job."""

import logging
import sys

from deepspeed.launcher.arguments import check, parse_args
from deepspeed.launcher.environment import ENVIRONMENT_FILE
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.launch import launch
from deepspeed.launcher.plan import fetch_hostfile, make_plan
from deepspeed.launcher.resources import (
    decode_world_info,
    encode_world_info,
    parse_hostfile_lines,
    parse_resource_filter,
)
from deepspeed.log import logger

DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_FILE
_parse_hostfile = parse_hostfile_lines

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "LaunchError",
    "_parse_hostfile",
    "decode_world_info",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_resource_filter",
    "run",
]


def run(args):
    """Starts the job that the list ``args`` describes; returns its exit code.

    Raises:
        ValueError: options that contradict each other, a malformed hostfile or environment file.
        NotImplementedError: options of several nodes, of autotuning.
        LaunchError: the script, the port, the slots or the hosts do not allow a start.
    """
    options = parse_args(args)
    check(options)
    plan = make_plan(options)
    if logger.isEnabledFor(logging.INFO):
        for note in plan.notes:
            print(f"deepspeed: {note}", file=sys.stderr)
    return launch(plan)


def main(args=None):
    """``run(args)``. Without ``args`` it is the program: it takes the command line, and an error becomes one
    paragraph on stderr and exit code 1 (2 for an option that does not exist)."""
    if args is not None:
        return run(args)
    try:
        return run(sys.argv[1:])
    except (LaunchError, ValueError, NotImplementedError, OSError) as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the first process was started
        return 130


if __name__ == "__main__":
    sys.exit(main())
