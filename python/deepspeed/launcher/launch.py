"""Starts one node's ranks under two processes that guard each other.

The front process is the one the user sees: it takes signals and gives the exit code. Its child, the supervisor, owns
the ranks. Each of the two ends everything below it when the other is killed, and both adopt orphans, so that neither
a rank nor a helper that a rank started survives the job.

``python -m deepspeed.launcher.launch`` starts one host's share of a job whose hosts and slots are known.
"""

import argparse
import contextlib
import os
import signal
import sys
import time

from deepspeed.launcher import linux
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.exit_codes import shell_code
from deepspeed.launcher.options import COMMAND_OPTIONS, add_options, parse_command, switch
from deepspeed.launcher.plan import DEFAULT_PORT, Share
from deepspeed.launcher.resources import decode_world_info
from deepspeed.launcher.supervisor import Supervisor
from deepspeed.registry import load_target

# Signals that are passed on to the ranks.
FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)


_OPTIONS = {
    "--world_info": {"default": "", "metavar": "TEXT", "help": "hosts and slots, as encode_world_info says them"},
    "--node_rank": {"type": int, "default": 0, "metavar": "N", "help": "number of this host among them"},
    "--master_addr": {"default": "127.0.0.1", "help": "address of rank 0"},
    "--master_port": {"type": int, "default": DEFAULT_PORT, "metavar": "PORT", "help": "port of rank 0"},
    **COMMAND_OPTIONS,
    "--save_pid": {"type": int, "default": 0, "metavar": "PID", "help": "write this process's id to /tmp/PID.ds"},
    "--enable_each_rank_log": {"metavar": "DIR", "help": "each rank's output goes to a file there"},
    "--log_rank_prefix": switch("start each line with [host:rank]"),
    "--bind_cores_to_rank": switch("give each rank cores of its own"),
    "--bind_core_list": {"metavar": "L", "help": "cores to share out"},
    "--enable_elastic_training": switch("start the ranks again when one fails or hosts go"),
    "--min_elastic_nodes": {"type": int, "default": -1, "metavar": "N", "help": "fewest hosts then"},
    "--max_elastic_nodes": {"type": int, "default": -1, "metavar": "N", "help": "most hosts then"},
    "--insecure": switch("let other hosts in although DS_JOB_KEY is not set"),
    "--job_id": {"default": "", "help": "a word by which the processes of a job can be told from others"},
    "training_script": {"help": "the script, with its arguments behind it"},
    "training_script_args": {"nargs": argparse.REMAINDER},
}


def launch(plan):
    """Runs a ``NodePlan``; returns the exit code of the job when no process of it is left."""
    if plan.log_dir:
        os.makedirs(plan.log_dir, exist_ok=True)
    with pid_file(plan.save_pid):
        linux.become_subreaper()
        front = os.getpid()
        # Processes of a program that calls this function are left alone.
        others = set(linux.descendants(front))
        # A process that ignores SIGCHLD (some daemons do, and children inherit it) gets no status of an ended child.
        child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Blocked until the supervisor is ready for them: a signal between fork and its handlers would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        supervisor = linux.fork(lambda: supervise(plan, front))
        try:
            return _wait(supervisor, others)
        finally:
            linux.become_subreaper(False)
            signal.signal(signal.SIGCHLD, child_handler or signal.SIG_DFL)


def supervise(plan, front):
    """In a forked child of the process ``front``: runs the plan; returns the exit code of the job."""
    try:
        return Supervisor(plan, front).run()
    except OSError as error:
        raise OSError(f"a rank could not be started: {error}") from None


def _wait(supervisor, others):
    def forward(sig, frame):
        linux.kill(supervisor, sig)
        if sig == signal.SIGTSTP:  # Ctrl-Z: the ranks are not in the terminal's group, so this process stops them
            os.kill(os.getpid(), signal.SIGSTOP)
            linux.kill(supervisor, signal.SIGCONT)

    with linux.handling(linux.not_ignored((*FORWARDED, signal.SIGTSTP)), forward):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        _, status = os.waitpid(supervisor, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # the supervisor was killed, so this process cleans up
        kill_descendants(others)
        sys.stderr.write(f"deepspeed: the supervising process was killed by signal {-code}; the job was ended.\n")
    return shell_code(code)


def kill_descendants(others):
    """Ends all processes below this one but ``others``."""
    while left := set(linux.descendants(os.getpid())).difference(others):
        linux.kill_all(left)
        time.sleep(0.01)


@contextlib.contextmanager
def pid_file(pid=True):
    """A context in which this process's id is in /tmp/<pid>.ds, where ``pid`` is True for that id; none for a false
    ``pid``."""
    if not pid:
        yield
        return
    path = f"/tmp/{os.getpid() if pid is True else pid}.ds"
    write_new(path, [str(os.getpid())])
    try:
        yield
    finally:
        os.unlink(path)


def write_new(path, texts):
    """Writes a file into a folder to which all users can write, and returns its status. A link that another user made
    there is not followed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(texts)
        file.flush()
        return os.fstat(descriptor)


def parse_args(args=None):
    """The options of ``python -m deepspeed.launcher.launch`` as a namespace."""
    parser = argparse.ArgumentParser(description="Starts the ranks of one host and watches over them.")
    words = sys.argv[1:] if args is None else args
    return parse_command(add_options(parser, _OPTIONS), words, "training_script_args")


def slots_of(args):
    """``{host: [slot, ...]}`` of ``--world_info``; ValueError for a world that has no such host."""
    world = decode_world_info(args.world_info)
    if not 0 <= args.node_rank < len(world):
        raise ValueError(f"--node_rank is {args.node_rank}, but --world_info has {len(world)} host(s).")
    return {host: list(range(slots)) if isinstance(slots, int) else slots for host, slots in world.items()}


def plan_of(args):
    """The ``NodePlan`` for the options of this program."""
    world = slots_of(args)
    slots, several = list(world.values()), len(world) > 1
    share = Share(
        host=list(world)[args.node_rank] if several and args.log_rank_prefix else "",
        node=args.node_rank,
        counts=[len(one) for one in slots],
        slots=slots[args.node_rank],
        master_addr=args.master_addr,
        master_port=args.master_port,
        options={**vars(args), "user_script": args.training_script, "user_args": args.training_script_args},
    )
    return share.plan(dict(os.environ))


def main(args=None):
    """Runs the share to its end; returns the exit code, 1 with a sentence where it could not be started."""
    try:
        options = parse_args(args)
        if options.enable_elastic_training:
            return load_target("deepspeed.launcher.no_ssh:run_elastic_share")(options, slots_of(options))
        if options.min_elastic_nodes > 0 or options.max_elastic_nodes > 0:
            raise ValueError("--min_elastic_nodes and --max_elastic_nodes need --enable_elastic_training.")
        return launch(plan_of(options))
    except (LaunchError, ValueError, OSError) as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
