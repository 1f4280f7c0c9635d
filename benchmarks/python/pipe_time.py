"""Time of a batch of a pipeline: ours, by each schedule, against torch.distributed.pipelining (torch 2.5 or later).

    python benchmarks/python/pipe_time.py [--python PATH] [--ranks 2] [--micro-batches 8] [--model 10m] [--json FILE]

All run in the same processes, on the same data, in interleaved blocks of batches: forward, backward and AdamW. The
floor is what 1F1B needs if nothing but the passes takes time: (m + p - 1) times a micro-batch of the slowest stage,
and the update. Messages by themselves: pipe_messages.py.
"""

import argparse
import os
import statistics
import sys
import time

from common import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MODELS = {"10m": (384, 6, 6, 1024), "100m": (768, 12, 12, 8192)}  # width, layers, heads, words


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the deepspeed to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--model", choices=sorted(MODELS), default="10m")
    parser.add_argument("--rows", type=int, default=2, help="sequences of 128 tokens of a micro-batch")
    parser.add_argument("--schedules", default="1f1b,zb-h1")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block", type=int, default=2, help="timed batches of each contender in a round")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    import torch
    from torch import nn

    import deepspeed
    from common import machine
    from deepspeed.pipe import PipelineModule
    from model import Block, Shape

    rank, world, count = int(os.environ["RANK"]), args.ranks, args.micro_batches
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    width, layers, heads, words = MODELS[args.model]
    shape = Shape(vocab_size=words, layers=layers, heads=heads, width=width)

    def loss_of(logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def model():
        torch.manual_seed(0)
        blocks = [Block(shape) for _ in range(layers)]
        return [nn.Embedding(words, width), *blocks, nn.Linear(width, words)]

    share = (layers + 2) / world
    bounds = [round(part * share) for part in range(world + 1)]
    random = torch.Generator().manual_seed(1)

    def data():
        made = [torch.randint(0, words, (args.rows, 129), generator=random) for _ in range(count)]
        return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in made]

    def ours(schedule):
        module = PipelineModule(model(), num_stages=world, loss_fn=loss_of, partition_method=bounds)
        engine = deepspeed.initialize(
            model=module,
            config={
                "train_micro_batch_size_per_gpu": args.rows,
                "gradient_accumulation_steps": count,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "pipeline": {"schedule": schedule},
                "steps_per_print": 10**9,
            },
        )[0]
        return lambda batch: engine.train_batch(iter(batch))

    def theirs():
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        own = nn.Sequential(*model()[bounds[rank] : bounds[rank + 1]])
        stage = PipelineStage(own, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, foreach=True)

        def step(batch):
            x, y = (torch.cat(column) for column in zip(*batch))
            inputs = (x,) if rank == 0 else ()
            schedule.step(*inputs, **({"target": y} if rank == world - 1 else {}))
            optimizer.step()
            optimizer.zero_grad()

        return step

    def passes():
        own = nn.Sequential(*model()[bounds[rank] : bounds[rank + 1]])
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, foreach=True)

        def step(batch):
            for x, y in batch:
                x = x if rank == 0 else torch.zeros(args.rows, 128, width, requires_grad=True)
                out = own(x)
                (loss_of(out, y) if rank == world - 1 else out.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    contenders = {f"ours {name}": ours(name) for name in args.schedules.split(",")}
    try:
        contenders["torch 1f1b"] = theirs()
    except ImportError:
        pass
    contenders["passes alone"] = passes()
    times = {name: [] for name in contenders}

    def timed(step, blocks):
        batches = [data() for _ in range(blocks)]
        torch.distributed.barrier()
        begin = time.perf_counter()
        for batch in batches:
            step(batch)
        torch.distributed.barrier()
        return (time.perf_counter() - begin) / blocks

    for step in contenders.values():
        timed(step, 2)
    order = list(contenders)
    for turn in range(args.rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            times[name].append(timed(contenders[name], args.block))
    if rank == 0:
        figures = {
            "batch_s": {name: statistics.median(row) for name, row in times.items()},
            "ratio": {},
        }
        figures["floor_s"] = figures["batch_s"]["passes alone"] * (count + world - 1) / count
        for name in contenders:
            if "torch 1f1b" in times and name.startswith("ours"):
                figures["ratio"][f"{name} / torch 1f1b"] = statistics.median(
                    a / b for a, b in zip(times[name], times["torch 1f1b"])
                )
        figures["setting"] = {k: getattr(args, k) for k in ("ranks", "micro_batches", "model", "rows")}
        machine.write_json(args.json, "pipe_time", figures)
    torch.distributed.barrier()


if __name__ == "__main__":
    arguments = parse_arguments()
    each = max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    options = ("ranks", "micro-batches", "model", "rows", "schedules", "rounds", "block")
    ranks.run(__file__, arguments, work, options, arguments.ranks, threads=each, python=arguments.python)
