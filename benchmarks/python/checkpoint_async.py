"""The time for which training stands still for a checkpoint: written at once, and written in the background.

    python benchmarks/python/checkpoint_async.py [--gb 2] [--rounds 3] [--folder DIR] [--json FILE]

One process, ZeRO stage 1, Adam after a step. The two kinds of save alternate; of each the median is compared, and the
first save in the background, which has to find memory for its copy, is told apart from the later ones. The goal is a
stall of at most 10 % of the save at once. Masters and optimizer states are copied while the next step computes its
gradients, so what that step takes longer than others is shown, too: it shares cores and memory with the copy, and waits
before its update if the copy is not there yet. Beside it: what the disk does in one stream of the same writer.
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
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch: how long a step computes")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--folder", help="where to save; a new temporary folder otherwise")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def disk_bytes_per_second(folder, bytes):
    import torch

    from deepspeed.checkpoint.write import file_writer

    data = torch.randint(0, 255, (bytes,), dtype=torch.uint8).numpy()
    path = os.path.join(folder, "probe")
    start = time.perf_counter()
    file_writer.write_bytes(data, path)
    seconds = time.perf_counter() - start
    os.unlink(path)
    return bytes / seconds


def make_engines(gb, dtype):
    """An engine after a step, and the checkpoint engines that are compared."""
    import torch

    import deepspeed
    from deepspeed.checkpoint.engines.built_in import AsyncCheckpointEngine, FastCheckpointEngine

    deepspeed.logger.setLevel("WARNING")
    # Weight, master, two moments in the files: 16 or 14 bytes for each parameter.
    layers = max(1, round(gb * 1e9 / (16 if dtype == "fp32" else 14) / WIDTH**2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": dtype == "bf16"},
    }
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    engine = deepspeed.initialize(model=model, config=config)[0]
    step(engine, 1)
    return engine, FastCheckpointEngine(), AsyncCheckpointEngine()


def step(engine, rows):
    """(seconds of forward and backward, seconds of engine.step)"""
    import torch

    began = time.perf_counter()
    engine.backward(engine(torch.ones(rows, WIDTH, dtype=next(engine.module.parameters()).dtype)).square().mean())
    computed = time.perf_counter()
    engine.step()
    return computed - began, time.perf_counter() - computed


def save(engine, writer, folder, rows):
    """(seconds until save_checkpoint returns, seconds until all is on the disk, bytes, ``step`` after it)."""
    from deepspeed.checkpoint.write import verify

    engine.checkpoint_engine = writer
    start = time.perf_counter()
    engine.save_checkpoint(folder, tag="t")
    stall = time.perf_counter() - start
    after = step(engine, rows)
    writer.wait()
    whole = time.perf_counter() - start
    size = sum(record["bytes"] for record in verify.read(os.path.join(folder, "t"))["files"].values())
    shutil.rmtree(os.path.join(folder, "t"))
    return stall, whole, size, after


def main():
    args = parse_arguments()
    folder = tempfile.mkdtemp(prefix="checkpoint_async_", dir=args.folder)
    try:
        engine, at_once, behind = make_engines(args.gb, args.dtype)
        probe = int(min(args.gb, 1.0) * 1e9)
        disk, stalls, wholes, synchronous, plain_steps, steps_after = [], [], [], [], [], []
        for _ in range(args.rounds):
            disk.append(disk_bytes_per_second(folder, probe))
            seconds, _, size, plain = save(engine, at_once, folder, args.rows)
            synchronous.append(seconds)
            plain_steps.append(plain)
            stall, whole, _, after = save(engine, behind, folder, args.rows)
            stalls.append(stall)
            wholes.append(whole)
            steps_after.append(after)
    finally:
        shutil.rmtree(folder)
    at_once_s = statistics.median(synchronous)

    def median(steps, part):
        return statistics.median(step[part] for step in steps)

    figures = {
        "state_bytes": size,
        "dtype": args.dtype,
        "disk_bytes_per_second": statistics.median(disk),
        "at_once_s": at_once_s,
        "at_once_bytes_per_second": size / at_once_s,
        "first_stall_s": stalls[0],
        "first_stall_share": stalls[0] / at_once_s,
        "background_until_on_disk_s": statistics.median(wholes),
    }
    if len(stalls) > 1:
        later = statistics.median(stalls[1:])
        compute_longer = median(steps_after[1:], 0) - median(plain_steps[1:], 0)
        update_longer = median(steps_after[1:], 1) - median(plain_steps[1:], 1)
        figures.update(
            later_stall_s=later,
            later_stall_share=later / at_once_s,
            compute_s=median(plain_steps[1:], 0),
            compute_longer_s=compute_longer,
            update_s=median(plain_steps[1:], 1),
            update_longer_s=update_longer,
            stall_and_longer_step_share=(later + compute_longer + update_longer) / at_once_s,
        )
    for key, value in figures.items():
        print(f"{key:28} {value:.4g}" if isinstance(value, (int, float)) else f"{key:28} {value}")
    machine.write_json(args.json, "checkpoint_async", figures)
    print(json.dumps({"all": {"at_once_s": synchronous, "stall_s": stalls}}))


if __name__ == "__main__":
    main()
