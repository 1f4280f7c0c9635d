"""The share of time in which stages wait, measured beside the plan, and our own time per instruction.

    python benchmarks/python/pipe_bubble.py [--python PATH] [--ranks 4] [--micro-batches 8] [--pass-ms 25] [--json FILE]

Layers sleep, so that more ranks than cores work at once: a forward, the gradient of an input and that of a weight take
``--pass-ms`` each. All schedules run in the same processes, in turn. ``own_us``: what a batch takes longer than its
sleeps let it, for each instruction of the rank that has most of them.
"""

import argparse
import os
import statistics
import sys
import time

from common import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-v,dualpipe-v")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    sys.path[:0] = [os.path.join(ROOT, "tests", "dist"), HERE]
    import torch

    import deepspeed
    from common import machine
    from deepspeed._native import _C
    from deepspeed.pipe import LayerSpec, PipelineModule
    from pipe_models import Sleeper

    seconds, count = args.pass_ms / 1e3, args.micro_batches

    rank, world = int(os.environ["RANK"]), args.ranks
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")

    def engine_of(schedule):
        chunks = 2 if schedule.endswith("-v") else 1
        module = PipelineModule(
            [LayerSpec(Sleeper, seconds) for _ in range(world * chunks)], num_stages=world, partition_method="uniform",
            loss_fn=lambda out, labels: out.square().mean(), virtual_stages=chunks,
            placement="v" if chunks == 2 else "loop",
        )  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": count,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "pipeline": {"schedule": schedule},
            "steps_per_print": 10**9,
        }
        native = _C.pipe.schedule(schedule, world, chunks, count)
        parts = [_C.pipe.Part(forward=seconds, backward_input=seconds, backward_weight=seconds)] * (world * chunks)
        return deepspeed.initialize(model=module, config=config)[0], native.cost(parts), native

    figures = {}
    for schedule in args.schedules.split(","):
        engine, cost, native = engine_of(schedule)
        bubbles, own = [], []
        instructions = max(len(native.acts(one)) for one in range(world))
        for _ in range(args.rounds):
            engine._measured.begin()
            for batch in range(10):
                # The first stage computes the gradient of its input, too: the plan has it.
                items = [(torch.ones(2, 4, requires_grad=True), torch.zeros(2, 4)) for _ in range(count)]
                torch.distributed.barrier()
                begin = time.perf_counter()
                engine.train_batch(iter(items))
                if batch:
                    own.append((time.perf_counter() - begin - cost.seconds) / instructions * 1e6)
            bubbles.append(engine.pipe_plan().measured["bubble"])
        figures[schedule] = {
            "planned": round(cost.bubble, 4),
            "measured": round(statistics.median(bubbles), 4),
            "least": round(min(bubbles), 4),
            "own_us": round(statistics.median(own), 1),
            "instructions": instructions,
        }
        engine.destroy()
    if rank == 0:
        figures["setting"] = {"ranks": world, "micro_batches": count, "pass_ms": args.pass_ms}
        machine.write_json(args.json, "pipe_bubble", figures)
    torch.distributed.barrier()


if __name__ == "__main__":
    arguments = parse_arguments()
    options = ("ranks", "micro-batches", "pass-ms", "schedules", "rounds")
    ranks.run(__file__, arguments, work, options, arguments.ranks, python=arguments.python)
