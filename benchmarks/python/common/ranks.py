"""Runs the file of a benchmark as the ranks of a job on this machine, and shows what rank 0 has found."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time


def measure(script, args, names, ranks, threads=1, python=sys.executable):
    """Starts ``script --worker --json FILE`` with the options ``names`` of ``args`` as ``ranks`` ranks.

    Returns what one of them has written into FILE; ends this program where a rank fails. ``threads``: of OpenMP, each.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "figures.json")
        command = [python, os.path.abspath(script), "--worker", "--json", out]
        for name in names:
            value = getattr(args, name.replace("-", "_"))
            if value is not False:
                command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        processes = []
        for rank in map(str, range(ranks)):
            env = dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS=str(threads))  # fmt: skip
            processes.append(subprocess.Popen(command, env=env))
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
        finally:  # The others may wait for a rank that failed.
            for process in processes:
                process.terminate()
        if any([process.wait() for process in processes]):
            sys.exit("a rank failed; its message is above")
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def run(script, args, work, names, count, **more):
    """The end of a benchmark: ``work(args)`` in a process that is a rank; else starts ``count`` ranks with the options
    ``names``, and shows what they found. ``more``: of ``measure``."""
    if args.worker:
        work(args)
    else:
        show(measure(script, args, names, count, **more), args.json)


def show(result, path):
    """Prints the figures of ``machine.write_json``, and writes all of it to ``path``, if there is one."""
    print(json.dumps(result["figures"], indent=1))
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file)
