"""How long training stands still for a checkpoint: written at once, and written in the background.

    python benchmarks/python/checkpoint_async.py [--gb 2] [--rounds 3] [--folder DIR] [--json FILE]

One process, ZeRO stage 1, Adam after a step. The two kinds of save alternate; of each the median is compared, and the
first save in the background, which has to find memory for its copy, is told apart from the later ones. The goal is a
stall of at most 10 % of the save at once. Beside it: what the disk does in one stream of the same writer.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE]

from common import machine  # noqa: E402  (the line above finds it from any directory)

WIDTH = 2048


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to save; a new temporary folder otherwise")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def disk_bytes_per_second(folder, bytes):
    import torch

    from deepspeed.checkpoint import file_writer

    data = torch.randint(0, 255, (bytes,), dtype=torch.uint8).numpy()
    path = os.path.join(folder, "probe")
    start = time.perf_counter()
    file_writer.write_bytes(data, path)
    seconds = time.perf_counter() - start
    os.unlink(path)
    return bytes / seconds


def make_engines(gb):
    """An engine after a step, and the checkpoint engines that are compared."""
    import torch

    import deepspeed
    from deepspeed.checkpoint.engines.async_engine import AsyncCheckpointEngine
    from deepspeed.checkpoint.engines.fast_engine import FastCheckpointEngine

    deepspeed.logger.setLevel("WARNING")
    layers = max(1, round(gb * 1e9 / 16 / WIDTH**2))  # weight, master, two moments: 16 bytes for each parameter
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
    }
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    engine = deepspeed.initialize(model=model, config=config)[0]
    step(engine)
    return engine, FastCheckpointEngine(), AsyncCheckpointEngine()


def step(engine):
    import torch

    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()


def save(engine, writer, folder):
    """(seconds until save_checkpoint returns, seconds until all is on the disk, bytes)."""
    from deepspeed.checkpoint import manifest

    engine.checkpoint_engine = writer
    start = time.perf_counter()
    engine.save_checkpoint(folder, tag="t")
    stall = time.perf_counter() - start
    writer.wait()
    whole = time.perf_counter() - start
    size = sum(record["bytes"] for record in manifest.read(os.path.join(folder, "t"))["files"].values())
    shutil.rmtree(os.path.join(folder, "t"))
    return stall, whole, size


def main():
    args = parse_arguments()
    folder = tempfile.mkdtemp(prefix="checkpoint_async_", dir=args.folder)
    try:
        engine, at_once, behind = make_engines(args.gb)
        probe = int(min(args.gb, 1.0) * 1e9)
        disk, stalls, wholes, synchronous = [], [], [], []
        for _ in range(args.rounds):
            disk.append(disk_bytes_per_second(folder, probe))
            seconds, _, size = save(engine, at_once, folder)
            synchronous.append(seconds)
            stall, whole, _ = save(engine, behind, folder)
            stalls.append(stall)
            wholes.append(whole)
            step(engine)
    finally:
        shutil.rmtree(folder)
    at_once_s = statistics.median(synchronous)
    figures = {
        "state_bytes": size,
        "disk_bytes_per_second": statistics.median(disk),
        "at_once_s": at_once_s,
        "at_once_bytes_per_second": size / at_once_s,
        "first_stall_s": stalls[0],
        "first_stall_share": stalls[0] / at_once_s,
        "background_until_on_disk_s": statistics.median(wholes),
    }
    if len(stalls) > 1:
        later = statistics.median(stalls[1:])
        figures.update(later_stall_s=later, later_stall_share=later / at_once_s, copy_bytes_per_second=size / later)
    for key, value in figures.items():
        print(f"{key:28} {value:.4g}")
    machine.write_json(args.json, "checkpoint_async", figures)
    print(json.dumps({"all": {"at_once_s": synchronous, "stall_s": stalls}}))


if __name__ == "__main__":
    main()
