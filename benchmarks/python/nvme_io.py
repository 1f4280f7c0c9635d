"""``aio_handle`` against fio, at equal settings, on equal files, in one run; its defaults against the best setting; and
``FastFileWriter`` against ``torch.save`` with fsync.

    python benchmarks/python/nvme_io.py [--dir DIR] [--mb 256] [--rounds 5] [--json FILE]

Each round asks both for the same bytes of the same file, reading or writing, one after the other: fio (Debian's)
by the same interface of the kernel (io_uring or libaio), with O_DIRECT, one job, ``bs`` = block_size and ``iodepth`` =
queue_depth; the handle with one thread and overlap_events. A ratio is that of one round; the median counts. fio's is
its own, without its start. The stream of old torch.save is written by torch itself, through the descriptor, and has no
target. Exit code 1 if a target is missed: 1.0 of fio, defaults 0.9 of the best, 2.0 of torch.save.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from deepspeed._native import _C
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.op_builder import AsyncIOBuilder

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import machine  # noqa: E402  (the line above finds it from any directory)

BLOCKS = [128 << 10, 1 << 20, 8 << 20]
DEPTHS = [1, 8, 32]
TARGETS = {"fio": 1.0, "defaults": 0.9, "torch.save": 2.0}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="/var/tmp", help="where the files go: on the disk in question")
    parser.add_argument("--mb", type=int, default=256, help="MiB of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def fio(path, size, read, block, depth, engine):
    """Bytes a second by fio's own clock."""
    out = subprocess.run(
        ["fio", "--name=x", f"--filename={path}", f"--rw={'read' if read else 'write'}", f"--bs={block}",
         f"--size={size}", f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", "--overwrite=1",
         "--output-format=json"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return json.loads(out[out.index("{") :])["jobs"][0]["read" if read else "write"]["bw_bytes"]


def ours(handle, tensor, path, read):
    start = time.perf_counter()
    (handle.sync_pread if read else handle.sync_pwrite)(tensor, path)
    return tensor.numel() / (time.perf_counter() - start)


def against_fio(args, path, engine):
    op, size, rows = AsyncIOBuilder().load(), args.mb << 20, []
    memory = op.aio_handle().new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    memory.random_()  # fio's buffers are random, too: some drives are faster with zeros
    op.aio_handle().sync_pwrite(memory, path)
    for block, depth, read in itertools.product(BLOCKS, DEPTHS, (True, False)):
        handle = op.aio_handle(block, depth, False, True, 1)
        mine, theirs = [], []
        for i in range(args.rounds):
            for fio_now in (i % 2 == 0, i % 2 == 1):  # the first one changes
                if fio_now:
                    theirs.append(fio(path, size, read, block, depth, engine))
                else:
                    mine.append(ours(handle, memory, path, read))
        ratios = [a / b for a, b in zip(mine, theirs)]
        row = {"op": "read" if read else "write", "block_size": block, "queue_depth": depth, "ratios": ratios}
        row["GB/s"], row["fio GB/s"] = statistics.median(mine) / 1e9, statistics.median(theirs) / 1e9
        row["ratio"] = statistics.median(ratios)
        rows.append(row)
        print(
            f"{row['op']:5s} {block >> 10:5d} KiB, depth {depth:2d}: {row['GB/s']:6.2f} GB/s, "
            f"fio {row['fio GB/s']:6.2f}, ratio {row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return rows


def defaults_against_best(args, path, rows):
    """The handle without arguments against the setting that was fastest above, alternating."""
    op, size, found = AsyncIOBuilder().load(), args.mb << 20, {}
    memory = op.aio_handle().new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).random_()
    for name in ("read", "write"):
        best = max((row for row in rows if row["op"] == name), key=lambda row: row["GB/s"])
        tuned = op.aio_handle(best["block_size"], best["queue_depth"], False, True, 1)
        plain = op.aio_handle()
        pairs = [(ours(plain, memory, path, name == "read"), ours(tuned, memory, path, name == "read"))
                 for _ in range(args.rounds)]  # fmt: skip
        found[name] = statistics.median(a / b for a, b in pairs)
        print(f"{name}: defaults reach {found[name]:.2f} of the best setting ({best['block_size'] >> 10} KiB, depth "
              f"{best['queue_depth']})")  # fmt: skip
    return found


def writers(args, folder):
    """Seconds of FastFileWriter and of torch.save with fsync, for the same state."""
    op = AsyncIOBuilder().load()
    handle = op.aio_handle()
    memory = handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))
    state = {f"layer.{i}": torch.randn((args.mb << 20) // 32) for i in range(8)}
    ratios, seconds = {True: [], False: []}, {}
    for archive, _ in itertools.product((True, False), range(args.rounds)):
        start = time.perf_counter()
        with FastFileWriter(os.path.join(folder, "ours.pt"), FastFileWriterConfig(handle, memory)) as writer:
            torch.save(state, writer, _use_new_zipfile_serialization=archive)
        fast = time.perf_counter() - start
        start = time.perf_counter()
        with open(os.path.join(folder, "torchs.pt"), "wb") as file:
            torch.save(state, file, _use_new_zipfile_serialization=archive)
            file.flush()
            os.fsync(file.fileno())
        plain = time.perf_counter() - start
        ratios[archive].append(plain / fast)
        seconds.setdefault(archive, []).append((fast, plain))
        for name in ("ours.pt", "torchs.pt"):
            os.unlink(os.path.join(folder, name))
    result = {}
    for archive, name in ((True, "zip archive"), (False, "stream")):
        fast, plain = (statistics.median(pair[i] for pair in seconds[archive]) for i in (0, 1))
        result[name] = {
            "FastFileWriter s": fast,
            "torch.save + fsync s": plain,
            "ratio": statistics.median(ratios[archive]),
        }
        print(f"{name}: FastFileWriter {fast:.3f} s, torch.save + fsync {plain:.3f} s, ratio "
              f"{result[name]['ratio']:.2f}")  # fmt: skip
    return result


def main():
    args = parse_arguments()
    if shutil.which("fio") is None:
        sys.exit("this benchmark needs fio: apt-get install fio (packages/debian.txt, group bench)")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path, backend = os.path.join(folder, "file"), _C.aio.backend(folder)
        print(f"{args.dir}: {backend}; {args.mb} MiB, {args.rounds} rounds")
        rows = against_fio(args, path, "io_uring" if backend.startswith("io_uring") else "libaio")
        best = defaults_against_best(args, path, rows)
        os.unlink(path)
        saved = writers(args, folder)
    if args.json:
        figures = {
            "backend": backend,
            "mb": args.mb,
            "targets": TARGETS,
            "fio": rows,
            "defaults": best,
            "writers": saved,
        }
        machine.write_json(args.json, "nvme_io", figures)
    missed = [row for row in rows if row["ratio"] < TARGETS["fio"]]
    missed += [value for value in best.values() if value < TARGETS["defaults"]]
    missed += [] if saved["zip archive"]["ratio"] >= TARGETS["torch.save"] else ["torch.save"]
    print(f"{len(missed)} targets missed" if missed else "all targets met")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
