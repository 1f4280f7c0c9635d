"""The command line of ``deepspeed``."""

import argparse

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")

# Options that only mean something on several nodes, with what each would do there.
_MULTI_NODE = {
    "force_multi": "treat one node as several",
    "no_ssh": "start on each node by hand",
    "no_ssh_check": "skip the test of the connections",
    "ssh_port": "reach the nodes through another port",
    "launcher_args": "pass options to the program that reaches the nodes",
    "venv_script": "enter a virtual environment on the nodes",
    "min_elastic_nodes": "train on a changing number of nodes",
    "max_elastic_nodes": "train on a changing number of nodes",
    "elastic_training": "train on a changing number of nodes",
}


def build_parser():
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

    many = parser.add_argument_group("several nodes (not supported yet) and tuning")
    many.add_argument("--launcher", default="pdsh", help=f"one of {', '.join(LAUNCHERS)}; only used for several nodes")
    many.add_argument("--launcher_args", default="")
    many.add_argument("--node_rank", type=int, default=-1)
    many.add_argument("--no_ssh", action="store_true")
    many.add_argument("--no_ssh_check", action="store_true")
    many.add_argument("--ssh_port", type=int, default=None)
    many.add_argument("--force_multi", action="store_true")
    many.add_argument("--venv_script", default=None)
    many.add_argument("--min_elastic_nodes", type=int, default=-1)
    many.add_argument("--max_elastic_nodes", type=int, default=-1)
    many.add_argument("--elastic_training", action="store_true")
    many.add_argument("--autotuning", default="", choices=["", "tune", "run"])

    add("user_script", help="the script, with its arguments behind it")
    add("user_args", nargs=argparse.REMAINDER)
    return parser


def parse_args(args=None):
    """The options as a namespace; ``user_script`` and ``user_args`` are the command to start."""
    return build_parser().parse_args(args)


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
    if args.launcher.lower() not in LAUNCHERS:
        raise ValueError(f"--launcher is {args.launcher!r}; it must be one of {', '.join(LAUNCHERS)}.")
    if args.num_nodes > 1:
        raise NotImplementedError(_not_yet(f"--num_nodes {args.num_nodes}"))
    if args.num_nodes == 0 or args.num_nodes < -1:
        raise ValueError(f"--num_nodes is {args.num_nodes}; it must be at least 1.")
    if args.node_rank > 0:
        raise NotImplementedError(_not_yet(f"--node_rank {args.node_rank}"))
    if args.autotuning:
        raise NotImplementedError("--autotuning is not supported yet: leave it out and set the batch sizes yourself.")
    defaults = build_parser()
    for name, meaning in _MULTI_NODE.items():
        if getattr(args, name) != defaults.get_default(name):
            raise NotImplementedError(_not_yet(f"--{name} (to {meaning})"))


def _not_yet(what):
    return f"{what}: multi-node is not supported yet. Start the job on one node, without this option."
