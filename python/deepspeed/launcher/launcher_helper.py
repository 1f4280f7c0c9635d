"""The program that mpirun starts as each rank: it finds its rank, binds its cores, and runs the script.

It waits for the script, to say which rank failed on which host: MPI's own words name the one or the other, or neither.
And Hydra (MPICH) lets the ranks of other hosts run on when one fails that has not called MPI, so that it must be told.
"""

import argparse
import contextlib
import os
import signal
import stat
import sys
import time

from deepspeed.host import numa
from deepspeed.host.cpu import physical_cores
from deepspeed.host.mpi_ranks import ranks_of
from deepspeed.launcher import exit_codes, linux
from deepspeed.launcher.environment import script_command
from deepspeed.launcher.options import COMMAND_OPTIONS, add_options, parse_command, switch
from deepspeed.launcher.output import log_file
from deepspeed.launcher.resources import counts_of, decode_world_info

_LAST_WORDS_S = 5.0
_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


_OPTIONS = {
    "--launcher": {"default": "", "help": "which MPI, for messages"},
    "--world_info": {"default": "", "help": "hosts and slots, as encode_world_info says them"},
    **COMMAND_OPTIONS,
    "--bind_cores_to_rank": switch("give each rank cores of its own"),
    "--bind_core_list": {"metavar": "L", "help": "cores to share out"},
    "--enable_each_rank_log": {"metavar": "DIR", "help": "each rank's output goes to a file"},
    "user_script": {"help": "the script, with its arguments behind it"},
    "user_args": {"nargs": argparse.REMAINDER},
}


def parse_args(args=None):
    """The options as a namespace."""
    parser = argparse.ArgumentParser(description="Sets the variables of a rank that MPI started, and runs the script.")
    words = sys.argv[1:] if args is None else args
    return parse_command(add_options(parser, _OPTIONS), words, "user_args")


def rank_command(args, environment):
    """``(command, variables, cores)`` of this rank; ``cores`` is None where none are bound."""
    ranks = ranks_of(environment, counts_of(decode_world_info(args.world_info)) if args.world_info else {})
    variables, cores = {name: str(value) for name, value in ranks.items()}, None
    if args.bind_cores_to_rank:
        if "KMP_AFFINITY" in environment:
            raise ValueError("KMP_AFFINITY is set and would bind threads a second time: unset it.")
        cores = numa.cores_of_rank(args.bind_core_list, ranks["LOCAL_SIZE"], ranks["LOCAL_RANK"])
        if not environment.get("OMP_NUM_THREADS"):
            variables["OMP_NUM_THREADS"] = str(len(physical_cores(cores)))
    return script_command(args, ranks["LOCAL_RANK"]), variables, cores


def write_to_file(folder, rank):
    """From now on stdout and stderr are a file in ``folder``."""
    os.makedirs(folder, exist_ok=True)
    with log_file(folder, rank) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def run_rank(command, environment, log_dir=None):
    """Runs the script, with all descriptors that MPI opened for the rank; returns its exit code.

    Signals of MPI go to the group of processes that it made of the rank, so that both of us get them: the script does
    what it does on them, and here they end nothing.
    """
    heard, started, helper = [], time.monotonic(), os.getpid()
    for sig in linux.not_ignored(_GROUP):
        signal.signal(sig, lambda number, frame: heard.append(number))

    def become():  # MPI's SIGKILL for the helper ends the script, too
        linux.die_with_parent(helper)
        if log_dir:
            write_to_file(log_dir, environment["RANK"])
        os.execvpe(command[0], command, environment)

    script = linux.fork(become)
    code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
    if code and not heard:
        name = f"rank {environment['RANK']} of {environment['WORLD_SIZE']}"
        said = exit_codes.report(name, script, "", code, time.monotonic() - started)
        print(f"{said}.", file=sys.stderr, flush=True)
        end_job(environment, exit_codes.shell_code(code))
    return exit_codes.shell_code(code)


def end_job(environment, code):
    """Asks Hydra, which opened the descriptor PMI_FD for that, to end all ranks; mpirun then ends with ``code``.
    Another MPI does so by itself."""
    if environment.get("PMI_FD", "").isdigit():
        _wait_until_read(sys.stdout.fileno(), sys.stderr.fileno())
        with contextlib.suppress(OSError):  # it is ending already
            os.write(int(environment["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)


def _wait_until_read(*streams):
    # Hydra drops what it has not read of a rank when the job is over.
    limit = time.monotonic() + _LAST_WORDS_S
    for fd in streams:
        while stat.S_ISFIFO(os.fstat(fd).st_mode) and linux.unread(fd) and time.monotonic() < limit:
            time.sleep(0.01)


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
