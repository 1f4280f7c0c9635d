"""``ds_io``: measures how fast tensors are written to, or read from, folders with one setting."""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from deepspeed.host.command_line import check_output, program
from deepspeed.nvme.transfer_rate import Bench, Setting, bytes_of

# Flags -> how argparse is to treat them.
OPTIONS = {
    "--folder": dict(metavar="DIR", help="where the files go: on the drive to measure"),
    "--folder_to_device_mapping": dict(
        nargs="+", metavar="DIR:N", default=[], help="a process for each, with the folder and the device of that number"
    ),
    "--read": dict(action="store_true", help="measure reads (default: writes)"),
    "--io_size": dict(type=str, default="400M", help="bytes of a tensor (default 400M)"),
    "--block_size": dict(type=str, default="1M", help="bytes of a request (default 1M)"),
    "--queue_depth": dict(type=int, default=32, help="requests at a time for each thread (default 32)"),
    "--io_parallel": dict(type=int, default=1, help="threads for one tensor (default 1)"),
    "--multi_process": dict(type=int, default=1, help="processes, each with its own file (default 1)"),
    "--loops": dict(type=int, default=3, help="transfers to measure (default 3)"),
    "--single_submit": dict(action="store_true", help="tell the system of each request by itself"),
    "--sequential_requests": dict(
        action="store_true", help="replace requests when half of the queue is complete (default: each when it is)"
    ),
    "--handle": dict(action="store_true", help="use async_pread and async_pwrite with wait()"),
    "--validate": dict(action="store_true", help="read the file again and compare it with the tensor"),
    "--gpu": dict(action="store_true", help="tensors of the GPU"),
    "--use_gds --gds": dict(action="store_true", help="GPUDirect storage, for tensors of the GPU"),
    "--slow_bounce_buffer": dict(action="store_true", help="copy tensors of the GPU in one piece, in Python"),
    "--unlocked": dict(action="store_true", help="tensors of the host that are not page-locked"),
    "--json": dict(metavar="FILE", help="write the figures there, too"),
}


def parse_io_arguments(argv=None):
    """The command line of ``ds_io``."""
    parser = argparse.ArgumentParser(prog="ds_io", description=__doc__)
    for flags, settings in OPTIONS.items():
        parser.add_argument(*flags.split(), **settings)
    args = parser.parse_args(argv)
    for wrong, why in (
        (
            bool(args.folder) == bool(args.folder_to_device_mapping),
            "give either --folder or --folder_to_device_mapping",
        ),
        (args.use_gds and not args.gpu, "--use_gds is for tensors of the GPU: give --gpu, too"),
        (min(args.loops, args.multi_process) < 1, "--loops and --multi_process are at least 1"),
    ):
        if wrong:
            parser.error(why)
    try:
        args.io_size, args.block_size = bytes_of(args.io_size), bytes_of(args.block_size)
        args.targets = targets_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def targets_of(args):
    """(folder, device) of each process."""
    kind = "cuda" if args.gpu else "cpu"
    if args.folder:
        devices = [f"{kind}:{i}" if args.gpu else kind for i in range(args.multi_process)]
        return [(args.folder, device) for device in devices]
    made = []
    for text in args.folder_to_device_mapping:
        folder, _, number = text.rpartition(":")
        if not folder or not number.isdigit():
            raise ValueError(f"--folder_to_device_mapping takes DIR:N, a folder and a number, got {text!r}")
        made.append((folder, f"{kind}:{number}" if args.gpu else kind))
    return made


def measure(args, folder, device):
    """The GB/s of each loop, in this process."""
    setting = Setting(args.block_size, args.queue_depth, args.single_submit, not args.sequential_requests,
                      args.io_parallel)  # fmt: skip
    with Bench(folder, args.io_size, device, args.use_gds, args.slow_bounce_buffer, args.unlocked) as bench:
        return bench.rates(setting, args.read, args.loops, args.validate, single=not args.handle)


def run(args):
    """{"op", "gb_per_s": sum of the processes' medians, "processes": GB/s of each loop of each}."""
    if len(args.targets) == 1:
        rates = [measure(args, *args.targets[0])]
    else:
        with ProcessPoolExecutor(len(args.targets), mp_context=get_context("spawn")) as pool:
            rates = list(pool.map(measure, [args] * len(args.targets), *zip(*args.targets)))
    total = sum(statistics.median(each) for each in rates)
    return {"op": "read" if args.read else "write", "gb_per_s": total, "processes": rates}


@program("ds_io")
def ds_io_main(argv=None):
    """The program ``ds_io``. ``argv``: its arguments (default: those of the process)."""
    args = parse_io_arguments(argv)
    check_output(args.json, "--json")
    result = run(args)
    for number, rates in enumerate(result["processes"]):
        folder, device = args.targets[number]
        texts = ", ".join(f"{rate:.3f}" for rate in rates)
        print(f"process {number}: {folder}, {device}: {result['op']} GB/s of each loop: {texts}")
    print(f"{result['op']} speed: {result['gb_per_s']:.3f} GB/s")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
