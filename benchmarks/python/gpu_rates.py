"""Rates of this machine that decide how a training step should be written: memory, PCIe, launches, events, NCCL.

    python benchmarks/python/gpu_rates.py [--device cuda] [--megabytes 1024] [--json FILE]

On a GPU: the rate of a copy within its memory (bytes read and written), of copies from and to pinned memory of the host
in one direction and in both at once; microseconds of the host for the launch of a small kernel, for recording an event,
for letting a stream wait for one, for asking one, and for waiting for one that has been reached; and for a call of NCCL
with a communicator that blocks and with one that does not, of one rank. On the CPU the copy and the launch alone.
"""

import argparse
import ctypes
import functools
import os
import statistics
import sys
import time

ROUNDS = 5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1, help="has no effect: one process measures")
    parser.add_argument("--megabytes", type=int, help="of a copy (default: 1024 on a GPU, 64 on the CPU)")
    parser.add_argument("--calls", type=int, default=1000, help="launches, events and calls of NCCL of a round")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def median(measure):
    return statistics.median(measure() for _ in range(ROUNDS))


def copies(device, size):
    """Bytes per second."""
    import torch

    here, there = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    found = {"copy, read and written": 2 * size / median(lambda: _seconds(device, lambda: there.copy_(here)))}
    if device.type == "cpu":
        return found
    host, other = (torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    side = torch.cuda.Stream()

    def both_at_once():
        with torch.cuda.stream(side):
            other.copy_(there, non_blocking=True)
        here.copy_(host, non_blocking=True)

    found["to the device"] = size / median(lambda: _seconds(device, lambda: here.copy_(host, non_blocking=True)))
    found["to the host"] = size / median(lambda: _seconds(device, lambda: host.copy_(here, non_blocking=True)))
    found["in both directions, sum"] = 2 * size / median(lambda: _seconds(device, both_at_once))
    return found


def _seconds(device, run, repeats=4):
    _wait(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - begin) / repeats


def _wait(device):
    if device.type != "cpu":
        import torch

        torch.cuda.synchronize()


def calls_of_host(device, count):
    """Microseconds of the host for a call."""
    import torch

    one = torch.zeros(1, device=device)
    runs = {"launch": lambda: one.add_(1)}
    if device.type != "cpu":
        event, side, reached = torch.cuda.Event(), torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        reached.record()
        torch.cuda.synchronize()
        runs["event recorded"] = event.record
        runs["stream waits for an event"] = lambda: side.wait_event(event)
        runs["event asked"] = reached.query
        runs["host waits for a reached event"] = reached.synchronize
    found = {name: median(functools.partial(_microseconds, device, run, count)) for name, run in runs.items()}
    if device.type != "cpu":
        small = torch.zeros(1, pin_memory=True)

        def number():
            small.copy_(one, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        found["a number brought to the host"] = median(lambda: _microseconds(device, number, count // 10 or 1))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            one.add_(1)
        end.record()
        end.synchronize()
        found["small kernel, on the device"] = begin.elapsed_time(end) * 1e3 / count
    return found


def _microseconds(device, run, count):
    for _ in range(10):
        run()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        run()
    took = time.perf_counter() - begin
    _wait(device)
    return took * 1e6 / count


# ---- NCCL ------------------------------------------------------------------------------------------------------------
class _Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class _Config(ctypes.Structure):
    """As NCCL 2.14 laid it out."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
    ]  # fmt: skip


_IN_PROGRESS, _FLOAT, _SUM = 7, 7, 0


class Nccl:
    """A communicator of one rank."""

    def __init__(self, library, blocking):
        self.library, self.comm, name = library, ctypes.c_void_p(), _Id()
        self.check(library.ncclGetUniqueId(ctypes.byref(name)))
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, blocking)
        init = library.ncclCommInitRankConfig
        init.argtypes = (ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int, ctypes.c_void_p)
        self.check(init(ctypes.byref(self.comm), 1, name, 0, ctypes.byref(config)))
        library.ncclAllReduce.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
            ctypes.c_void_p,
        )  # fmt: skip

    def check(self, result):
        state = ctypes.c_int(result)
        while state.value == _IN_PROGRESS:
            self.library.ncclCommGetAsyncError(self.comm, ctypes.byref(state))
        if state.value:
            raise RuntimeError(f"NCCL has failed with the result {state.value}")

    def all_reduce(self, given, taken, stream):
        self.check(
            self.library.ncclAllReduce(
                given.data_ptr(), taken.data_ptr(), given.numel(), _FLOAT, _SUM, self.comm, stream
            )
        )


def nccl(device, count):
    """Microseconds of the host for an all-reduce of one rank."""
    import torch

    from deepspeed.comm.nccl_join import find_library

    given, taken = torch.zeros(1 << 18, device=device), torch.zeros(1 << 18, device=device)
    stream = torch.cuda.current_stream().cuda_stream
    found, library = {}, ctypes.CDLL(find_library().path)
    for blocking, name in ((1, "NCCL, blocking"), (0, "NCCL, not blocking")):
        comm = Nccl(library, blocking)

        def run(comm=comm):
            comm.all_reduce(given, taken, stream)

        found[name] = median(functools.partial(_microseconds, device, run, count // 4 or 1))
    return found


def main():
    args = parse_arguments()
    import torch

    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    size = (args.megabytes or (1024 if args.device == "cuda" else 64)) << 20
    figures = {"bytes per second": copies(device, size), "microseconds of the host": calls_of_host(device, args.calls)}
    try:
        if device.type == "cpu":
            raise OSError("it needs a GPU")
        figures["microseconds of the host"].update(nccl(device, args.calls))
    except (OSError, RuntimeError, AttributeError) as error:
        print(f"NCCL is left out: {error}")
    for name, rate in figures["bytes per second"].items():
        print(f"  {name:34s} {rate / 1e9:10.1f} GB/s")
    for name, took in figures["microseconds of the host"].items():
        print(f"  {name:34s} {took:10.2f} us")
    if args.json:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from common import machine

        machine.write_json(args.json, "gpu_rates", figures, device=args.device)


if __name__ == "__main__":
    main()
