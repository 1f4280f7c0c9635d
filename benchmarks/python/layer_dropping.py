"""Measures the operations and the time that dropped tokens and layers save, and what moving rows costs.

    python benchmarks/python/layer_dropping.py [--rounds 5] [--threads 2] [--only PART] [--stage 0] [--json FILE]
    deepspeed --num_gpus 2 benchmarks/python/layer_dropping.py --threads 1 --only layers --stage 3

fp32, a GPT with 24 layers of which 22 drop tokens. Operations are counted by deepspeed.profiling.op_costs,
times are medians of whole steps (forward, backward and update by the engine), the configurations in turn; "cpu" are
those of the process, which other programs on the machine disturb less.

- Random-LTD: operations of a run by the schedule (from an eighth of the sequence to all of it over two thirds of the
  steps), over those of the plain model; for one number of kept tokens the time that is saved over the operations that
  are saved; and the share of a layer's time that moves rows, forward and backward, at width 512.
- Progressive layer dropping: the same for theta 0.5, over steps that leave out half of the layers in the mean.
"""

import argparse
import json
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "tests", "dist"))
LAYERS, WORDS = 24, 512


def config(rows, stage, **more):
    return {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000000,
        **more,
    }


def token_section(kept, length, steps=1):
    section = {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_id": list(range(1, LAYERS - 1)),
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": kept,
            "max_value": kept if steps == 1 else length,
            "schedule_config": {"require_steps": steps, "seq_per_step": 16},
        },
    }
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}}


def clocks():
    return time.perf_counter(), time.process_time()


def since(start):
    return tuple(now - then for now, then in zip(clocks(), start))


class Runs:
    """Engines of one model shape, with the operations of a step and its time."""

    def __init__(self, width, length, rows, stage):
        import torch

        import deepspeed
        from deepspeed.profiling.op_costs import CountedOps
        from layer_models import Block, Transformer, loss_of

        self.torch, self.deepspeed, self.counted, self.loss_of = torch, deepspeed, CountedOps, loss_of
        self.block = Block
        self.made = lambda: Transformer(LAYERS, width, WORDS, heads=8)
        self.batch = torch.randint(WORDS, (rows, length))
        self.rows, self.stage = rows, stage

    def engine(self, convert=None, **more):
        engine = self.deepspeed.initialize(model=self.made(), config=config(self.rows, self.stage, **more))[0]
        return engine if convert is None else convert(engine, self.block)

    def step(self, engine):
        engine.backward(self.loss_of(engine, self.batch))
        engine.step()

    def flops(self, engine):
        with self.counted() as counted:
            engine.backward(self.loss_of(engine, self.batch))
        engine.step()
        return counted.flops

    def times(self, rounds, **engines):
        """Medians of steps in turn, in seconds: of the wall, of the processors."""
        found = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name, engine in engines.items():
                start = clocks()
                self.step(engine)
                found[name] += [since(start)] if number else []
        return {name: [statistics.median(times) for times in zip(*both)] for name, both in found.items()}


def tokens(rounds, width, length, rows, stage):
    from deepspeed.data.random_ltd import convert_to_random_ltd

    runs = Runs(width, length, rows, stage)
    plain, steps = runs.engine(), 300
    engine = runs.engine(convert_to_random_ltd, **token_section(length // 8, length, steps * 2 // 3))
    whole, at = runs.flops(plain), {}
    scheduler = engine.random_ltd_scheduler
    for kept in sorted({scheduler.get_value(step) for step in range(steps)}):
        one = runs.engine(convert_to_random_ltd, **token_section(kept, length))
        at[kept] = runs.flops(one)
        one.destroy()
    saved = 1 - sum(at[scheduler.get_value(step)] for step in range(steps)) / (steps * whole)
    half = runs.engine(convert_to_random_ltd, **token_section(length // 2, length))
    times = runs.times(rounds, plain=plain, half=half)
    fewer, (faster, cpu) = 1 - at[length // 2] / whole, (1 - a / b for a, b in zip(times["half"], times["plain"]))
    return {
        "flops_saved_by_the_schedule": saved,
        "half_flops_saved": fewer,
        "half_time_saved": faster,
        "half_cpu_saved": cpu,
        "time_over_flops": faster / fewer,
        "cpu_over_flops": cpu / fewer,
        **{f"{name}_seconds": value for name, (value, _) in times.items()},
    }


def moves(rounds, width, length, rows):
    """The share of a layer's time, forward and backward, in which rows move."""
    import torch

    from deepspeed import _native
    from deepspeed.ops.random_ltd import GatherTokens, ScatterTokens
    from layer_models import Block

    layer, x = Block(width, heads=8), torch.randn(rows, length, width, requires_grad=True)
    index = _native._C.choose_tokens(1, 0, 0, 0, rows, length, length // 2)

    def run(inside):
        passed, kept = GatherTokens.apply(x, index, True)
        ScatterTokens.apply(passed, inside(kept), index, True).backward(grad)

    grad, found = torch.randn(rows, length, width), {"layer": [], "moves": []}
    for number in range(rounds + 2):
        for name, inside in (("layer", layer), ("moves", lambda kept: kept)):
            start = time.perf_counter()
            run(inside)
            found[name] += [time.perf_counter() - start] if number > 1 else []
    found = {name: statistics.median(times) for name, times in found.items()}
    return {**{f"{name}_ms": 1e3 * value for name, value in found.items()}, "share": found["moves"] / found["layer"]}


def layers(rounds, width, length, rows, stage):
    from deepspeed.data.layer_drop import convert_to_pld

    runs = Runs(width, length, rows, stage)
    dropping = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 100.0}}
    plain, engine = runs.engine(), runs.engine(convert_to_pld, **dropping)
    runs.step(engine)
    whole, flops, left_out, spent, all_kept = runs.flops(plain), 0, 0, [], []
    counted = runs.flops(engine)
    of_layer = (whole - counted) / len(engine.data_efficiency_report()["layers_left_out"])
    for _ in range(2 * rounds):
        for one, times in ((engine, spent), (plain, all_kept)):
            start = clocks()
            runs.step(one)
            times.append(since(start))
        report = engine.data_efficiency_report()
        left_out += len(report["layers_left_out"])
        flops += whole - of_layer * len(report["layers_left_out"])
    fewer = 1 - flops / (2 * rounds * whole)
    faster, cpu = (1 - sum(a) / sum(b) for a, b in zip(zip(*spent), zip(*all_kept)))
    return {
        "left_out": left_out / (2 * rounds),
        "flops_saved": fewer,
        "time_saved": faster,
        "cpu_saved": cpu,
        "time_over_flops": faster / fewer,
        "cpu_over_flops": cpu / fewer,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--only", choices=("random_ltd", "rows", "layers"))
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    shape = args.width, args.length, args.rows, args.stage
    parts = {
        "random_ltd": lambda: tokens(args.rounds, *shape),
        "rows": lambda: moves(2 * args.rounds, 512, 512, 4),
        "layers": lambda: layers(args.rounds, *shape),
    }
    found = {name: measure() for name, measure in parts.items() if args.only in (None, name)}
    for name, figures in found.items():
        print(name, {key: round(value, 4) for key, value in figures.items()}, flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(found, out)


if __name__ == "__main__":
    main()
