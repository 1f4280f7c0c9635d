"""Makes a plan of the processes to start from the command line. All checks are done before the first process starts."""

import os
import socket
import sys

from deepspeed.host import devices, numa, ports
from deepspeed.host.addresses import is_own_address
from deepspeed.host.programs import find_program
from deepspeed.launcher import environment
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.resources import parse_hostfile_lines, parse_inclusion_exclusion, parse_resource_filter

DEFAULT_PORT = 29500
# From the first failure: SIGTERM at once, SIGKILL after this many seconds.
GRACE_S = 5.0
_HERE = ("localhost", "127.0.0.1", "::1")


class NodePlan:
    """One host's share of a job: for each rank a command, an environment and its cores (None: all).

    ``grace_s``: seconds between SIGTERM (or Ctrl-C) and SIGKILL; ``failure_grace_s``: that for the others when a rank
    has failed. ``first_rank``, ``world``: of the job, which may have ranks on other hosts. ``host``: what output calls
    this host. ``notes`` are lines to show before the start; ``prefix`` puts host and rank before each line of output;
    ``log_dir`` is the folder that gets the output instead; ``save_pid`` leaves the launcher's process id in a file.
    ``report_fd``: the supervisor writes failures there, one JSON object per line, instead of showing them. ``starter``:
    the name of a single command that starts the ranks itself and reports which of them failed.
    """

    def __init__(
        self, commands, environments, cores, notes=(), prefix=False, log_dir=None, save_pid=False, grace_s=GRACE_S,
        first_rank=0, world=None, host="", memory=None,
    ):  # fmt: skip
        self.commands = commands
        self.environments = environments
        self.cores = cores
        self.notes = list(notes)
        self.prefix = prefix
        self.log_dir = log_dir
        self.save_pid = save_pid  # a number: of the process that the file is named after
        self.grace_s = self.failure_grace_s = grace_s
        self.port_claim = None  # held while the job runs
        self.first_rank = first_rank
        self.world = len(commands) if world is None else world
        self.host = host
        self.memory = memory or [((), False)] * len(commands)  # arguments of linux.take_memory_from
        self.report_fd = None
        self.starter = ""
        self.forks, self.kept_fds = False, ()  # ranks are forked from the supervisor, with these descriptors

    def line_prefix(self, rank):
        """The bytes that precede each output line of ``rank``."""
        if not self.prefix:
            return b""
        return f"[{self.host}:{rank}] ".encode() if self.host else f"[rank {rank}] ".encode()


def show_notes(notes, verbose):
    """Prints ``notes`` for the user before the start, on stderr; nothing unless ``verbose``."""
    for note in notes if verbose else ():
        print(f"deepspeed: {note}", file=sys.stderr)


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
    """True when ``name`` is this machine: one of its names, or a name or text of one of its addresses."""
    if name in _HERE or name in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_own_address(address[0]) for *_, address in found)


def local_slots(environment, notes):
    """``(slots of this machine, True when they are GPUs)``."""
    wanted = environment.get("DS_ACCELERATOR", "")
    gpus = devices.visible_gpu_ids() if wanted in ("", "cuda") else []
    if gpus:
        return gpus, True
    if wanted not in ("", "cpu"):
        notes.append(
            f"The launcher cannot count devices of DS_ACCELERATOR={wanted}: --num_accelerators N says how many."
        )
        return [0], False
    return list(range(numa.numa_node_count())), False


def active_hosts(args, notes):
    """``{host: [slot, ...]}`` that the hostfile and the filters leave, in order; None where there is no hostfile."""
    pool = fetch_hostfile(args.hostfile)
    if pool is None:
        if args.hostfile != DEFAULT_HOSTFILE:
            notes.append(f"There is no hostfile {args.hostfile}; using this machine only.")
        if args.num_nodes > 1:
            raise LaunchError(
                f"--num_nodes is {args.num_nodes}, but there is no hostfile {args.hostfile} that names the hosts: "
                f"write one 'NAME slots=N' per line, and name it by --hostfile."
            )
        return None
    if args.num_nodes > len(pool):
        raise LaunchError(
            f"--num_nodes is {args.num_nodes}, but the hostfile {args.hostfile} names {len(pool)} host(s): ask "
            f"for fewer."
        )
    if args.num_nodes > 0:
        pool = dict(list(pool.items())[: args.num_nodes])
    if not any(pool.values()):
        raise LaunchError(f"every host of the hostfile {args.hostfile} has slots=0: write slots=N with N above 0.")
    active = parse_inclusion_exclusion(pool, args.include, args.exclude)
    if args.num_gpus > 0:
        active = {
            host: first_slots(slots, args.num_gpus, f"the host {host} of the hostfile {args.hostfile}")
            for host, slots in active.items()
            if slots
        }
    if not any(active.values()):
        raise LaunchError("no slot is left after --include/--exclude: nothing would be started.")
    return {host: slots for host, slots in active.items() if slots}


def choose_slots(args, notes):
    """``(slots of this node, ids for CUDA_VISIBLE_DEVICES or None)`` by hostfile, filters and --num_accelerators."""
    local, on_gpu = local_slots(os.environ, notes)
    active = active_hosts(args, notes)
    if active is None:
        return _choose_local(args, local, on_gpu, notes)
    slots = next(iter(active.values()), [])
    if not on_gpu:
        return slots, None
    return slots, gpu_ids(slots, local, f"the hostfile {args.hostfile}")


def gpu_ids(slots, local, source):
    """The names of ``slots`` among ``local``, the visible GPUs; LaunchError for a slot beyond them."""
    missing = [slot for slot in slots if slot >= len(local)]
    if missing:
        raise LaunchError(
            f"{source} gives the host {socket.gethostname()} slot {missing[0]}, but it has {len(local)} visible "
            f"GPU(s): lower its slots=N."
        )
    return [local[slot] for slot in slots]


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
    if args.num_gpus > 0:
        local = first_slots(local, args.num_gpus, "this machine (CUDA_VISIBLE_DEVICES included)")
    return local, local


def first_slots(slots, count, where):
    """The first ``count`` of ``slots``; LaunchError when there are fewer."""
    if count > len(slots):
        raise LaunchError(
            f"--num_accelerators (--num_gpus) is {count}, but {where} offers {len(slots)}: ask for fewer."
        )
    return slots[:count]


def choose_port(asked, notes):
    """The port where the ranks meet, and the claim that keeps other launchers off it; LaunchError when the one that was
    asked for is taken."""
    source = "--master_port"
    if asked is None and os.environ.get("MASTER_PORT"):
        source = "the environment variable MASTER_PORT"
        try:
            asked = int(os.environ["MASTER_PORT"])
        except ValueError:
            raise ValueError(f"{source} is {os.environ['MASTER_PORT']!r}, which is not a port number.") from None
    if asked is None:
        port, claim = ports.claim_any_port(DEFAULT_PORT)
        if port != DEFAULT_PORT:
            notes.append(
                f"The default port {DEFAULT_PORT} is in use by another process; the ranks meet at port {port}."
            )
        return port, claim
    claim = ports.claim_port(asked)
    if claim is None:
        raise LaunchError(
            f"port {asked} ({source}) of this machine is in use by another process, perhaps another training: choose a "
            f"free one with --master_port PORT, or leave it out and one is chosen."
        )
    return asked, claim


def rank_command(args, local_rank):
    """The program and arguments of one rank."""
    command = [args.user_script]
    if not args.no_python:
        # Unbuffered, so that output is visible at once and is not lost if the rank is killed.
        command = [sys.executable or "python3", "-u"] + (["-m"] if args.module else []) + command
    if not args.no_local_rank:
        command.append(f"--local_rank={local_rank}")
    return command + args.user_args


def check_script(args):
    """LaunchError if the given name is not a script, module or program."""
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


def grace_s(variables=os.environ):
    """The value of ``DS_LAUNCHER_GRACE_S`` in ``variables``, or ``GRACE_S``."""
    text = variables.get("DS_LAUNCHER_GRACE_S", "")
    try:
        return max(0.0, float(text)) if text else GRACE_S
    except ValueError:
        raise ValueError(
            f"the environment variable DS_LAUNCHER_GRACE_S is {text!r}; it is a number of seconds."
        ) from None


class Place:
    """The position of a host in a job: its first rank, the number of all ranks, its own number and that of all hosts,
    the name that output lines give it (empty: none), and the address and port of rank 0."""

    def __init__(self, master_addr, master_port, first_rank=0, world=None, node=0, nodes=1, host=""):
        self.master_addr = master_addr
        self.master_port = master_port
        self.first_rank = first_rank
        self.world = world
        self.node = node
        self.nodes = nodes
        self.host = host


def make_plan(args):
    """The ``NodePlan`` for parsed and checked arguments of a job on this host alone."""
    check_script(args)
    notes = []
    slots, device_ids = choose_slots(args, notes)
    base = {**os.environ, **environment.read_environment_files()}
    cores = bind_cores(args, len(slots), base, notes)
    port, claim = choose_port(args.master_port, notes)
    plan = host_plan(args, cores, Place(args.master_addr or "127.0.0.1", port), base, device_ids, notes)
    plan.port_claim = claim
    return plan


def host_plan(args, cores, place, base, device_ids, notes):
    """The ``NodePlan`` of one host, with a rank for each entry of ``cores``, at its ``Place`` in the job.

    ``base``: environment to start from; ``device_ids``: devices of this host for the job, or None to leave them alone.
    """
    count = len(cores)
    world = count if place.world is None else place.world
    variable = environment.visible_devices_variable(base.get("DS_ACCELERATOR"))
    shared, more = environment.node_environment(
        base, count, place.master_addr, place.master_port, device_ids, world, (place.node, place.nodes), variable
    )
    return NodePlan(
        commands=[rank_command(args, rank) for rank in range(count)],
        environments=[environment.rank_environment(shared, place.first_rank + rank, rank) for rank in range(count)],
        cores=cores,
        notes=notes + more,
        prefix=bool(place.host) or args.log_rank_prefix or os.environ.get("DS_LOG_RANK_PREFIX", "0") not in ("", "0"),
        log_dir=args.enable_each_rank_log if args.enable_each_rank_log not in (None, "None", "") else None,
        save_pid=args.save_pid,
        grace_s=grace_s(base),
        first_rank=place.first_rank,
        world=world,
        host=place.host,
        memory=numa.memory_of_ranks(cores),
    )


def bind_cores(args, count, base, notes):
    """The cores of each of ``count`` ranks, None for all; OMP_NUM_THREADS is added to ``base`` where they are bound."""
    if not args.bind_cores_to_rank:
        return [None] * count
    if "KMP_AFFINITY" in base:
        raise LaunchError(
            "KMP_AFFINITY is set and would bind threads a second time: unset it for --bind_cores_to_rank."
        )
    cores = [numa.cores_of_rank(args.bind_core_list, count, rank) for rank in range(count)]
    if not base.get("OMP_NUM_THREADS"):
        base["OMP_NUM_THREADS"] = str(environment.within_quota(len(environment.physical_cores(cores[0])), count))
    shown = "; ".join(
        f"rank {rank} {numa.format_range_list(mine)}"
        + (f" (memory node {numa.format_range_list(nodes)})" if nodes else "")
        for rank, (mine, (nodes, _)) in enumerate(zip(cores, numa.memory_of_ranks(cores)))
    )
    notes.append(f"Cores of the ranks: {shown}; {base['OMP_NUM_THREADS']} thread(s) each (OMP_NUM_THREADS).")
    return cores
