"""Memory of training in bf16, with and without gradient accumulation, beside the published formula.

    python benchmarks/python/grad_memory.py [--worlds 1,2,3,4] [--accumulations 1,4] [--layers 8] [--width 1024]
                                            [--json FILE]

For each world size, ZeRO stage and number of accumulation steps a stack of linear layers is trained for three steps
with AdamW. Printed are bytes for each parameter: what the engine says that it holds (``core.held_bytes()``), the
largest growth of a rank's resident memory (shared pages counted once) since before the model was built, and the
formula: 2 for
the parameters, 2 for the gradients, 12 for masters and moments, divided by N where the stage divides.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

from common.memory import Peak, private_bytes

HERE = os.path.dirname(os.path.abspath(__file__))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,3,4")
    parser.add_argument("--accumulations", default="1,4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def formula(stage, world):
    parts = (2, 2, 12)  # parameters, gradients, masters and moments
    first_cut = {0: 3, 1: 2, 2: 1, 3: 0}[stage]
    return sum(part / (world if index >= first_cut else 1) for index, part in enumerate(parts))


def work(args):
    import ctypes
    import gc

    import torch

    import deepspeed

    torch.set_num_threads(1)
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # an engine leaves malloc as it is
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # big tensors go back to the system when they are freed
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()

    def run(stage, accumulate, layers, width):
        gc.collect()
        torch.distributed.barrier()
        before, peak = private_bytes(), Peak()
        peak.start()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20},
        }
        init = deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3)
        with init:
            model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
        engine = deepspeed.initialize(model=model.bfloat16() if stage < 3 else model, config=config)[0]
        peak.highest = 0  # not what building the model took
        for _ in range(3 * accumulate):
            engine.backward(engine(torch.ones(2, width, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        time.sleep(0.02)
        peak.stop = True
        peak.join()
        held = sum(engine.core.held_bytes().values())
        engine.destroy()
        return held, peak.highest - before

    run(2, 1, 2, 64)  # what is imported and allocated once
    numel, found = args.layers * args.width**2, []
    for accumulate in map(int, args.accumulations.split(",")):
        for stage in range(4):
            held, peak = run(stage, accumulate, args.layers, args.width)
            ranks = [None] * world
            torch.distributed.all_gather_object(ranks, (held / numel, peak / numel))
            found.append(
                {
                    "world": world,
                    "stage": stage,
                    "accumulation": accumulate,
                    "formula": round(formula(stage, world), 2),
                    "held": round(max(r[0] for r in ranks), 2),
                    "peak": round(max(r[1] for r in ranks), 2),
                }
            )
    if rank == 0:
        with open(os.environ["FIGURES"], "w", encoding="utf-8") as file:
            json.dump(found, file)


def measure(args, world):
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        figures = os.path.join(folder, "figures.json")
        command = [sys.executable, os.path.abspath(__file__), "--worker", *sys.argv[1:]]
        ranks = []
        for rank in range(world):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
            own.update(MASTER_PORT=port, FIGURES=figures)
            ranks.append(subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in own.items()}}))
        if any([process.wait() for process in ranks]):
            sys.exit("a rank failed")
        with open(figures, encoding="utf-8") as file:
            return json.load(file)


def main():
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    sys.path.insert(0, HERE)
    from common import machine

    found = [row for world in map(int, args.worlds.split(",")) for row in measure(args, world)]
    print("| ranks | stage | accumulation | formula | held | peak |\n|---|---|---|---|---|---|")
    for row in found:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if args.json:
        machine.write_json(args.json, "grad_memory", {"layers": args.layers, "width": args.width, "rows": found})


if __name__ == "__main__":
    main()
