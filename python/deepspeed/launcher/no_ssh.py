"""``--no_ssh``: a user or a cluster starts the same command on every host, and the hosts find each other.

Host 0 is the head. It listens at the address and port of rank 0, and the other hosts connect to it in any order. Each
host keeps its own variables, folder and output. If the head of an elastic job is lost, the others keep their snapshots
in memory and wait until the head is started again.
"""

import contextlib
import os
import socket
import sys

from deepspeed.host.job_key import KEY_VARIABLE, NO_KEY
from deepspeed.launcher import environment, plan
from deepspeed.launcher.agent import Agent, connect, facts
from deepspeed.launcher.arguments import build_parser, check
from deepspeed.launcher.cluster import ClusterJob, agent_words, listen, run_head
from deepspeed.launcher.launch import launch
from deepspeed.launcher.plan import OPTIONS, LaunchError, Share, asked_port

# Variables in which clusters give the number of this host and the number of hosts.
_NODE = ("NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID", "GROUP_RANK")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES")


class HandStartedJob(ClusterJob):
    """The job as host 0 sees it: all hosts connect by themselves, this one through a child process."""

    hosts_come_alone = True

    def __init__(self, args, nodes, slots, address, port, verbose):
        names = [socket.gethostname()] + [f"number {node}" for node in range(1, nodes)]
        super().__init__(args, {name: slots if node == 0 else [] for node, name in enumerate(names)}, None, verbose)
        self._address, self._port = address, port
        self._exports = environment.read_environment_files()
        self.key = os.environ.get(KEY_VARIABLE, "")
        self.insecure = args.insecure

    def start_ways(self, hosts):
        self.meeting = listen(self._port)
        return [self.start_way(hosts[0])]

    def can_reach(self, host):
        return host.node == 0

    def hosts_now(self):
        return {}

    def _words(self, host):
        # Hosts of an elastic job connect to the head's port; ranks meet at other ports.
        return agent_words(self.args, "--node", "0", *(["--port", "0"] if self.args.elastic_training else []))

    def host_of(self, join, hosts):
        node, nodes = join.get("node", -1), join.get("nodes")
        if nodes != len(hosts):
            return None, f"host {node} was started for {nodes} hosts, and host 0 for {len(hosts)}"
        if not 0 < node < len(hosts):
            return None, f"there is no host {node} among {len(hosts)}"
        return hosts[node], ""

    def port_of(self, first):
        return super().port_of(first) if self.args.elastic_training else self._port

    def _address_of(self, first, hosts):
        return self._address if first.node == 0 else first.peer

    def shares(self, hosts, slots=None, elastic=None):
        self.args.master_addr = self._address_of(hosts[0], hosts)
        return super().shares(hosts, slots, elastic)


def _number(names, what):
    name = next(filter(os.environ.get, names), None)
    if name is not None and not os.environ[name].isdigit():
        raise ValueError(f"the environment variable {name} is {os.environ[name]!r}; it is {what}.")
    return None if name is None else int(os.environ[name])


def where(args, notes):
    """``(number of this host, number of hosts, slots, device ids, address of host 0)``; LaunchError if
    neither an option nor a variable gives one of them."""
    hosts = plan.active_hosts(_without_count(args), notes)
    node = args.node_rank if args.node_rank >= 0 else _number(_NODE, "the number of this host")
    asked = next((count for count in (args.num_nodes, args.max_elastic_nodes) if count > 0), None)
    nodes = len(hosts) if hosts else asked or _number(_NODES, "the number of hosts")
    address = args.master_addr or os.environ.get("MASTER_ADDR") or (next(iter(hosts)) if hosts else "")
    needs = "--no_ssh needs the"
    for wrong, why in (
        (nodes is None, f"{needs} number of hosts: give --num_nodes N, or a hostfile that names them."),
        (node is None, f"{needs} number of this host: give --node_rank, or set one of {', '.join(_NODE)}."),
        (
            None not in (node, nodes) and not 0 <= node < nodes,
            f"--node_rank is {node}, but there are {nodes} host(s), numbered from 0.",
        ),
        (not address, f"{needs} address of host 0: give --master_addr, or set MASTER_ADDR."),
    ):
        if wrong:
            raise LaunchError(why)
    if not hosts:
        slots, ids = plan.choose_slots(_without_count(args), notes)
        return node, nodes, list(range(len(slots))), ids, address
    return node, nodes, list(hosts.values())[node], None, address


def _without_count(args):
    # Without a hostfile --num_nodes does not select among listed hosts.
    return args if os.path.exists(args.hostfile) else type(args)(**{**vars(args), "num_nodes": -1})


def run_no_ssh(args, verbose):
    """Runs this host's part of the job; every host returns the exit code of the job."""
    notes = []
    node, nodes, slots, ids, address = where(args, notes)
    if nodes == 1 and not args.elastic_training:
        made = plan.make_plan(args)
        plan.show_notes(made.notes, verbose)
        return launch(made)
    plan.show_notes(notes, verbose)
    return _run_part(args, node, nodes, slots, ids, address, verbose)


def run_elastic_share(args, world):
    """One host's part of an elastic job, by the options of ``deepspeed.launcher.launch``.

    ``world``: ``{host: [slot, ...]}``.
    """
    told = build_parser().parse_args(["--no_ssh", "--elastic_training", args.training_script])
    known = {name: value for name, value in vars(args).items() if hasattr(told, name)}
    vars(told).update(known, user_args=args.training_script_args)
    check(told)
    slots = list(world.values())[args.node_rank]
    return _run_part(told, args.node_rank, len(world), slots, None, args.master_addr, True)


def _run_part(args, node, nodes, slots, ids, address, verbose):
    port = asked_port(args) or plan.DEFAULT_PORT
    args.device_ids = ids
    key = os.environ.get(KEY_VARIABLE, "")
    if args.insecure and not key:
        print(
            f"deepspeed: warning: --insecure without {KEY_VARIABLE}: any host that reaches port {port} can "
            f"take part in the job and read its environment.",
            file=sys.stderr,
        )
    if node == 0:
        if not (key or args.insecure):
            print(f"deepspeed: {NO_KEY}.", file=sys.stderr)
        return run_head(HandStartedJob(args, nodes, slots, address, port, verbose))
    own = Share(
        host="", node=node, counts=[], slots=slots, master_addr=address, master_port=port,
        options={name: getattr(args, name) for name in OPTIONS}, exports=environment.read_environment_files(),
        device_ids=ids,
    )  # fmt: skip
    meets = 0 if args.elastic_training else None  # the port of rank 0, if it runs on this host
    hello = {"node": node, "nodes": nodes, "slots": slots, "name": socket.gethostname()}
    with contextlib.closing(Agent(own)) as agent:
        while True:
            link = connect([address], port, key, hello, args.join_timeout, args.insecure)
            code = agent.serve(link, node, facts(meets), meets)
            if not link.lost or not args.elastic_training:
                return code
            print(f"deepspeed: waiting {args.join_timeout:.0f} s (--join_timeout) for another head.", file=sys.stderr)
