"""The program that mpirun starts as each rank: it finds its place, binds its cores, and runs the script.

It waits for the script, to say which rank failed on which host: MPI's own words name the one or the other, or neither.
And Hydra (MPICH) lets the ranks of other hosts run on when one fails that has not called MPI, so that it must be told.
"""

import argparse
import os
import signal
import socket
import stat
import sys
import time

from deepspeed.host import numa
from deepspeed.host.cpu import physical_cores
from deepspeed.host.place import place_of
from deepspeed.launcher import exit_codes, linux
from deepspeed.launcher.resources import decode_world_info

_LAST_WORDS_S = 5.0
_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def parse_args(args=None):
    """The options as a namespace."""
    parser = argparse.ArgumentParser(description="Sets the variables of a rank that MPI started, and runs the script.")
    parser.add_argument("--launcher", default="", help="which MPI, for messages")
    parser.add_argument("--world_info", default="", help="hosts and slots, as encode_world_info says them")
    parser.add_argument("--module", action="store_true", help="the script is a module name")
    parser.add_argument("--no_python", action="store_true", help="the script is a program of its own")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank cores of its own")
    parser.add_argument("--bind_core_list", default=None, metavar="L", help="cores to share out")
    parser.add_argument("--enable_each_rank_log", default=None, metavar="DIR", help="each rank's output goes to a file")
    parser.add_argument("user_script", help="the script, with its arguments behind it")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def rank_command(args, environment):
    """``(command, variables, cores)`` of this rank; ``cores`` is None where none are bound."""
    world = decode_world_info(args.world_info) if args.world_info else {}
    counts = {host: slots if isinstance(slots, int) else len(slots) for host, slots in world.items()}
    place = place_of(environment, counts)
    command = [args.user_script]
    if not args.no_python:
        command = [sys.executable, "-u"] + (["-m"] if args.module else []) + command
    if not args.no_local_rank:
        command.append(f"--local_rank={place['LOCAL_RANK']}")
    variables = {name: str(value) for name, value in place.items()}
    cores = None
    if args.bind_cores_to_rank:
        if "KMP_AFFINITY" in environment:
            raise ValueError("KMP_AFFINITY is set and would bind threads a second time: unset it.")
        cores = numa.cores_of_rank(args.bind_core_list, place["LOCAL_SIZE"], place["LOCAL_RANK"])
        if not environment.get("OMP_NUM_THREADS"):
            variables["OMP_NUM_THREADS"] = str(len(physical_cores(cores)))
    return command + args.user_args, variables, cores


def write_to_file(folder, rank):
    """From now on stdout and stderr are a file in ``folder``."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def run_rank(command, environment, log_dir=None):
    """Runs the script, with all descriptors that MPI opened for the rank; returns its exit code.

    Signals of MPI go to the group of processes that it made of the rank, so that both of us get them: the script does
    what it does on them, and here they end nothing.
    """
    heard, started, helper = [], time.monotonic(), os.getpid()
    for sig in _GROUP:
        if signal.getsignal(sig) != signal.SIG_IGN:
            signal.signal(sig, lambda number, frame: heard.append(number))
    sys.stdout.flush()
    sys.stderr.flush()
    script = os.fork()
    if script == 0:
        _become(command, environment, log_dir, helper)
    code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
    if code and not heard:
        after_s = time.monotonic() - started
        print(
            f"deepspeed: rank {environment['RANK']} of {environment['WORLD_SIZE']} (pid {script}, host "
            f"{socket.gethostname()}) {exit_codes.how_it_ended(code)} {after_s:.1f} s after the start.",
            file=sys.stderr,
            flush=True,
        )
        end_job(environment, exit_codes.shell_code(code))
    return exit_codes.shell_code(code)


def end_job(environment, code):
    """Asks Hydra, which opened the descriptor PMI_FD for that, to end all ranks; mpirun then ends with ``code``.
    Another MPI does so by itself."""
    if environment.get("PMI_FD", "").isdigit():
        _wait_until_read(sys.stdout.fileno(), sys.stderr.fileno())
        try:
            os.write(int(environment["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
        except OSError:  # it is ending already
            pass


def _wait_until_read(*streams):
    # Hydra drops what it has not read of a rank when the job is over.
    limit = time.monotonic() + _LAST_WORDS_S
    for fd in streams:
        while stat.S_ISFIFO(os.fstat(fd).st_mode) and linux.unread(fd) and time.monotonic() < limit:
            time.sleep(0.01)


def _become(command, environment, log_dir, helper):
    # In the forked child: the script, which MPI's SIGKILL for the helper ends, too.
    try:
        linux.die_with_parent(helper)
        if log_dir:
            write_to_file(log_dir, environment["RANK"])
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"deepspeed: error: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def main(args=None):
    """Runs the script and returns its exit code; 1 with a sentence where that is not possible."""
    try:
        options = parse_args(args)
        command, variables, cores = rank_command(options, os.environ)
        if cores:
            os.sched_setaffinity(0, cores)
            linux.take_memory_from(*numa.memory_of_ranks([cores])[0])
        return run_rank(command, {**os.environ, **variables}, options.enable_each_rank_log)
    except (ValueError, OSError) as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
