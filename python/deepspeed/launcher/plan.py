"""Makes a plan of the processes to start from the command line. All checks are done before the first process starts."""

import os
import socket
import sys
from types import SimpleNamespace

from deepspeed.host import devices, numa, ports
from deepspeed.host.addresses import is_own_address
from deepspeed.host.programs import find_program
from deepspeed.host.variables import number
from deepspeed.host.vendors import VENDORS
from deepspeed.launcher import environment
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.device_count import ask, is_asked
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.resources import parse_hostfile_lines, parse_inclusion_exclusion, parse_resource_filter

DEFAULT_PORT = 29500
# From the first failure: SIGTERM at once, SIGKILL after this many seconds.
GRACE_S = 5.0
_HERE = ("localhost", "127.0.0.1", "::1")


class NodePlan(SimpleNamespace):
    """One host's share of a job: for each rank a command, an environment and its cores (None: all).

    ``grace_s``: seconds between SIGTERM (or Ctrl-C) and SIGKILL; ``failure_grace_s``: that for the others when a rank
    has failed. ``first_rank``, ``world``: of the job, which may have ranks on other hosts. ``host``: what output calls
    this host. ``notes`` are lines to show before the start; ``prefix`` puts host and rank before each line of output;
    ``log_dir`` is the folder that gets the output instead; ``save_pid`` leaves the launcher's process id in a file (a
    number: that of the process after which the file is named). ``report_fd``: the supervisor writes failures there, one
    JSON object per line, instead of showing them. ``starter``: the name of a single command that starts the ranks
    itself and reports which of them failed. ``memory``: for each rank the arguments of ``linux.take_memory_from``.
    ``port_claim``: held while the job runs. ``forks``: ranks are forked from the supervisor, with the descriptors
    ``kept_fds``.
    """

    def __init__(self, commands, environments, cores, grace_s=GRACE_S, **more):
        defaults = dict(
            notes=(), prefix=False, log_dir=None, save_pid=False, first_rank=0, world=len(commands), host="",
            memory=[((), False)] * len(commands), port_claim=None, report_fd=None, starter="", forks=False, kept_fds=(),
        )  # fmt: skip
        super().__init__(
            commands=commands, environments=environments, cores=cores, grace_s=grace_s, failure_grace_s=grace_s,
            **{**defaults, **more},
        )  # fmt: skip

    def line_prefix(self, rank):
        """The bytes that precede each output line of ``rank``."""
        if not self.prefix:
            return b""
        return f"[{self.host}:{rank}] ".encode() if self.host else f"[rank {rank}] ".encode()


# Options of the launcher that a host needs to start its ranks.
OPTIONS = (
    "user_script", "user_args", "module", "no_python", "no_local_rank", "bind_cores_to_rank", "bind_core_list",
    "log_rank_prefix", "enable_each_rank_log", "save_pid",
)  # fmt: skip
_RESTART_GRACE_S = 1.0  # between SIGTERM and SIGKILL for ranks that start again at once


class Share(SimpleNamespace):
    """The share of one host in a job; ``Share(**vars(share))``, on another host, is the same.

    host: its name in output lines, empty for none; node: its number. counts: ranks of every host.
    slots: of this host, one per rank. device_ids: the names of these devices if they are known already, none at all
    where they are to be left alone. options: values of ``OPTIONS``. exports: variables from the host where the job was
    started. folder: the working folder of the ranks; None: that of this process. elastic: variables that tell ranks
    that the job may start again; None: it may not. master_addr, master_port: where rank 0 listens.
    """

    def __init__(self, options, **more):
        options = {name: options[name] for name in OPTIONS}
        super().__init__(**{**dict(exports={}, folder=None, device_ids=None, elastic=None), **more}, options=options)

    def plan(self, inherited, notes=()):
        """The ``NodePlan`` on this host, from its environment ``inherited``; LaunchError if it lacks something."""
        args, notes = SimpleNamespace(**self.options), list(notes)
        first, count = sum(self.counts[: self.node]), len(self.slots)
        if self.folder is not None:
            self._enter()
        check_script(args)
        base = merged(inherited, self.exports)
        cores = bind_cores(args, count, base, notes)
        shared = environment.host_environment(base, self, self._devices(base), notes)
        ranks = [{"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(count)]
        prefix = self.host or args.log_rank_prefix or os.environ.get("DS_LOG_RANK_PREFIX", "0") not in ("", "0")
        made = NodePlan(
            commands=[environment.script_command(args, local) for local in range(count)],
            environments=[{**shared, **own, **(self.elastic or {})} for own in ranks],
            cores=cores, notes=notes, prefix=bool(prefix),
            log_dir=args.enable_each_rank_log if args.enable_each_rank_log not in (None, "None", "") else None,
            save_pid=args.save_pid, grace_s=grace_s(base), first_rank=first, world=sum(self.counts), host=self.host,
            memory=numa.memory_of_ranks(cores),
        )  # fmt: skip
        if self.elastic is not None:
            made.failure_grace_s = min(made.grace_s, _RESTART_GRACE_S)
        return made

    def _enter(self):
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise LaunchError(
                f"the folder {self.folder}, where the job was started, cannot be entered on this host "
                f"({error.strerror}): start the job in a folder that all hosts share."
            ) from None

    def _devices(self, base):
        if self.device_ids is not None:
            return self.device_ids
        local, on_gpu = local_slots(base, [])
        if on_gpu:
            return gpu_ids(self.slots, local, "the hostfile")
        return self.slots if base.get("DS_ACCELERATOR", "") not in ("", "cpu", "cuda") else None


def merged(inherited, exports):
    """``inherited`` with ``exports``; a search path for modules is put in front of the host's own."""
    paths = [path for each in (exports, inherited) for path in each.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} if exports.get("PYTHONPATH") else {}
    return {**inherited, **exports, **path}


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


def local_slots(variables, notes):
    """``(slots of this machine, True when a variable chooses among them)``. ``variables`` gets the name of an
    accelerator that ranks would choose by its package."""
    wanted = variables.get("DS_ACCELERATOR", "")
    if is_asked(wanted):
        name, count, why_not = ask(variables)
        if count and name not in ("cuda", "cpu"):
            variables["DS_ACCELERATOR"] = name
            row = VENDORS.get(name)
            given = [part for part in variables.get(row.visible, "").split(",") if part] if row is not None else []
            return given if len(given) == count else list(range(count)), row is not None and bool(row.visible)
        if wanted:
            notes.append(
                f"The launcher cannot count devices of DS_ACCELERATOR={wanted}: --num_accelerators N says how many "
                f"({why_not or 'there are none'})."
            )
            return [0], False
    gpus = devices.visible_gpu_ids() if wanted in ("", "cuda") else []
    if gpus:
        return gpus, True
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
    active = _some_left(parse_inclusion_exclusion(pool, args.include, args.exclude))
    if args.num_gpus <= 0:
        return active
    return {
        host: first_slots(slots, args.num_gpus, f"the host {host} of the hostfile {args.hostfile}")
        for host, slots in active.items()
    }


def choose_slots(args, notes):
    """``(slots of this node, ids for the variable of visible devices or None)`` by hostfile, filters and --num_accelerators."""
    local, on_gpu = local_slots(os.environ, notes)
    active = active_hosts(args, notes)
    if active is None:
        slots = _choose_local(args, local, on_gpu, notes)
        return slots, slots if on_gpu else None
    slots = next(iter(active.values()), [])
    return slots, gpu_ids(slots, local, f"the hostfile {args.hostfile}") if on_gpu else None


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
        of_cuda = environment.visible_variable(os.environ) == "CUDA_VISIBLE_DEVICES"
        if on_gpu and of_cuda and devices.visible_device_ids() is not None:
            notes.append("CUDA_VISIBLE_DEVICES is replaced by what --include/--exclude choose.")
            every = [str(index) for index in range(devices.nvidia_device_count())]
        return _some_left(parse_resource_filter({"localhost": every}, args.include, args.exclude))["localhost"]
    if args.num_gpus <= 0:
        return local
    if not on_gpu:
        return list(range(args.num_gpus))
    return first_slots(local, args.num_gpus, "this machine (CUDA_VISIBLE_DEVICES included)")


def _some_left(active):
    # The hosts with slots after the filters; LaunchError for none.
    found = {host: slots for host, slots in active.items() if slots}
    if not found:
        raise LaunchError("no slot is left after --include/--exclude: nothing would be started.")
    return found


def first_slots(slots, count, where):
    """The first ``count`` of ``slots``; LaunchError when there are fewer."""
    if count > len(slots):
        raise LaunchError(
            f"--num_accelerators (--num_gpus) is {count}, but {where} offers {len(slots)}: ask for fewer."
        )
    return slots[:count]


def asked_port(args):
    """The port of ``--master_port`` or of the variable MASTER_PORT, or None."""
    text = os.environ.get("MASTER_PORT", "") if args.master_port is None else str(args.master_port)
    if text and not (text.strip().isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"the environment variable MASTER_PORT is {text!r}, which is not a port number.")
    return int(text) if text else None


def choose_port(args, notes):
    """The port where the ranks meet, and the claim that keeps other launchers off it; LaunchError when the one that was
    asked for is taken."""
    asked = asked_port(args)
    if asked is None:
        port, claim = ports.claim_any_port(DEFAULT_PORT)
        if port != DEFAULT_PORT:
            notes.append(
                f"The default port {DEFAULT_PORT} is in use by another process; the ranks meet at port {port}."
            )
        return port, claim
    claim = ports.claim_port(asked)
    if claim is None:
        source = "the environment variable MASTER_PORT" if args.master_port is None else "--master_port"
        raise LaunchError(
            f"port {asked} ({source}) of this machine is in use by another process, perhaps another training: choose a "
            f"free one with --master_port PORT, or leave it out and one is chosen."
        )
    return asked, claim


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
    return max(0.0, number("DS_LAUNCHER_GRACE_S", GRACE_S, variables=variables))


def make_plan(args):
    """The ``NodePlan`` for parsed and checked arguments of a job on this host alone."""
    check_script(args)
    notes = []
    slots, device_ids = choose_slots(args, notes)
    base = {**os.environ, **environment.read_environment_files()}
    port, claim = choose_port(args, notes)
    share = Share(
        host="", node=0, counts=[len(slots)], slots=slots, master_addr=args.master_addr or "127.0.0.1",
        master_port=port, options=vars(args), device_ids=device_ids or [],
    )  # fmt: skip
    plan = share.plan(base, notes)
    plan.port_claim = claim
    return plan


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
