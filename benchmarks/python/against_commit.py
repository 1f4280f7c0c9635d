"""This tree against another commit, in turn: steps, collectives, saves and loads, steps of many parameters, the import.

    git worktree add /tmp/before COMMIT && make -C /tmp/before build
    python benchmarks/python/against_commit.py --before /tmp/before [--rounds 9] [--collectives shm] [--json FILE]

In each round both trees are measured one after the other, in processes of their own, and the order changes from round
to round. A figure is the median over the rounds of (this tree / before), with the quartiles, which say by how much the
machine varies; beside them are the medians of both. The other commit runs this file, too, so public names alone are
measured.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import types

from common import machine, ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
VERBS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="FOLDER", help="the other checkout, built for this Python")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--block", type=int, default=6, help="timed steps of each stage in a round")
    parser.add_argument("--parameters", type=int, default=10000, help="of the model with many of them")
    parser.add_argument("--collectives", metavar="BACKEND", default="", help="these alone, over gloo or shm")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker and not args.before:
        parser.error("--before names the checkout to compare with")
    return args


def engine_of(deepspeed, model, stage):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "steps_per_print": 10**9,
              "optimizer": optimizer, "zero_optimization": {"stage": stage}}  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def timed(call, times, warm):
    """Seconds of each of ``times`` calls after ``warm`` others: their median."""
    found = []
    for _ in range(warm + times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[warm:])


def steps_and_checkpoints(args, deepspeed, torch):
    """The GPT of the quickstart at each stage, and what it takes to save and load it."""
    from model import GPT, Shape
    from step_time import MODELS

    shape = Shape(**MODELS["10m"])
    draws = torch.Generator().manual_seed(int(os.environ["RANK"]))
    found = {}
    for stage in range(4):
        torch.manual_seed(0)
        engine = engine_of(deepspeed, GPT(shape), stage)

        def step(engine=engine):
            rows = torch.randint(0, shape.vocab_size, (4, shape.context + 1), generator=draws)
            engine.backward(engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
            engine.step()

        found[f"step, stage {stage}"] = timed(step, args.block, 3)
        if stage in (1, 3):
            folder = os.path.join(os.path.dirname(args.json), f"stage{stage}")
            found[f"save, stage {stage}"] = timed(lambda e=engine, f=folder: e.save_checkpoint(f, "one"), 3, 1)
            found[f"load, stage {stage}"] = timed(lambda e=engine, f=folder: e.load_checkpoint(f, "one"), 3, 1)
        engine.destroy()
    return found


def collectives(args, deepspeed, torch):
    dist, world, found = deepspeed.comm, int(os.environ["WORLD_SIZE"]), {}
    for name, size in SIZES.items():
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // world)
        for verb in VERBS:
            given = {"all_reduce": (whole,), "broadcast": (whole, 0), "all_gather_into_tensor": (whole, part)}
            call = getattr(dist, verb)
            given = given.get(verb, (part, whole))
            times = max(20, min(2000, 2**26 // size))

            def many(call=call, given=given, times=times):
                for _ in range(times):
                    call(*given)

            found[f"{verb}, {name}"] = timed(many, 3, 1) / times
    return found


def many_parameters(args, deepspeed, torch):
    """One rank; the forward is one operation, so that what the engine does for each parameter is what is left."""

    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4)) for _ in range(args.parameters))

        def forward(self):
            return torch.cat(list(self.all)).sum()

    found = {}
    for stage in (0, 2):
        engine = engine_of(deepspeed, Many(), stage)

        def step(engine=engine):
            engine.backward(engine())
            engine.step()

        found[f"step of {args.parameters} parameters, stage {stage}"] = timed(step, 20, 5)
        engine.destroy()
    return found


def work(args):
    """One rank of one tree; rank 0 writes what it measured."""
    begin = time.perf_counter()
    import torch

    loaded = time.perf_counter()
    import deepspeed

    imported = time.perf_counter()
    sys.path[:0] = [os.path.join(ROOT, "examples", "quickstart"), HERE]
    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed(dist_backend=args.collectives or "gloo")
    if args.collectives:
        found = collectives(args, deepspeed, torch)
    elif int(os.environ["WORLD_SIZE"]) == 1:
        found = {"import": imported - loaded, "import of torch": loaded - begin}
        found.update(many_parameters(args, deepspeed, torch))
    else:
        found = {**steps_and_checkpoints(args, deepspeed, torch), **collectives(args, deepspeed, torch)}
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file)


def measured(tree, args):
    """Seconds by name, of one round in one tree. The interpreter is a script that puts that package first."""
    with tempfile.TemporaryDirectory() as scratch:
        python = os.path.join(scratch, "python")
        with open(python, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nPYTHONPATH="{tree}/python" exec "{sys.executable}" "$@"\n')
        os.chmod(python, 0o755)
        passed = types.SimpleNamespace(block=args.block, parameters=args.parameters, collectives=args.collectives)
        found = {}
        for count in (1, args.ranks)[bool(args.collectives) :]:
            threads = max(1, len(os.sched_getaffinity(0)) // count)
            found.update(
                ranks.measure(__file__, passed, ("block", "parameters", "collectives"), count, threads, python)
            )
        return found


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    trees = {"before": os.path.abspath(args.before), "now": ROOT}
    rounds = {"before": [], "now": []}
    for number in range(args.rounds):
        for name in list(trees)[:: 1 if number % 2 else -1]:
            rounds[name].append(measured(trees[name], args))
    figures = {}
    for name in rounds["now"][0]:
        before, now = ([one[name] for one in rounds[which]] for which in ("before", "now"))
        each = [a / b for a, b in zip(now, before)]
        quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
        figures[name] = {"ratio": statistics.median(each), "quartiles": [quartiles[0], quartiles[2]],
                         "before_s": statistics.median(before), "now_s": statistics.median(now)}  # fmt: skip
        medians = "{before_s:.6f} -> {now_s:.6f} s".format(**figures[name])
        print(f"{name:40s} {figures[name]['ratio']:.3f} ({quartiles[0]:.3f} to {quartiles[2]:.3f})  {medians}")
    commits = {name: machine.commit(tree) for name, tree in trees.items()}
    machine.write_json(args.json, "against_commit", figures, **commits)


if __name__ == "__main__":
    main()
