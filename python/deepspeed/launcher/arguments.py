"""The command line of ``deepspeed``."""

import argparse
import sys

from deepspeed.host.command_line import MOST_SLOTS
from deepspeed.launcher.options import COMMAND_OPTIONS, add_options, parse_command, switch
from deepspeed.launcher.runners import RUNNERS
from deepspeed.log import level_from_string

DEFAULT_HOSTFILE = "/job/hostfile"


_NUMBER = {"type": int, "default": -1, "metavar": "N"}


def _groups():
    """The options by title; ``--launcher`` names the runners, of other packages too."""
    return {
        "how many and where": {
            "--num_gpus --num_accelerators": _NUMBER
            | {"help": "processes on this node (default: GPUs visible, else memory nodes of the CPU)"},
            "--num_nodes": _NUMBER | {"help": "use the first N nodes of the hostfile"},
            "-i --include": {"default": "", "help": "slots to use, such as localhost:0,2"},
            "-e --exclude": {"default": "", "help": "slots not to use"},
            "-H --hostfile": {"default": DEFAULT_HOSTFILE, "help": "nodes, one 'NAME slots=N' per line"},
            "--bind_cores_to_rank": switch("give each process cores of its own"),
            "--bind_core_list": {"metavar": "L", "help": "cores to share out, such as 0-27,32-59"},
        },
        "how the processes meet": {
            "--master_addr": {"default": "", "help": "address of rank 0 (default 127.0.0.1)"},
            "--master_port": {"type": int, "metavar": "PORT", "help": "port of rank 0 (default 29500)"},
        },
        "how the script is started": COMMAND_OPTIONS,
        "output": {
            "--log_rank_prefix": switch("start each line with [rank N] (DS_LOG_RANK_PREFIX=1)"),
            "--enable_each_rank_log": {
                "metavar": "DIR",
                "help": "write each process's output to DIR/<time>_rank<N>.log instead of the terminal",
            },
            "--save_pid": switch("write the launcher's process id to /tmp/<pid>.ds"),
        },
        "several hosts": {
            "--launcher": {
                "default": "pdsh", "metavar": "NAME",
                "help": f"how they are reached: {', '.join(RUNNERS.names())} (default pdsh, "
                "ssh where that is not installed)",
            },
            "--launcher_args": {"default": "", "metavar": "WORDS", "help": "options for the program that reaches them"},
            "--ssh_port": {"type": int, "metavar": "PORT", "help": "port of their ssh servers"},
            "--no_ssh": switch("the job is started by hand, or by a cluster, on each host"),
            "--node_rank": _NUMBER | {"help": "with --no_ssh: number of this host"},
            "--insecure": switch("with --no_ssh: let other hosts in although DS_JOB_KEY is not set"),
            "--join_timeout": {
                "type": float, "default": 300.0, "metavar": "S", "help": "seconds in which all hosts must have come",
            },
            "--no_ssh_check": switch("accepted; hosts are not tested before the start"),
            "--force_multi": switch("start through an agent also where one host is enough"),
            "--venv_script": {"metavar": "FILE", "help": "script to source on each host first"},
            "--slurm_comment": {"default": "", "metavar": "TEXT", "help": "comment of the step, for Slurm"},
            "--elastic_training": switch(
                "start the ranks again when one fails or hosts come and go; the script goes on from its checkpoint"
            ),
            "--min_elastic_nodes": _NUMBER | {"help": "fewest hosts then (default 1)"},
            "--max_elastic_nodes": _NUMBER | {"help": "most hosts then (default all)"},
        },
        "more": {
            "--check": switch("start nothing; say whether a job can run on the hosts, and what to do"),
            "--autotuning": {
                "default": "", "choices": ["", "tune", "run"], "metavar": "HOW",
                "help": "tune: find the fastest configuration; run: train with it then",
            },
            "--use_hpu": switch("train on Gaudi (DS_ACCELERATOR=hpu)"),
            "--log_level": {"metavar": "LEVEL", "help": "of the launcher's own lines: debug, info, warning, error"},
            "-q --quiet": switch("errors only, as --log_level error"),
        },
    }  # fmt: skip


def build_parser(script_may_be_missing=False):
    """The command line. ``script_may_be_missing``: for ``--check``."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Starts one process per accelerator of a training or inference script and watches over them.",
        epilog="Everything after the script belongs to the script.",
    )
    for title, options in _groups().items():
        add_options(parser.add_argument_group(title), options)
    script = {"nargs": "?" if script_may_be_missing else None, "help": "the script, with its arguments behind it"}
    return add_options(parser, {"user_script": script, "user_args": {"nargs": argparse.REMAINDER}})


def parse_args(args=None):
    """The options as a namespace; ``user_script`` and ``user_args`` are the command to start."""
    words = sys.argv[1:] if args is None else args
    parser = build_parser("--check" in words)
    options = parse_command(parser, words, "user_args", argparse.Namespace(device_ids=None))
    if options.user_script is None and not options.check:
        parser.error("the following arguments are required: user_script")
    return options


def _why_not(parse, text):
    # The error of ``parse`` for ``text``, "" if there is none.
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""


def _contradictions(args):
    # Pairs of a condition that must not hold, and what to say then.
    for name, port in (("master_port", args.master_port), ("ssh_port", args.ssh_port)):
        yield port is not None and not 0 < port < 65536, f"--{name} is {port}; a port lies between 1 and 65535."
    filters, least, most = args.include or args.exclude, args.min_elastic_nodes, args.max_elastic_nodes
    yield (
        (args.num_nodes >= 0 or args.num_gpus >= 0) and filters,
        "--num_nodes and --num_gpus cannot be combined with --include or --exclude: both say which slots to use.",
    )
    yield args.include and args.exclude, "--include and --exclude exclude each other: give one of them."
    for name, count in (
        ("num_accelerators (--num_gpus)", args.num_gpus), ("num_nodes", args.num_nodes),
        ("min_elastic_nodes", least), ("max_elastic_nodes", most),
    ):  # fmt: skip
        yield count == 0 or count < -1, f"--{name} is {count}; it must be at least 1."
        yield count > MOST_SLOTS, f"--{name} is {count}; it is at most {MOST_SLOTS}."
        yield (
            count > 0 and "elastic" in name and not args.elastic_training,
            f"--{name} is for a job whose number of hosts may change: add --elastic_training.",
        )
    yield from (
        (args.module and args.no_python, "--module and --no_python exclude each other: a module is started by Python."),
        (
            args.bind_core_list and not args.bind_cores_to_rank,
            "--bind_core_list says which cores to share out; add --bind_cores_to_rank to do so.",
        ),
        (
            args.node_rank >= 0 and not args.no_ssh,
            "--node_rank says which host this is when the job is started on each: add --no_ssh.",
        ),
        (
            args.insecure and not args.no_ssh,
            "--insecure is for hosts that come without a key: add --no_ssh, or leave it out.",
        ),
        (
            args.no_ssh and (args.check or args.launcher_args or args.ssh_port is not None),
            "--check, --launcher_args and --ssh_port reach other hosts, which --no_ssh does not.",
        ),
        (
            args.no_ssh and args.venv_script,
            "--venv_script needs --no_ssh to be left out: enter the environment before you start the job.",
        ),
        (args.join_timeout <= 0, f"--join_timeout is {args.join_timeout:g}; it must be above 0 seconds."),
        (
            args.autotuning and (args.check or args.no_ssh or args.elastic_training),
            "--autotuning starts jobs of its own: leave --check, --no_ssh and --elastic_training out.",
        ),
        (0 < most < least, f"--min_elastic_nodes is {least}, more than --max_elastic_nodes {most}."),
    )
    for name, parse, text in (
        ("launcher", RUNNERS.entry, args.launcher.lower()),
        ("log_level", level_from_string, "info" if args.log_level is None else args.log_level),
    ):  # fmt: skip
        why = _why_not(parse, text)
        yield why, f"--{name}: {why}"


def check(args):
    """Refuses options that contradict each other, with ValueError."""
    for refused, why in _contradictions(args):
        if refused:
            raise ValueError(why)
