"""The command line of ``deepspeed``."""

import argparse
import sys

from deepspeed.launcher.runners import RUNNERS
from deepspeed.log import level_from_string

DEFAULT_HOSTFILE = "/job/hostfile"


def build_parser(script_may_be_missing=False):
    """The command line. ``script_may_be_missing``: for ``--check``."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Starts one process per accelerator of a training or inference script and watches over them.",
        epilog="Everything after the script belongs to the script.",
    )
    add = parser.add_argument
    what = parser.add_argument_group("how many and where")
    what.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N",
        help="processes on this node (default: GPUs visible, else memory nodes of the CPU)",
    )  # fmt: skip
    what.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="use the first N nodes of the hostfile")
    what.add_argument("-i", "--include", default="", help="slots to use, such as localhost:0,2")
    what.add_argument("-e", "--exclude", default="", help="slots not to use")
    what.add_argument("-H", "--hostfile", default=DEFAULT_HOSTFILE, help="nodes, one 'NAME slots=N' per line")
    what.add_argument("--bind_cores_to_rank", action="store_true", help="give each process cores of its own")
    what.add_argument("--bind_core_list", default=None, metavar="L", help="cores to share out, such as 0-27,32-59")

    meet = parser.add_argument_group("how the processes meet")
    meet.add_argument("--master_addr", default="", help="address of rank 0 (default 127.0.0.1)")
    meet.add_argument("--master_port", type=int, default=None, metavar="PORT", help="port of rank 0 (default 29500)")

    how = parser.add_argument_group("how the script is started")
    how.add_argument("--module", action="store_true", help="the script is a module name, as for python -m")
    how.add_argument("--no_python", action="store_true", help="the script is a program of its own")
    how.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")

    out = parser.add_argument_group("output")
    out.add_argument(
        "--log_rank_prefix", action="store_true", help="start each line with [rank N] (DS_LOG_RANK_PREFIX=1)"
    )
    out.add_argument(
        "--enable_each_rank_log", default=None, metavar="DIR",
        help="write each process's output to DIR/<time>_rank<N>.log instead of the terminal",
    )  # fmt: skip
    out.add_argument("--save_pid", action="store_true", help="write the launcher's process id to /tmp/<pid>.ds")

    many = parser.add_argument_group("several hosts")
    many.add_argument(
        "--launcher", default="pdsh", metavar="NAME",
        help=f"how they are reached: {', '.join(RUNNERS.names())} (default pdsh, ssh where that is not installed)",
    )  # fmt: skip
    many.add_argument("--launcher_args", default="", metavar="WORDS", help="options for the program that reaches them")
    many.add_argument("--ssh_port", type=int, default=None, metavar="PORT", help="port of their ssh servers")
    many.add_argument("--no_ssh", action="store_true", help="the job is started by hand, or by a cluster, on each host")
    many.add_argument("--node_rank", type=int, default=-1, metavar="N", help="with --no_ssh: number of this host")
    many.add_argument(
        "--insecure", action="store_true", help="with --no_ssh: let other hosts in although DS_JOB_KEY is not set"
    )
    many.add_argument(
        "--join_timeout", type=float, default=300.0, metavar="S", help="seconds in which all hosts must have come"
    )
    many.add_argument("--no_ssh_check", action="store_true", help="accepted; hosts are not tested before the start")
    many.add_argument("--force_multi", action="store_true", help="start through an agent also where one host is enough")
    many.add_argument("--venv_script", default=None, metavar="FILE", help="script to source on each host first")
    many.add_argument("--slurm_comment", default="", metavar="TEXT", help="comment of the step, for Slurm")
    many.add_argument(
        "--elastic_training", action="store_true",
        help="start the ranks again when one fails or hosts come and go; the script goes on from its checkpoint",
    )  # fmt: skip
    many.add_argument("--min_elastic_nodes", type=int, default=-1, metavar="N", help="fewest hosts then (default 1)")
    many.add_argument("--max_elastic_nodes", type=int, default=-1, metavar="N", help="most hosts then (default all)")

    more = parser.add_argument_group("more")
    more.add_argument(
        "--check", action="store_true", help="start nothing; say whether a job can run on the hosts, and what to do"
    )
    more.add_argument(
        "--autotuning", default="", choices=["", "tune", "run"], metavar="HOW",
        help="tune: find the fastest configuration; run: train with it then (needs deepspeed.autotuning)",
    )  # fmt: skip
    more.add_argument("--use_hpu", action="store_true", help="train on Gaudi (DS_ACCELERATOR=hpu)")
    more.add_argument(
        "--log_level", default=None, metavar="LEVEL", help="of the launcher's own lines: debug, info, warning, error"
    )
    more.add_argument("-q", "--quiet", action="store_true", help="errors only, as --log_level error")

    add("user_script", nargs="?" if script_may_be_missing else None, help="the script, with its arguments behind it")
    add("user_args", nargs=argparse.REMAINDER)
    return parser


def parse_args(args=None):
    """The options as a namespace; ``user_script`` and ``user_args`` are the command to start."""
    words = sys.argv[1:] if args is None else args
    parser = build_parser("--check" in words)
    options = parser.parse_args(words, argparse.Namespace(device_ids=None))
    if options.user_script is None and not options.check:
        parser.error("the following arguments are required: user_script")
    return options


def check(args):
    """Refuses what contradicts itself (ValueError) and what this build cannot do (NotImplementedError)."""
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise ValueError(
            "--num_nodes and --num_gpus cannot be combined with --include or --exclude: both say which slots to use."
        )
    if args.include and args.exclude:
        raise ValueError("--include and --exclude exclude each other: give one of them.")
    if args.num_gpus == 0 or args.num_gpus < -1:
        raise ValueError(f"--num_accelerators (--num_gpus) is {args.num_gpus}; it must be at least 1.")
    if args.module and args.no_python:
        raise ValueError("--module and --no_python exclude each other: a module is started by Python.")
    if args.bind_core_list and not args.bind_cores_to_rank:
        raise ValueError("--bind_core_list says which cores to share out; add --bind_cores_to_rank to do so.")
    if args.master_port is not None and not 0 < args.master_port < 65536:
        raise ValueError(f"--master_port is {args.master_port}; a port lies between 1 and 65535.")
    if args.ssh_port is not None and not 0 < args.ssh_port < 65536:
        raise ValueError(f"--ssh_port is {args.ssh_port}; a port lies between 1 and 65535.")
    try:
        RUNNERS.entry(args.launcher.lower())
    except ValueError as error:
        raise ValueError(f"--launcher: {error}") from None
    if args.num_nodes == 0 or args.num_nodes < -1:
        raise ValueError(f"--num_nodes is {args.num_nodes}; it must be at least 1.")
    if args.node_rank >= 0 and not args.no_ssh:
        raise ValueError("--node_rank says which host this is when the job is started on each: add --no_ssh.")
    if args.insecure and not args.no_ssh:
        raise ValueError("--insecure is for hosts that come without a key: add --no_ssh, or leave it out.")
    if args.no_ssh and (args.check or args.launcher_args or args.ssh_port is not None):
        raise ValueError("--check, --launcher_args and --ssh_port reach other hosts, which --no_ssh does not.")
    if args.no_ssh and args.venv_script:
        raise ValueError("--venv_script needs --no_ssh to be left out: enter the environment before you start the job.")
    if args.join_timeout <= 0:
        raise ValueError(f"--join_timeout is {args.join_timeout:g}; it must be above 0 seconds.")
    if args.log_level is not None:
        try:
            level_from_string(args.log_level)
        except ValueError as error:
            raise ValueError(f"--log_level: {error}") from None
    if args.autotuning and (args.check or args.no_ssh or args.elastic_training):
        raise ValueError("--autotuning starts jobs of its own: leave --check, --no_ssh and --elastic_training out.")
    least, most = args.min_elastic_nodes, args.max_elastic_nodes
    for name, count in (("min_elastic_nodes", least), ("max_elastic_nodes", most)):
        if count == 0 or count < -1:
            raise ValueError(f"--{name} is {count}; it must be at least 1.")
        if count > 0 and not args.elastic_training:
            raise ValueError(f"--{name} is for a job whose number of hosts may change: add --elastic_training.")
    if 0 < most < least:
        raise ValueError(f"--min_elastic_nodes is {least}, more than --max_elastic_nodes {most}.")
