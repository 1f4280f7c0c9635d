"""``ds_bench``: how fast collectives are, at one size or over many, on this machine or several hosts.

ds_bench --num_accelerators 2 --scan
deepspeed -H hosts --module deepspeed.comm.bench --all-reduce --maxsize 26
"""

import argparse
import os
import subprocess
import sys
import time

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import collectives, process_group
from deepspeed.comm.bandwidth import bandwidths, readable_size
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.host.command_line import program

DTYPES = {"float": torch.float32, "float32": torch.float32, "half": torch.float16, "float16": torch.float16,
          "bfloat16": torch.bfloat16}  # fmt: skip


def _there_and_back(value, other):
    # Rank 0 to rank 1 and back: one message each way.
    rank = process_group.get_rank()
    if rank == 0:
        collectives.send(value, 1)
        collectives.recv(other, 1)
    elif rank == 1:
        collectives.recv(other, 0)
        collectives.send(value, 0)


# flag: (call, elements of the second tensor for n of the first and `ranks` ranks)
OPS = {
    "all_reduce": (lambda value, other, how: collectives.all_reduce(value, **how), lambda n, ranks: 0),
    "all_gather": (
        lambda value, other, how: collectives.all_gather_into_tensor(other, value, **how), lambda n, ranks: n * ranks,
    ),
    "reduce_scatter": (
        lambda value, other, how: collectives.reduce_scatter_tensor(other, value, **how), lambda n, ranks: n // ranks,
    ),
    "all_to_all": (lambda value, other, how: collectives.all_to_all_single(other, value, **how), lambda n, ranks: n),
    "broadcast": (lambda value, other, how: collectives.broadcast(value, 0, **how), lambda n, ranks: 0),
    "pt2pt": (lambda value, other, how: _there_and_back(value, other), lambda n, ranks: n),
}  # fmt: skip
_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Their names in the table of bandwidths.
_LOG_NAMES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor",
              "all_to_all": "all_to_all_single", "pt2pt": "send"}  # fmt: skip


_NUMBER = {"type": int, "metavar": "N"}
_OPTIONS = {
    "--scan": {"action": "store_true", "help": "every power of two up to --maxsize instead of that size alone"},
    "--maxsize": {**_NUMBER, "default": 24, "help": "2^N elements (default 24)"},
    "--trials": {**_NUMBER, "default": 5, "help": "calls to measure (default 5)"},
    "--warmups": {**_NUMBER, "default": 5, "help": "calls before (default 5)"},
    "--dtype": {"default": "float", "choices": sorted(DTYPES), "help": "of the elements (default float)"},
    "--bw-unit": {"default": "Gbps", "choices": ("Gbps", "GBps"), "help": "gigabits or gigabytes per second"},
    "--async-op": {"action": "store_true", "help": "calls do not wait; the last one of a measurement is waited for"},
    "--backend": {"help": "of the process group (default: the accelerator's)"},
    "--raw": {"action": "store_true", "help": "bytes as a number, columns by tabs"},
}


def build_parser():
    """The command line."""
    parser = argparse.ArgumentParser(prog="ds_bench", description="Measures collectives between ranks.")
    for name in OPS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=f"measure {name} (default: all)")
    for name, more in _OPTIONS.items():
        parser.add_argument(name, **more)
    return add_starts(parser)


def add_starts(parser):
    """The options that start ranks, which the ranks themselves do not get."""
    add = parser.add_argument
    add("--num_accelerators", "--num_gpus", type=int, default=-1, metavar="N", help="ranks to start on this machine")
    add("--hostfile", "-H", default=None, help="hosts to start ranks on")
    return parser


@program("ds_bench")
def main(args=None):
    """Starts the ranks with the launcher, when that is asked for or this process is no rank; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    options = build_parser().parse_args(words)
    if min(options.trials, 30 - options.maxsize, options.maxsize + 1) < 1 or options.warmups < 0:
        build_parser().error("--trials is at least 1, --warmups at least 0, --maxsize between 0 and 29.")
    inside = "RANK" in os.environ
    if inside and options.num_accelerators <= 0 and not options.hostfile:
        measure(options)
        return 0
    start = [sys.executable, "-m", "deepspeed.launcher", "-q", "--module", "--no_local_rank"]
    if options.num_accelerators > 0:
        start.append(f"--num_accelerators={options.num_accelerators}")
    if options.hostfile:
        start.append(f"--hostfile={options.hostfile}")
    words = add_starts(argparse.ArgumentParser(add_help=False)).parse_known_args(words)[1]
    # Variables that an outer job has given this process are not for the ranks of this one.
    environment = {name: value for name, value in os.environ.items() if not inside or name not in _OF_THE_JOB}
    return subprocess.call([*start, "deepspeed.comm.bench", *words], env=environment)


def measure(options):
    """Measures what was asked for among the ranks of this job; rank 0 prints a table per operation."""
    process_group.init_distributed(options.backend, verbose=False)
    ranks, rank = process_group.get_world_size(), process_group.get_rank()
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(process_group.get_local_rank())
    asked = [name for name in OPS if getattr(options, name)] or list(OPS)
    sizes = [2**power for power in (range(options.maxsize + 1) if options.scan else [options.maxsize])]
    for name in asked:
        if name == "pt2pt" and ranks < 2:
            continue
        rows = [row for row in (_row(name, size, options, ranks, accelerator) for size in sizes) if row]
        if rank == 0:
            print(table(name, rows, ranks, options), flush=True)
    process_group.destroy_process_group()


def _row(name, size, options, ranks, accelerator):
    """``(bytes of one rank's tensor, seconds of a call)``, or None for a size that cannot be shared out."""
    call, other_size = OPS[name]
    if name in ("reduce_scatter", "all_to_all") and size % ranks:
        size = size // ranks * ranks
    if size == 0:
        return None
    device = accelerator.current_device_name()
    value = torch.ones(size, dtype=DTYPES[options.dtype], device=device)
    other = torch.empty(other_size(size, ranks), dtype=value.dtype, device=device)
    how = {"async_op": True} if options.async_op else {}
    for _ in range(options.warmups):
        _finish(call(value, other, how))
    collectives.barrier()
    accelerator.synchronize()
    start, last = time.perf_counter(), None
    for _ in range(options.trials):
        last = call(value, other, how)
    _finish(last)
    accelerator.synchronize()
    seconds = torch.tensor([(time.perf_counter() - start) / options.trials], dtype=torch.float64)
    slowest = seconds.to(device)
    collectives.all_reduce(slowest, op=ReduceOp.MAX)
    return size * value.element_size(), float(slowest.item())


def _finish(work):
    if hasattr(work, "wait"):
        work.wait()


def table(name, rows, ranks, options):
    """The figures of one operation as text: size, time of a call, algorithm and bus bandwidth."""
    scale = 1.0 if options.bw_unit == "Gbps" else 1 / 8
    lines = [f"---- {name} on {ranks} rank(s), {options.dtype} ----"]
    form = "{}\t{}\t{}\t{}" if options.raw else "{:<16}{:<16}{:<20}{}"
    lines.append(form.format("Size", "Duration", f"Throughput ({options.bw_unit})", f"BusBW ({options.bw_unit})"))
    for size, seconds in rows:
        algorithm, bus = bandwidths(_LOG_NAMES.get(name, name), size, seconds * 1e3, ranks)
        shown = str(size) if options.raw else readable_size(size)
        lines.append(form.format(shown, f"{seconds * 1e6:.2f} us", f"{algorithm * scale:.3f}", f"{bus * scale:.3f}"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
