"""Writing a state to a file: ``PreparedTorch`` against ``torch.save``, in one run, beside what the disk can do.

    python benchmarks/python/checkpoint_write.py [--gb 2] [--tensors 16] [--rounds 5] [--dir DIR] [--json FILE]

Each round writes the same state with each method in turn, and both end with fsync; torch.save is timed without it, too
(its bytes are then in memory only). Beside it: plain O_DIRECT writes of as many bytes from one buffer, without checksum
or copy, two at a time, and fio's figure for the same where fio is installed. Both files are loaded and compared once.
Exit code 1 if the median ratio is below the target of 3.
"""

import argparse
import concurrent.futures
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from deepspeed import _compat
from deepspeed.checkpoint.write.file_writer import PreparedTorch, WriterOptions, file_crc32

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import machine  # noqa: E402  (the line above finds it from any directory)

BLOCK = 64 << 20
TARGET = 3.0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="GiB of fp32 tensors")
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/var/tmp", help="where the files go: on the disk in question")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def sync(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def raw_write(path, bytes):
    """Seconds of O_DIRECT writes of the same buffer, two at a time, into reserved space."""
    memory = mmap.mmap(-1, BLOCK)
    memory.write(os.urandom(1 << 20) * (BLOCK >> 20))
    start = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    os.posix_fallocate(file, 0, bytes)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        offsets = range(0, bytes - bytes % BLOCK, BLOCK)
        assert all(done == BLOCK for done in pool.map(lambda offset: os.pwrite(file, memory, offset), offsets))
    os.fsync(file)
    os.close(file)
    return time.perf_counter() - start


def fio_write(path, bytes):
    """Seconds by fio, or None."""
    if shutil.which("fio") is None:
        return None
    command = (
        f"fio --name=w --filename={path} --rw=write --bs=64m --ioengine=libaio --iodepth=2 --direct=1 --end_fsync=1"
    )
    out = subprocess.run(
        [*command.split(), f"--size={bytes}", "--end_fsync=1", "--output-format=json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return json.loads(out)["jobs"][0]["write"]["runtime"] / 1e3


def measure(args, folder):
    torch.manual_seed(0)
    numel = int(args.gb * (1 << 30)) // 4 // args.tensors
    state = {f"layer.{i}.weight": torch.randn(numel) for i in range(args.tensors)}
    bytes = numel * 4 * args.tensors // BLOCK * BLOCK
    ours, theirs, raw = (os.path.join(folder, name) for name in ("ours.pt", "torchs.pt", "raw"))
    times = {name: [] for name in ("PreparedTorch", "torch.save + fsync", "torch.save", "raw O_DIRECT", "fio")}
    for round in range(args.rounds):
        start = time.perf_counter()
        record = PreparedTorch(state).write(ours, WriterOptions())
        times["PreparedTorch"].append(time.perf_counter() - start)
        start = time.perf_counter()
        torch.save(state, theirs)
        times["torch.save"].append(time.perf_counter() - start)
        sync(theirs)
        times["torch.save + fsync"].append(time.perf_counter() - start)
        if round == 0:
            assert file_crc32(ours) == record["crc32"]
            a, b = _compat.load(ours), _compat.load(theirs)
            assert list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
            del a, b
        os.unlink(ours)
        os.unlink(theirs)
        try:
            times["raw O_DIRECT"].append(raw_write(raw, bytes))
        except OSError:  # no O_DIRECT here
            pass
        seconds = fio_write(raw, bytes)
        times["fio"] += [] if seconds is None else [seconds]
        if os.path.exists(raw):
            os.unlink(raw)
    return numel * 4 * args.tensors, {name: values for name, values in times.items() if values}


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        bytes, times = measure(args, folder)
    figures = {"bytes": bytes, "target": TARGET}
    for name, values in times.items():
        median = statistics.median(values)
        figures[name] = {"seconds": median, "min": min(values), "max": max(values), "GB/s": bytes / median / 1e9}
        print(f"{name:20s} {median:7.2f} s ({min(values):.2f} to {max(values):.2f})  {bytes / median / 1e9:6.2f} GB/s")
    for name in ("torch.save + fsync", "torch.save"):
        ratios = [theirs / ours for theirs, ours in zip(times[name], times["PreparedTorch"])]
        figures[f"{name} / PreparedTorch"] = statistics.median(ratios)
        print(f"{name} takes {statistics.median(ratios):.2f} times as long as PreparedTorch (rounds: "
              f"{', '.join(f'{ratio:.2f}' for ratio in ratios)})")  # fmt: skip
    if args.json:
        machine.write_json(args.json, "checkpoint_write", figures)
    sys.exit(figures["torch.save + fsync / PreparedTorch"] < TARGET)


if __name__ == "__main__":
    main()
