"""The cost of snapshots in memory (``elasticity.memory_copies``) for a step: a GPT of 100 million parameters, N = 10.

    python benchmarks/python/memory_copies.py [--layers 14] [--tokens 512] [--steps 10] [--rounds 3] [--json FILE]

One process, ZeRO stage 1, AdamW. Runs of N steps with a snapshot in them and without one alternate; of each kind the
median is compared. The goal is 2 %. Beside the time that passes stands the time that processors were busy, which does
not know of others on the machine. The first snapshots, which have to find memory, are not counted.

The limit is one copy: the bytes of a snapshot at the rate at which one core copies memory. ``of_limit`` is the share of
that in the processor time that a snapshot takes.
"""

import argparse
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "python")]

from common import machine  # noqa: E402  (the line above finds it from any directory)

WIDTH, VOCABULARY = 768, 1024


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    parser.add_argument("--steps", type=int, default=10, help="between two snapshots")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def make_engine(args, folder):
    import torch

    import deepspeed

    deepspeed.logger.setLevel("WARNING")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH),
        torch.nn.TransformerEncoder(layer, args.layers),
        torch.nn.Linear(WIDTH, VOCABULARY, bias=False),
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "elasticity": {"memory_copies": 1, "snapshot_steps": args.steps},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.load_checkpoint(folder)  # nothing is there; snapshots begin
    tokens = torch.randint(0, VOCABULARY, (4, args.tokens // 4))

    def step():
        loss = torch.nn.functional.cross_entropy(engine(tokens).reshape(-1, VOCABULARY), tokens.reshape(-1))
        engine.backward(loss)
        engine.step()

    return engine, step


def snapshot(engine):
    """One, with nothing beside it."""
    copies = engine._memory_copies
    copies.snapshots.look(copies._all_of)
    engine.global_steps += 1
    copies.snapshots.take(engine, {}, copies._all_of)
    copies.snapshots._behind.drain()


def busy_seconds(function):
    began = time.process_time()
    function()
    return time.process_time() - began


def copy_rate():
    """GB/s of one core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source, target = torch.ones(1 << 28, dtype=torch.uint8), torch.ones(1 << 28, dtype=torch.uint8)
    best = min(busy_seconds(lambda: target.copy_(source)) for _ in range(5))
    torch.set_num_threads(threads)
    return source.numel() / 1e9 / best


def main():
    args = parse_arguments()
    from deepspeed.launcher.memory_keeper import MemoryKeeper

    keeper = MemoryKeeper()
    try:
        os.environ.update(keeper.variables)
        engine, step = make_engine(args, os.path.join(keeper.folder, "nothing"))
        copies = engine._memory_copies
        taken = {True: [], False: []}
        for turn in range(-4, 2 * args.rounds):
            with_snapshot = turn % 2 == 0
            copies._every = args.steps if with_snapshot else 10**9
            engine.global_steps = args.steps * (turn + 5) - 2  # the second step of each run ends with a snapshot
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(args.steps if turn >= 0 else 3):
                step()
            if turn >= 0:
                taken[with_snapshot].append((time.perf_counter() - began, time.process_time() - busy))
            copies.snapshots._behind.drain()
            size = sum(
                os.path.getsize(os.path.join(root, name))
                for root, _, names in os.walk(copies.snapshots.folder)
                for name in names
            )
        snapshots_alone = [busy_seconds(lambda: snapshot(engine)) for _ in range(5)]
        params = sum(param.numel() for param in engine.module.parameters())
        engine.destroy()
    finally:
        keeper.close()

    def median(kind, part):
        return statistics.median(one[part] for one in taken[kind])

    figures = {
        "parameters": params,
        "bytes_in_memory": size,  # two snapshots
        "step_s": median(False, 0) / args.steps,
        "step_busy_s": median(False, 1) / args.steps,
        "longer_share": median(True, 0) / median(False, 0) - 1,
        "busier_share": median(True, 1) / median(False, 1) - 1,
        "runs": taken,
    }
    alone = figures["snapshot_busy_s"] = statistics.median(snapshots_alone)
    figures["copy_GB_s"] = copy_rate()
    figures["of_limit"] = size / 2 / 1e9 / figures["copy_GB_s"] / alone
    figures["alone_share"] = alone / (figures["step_busy_s"] * args.steps)
    for key, value in figures.items():
        print(f"{key:18} {value:.4g}" if isinstance(value, (int, float)) else f"{key:18} {value}")
    machine.write_json(args.json, "memory_copies", {key: value for key, value in figures.items() if key != "runs"})


if __name__ == "__main__":
    main()
