"""A job on several hosts: its hosts, the share that each of them gets, and the connections to them."""

import contextlib
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor

from deepspeed.host.job_key import KEY_VARIABLE
from deepspeed.launcher import environment, plan
from deepspeed.launcher.agent import KEY_MARK
from deepspeed.launcher.elastic_head import ElasticHead
from deepspeed.launcher.head import Head
from deepspeed.launcher.host_link import Way
from deepspeed.launcher.launch import launch, pid_file
from deepspeed.launcher.plan import OPTIONS, LaunchError, Share, asked_port
from deepspeed.launcher.resources import counts_of, encode_world_info
from deepspeed.launcher.runners import RUNNERS
from deepspeed.launcher.runners.base import python_words

_KEY_LINE = re.compile(rb"(?m)^.*%s (\S+) ([0-9a-f]{32})\s*\n" % KEY_MARK.encode())

# The first lines that Python runs on a host. They find the package if it is not installed there.
_BOOT = (
    "import os,sys;p=sys.argv.pop(1);"
    "sys.path[:1]=[p] if os.path.isdir(os.path.join(p,'deepspeed')) else [];"
    "from deepspeed.launcher.agent import main;sys.exit(main())"
)


def agent_words(args, *more):
    """The command that starts an agent, as a list of arguments."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [*python_words(args), "-u", "-c", _BOOT, package, *more]


def local_addresses(hosts):
    """Addresses of this machine at which ``hosts`` may reach it, the most likely one first."""
    found = []
    for host in [*hosts, "192.0.2.1"]:  # 192.0.2.1 belongs to no host: it gives the interface of the default route
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname()]))


def which_are_here(hosts):
    """``{name: whether that is this machine}``; the names are looked up in parallel."""
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as threads:
        return dict(zip(hosts, threads.map(plan.is_this_host, hosts)))


def listen(port=0):
    """A socket to which hosts connect; LaunchError if the port is taken."""
    meeting = socket.socket(socket.AF_INET)
    # torch's store sets this, too: it can listen at the same port once all hosts have joined.
    meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        meeting.bind(("", port))
        meeting.listen(1024)
    except OSError as error:
        meeting.close()
        raise LaunchError(
            f"port {port} of this machine cannot be listened on ({error.strerror}): choose a free one with "
            f"--master_port PORT."
        ) from None
    meeting.setblocking(False)
    return meeting


def address_of(first, hosts, near):
    """The address at which ``hosts`` reach ``first``, which is one of them. ``near``: whether they are this machine."""
    if near.get(first.name, False):
        return local_addresses([host.name for host in hosts if host is not first])[0]
    return first.facts.get("address") or first.peer or first.name


class ClusterJob:
    """``hosts``: ``{name: slots}``. ``runner`` starts their agents; None if the hosts connect by themselves."""

    hosts_come_alone = False  # users start the agents: the head waits for them, and tells all how the job has ended
    insecure = False  # accept agents of other machines that do not know the key

    def __init__(self, args, hosts, runner, verbose=True):
        self.args, self.hosts, self.runner, self.verbose = args, hosts, runner, verbose
        self.join_timeout = args.join_timeout
        self.grace_s = plan.grace_s()
        self.master_port = asked_port(args)
        self.first_failing = None
        self._exports = environment.exports(os.environ, environment.read_environment_files())
        paths = os.path.abspath("."), self._exports.get("PYTHONPATH", "")
        self._exports["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.key = os.urandom(16).hex()
        self._keys = {}  # host -> key, for agents that make their own; None until the agent has sent it
        self.meeting = None
        self._near = which_are_here(hosts)

    # ---- reaching the hosts --------------------------------------------------------------------------------------
    def start_ways(self, hosts):
        """Starts the programs that connect to the hosts."""
        far = [host for host in hosts if not (self._near[host.name] or self.runner.one_link_per_host)]
        ways = [self.start_way(host) for host in hosts if host not in far]
        if not far:
            return ways
        self.meeting = listen()
        names = [host.name for host in far]
        where = f"{','.join(local_addresses(names))}:{self.meeting.getsockname()[1]}"
        wanted = ["--port", str(self.master_port or 0)]
        variables = dict(os.environ)
        if self.runner.passes_environment:
            variables[KEY_VARIABLE] = self.key
        else:
            wanted.append("--tell-key")
            self._keys = {name: None for name in names}
        words = agent_words(self.args, "--connect", where, *wanted, "--wait", f"{self.join_timeout:g}")
        command = self.runner.agents_command(names, words, variables)
        return [*ways, Way(command, variables, False, self.hear_keys)]

    def start_way(self, host):
        """Starts the program that connects to ``host`` alone."""
        words = self._words(host)
        if host.name not in self._near:
            self._near[host.name] = plan.is_this_host(host.name)
        near = self._near[host.name] or self.runner is None
        host.way = Way(words if near else self.runner.agent_command(host.name, words), dict(os.environ), True)
        host.link = host.way.link
        return host.way

    def can_reach(self, host):
        """Whether ``start_way`` may reconnect to ``host`` after its link was lost."""
        return True

    def hosts_now(self):
        """``{name: slots}`` as the hostfile lists them now. The hostfile of an elastic job may grow."""
        with contextlib.suppress(ValueError, OSError, LaunchError):  # the file is being written
            self.hosts = {**(plan.active_hosts(self.args, []) or {}), **self.hosts}
        return self.hosts

    def _words(self, host):
        meets = host.node == 0 or self.args.elastic_training
        port = ["--port", str(self.master_port or 0)] if meets else []
        return agent_words(self.args, "--node", str(host.node), *port)

    def host_of(self, join, hosts):
        """``(host, "")`` for the host that the message ``join`` names, or ``(None, reason)``."""
        found = next((host for host in hosts if host.name == join.get("name")), None)
        return found, "" if found is not None else f"no host of this job is called {join.get('name')!r}"

    def key_of(self, host):
        """The key that the agent of ``host`` must prove to know; None until the agent has sent it."""
        return self._keys.get(host.name, self.key)

    def hear_keys(self, said):
        """Takes the keys of agents out of ``said``, complete output lines of the program that started them.

        Returns the rest of ``said``.
        """

        def take(found):
            name, key = found[1].decode(), found[2].decode()
            if self._keys.get(name, "") is None:
                self._keys[name] = key
            return b""

        return _KEY_LINE.sub(take, said)

    def port_of(self, first):
        """The port of rank 0, which runs on the host ``first``; None if the requested port is taken."""
        return first.facts.get("port") or None

    # ---- shares --------------------------------------------------------------------------------------------------
    def shares(self, hosts, slots=None, elastic=None):
        """The ``Share`` of each host, as a message. ``slots``: of each host, default all; ``elastic``: see there."""
        first, slots = hosts[0], slots or [host.slots for host in hosts]
        near = all(self._near.get(host.name, False) for host in hosts)
        address = self.args.master_addr or ("127.0.0.1" if near else self._address_of(first, hosts))
        options = {name: getattr(self.args, name) for name in OPTIONS}
        counts, ids = [len(own) for own in slots], self.args.device_ids
        return [
            vars(Share(
                host=host.name if len(self.hosts) > 1 else "", node=node, counts=counts, slots=own,
                master_addr=address, master_port=self.port_of(first), options=options, exports=self._exports,
                folder=os.path.abspath("."), device_ids=None if ids is None else ids[: len(own)], elastic=elastic,
            ))
            for node, (host, own) in enumerate(zip(hosts, slots))
        ]  # fmt: skip

    def _address_of(self, first, hosts):
        return address_of(first, hosts, self._near)


def choose_runner(args, hosts, notes):
    """The runner of ``--launcher``; ssh if that is pdsh and pdsh is not installed."""
    name = args.launcher.lower()

    def made(name):
        kind = RUNNERS.get(name)
        return kind(args, encode_world_info(hosts), *([counts_of(hosts)] if kind.takes_pool else []))

    if args.elastic_training and name == "pdsh":
        name = "ssh"  # hosts of an elastic job join and leave one by one
    runner = made(name)
    if args.elastic_training and not runner.one_link_per_host:
        raise ValueError(
            f"--elastic_training reaches each host by itself, which --launcher {name} does not: take --launcher ssh, "
            f"or start the job on every host with --no_ssh (also under srun)."
        )
    why = runner.why_not()
    if why and name == "pdsh":
        notes.append("pdsh is not installed; the hosts are reached by ssh.")
        runner = made("ssh")
        why = runner.why_not()
    if why and (runner.starts_ranks or not all(which_are_here(hosts).values())):
        raise LaunchError(why)
    return runner


def run_cluster(args, hosts, verbose):
    """Runs the job on ``hosts``; returns its exit code."""
    notes = []
    runner = choose_runner(args, hosts, notes)
    plan.show_notes(notes, verbose)
    if runner.starts_ranks:
        try:
            made = mpi_plan(args, hosts, runner)
            plan.show_notes(made.notes, verbose)
            return launch(made)
        finally:
            runner.tidy()
    return run_head(ClusterJob(args, hosts, runner, verbose))


def run_head(job):
    """Runs a ``ClusterJob``; returns its exit code."""
    with pid_file(job.args.save_pid):
        return (ElasticHead if job.args.elastic_training else Head)(job).run()


def mpi_plan(args, hosts, runner):
    """A ``NodePlan`` whose one process is mpirun."""
    if runner.reads_hostfile and not os.path.exists(args.hostfile):
        raise LaunchError(
            f"--launcher {runner.name} reads the hostfile itself, and there is no {args.hostfile}: write one (-H FILE)."
        )
    exports = environment.exports(os.environ, environment.read_environment_files())
    first, notes = next(iter(hosts)), []
    near = plan.is_this_host(first)
    if near:  # rank 0 will listen here
        port, claim = plan.choose_port(args, notes)
    else:
        port, claim = asked_port(args) or plan.DEFAULT_PORT, None
    address = args.master_addr or (local_addresses([host for host in hosts if host != first])[0] if near else first)
    for name, value in {**exports, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        runner.add_export(name, value)
    variables = dict(os.environ)
    command = [runner.program_here(), *runner.get_cmd(variables, hosts)[1:]]
    return plan.NodePlan(
        [command], [variables], [None], plan.grace_s(), notes=notes, starter="mpirun", port_claim=claim
    )
