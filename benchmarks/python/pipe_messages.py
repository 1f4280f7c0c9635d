"""Messages from stage to stage of a pipeline, there and back: by our channel, by gloo, and what one copy costs.

    python benchmarks/python/pipe_messages.py [--python PATH] [--rounds 6] [--json FILE]

Two ranks of one host. Each round times every way once, in turn (A B A B ...); figures are medians, in GB/s of one
direction. ``copy``: the same bytes copied out of the other process's memory (process_vm_readv) into warm memory, back
and forth, without anybody saying when: what a message cannot beat with one thread.
"""

import argparse
import ctypes
import datetime
import os
import statistics
import sys
import time

from common import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def work(args):
    sys.path.insert(0, HERE)
    import torch
    import torch.distributed as dist

    import deepspeed
    from common import machine
    from deepspeed import comm
    from deepspeed._native import _C
    from deepspeed.comm import mesh
    from deepspeed.comm.mesh_views import Purpose

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    native = _C.ProcessMesh({"pp": [0, 1]}, mesh.job(comm.get_world_group()))
    pair = [native.communicator(["pp"], one) for one in (Purpose.PIPE, Purpose.PIPE_GRADS)]
    options = {"device": "cpu", "notes": "cpu", "bound": 2, "ahead": 2, "timeout": datetime.timedelta(minutes=5)}
    channel = _C.PipeChannel(activations=pair[0], grads=pair[1], **options)
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv

    def ways(size):
        value, other, turns = torch.ones(size // 4), torch.ones(size // 4), max(4, min(200, (64 << 20) // size))
        places = [None, None]
        dist.all_gather_object(places, (os.getpid(), value.data_ptr()))
        pid, address = places[1 - rank]
        here, there = Span(other.data_ptr(), size), Span(address, size)

        def by_channel():
            channel.expect(False, 1 - rank, turns)
            for _ in range(turns):
                if rank == 0:
                    channel.send(False, 1, [value], False)
                channel.recv(False, 1 - rank)
                if rank == 1:
                    channel.send(False, 0, [value], False)
            channel.settle()

        def by_gloo():
            for _ in range(turns):
                if rank == 0:
                    dist.send(value, 1)
                dist.recv(other, 1 - rank)
                if rank == 1:
                    dist.send(value, 0)

        def copies():
            for _ in range(2 * turns if rank == 0 else 0):
                if readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != size:
                    raise OSError(ctypes.get_errno(), "process_vm_readv")

        return turns, {"channel": by_channel, "gloo": by_gloo, "copy": copies}

    figures = {}
    for name, size in SIZES.items():
        turns, contenders = ways(size)
        rates = {way: [] for way in contenders}
        for turn in range(args.rounds + 1):
            for way, move in contenders.items():
                dist.barrier()
                begin = time.perf_counter()
                move()
                dist.barrier()
                seconds = time.perf_counter() - begin
                if turn:  # the first one warms up
                    rates[way].append(2 * turns * size / seconds / 1e9)
        found = {f"{way}_gb_s": statistics.median(rate) for way, rate in rates.items()}
        found["channel / gloo"] = statistics.median(a / b for a, b in zip(rates["channel"], rates["gloo"]))
        found["channel / copy"] = statistics.median(a / b for a, b in zip(rates["channel"], rates["copy"]))
        found["channel_us"] = size / found["channel_gb_s"] / 1e3
        figures[name] = {key: round(value, 3) for key, value in found.items()}
    if rank == 0:
        machine.write_json(args.json, "pipe_messages", figures)
    dist.barrier()


if __name__ == "__main__":
    arguments = parse_arguments()
    ranks.run(__file__, arguments, work, ("rounds",), 2, python=arguments.python)
