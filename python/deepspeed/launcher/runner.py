"""The program ``deepspeed``: from the command line to the exit code of the job."""

import argparse
import logging
import os
import sys

from deepspeed.host.command_line import program
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE, check, parse_args
from deepspeed.launcher.environment import ENVIRONMENT_FILE, EXPORT_PREFIXES, missing_environment_file
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.launch import launch
from deepspeed.launcher.plan import (
    active_hosts,
    check_script,
    choose_slots,
    fetch_hostfile,
    is_this_host,
    make_plan,
    show_notes,
)
from deepspeed.launcher.resources import (
    decode_world_info,
    encode_world_info,
    parse_hostfile_lines,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_resource_filter,
)
from deepspeed.log import level_from_string, logger
from deepspeed.registry import load_target

DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_FILE
EXPORT_ENVS = list(EXPORT_PREFIXES)
DLTS_HOSTFILE = DEFAULT_HOSTFILE
AUTOTUNER = "deepspeed.autotuning.autotuner:Autotuner"
_parse_hostfile = parse_hostfile_lines

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "LaunchError",
    "_parse_hostfile",
    "decode_world_info",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_resource_filter",
    "run",
]


def run(args):
    """Starts the job that the list ``args`` describes; returns its exit code.

    Raises:
        ValueError: options that contradict each other, a malformed hostfile or environment file.
        LaunchError: the script, the port, the slots or the hosts do not allow a start.
    """
    options = parse_args(args)
    check(options)
    if options.use_hpu:
        os.environ["DS_ACCELERATOR"] = "hpu"
    level = "error" if options.quiet else options.log_level
    verbose = level_from_string(level) <= logging.INFO if level else logger.isEnabledFor(logging.INFO)
    missing = missing_environment_file()
    if missing:
        show_notes([f"DS_ENV_FILE names {missing}, which is neither in the home folder nor here."], verbose)
    if options.no_ssh:
        return load_target("deepspeed.launcher.no_ssh:run_no_ssh")(options, verbose)
    notes = []
    if options.check:
        hosts = hosts_to_use(options, notes)
        show_notes(notes, verbose)
        return load_target("deepspeed.launcher.check:run_check")(options, hosts)
    if options.autotuning:
        return tune(options, hosts_of_tuner(options, notes))
    hosts = far_hosts(options, notes)
    if hosts:
        show_notes(notes, verbose)
        return load_target("deepspeed.launcher.cluster:run_cluster")(options, hosts, verbose)
    plan = make_plan(options)
    show_notes(plan.notes, verbose)
    return launch(plan)


def hosts_to_use(args, notes):
    """``{host: [slot, ...]}``: those of the hostfile, or this machine."""
    return active_hosts(args, notes) or {"localhost": list(range(len(choose_slots(args, notes)[0])))}


def hosts_of_tuner(args, notes):
    """All hosts and slots: ``--num_nodes`` and ``--num_gpus`` say how many each of the tuner's jobs gets."""
    asked = hosts_to_use(args, notes)
    every = hosts_to_use(argparse.Namespace(**{**vars(args), "num_nodes": -1, "num_gpus": -1}), notes)
    return {host: max(slots, asked.get(host, []), key=len) for host, slots in every.items()}


def tune(args, hosts):
    """``--autotuning``: hands over to the published class ``Autotuner``; returns the exit code."""
    check_script(args)
    tuner = load_target(AUTOTUNER)(args, hosts)
    tuner.tune()
    tuner.print_tuning_results()
    if args.autotuning == "run":
        tuner.run_after_tuning()
    return 0


def far_hosts(args, notes):
    """``{host: [slot, ...]}`` of a job that needs agents, or None for one that this machine runs by itself."""
    hosts = active_hosts(args, notes)
    through_agent = args.force_multi or args.venv_script or args.elastic_training
    if hosts is None and args.min_elastic_nodes > 1:
        raise LaunchError(
            f"--min_elastic_nodes is {args.min_elastic_nodes}, and there is no hostfile {args.hostfile} by which other "
            f"hosts could come: write one 'NAME slots=N' per line, or start the job on every host with --no_ssh."
        )
    if hosts is None and through_agent:
        slots, args.device_ids = choose_slots(args, notes)
        return {"localhost": list(range(len(slots)))}
    if hosts is None or (len(hosts) == 1 and is_this_host(next(iter(hosts))) and not through_agent):
        return None
    return hosts


def main(args=None):
    """``run(args)``. Without ``args`` it is the program: it takes the command line, and an error becomes one
    paragraph on stderr and exit code 1 (2 for an option that does not exist)."""
    if args is not None:
        return run(args)
    return program("deepspeed: error")(lambda _: run(sys.argv[1:]))()


if __name__ == "__main__":
    sys.exit(main())
