"""From the command line to what is to be started, with everything checked before the first process exists."""

import os
import socket
import sys

from deepspeed.host import devices, numa
from deepspeed.host.ports import free_port, port_is_free
from deepspeed.host.programs import find_program
from deepspeed.launcher import environment
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.resources import parse_hostfile_lines, parse_resource_filter

DEFAULT_PORT = 29500
# From the first failure: SIGTERM at once, SIGKILL after this many seconds. With the rest it stays below five.
GRACE_S = 3.0
_HERE = ("localhost", "127.0.0.1", "::1")


class NodePlan:
    """One node's share of a job: for each rank a command, an environment and its cores (None: all).

    ``grace_s``: seconds between SIGTERM (or the user's Ctrl-C) and SIGKILL.
    ``notes`` are lines to show before the start; ``prefix`` puts the rank before each line of output; ``log_dir`` is
    the folder that gets the output instead; ``save_pid`` leaves the launcher's process id in a file.
    """

    def __init__(
        self, commands, environments, cores, notes=(), prefix=False, log_dir=None, save_pid=False, grace_s=GRACE_S
    ):
        self.commands = commands
        self.environments = environments
        self.cores = cores
        self.notes = list(notes)
        self.prefix = prefix
        self.log_dir = log_dir
        self.save_pid = save_pid
        self.grace_s = grace_s


def fetch_hostfile(path):
    """``{host: slots}`` of the file, or None when there is no such file."""
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as lines:
        try:
            return parse_hostfile_lines(lines.readlines())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def is_this_host(name):
    """True when ``name`` is this machine: one of its names, or an address that one can listen on here."""
    if name in _HERE or name in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return True
    except OSError:
        pass
    return False


def _local_slots(notes):
    # (slots to count, True when they are GPUs)
    wanted = os.environ.get("DS_ACCELERATOR", "")
    gpus = devices.visible_gpu_ids() if wanted in ("", "cuda") else []
    if gpus:
        return gpus, True
    if wanted not in ("", "cpu"):
        notes.append(
            f"The launcher cannot count devices of DS_ACCELERATOR={wanted}: --num_accelerators N says how many."
        )
        return [0], False
    return list(range(numa.numa_node_count())), False


def choose_slots(args, notes):
    """``(slots of this node, ids for CUDA_VISIBLE_DEVICES or None)`` by hostfile, filters and --num_accelerators."""
    local, on_gpu = _local_slots(notes)
    pool = fetch_hostfile(args.hostfile)
    if pool is None:
        if args.hostfile != DEFAULT_HOSTFILE:
            notes.append(f"There is no hostfile {args.hostfile}; using this machine only.")
        return _choose_local(args, local, on_gpu, notes)
    if args.num_nodes > 0:
        pool = dict(list(pool.items())[: args.num_nodes])
    active = parse_resource_filter(
        {host: list(range(count)) for host, count in pool.items()}, args.include, args.exclude
    )
    others = [host for host in active if not is_this_host(host)]
    if others or len(active) > 1:
        raise LaunchError(
            f"multi-node is not supported yet, but the hostfile {args.hostfile} names {', '.join(active)}. Keep only "
            f"this machine with --include={socket.gethostname()} if it is listed, or point --hostfile elsewhere."
        )
    slots = next(iter(active.values()), [])
    if args.num_gpus > 0:
        slots = _first(slots, args.num_gpus, f"the hostfile {args.hostfile}")
    if not slots:
        raise LaunchError("no slot is left after --include/--exclude: nothing would be started.")
    if not on_gpu:
        return slots, None
    missing = [slot for slot in slots if slot >= len(local)]
    if missing:
        raise LaunchError(
            f"the hostfile {args.hostfile} gives this machine slot {missing[0]}, but it has {len(local)} visible "
            f"GPU(s): lower its slots=N."
        )
    return slots, [local[slot] for slot in slots]


def _choose_local(args, local, on_gpu, notes):
    if args.include or args.exclude:
        every = local
        if on_gpu and devices.visible_device_ids() is not None:
            notes.append("CUDA_VISIBLE_DEVICES is replaced by what --include/--exclude choose.")
            every = [str(index) for index in range(devices.nvidia_device_count())]
        active = parse_resource_filter({"localhost": every}, args.include, args.exclude)
        slots = active.get("localhost", [])
        if not slots:
            raise LaunchError("no slot is left after --include/--exclude: nothing would be started.")
        return slots, slots if on_gpu else None
    if not on_gpu:
        return (list(range(args.num_gpus)) if args.num_gpus > 0 else local), None
    slots = _first(local, args.num_gpus, "this machine (CUDA_VISIBLE_DEVICES included)") if args.num_gpus > 0 else local
    return slots, slots


def _first(slots, count, where):
    if count > len(slots):
        raise LaunchError(
            f"--num_accelerators (--num_gpus) is {count}, but {where} offers {len(slots)}: ask for fewer."
        )
    return slots[:count]


def choose_port(asked, notes):
    """The port where the ranks meet; LaunchError when the one that was asked for is taken."""
    source = "--master_port"
    if asked is None and os.environ.get("MASTER_PORT"):
        source = "the environment variable MASTER_PORT"
        try:
            asked = int(os.environ["MASTER_PORT"])
        except ValueError:
            raise ValueError(f"{source} is {os.environ['MASTER_PORT']!r}, which is not a port number.") from None
    port = DEFAULT_PORT if asked is None else asked
    if port_is_free(port):
        return port
    if asked is not None:
        raise LaunchError(
            f"port {port} ({source}) of this machine is in use by another process, perhaps another training: choose a "
            f"free one with --master_port PORT, or leave it out and one is chosen."
        )
    port = free_port()
    notes.append(f"The default port {DEFAULT_PORT} is in use by another process; the ranks meet at port {port}.")
    return port


def rank_command(args, local_rank):
    """The program and arguments of one rank."""
    command = [args.user_script]
    if not args.no_python:
        # Unbuffered: what a rank says is seen when it says it, and not lost when it is killed.
        command = [sys.executable or "python3", "-u"] + (["-m"] if args.module else []) + command
    if not args.no_local_rank:
        command.append(f"--local_rank={local_rank}")
    return command + args.user_args


def check_script(args):
    """LaunchError when there is nothing to start under the given name."""
    script = args.user_script
    if args.no_python:
        if find_program(script) is None:
            raise LaunchError(
                f"the program {script!r} cannot be started: there is no executable file of that name here or on PATH."
            )
    elif not args.module and not os.path.exists(script):
        raise LaunchError(
            f"the script {script!r} does not exist (current folder: {os.getcwd()}). Check the path; for a module use "
            f"--module, for a program of its own --no_python."
        )


def grace_s():
    """``GRACE_S``, or the environment variable ``DS_LAUNCHER_GRACE_S``."""
    text = os.environ.get("DS_LAUNCHER_GRACE_S", "")
    try:
        return max(0.0, float(text)) if text else GRACE_S
    except ValueError:
        raise ValueError(
            f"the environment variable DS_LAUNCHER_GRACE_S is {text!r}; it is a number of seconds."
        ) from None


def make_plan(args):
    """The ``NodePlan`` for parsed and checked arguments."""
    check_script(args)
    notes = []
    slots, device_ids = choose_slots(args, notes)
    count = len(slots)
    cores = [None] * count
    base = {**os.environ, **environment.read_environment_files()}
    if args.bind_cores_to_rank:
        cores = _bind(args, count, base, notes)
    port = choose_port(args.master_port, notes)
    shared, more = environment.node_environment(base, count, args.master_addr or "127.0.0.1", port, device_ids)
    commands = [rank_command(args, rank) for rank in range(count)]
    if args.bind_cores_to_rank and numa.check_for_numactl_pkg():
        for rank, command in enumerate(commands):
            nodes = numa.memory_nodes_of(cores[rank])
            if nodes:
                command[:0] = ["numactl", "-m", numa.format_range_list(nodes)]
    return NodePlan(
        commands=commands,
        environments=[environment.rank_environment(shared, rank) for rank in range(count)],
        cores=cores,
        notes=notes + more,
        prefix=args.log_rank_prefix or os.environ.get("DS_LOG_RANK_PREFIX", "0") not in ("", "0"),
        log_dir=args.enable_each_rank_log if args.enable_each_rank_log not in (None, "None", "") else None,
        save_pid=args.save_pid,
        grace_s=grace_s(),
    )


def _bind(args, count, base, notes):
    if "KMP_AFFINITY" in base:
        raise LaunchError(
            "KMP_AFFINITY is set and would bind threads a second time: unset it for --bind_cores_to_rank."
        )
    cores = [numa.cores_of_rank(args.bind_core_list, count, rank) for rank in range(count)]
    if not base.get("OMP_NUM_THREADS"):
        base["OMP_NUM_THREADS"] = str(len(environment.physical_cores(cores[0])))
    if len(numa.numa_nodes()) > 1 and not numa.check_for_numactl_pkg():
        notes.append("numactl is not installed: cores are bound, memory is not (apt install numactl).")
    return cores
